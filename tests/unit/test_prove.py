from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perf import machine, prove
from perf.efficiency import Round, not_slowed
from perf.frame import Bar, Bench, Claim, NoisyRoundError, Outcome, Result, carry_out, median, spread, write
from perf.machine import Limits, Sample, judge
from perf.open_loop import Request
from perf.proofs import CLAIMS
from perf.proofs.accuracy import _worst
from perf.proofs.priorities import Trial
from tritonpilot.errors import MeasurementError, ServerError

QUIET = Limits()
CALM = Sample(10, 5, 1, 3)
NAMES = [
    "ctr_auc",
    "image_top1",
    "ocr_lines",
    "served_equals_inprocess",
    "mean_batch",
    "priority_overtakes",
    "stall_pairs",
    "ctr64_efficiency",
    "image_efficiency",
    "jpeg_efficiency",
    "text_batch_mates",
    "text_efficiency",
    "client_coalescing",
    "transports_agree",
    "single_row_cost",
    "onnx_conformance",
    "memory_flat",
    "bad_inputs_isolated",
    "stall_poisson",
    "starvation",
    "mixed_overload",
    "noisy_neighbour",
    "deadlines",
    "waker_cost",
    "entry_cost",
    "strict_config_loads",
    "int8_ctr",
    "int8_image",
    "int8_text",
    "int8_risk",
    "int8_ocr",
    "compensation_text",
    "coverage_refusal",
    "int8_served",
    "compose_e2e",
    "alerts",
    "dashboards",
    "locust_constant",
    "locust_burst",
    "stranger_locked_out",
    "balancer_kill",
    "loadgen_honesty",
    "simulator_speed",
    "simulator_error",
    "tuner_regret",
    "tuner_follows_slo",
    "tuner_vs_model_analyzer",
    "autopilot_day",
    "autopilot_phases",
    "changes_under_load",
    "helm_valid",
    "autopilot_chaos",
    "swap_50",
    "swap_refuses_bad",
    "swap_kill_each_step",
    "guard_detects",
    "cache_lfu",
    "cold_start",
    "heal_stub",
    "demo_time",
]


def claim(outcome: Callable[[Bench], Outcome], bar: Bar | None = None, *, needs_quiet: bool = False) -> Claim:
    return Claim("toy", outcome, "rows", bar or Bar(">", 4), "a toy", needs_quiet)


