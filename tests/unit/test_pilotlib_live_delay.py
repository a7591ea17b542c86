from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pilotlib.intake import Intake
from pilotlib.live_delay import (
    CLOCKS_APART_NS,
    MOST_US,
    PARAMETER,
    LiveDelay,
    LiveDelayError,
    control_key,
    memory_path,
)

KEY = "0123456789abcdef"
NS = 1_000_000


class Tensor:
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def shape(self) -> list[int]:
        return [self._rows, 1]


class Request:
    def __init__(self, rows: int = 1, parameters: str = "{}") -> None:
        self._rows, self._parameters = rows, parameters

    def inputs(self) -> list[Tensor]:
        return [Tensor(self._rows)] if self._rows else []

    def parameters(self) -> str:
        return self._parameters


class World:
    """A clock that goes only while somebody sleeps, and what was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ns = 10**12
        self.slept_ms: list[float] = []
        self.told: list[int] = []
        self.held_us: list[int] = []

    def sleep(self, seconds: float) -> None:
        self.slept_ms.append(round(seconds * 1e3, 3))
        self.now_ns += round(seconds * 1e9)

    def instance(self, key: str = KEY, model: str = "ctr") -> LiveDelay:
        return LiveDelay(
            self.folder / "live",
            model=model,
            key=key,
            max_batch_size=8,
            tell=self.told.append,
            tell_held=self.held_us.append,
            sleep=self.sleep,
            clock_ns=lambda: self.now_ns,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def signed(delay: object, *, key: str = KEY, model: str = "ctr", when_ns: int | None = None) -> str:
    said = f"{delay}:{time.time_ns() if when_ns is None else when_ns}"
    digest = hmac.new(key.encode(), f"{model}:{said}".encode(), hashlib.sha256).hexdigest()
    return json.dumps({PARAMETER: f"{said}:{digest}"})


def hold(delay: LiveDelay, *requests: Request) -> None:
    delay.hold(requests or [Request()], lambda: None, lambda: None)


def test_without_a_delay_nobody_waits(world: World) -> None:
    intake = Intake(None, lambda late: None, delay=world.instance())  # noqa: ARG005
    for _ in range(3):
        assert intake.execute([Request()], lambda requests: [len(requests)]) == [1]
    assert world.slept_ms == []
    assert world.told == [0]


def test_who_comes_too_soon_waits_and_the_next_does_not(world: World) -> None:
    delay = world.instance()
    delay.take(signed(5000))
    hold(delay)  # the first after a pause
    world.now_ns += 1 * NS  # it was computed
    hold(delay)
    world.now_ns += 1 * NS
    hold(delay)  # takes what gathered
    world.now_ns += 2 * NS
    hold(delay)
    world.now_ns += 5 * NS
    hold(delay)
    world.now_ns += 5 * NS
    hold(delay)
    assert world.slept_ms == [4, 3]


def test_a_full_execution_does_not_wait(world: World) -> None:
    delay = world.instance()
    delay.take(signed(5000))
    hold(delay)
    hold(delay, Request(5), Request(3))
    hold(delay, *[Request()] * 8)
    assert world.slept_ms == []
    hold(delay, Request(5), Request(0))
    assert world.slept_ms == [5]


def test_the_waker_knows_of_a_wait(world: World) -> None:
    delay, seen = world.instance(), []
    delay.take(signed(5000))
    for _ in range(2):
        delay.hold([Request()], lambda: seen.append("began"), lambda: seen.append("ended"))
    assert seen == ["began", "ended"]


def test_wakes_do_not_wait(world: World) -> None:
    delay = world.instance()
    delay.take(signed(5000))
    hold(delay)
    intake = Intake(None, lambda late: None, delay=delay)  # noqa: ARG005
    with pytest.raises(AttributeError):  # its answer is made of Triton's objects, which are not here
        intake.execute([Request(parameters='{"pilot_wake":true}')], list)
    assert world.slept_ms == []


def test_all_instances_follow_and_a_new_one_finds_what_was_said(world: World) -> None:
    first, second = world.instance(), world.instance()
    first.take(signed(5000))
    assert second.delay_ns == 5_000_000
    third = world.instance()
    assert third.delay_ns == 5_000_000
    second.take(signed(0))
    assert [each.delay_ns for each in (first, second, third)] == [0, 0, 0]
    assert world.told == [0, 0, 5000, 5000, 0]


def test_what_was_waited_is_told_once_a_second(world: World) -> None:
    delay = world.instance()
    delay.take(signed(100_000))
    for _ in range(40):
        hold(delay)
        world.now_ns += 1 * NS
    assert len(world.held_us) == sum(world.slept_ms) // 1000 + 1
    assert sum(world.held_us) <= sum(world.slept_ms) * 1e3


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (json.dumps({PARAMETER: "5000"}), "not signed"),
        (json.dumps({PARAMETER: 5000}), "not signed"),
        (json.dumps({PARAMETER: ""}), "not signed"),
        (json.dumps({PARAMETER: "5000:1:é"}), "not signed"),
        (json.dumps({PARAMETER: "\ud800:1:\ud800"}), "not signed"),
        (signed(5000, key="another key, 16+"), "not signed"),
        (signed(5000, key=""), "not signed"),
        (signed(5000, model="another"), "not signed"),
        (signed(-1), "takes 0 to"),
        (signed(MOST_US + 1), "takes 0 to"),
        (signed(10**20), "takes 0 to"),
        (signed("soon"), "takes 0 to"),
        (signed(5000, when_ns=time.time_ns() - 2 * CLOCKS_APART_NS), "said before"),
        (signed(5000, when_ns=time.time_ns() + 2 * CLOCKS_APART_NS), "said before"),
        (signed(5000, when_ns=10**30), "said before"),
    ],
)
def test_what_is_not_taken_changes_nothing(world: World, parameters: str, why: str) -> None:
    delay = world.instance()
    with pytest.raises(LiveDelayError, match=why):
        delay.take(parameters)
    assert (delay.delay_ns, world.told) == (0, [0])


def test_what_was_said_is_taken_once(world: World) -> None:
    delay, said = world.instance(), signed(5000)
    delay.take(said)
    delay.take(signed(0))
    with pytest.raises(LiveDelayError, match="said before"):
        world.instance().take(said)
    assert delay.delay_ns == 0


def test_a_file_that_others_may_write_is_not_used(world: World) -> None:
    path = world.folder / "live"
    path.write_bytes(bytes(4096))
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="others may change it"):
        world.instance()
    path.unlink()
    (world.folder / "elsewhere").write_bytes(b"")
    path.symlink_to(world.folder / "elsewhere")
    with pytest.raises(OSError, match="live"):
        world.instance()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["tritonserver"], ""),
        (["tritonserver", "--grpc-restricted-protocol=model-repository,trace:key=a=b"], "a=b"),
        (["tritonserver", "--http-restricted-api", "trace,model-repository:key=abc"], "abc"),
        (["tritonserver", "--http-restricted-api=trace:key=x", "--http-restricted-api=model-repository:key=y"], "y"),
        (["tritonserver", "--http-restricted-api=trace:key=x"], ""),
    ],
)
def test_the_key_is_that_of_who_may_load(arguments: list[str], key: str) -> None:
    assert control_key(arguments) == key


def test_the_memory_is_of_one_server() -> None:
    ours = memory_path(["tritonserver", "--backend-config=python,shm-region-prefix-name=tritonpilot_1_ab_"], "ctr")
    assert ours == Path("/dev/shm/tritonpilot_1_ab_live_ctr")  # noqa: S108
    other = memory_path(["tritonserver"], "ctr")
    assert f"_{os.getppid()}_" in other.name
    assert other.name.endswith("_live_ctr")


def test_the_hot_path_without_a_delay_is_cheap(world: World) -> None:
    """0.1 us on a quiet machine; the bound is for a busy one."""
    delay: Any = world.instance()
    began = time.perf_counter()
    for _ in range(100_000):
        if delay is not None and delay.delay_ns:
            raise AssertionError
    assert (time.perf_counter() - began) / 100_000 < 5e-6
