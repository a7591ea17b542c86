"""What an autopilot keeps on disk survives it, and what it tells can be read."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tritonpilot import metrics
from tritonpilot.autopilot import record
from tritonpilot.autopilot.controller import State
from tritonpilot.autopilot.record import AutopilotMetrics, Entry, Folder, Memory
from tritonpilot.autopilot.state import Sample
from tritonpilot.autopilot.terms import Knobs, Observation
from tritonpilot.errors import HostError

KNOBS = Knobs(500, 2, {"batch": 40})
NAN = math.nan
SEEN = Observation(5.0, 5.0, KNOBS, 10, 1, 10, 0, 0, 3, 200, 4, {4: 2.5}, 12.5, 0.5)
UNKNOWN = replace(SEEN, arrivals_per_s=NAN, utilisation=None, problem="The page is cut.")


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    memory = Memory(
        State(wanted=KNOBS, samples=(Sample(5, 10, 0.5, 0.5),), changed_s=(4.0,)), Knobs(0, 1, {"batch": 8})
    )

    with Folder(tmp_path / "new" / "state") as folder:
        assert folder.read() == ({}, 0.0)
        folder.write({"ctr": memory}, 12.5)
        assert folder.read() == ({"ctr": memory}, 12.5)
    assert {each.name for each in folder.path.iterdir()} == {"lock", "state.json"}


def test_figures_that_are_not_known_do_not_spoil_the_state(tmp_path: Path) -> None:
    memory = Memory(State(wanted=KNOBS, samples=(Sample(5, 10, None, NAN),)), KNOBS)

    with Folder(tmp_path) as folder:
        folder.write({"ctr": memory}, 1)
        found, _ = folder.read()

    assert math.isnan(found["ctr"].state.samples[0].utilisation or 0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 99}', '{"format": 1, "clock_s": 1, "models": {"ctr": {"state": 3}}}', "[" * 100_000],
    ids=["nothing", "half", "list", "format", "state", "deep"],
)
def test_a_broken_state_is_kept_aside_and_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)

    with Folder(tmp_path) as folder:
        with pytest.raises(HostError, match=r"kept as state\.broken"):
            folder.read()
        assert folder.read() == ({}, 0.0)
    assert (tmp_path / "state.broken").read_text() == text


def test_one_autopilot_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    hold = "import sys, time; from pathlib import Path; from tritonpilot.autopilot.record import Folder\n"
    hold += "with Folder(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            with pytest.raises(HostError, match=rf"Another autopilot \(process {other.pid}\)"), Folder(tmp_path):
                pass
        finally:
            other.kill()
    with Folder(tmp_path) as folder:
        assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(HostError, match="cannot be used"), Folder(tmp_path / "file" / "state"):
        pass


def test_a_broken_state_that_cannot_be_put_aside_is_said(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("[" * 100_000)
    (tmp_path / "state.broken" / "kept").mkdir(parents=True)

    with Folder(tmp_path) as folder, pytest.raises(HostError, match="cannot be put aside"):
        folder.read()


def test_a_full_disk_lets_it_begin(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")

    with Folder(tmp_path) as folder:
        assert folder.read() == ({}, 0.0)


def test_the_log_has_a_line_for_programs_and_a_sentence_for_people(tmp_path: Path) -> None:
    entry = Entry("ctr", "change", "P99 is late: 3 instances", before=KNOBS, target=replace(KNOBS, instances=3), way="instances",
                  seconds=0.41234, seen=UNKNOWN, time_s=0.0)  # fmt: skip

    with Folder(tmp_path) as folder:
        folder.log(entry)
        folder.log(Entry("", "stopped", "The autopilot was stopped."))
    first, second = map(json.loads, (tmp_path / "decisions.jsonl").read_text().splitlines())

    assert entry.line() == "ctr: change: P99 is late: 3 instances"
    assert (first["time"], first["event"], first["seconds"]) == ("1970-01-01T00:00:00.000+00:00", "change", 0.412)
    assert first["target"] == {"queue_delay_us": 500, "instances": 3, "max_queue_sizes": {"batch": 40}}
    assert first["seen"]["problem"] == "The page is cut."
    assert "arrivals_per_s" not in first["seen"], "it is not known"
    assert set(second) == {"time", "model", "event", "said"}


def test_the_log_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LOG_BYTES_MOST", 1000)

    with Folder(tmp_path) as folder:
        for number in range(100):
            folder.log(Entry("ctr", "keep", f"{number}"))

    sizes = [(tmp_path / name).stat().st_size for name in ("decisions.jsonl", "decisions.jsonl.1")]
    assert max(sizes) < 1200
    assert json.loads((tmp_path / "decisions.jsonl").read_text().splitlines()[-1])["said"] == "99"


def test_prometheus_is_told_what_was_decided_and_what_is_not_known() -> None:
    told = AutopilotMetrics()
    told.watch("ctr")
    told.count("ctr", "change")
    told.seen["ctr"] = SEEN
    told.seen["image"] = UNKNOWN
    told.unknown.add("absent")
    told.decided_s = 99.0

    samples = metrics.parse(generate_latest(told.registry).decode())

    def value(name: str, **labels: str) -> float:
        return metrics.value(samples, f"autopilot_{name}", **labels)

    assert value("decisions_total", model="ctr", event="change") == 1
    assert [sample.value for sample in samples if sample.labels.get("event") == "revert"] == [0], "counted from 0 on"
    assert (value("problem", model="ctr"), value("problem", model="image")) == (0, 1)
    assert value("problem", model="absent") == 1, "an alert asks for it"
    assert (value("instances", model="ctr"), value("queue_delay_seconds", model="ctr")) == (2, 0.0005)
    assert value("max_queue_size", **{"model": "ctr", "class": "batch"}) == 40
    assert value("last_decision_timestamp_seconds") == 99
    assert not [s for s in samples if s.name == "autopilot_arrivals_per_second" and s.labels["model"] == "image"]