def bench(*, needs_quiet: bool = True) -> Bench:
    return Bench(
        quick=False, needs_quiet=needs_quiet, say=lambda _: None, limits=QUIET, quiet_wait_s=0.01, quiet_look_s=0
    )


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Cores that others use in the coming looks at the machine, in turn; 0 afterwards."""
    coming: list[float] = []

    def judged(*_: object) -> machine.Noise:
        return judge(CALM, Sample(11, 5 + (coming.pop(0) if coming else 0), 1, 3), 2, QUIET)

    monkeypatch.setattr(machine, "judge", judged)
    return coming


# -- the noise decision ------------------------------------------------------------------------------------------------


def test_our_own_work_is_no_noise() -> None:
    noise = judge(CALM, Sample(12, 5 + 3.9, 1, 3 + 3.9), 2, QUIET)
    assert (noise.is_quiet, noise.reason) == (True, "quiet")


def test_work_of_others_is_noise_and_named() -> None:
    noise = judge(CALM, Sample(12, 5 + 2.5, 1, 3 + 2), 2, QUIET)
    assert not noise.is_quiet
    assert noise.other_cores == pytest.approx(0.25)
    assert "other processes used 0.25 cores (allowed 0.10)" in noise.reason


def test_stolen_time_is_noise_and_named() -> None:
    noise = judge(CALM, Sample(12, 5, 1.2, 3), 2, QUIET)
    assert noise.steal_share == pytest.approx(0.05)
    assert "the host took 5.0% of our cores" in noise.reason


def test_rounding_of_ticks_is_never_negative_noise() -> None:
    assert judge(CALM, Sample(12, 5, 1, 3.02), 2, QUIET).other_cores == 0


def test_own_work_of_children_is_counted_also_when_they_have_ended() -> None:
    busy = [sys.executable, "-c", "import time; s=time.process_time()\nwhile time.process_time()-s < 0.3: pass"]
    before = machine.tree_cpu_s(os.getpid())
    subprocess.run(busy, check=True)
    assert machine.tree_cpu_s(os.getpid()) - before >= 0.28


def test_sample_sees_the_cores_of_this_machine() -> None:
    now = machine.sample(sorted(os.sched_getaffinity(0)))
    assert now.busy_s > 0
    assert now.own_s > 0


def test_pinned_moves_every_thread_and_puts_it_back() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    done, seen = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (seen.set(), done.wait()))
    thread.start()
    seen.wait()
    with machine.pinned(core):
        assert {frozenset(os.sched_getaffinity(t)) for t in (0, thread.native_id or 0)} == {frozenset({core})}
    assert os.sched_getaffinity(thread.native_id or 0) == before == os.sched_getaffinity(0)
    done.set()
    thread.join()


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_noisy_round_is_repeated(noises: list[float]) -> None:
    noises[:] = [0, 0.5, 0, 0]  # quiet second, loud round, quiet second, quiet round
    values = iter((1, 2, 3))
    assert bench().rounds(1, lambda: next(values), check=lambda: None) == [2]


def test_a_round_that_says_that_it_was_disturbed_is_repeated(noises: list[float]) -> None:
    noises[:] = [0] * 4
    outcomes = iter((NoisyRoundError("the core was slow"), 7))

    def measure() -> int:
        found = next(outcomes)
        if isinstance(found, NoisyRoundError):
            raise found
        return found

    toy = bench()
    assert toy.rounds(1, measure, check=lambda: None) == [7]
    assert toy.noisy_rounds == 1


def test_too_many_noisy_rounds_are_refused_with_what_was_seen(noises: list[float]) -> None:
    noises[:] = [0, 0.5] * 3
    with pytest.raises(MeasurementError, match=r"too noisy: 2 rounds.*other processes used 0\.50 cores"):
        bench().rounds(1, lambda: 1, check=lambda: None)


def test_failure_in_a_noisy_round_is_noise_and_in_a_quiet_one_an_error(noises: list[float]) -> None:
    outcomes = iter((MeasurementError("too slow"), 7))

    def measure() -> int:
        found = next(outcomes)
        if isinstance(found, MeasurementError):
            raise found
        return found

    noises[:] = [0, 0.5]
    assert bench().rounds(1, measure, check=lambda: None) == [7]
    outcomes = iter((MeasurementError("too slow"),))
    with pytest.raises(MeasurementError, match="too slow"):
        bench().rounds(1, measure, check=lambda: None)


def test_machine_that_does_not_calm_down_is_refused(noises: list[float]) -> None:
    noises[:] = [1.0] * 100_000
    with pytest.raises(MeasurementError, match="too noisy to start"):
        bench().wait_until_quiet()


def test_dead_server_ends_the_proof(noises: list[float]) -> None:  # noqa: ARG001
    def check() -> None:
        raise ServerError("tritonserver died by SIGABRT")

    with pytest.raises(ServerError, match="SIGABRT"):
        bench().rounds(3, lambda: 1, check=check)


def test_noise_is_noted_but_tolerated_where_timing_does_not_matter(noises: list[float]) -> None:
    noises[:] = [0.5]
    loud = bench(needs_quiet=False)
    assert loud.rounds(1, lambda: 1, check=lambda: None) == [1]
    assert loud.noise[0].other_cores == pytest.approx(0.5)


def test_median_and_spread() -> None:
    assert (median([3, 1, 2]), spread([3, 1, 2])) == (2, 2)
    with pytest.raises(MeasurementError):
        median([])


# -- results -----------------------------------------------------------------------------------------------------------


def test_result_line_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims = {"toy": claim(lambda _: Outcome(6.5, 0.5, 3, details={"seen": [6, 6.5]}))}
    assert prove.main(["toy"], claims=claims, results=tmp_path, say=lambda _: None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "toy 6.5 rows (bar >4) ok"
    found = json.loads((tmp_path / "toy.json").read_text())
    assert {
        "name",
        "value",
        "unit",
        "bar",
        "ok",
        "spread",
        "rounds",
        "command",
        "machine",
        "versions",
        "date",
        "commit",
    } <= {*found}
    assert found["command"] == "make prove NAME=toy"
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", found["commit"])
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json"]


def test_short_result_is_written_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims = {"toy": claim(lambda _: Outcome(4))}
    assert prove.main(["toy"], claims=claims, results=tmp_path, say=lambda _: None) == 1
    assert capsys.readouterr().out == "toy 4 rows (bar >4) short\n"
    assert json.loads((tmp_path / "toy.json").read_text())["ok"] is False


def test_value_above_the_bar_is_short_when_something_else_went_wrong() -> None:
    assert not carry_out(claim(lambda _: Outcome(9, ok=False)), quick=False, say=print).ok


def test_refusal_leaves_the_earlier_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: Bench) -> Outcome:
        raise MeasurementError("The machine was too noisy.")

    (tmp_path / "toy.json").write_text("earlier")
    told: list[str] = []
    assert prove.main(["toy"], claims={"toy": claim(refuse)}, results=tmp_path, say=told.append) == 10
    assert capsys.readouterr().out == ""
    assert told[-1] == "toy: no figure. The machine was too noisy."
    assert (tmp_path / "toy.json").read_text() == "earlier"


def test_write_failure_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = carry_out(claim(lambda _: Outcome(5)), quick=False, say=print)
    write(result, tmp_path)
    before = (tmp_path / "toy.json").read_text()

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write(result, tmp_path)
    assert (tmp_path / "toy.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_unknown_name_lists_the_names(tmp_path: Path) -> None:
    told: list[str] = []
    assert prove.main(["ctr_acu"], results=tmp_path, say=told.append) == 2
    assert "ctr_auc" in told[0]


def test_without_a_name_the_proofs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES


def test_several_names_give_the_first_failure(tmp_path: Path) -> None:
    claims = {"good": claim(lambda _: Outcome(5)), "bad": claim(lambda _: Outcome(1))}
    assert prove.main(["good", "bad"], claims=claims, results=tmp_path, say=lambda _: None) == 1


def test_registry_is_named_by_its_claims() -> None:
    assert {name: entry.name for name, entry in CLAIMS.items()} == {name: name for name in NAMES}


@pytest.mark.parametrize(("compare", "at_limit"), [(">=", True), (">", False), ("<=", True), ("<", False)])
def test_bar_at_its_limit(compare: str, at_limit: bool) -> None:
    assert Bar(compare, 0.75).holds(0.75) is at_limit
    assert str(Bar(compare, 0.75)) == f"{compare}0.75"


def test_machine_description_tells_no_names() -> None:
    result: Result = carry_out(claim(lambda _: Outcome(5)), quick=True, say=print)
    text = json.dumps([result.machine, result.versions])
    assert os.uname().nodename not in result.machine.values()
    assert str(Path.home()) not in text
    assert result.command == "QUICK=1 make prove NAME=toy"


# -- what single proofs decide -----------------------------------------------------------------------------------------


def test_difference_of_answers_is_seen_and_a_wrong_shape_is_infinitely_wrong() -> None:
    class Alone:
        def get_outputs(self) -> list[object]:
            return [type("Output", (), {"name": "y"})]

        def run(self, names: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:  # noqa: ARG002
            return [inputs["x"] * 2]

    requests = [Request("m", {"x": np.array([[1.0], [2.0]], np.float32)})]
    assert _worst(Alone(), requests, [{"y": np.array([[2.0], [4.0]], np.float32)}]) == 0
    assert _worst(Alone(), requests, [{"y": np.array([[2.0], [4.5]], np.float32)}]) == 0.5
    assert _worst(Alone(), requests, [{"y": np.array([[2.0]], np.float32)}]) > 1e300
    assert _worst(Alone(), requests, [{"y": np.array([[2.0], [np.nan]], np.float32)}]) > 1e300


@pytest.mark.parametrize(
    ("trial", "overtook"),
    [
        (Trial(queued=250, ahead=2, behind=300, latency_ms=5), True),
        (Trial(queued=250, ahead=30, behind=300, latency_ms=50), False),
        (Trial(queued=250, ahead=2, behind=200, latency_ms=5), False),
    ],
)
def test_overtaking_leaves_only_the_executing_ahead(trial: Trial, overtook: bool) -> None:
    assert trial.overtook is overtook


def test_a_round_on_a_slowed_core_is_thrown_away() -> None:
    found = Round(served_rows=80, served_s={"tritonserver": 1.0}, served_wall_s=1.0, alone_rows=84, alone_s=1.0)

    assert not_slowed(found, fastest=90.0) is found
    with pytest.raises(NoisyRoundError, match="84%"):
        not_slowed(found, fastest=100.0)


def test_efficiency_compares_rows_per_cpu_second() -> None:
    found = Round(
        served_rows=800, served_s={"tritonserver": 0.5, "ctr": 1.5}, served_wall_s=2, alone_rows=1000, alone_s=2
    )
    assert (found.served_rate, found.alone_rate, found.ratio) == (400, 500, 0.8)
