"""How long do requests gather before an execution? As was said last, to any instance of the model, while it serves.

    delay = live_delay_of(args, config)          # in initialize; None where there is no batcher, or no memory to share
    delay.hold(requests, began, ended)           # in execute: waits, so that requests gather in Triton's queue meanwhile
    delay.take(request.parameters())             # of a request that tells a new delay

Triton's own queue delay is fixed when a model is loaded. This one is eight bytes that all instances map: a look at them costs
0.1 us an execution, a change one request (docs/adr/0018-live-delay.md says what was tried).

An execution that comes sooner after the last one than the delay waits until that is over. The one after it, which takes what
gathered meanwhile, does not wait, and neither does a full one. So there are at most two executions within the delay.

Who may change it: who knows the key of Triton's restricted APIs, which the stub reads from tritonserver's command line, and so
could load the model with another delay anyway. The parameter `pilot_live_delay` is "<us>:<time.time_ns()>:<HMAC-SHA256 of both>".
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pilotlib.loopback import parent_command_line
from pilotlib.stub import pb_utils

PARAMETER = "pilot_live_delay"
MOST_US = 1_000_000
CLOCKS_APART_NS = 300 * 10**9  # of who sends and this host
TELL_EVERY_S = 1.0
MEMORY = Path("/dev/shm")  # noqa: S108  where Linux keeps POSIX shared memory
RESTRICTIONS = ("--grpc-restricted-protocol", "--http-restricted-api")
CONTROL_API = "model-repository"
SHM_PREFIX = "shm-region-prefix-name="
DELAY, STAMP = 0, 1  # places in the memory, 8 bytes each: nanoseconds, and when that was said


class LiveDelayError(ValueError):
    """A request tells a delay that is not taken; the words are its answer."""


class LiveDelay:
    """Of one instance. `key` is that of the restricted APIs, "" where anybody may load models."""

    def __init__(
        self,
        path: Path,
        *,
        model: str,
        key: str,
        max_batch_size: int,
        tell: Callable[[int], None],
        tell_held: Callable[[int], None],
        sleep: Callable[[float], None] = time.sleep,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Map `path`, made when it is not there. `tell` gets the delay in us whenever this instance learns it, `tell_held` at most
        once a second how many us were waited since. Raises OSError, also when the file is not ours alone.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        seen = os.fstat(self._file)
        if seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            os.close(self._file)
            raise PermissionError(f"{path} belongs to somebody else, or others may change it")
        os.ftruncate(self._file, mmap.PAGESIZE)
        self._memory = memoryview(mmap.mmap(self._file, mmap.PAGESIZE)).cast("q")
        self._model, self._key, self._most_rows = model, key.encode(), max_batch_size
        self._tell, self._tell_held, self._sleep, self._clock_ns = tell, tell_held, sleep, clock_ns
        self._began_ns = 0
        self._has_held = False
        self._held_ns, self._tell_at_ns = 0, 0
        tell(self.delay_ns // 1000)

    @property
    def delay_ns(self) -> int:
        """What holds now; 0: executions do not wait."""
        return self._memory[DELAY]

    def hold(self, requests: Sequence[Any], began: Callable[[], None], ended: Callable[[], None]) -> None:
        """Wait if this execution comes too soon. `began` and `ended` are called around a wait."""
        now_ns = self._clock_ns()
        left_ns = self._began_ns + self._memory[DELAY] - now_ns
        if left_ns > 0 and not self._has_held and not self._is_full(requests):
            began()
            self._sleep(left_ns / 1e9)
            ended()
            self._has_held = True
            self._began_ns = self._clock_ns()
            self._count(self._began_ns - now_ns)
        else:
            self._has_held = False
            self._began_ns = now_ns

    def take(self, parameters: str) -> None:
        """Set the delay that a request tells, for all instances. Raises LiveDelayError."""
        said = json.loads(parameters).get(PARAMETER)
        delay, _, rest = said.partition(":") if isinstance(said, str) else ("", "", "")
        stamp, _, digest = rest.partition(":")
        signed = f"{self._model}:{delay}:{stamp}".encode(errors="replace")
        ours = hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(ours, digest.encode(errors="replace")):
            raise LiveDelayError(
                f"{PARAMETER} is not signed with the key of this server's restricted APIs; the delay stays as it was"
            )
        if not (delay.isdecimal() and stamp.isdecimal() and len(delay) < 10 and int(delay) <= MOST_US):
            raise LiveDelayError(f"{PARAMETER} is {delay} us, but takes 0 to {MOST_US}; the delay stays as it was")
        with _locked(self._file):
            if int(stamp) <= self._memory[STAMP] or abs(int(stamp) - time.time_ns()) > CLOCKS_APART_NS:
                raise LiveDelayError(
                    f"{PARAMETER} was said before, or the sender's clock is more than {CLOCKS_APART_NS // 10**9} s from this "
                    "host's; the delay stays as it was"
                )
            self._memory[STAMP], self._memory[DELAY] = int(stamp), int(delay) * 1000
            self._tell(int(delay))

    def _is_full(self, requests: Sequence[Any]) -> bool:
        rows = len(requests)
        if rows < self._most_rows:
            rows = sum(int(inputs[0].shape()[0]) if (inputs := request.inputs()) else 1 for request in requests)
        return rows >= self._most_rows

    def _count(self, held_ns: int) -> None:
        self._held_ns += held_ns
        if self._began_ns >= self._tell_at_ns:
            self._tell_at_ns = self._began_ns + round(TELL_EVERY_S * 1e9)
            self._tell_held(self._held_ns // 1000)
            self._held_ns %= 1000


def live_delay_of(args: Mapping[str, str], config: Mapping[str, Any]) -> LiveDelay | None:
    """An instance's delay, from initialize's `args`; None where the model has no dynamic batcher, or memory cannot be shared."""
    if config.get("dynamic_batching") is None or config.get("max_batch_size", 0) < 2:
        return None
    arguments = parent_command_line()
    labels = {"model": args["model_name"], "version": args["model_version"]}
    # NOTE: never given up while the process lives, or the other instances would write to freed memory.
    delays = pb_utils.MetricFamily(
        name="pilot_live_delay_us",
        description="Queue delay that the backend applies itself, and that can be changed while it serves",
        kind=pb_utils.MetricFamily.GAUGE,
    )
    held = pb_utils.MetricFamily(
        name="pilot_held_us_total",
        description="Time that executions waited for the live delay, which Triton counts as their compute time",
        kind=pb_utils.MetricFamily.COUNTER,
    )
    gauge, counter = delays.Metric(labels=labels), held.Metric(labels=labels)

    def tell(delay_us: int, family: Any = delays) -> None:  # noqa: ARG001  a metric needs a reference to its family
        gauge.set(delay_us)

    def tell_held(held_us: int, family: Any = held) -> None:  # noqa: ARG001
        counter.increment(held_us)

    try:
        return LiveDelay(
            memory_path(arguments, args["model_name"]),
            model=args["model_name"],
            key=control_key(arguments),
            max_batch_size=config["max_batch_size"],
            tell=tell,
            tell_held=tell_held,
        )
    except OSError:
        return None


def control_key(arguments: Sequence[str]) -> str:
    """The key of the API that loads models, from tritonserver's command line; "" where that is not restricted.

    A restriction is `--grpc-restricted-protocol=API,API:header=key`.
    """
    for restriction in _values(arguments, RESTRICTIONS):
        apis, _, header = restriction.partition(":")
        if CONTROL_API in apis.split(","):
            return header.partition("=")[2]
    return ""


def memory_path(arguments: Sequence[str], model: str) -> Path:
    """Where the instances of a model of this server meet: among its own shared memory, which is removed with it."""
    for value in _values(arguments, ("--backend-config",)):
        if SHM_PREFIX in value:
            return MEMORY / f"{value.partition(SHM_PREFIX)[2]}live_{model}"
    # Its process id and when it started: another server shall not find what this one leaves.
    started = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return MEMORY / f"tritonpilot_{os.getppid()}_{started}_live_{model}"


def _values(arguments: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What the command line says under these names, as `--name=value` or `--name value`."""
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, equals, value = argument.partition("=")
        if name in names:
            yield value if equals else following


@contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
