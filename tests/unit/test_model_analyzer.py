"""Model Analyzer's report and configuration: what is read from the one, what the other says."""

import os
import subprocess
from pathlib import Path

import pytest

from perf import model_analyzer
from perf.model_analyzer import Measured
from tritonpilot.errors import MeasurementError

# As Model Analyzer 1.58.0 wrote it.
REPORT = """\
Model Config Path,Instance Group,Max Batch Size,Concurrency,Satisfies Constraints,Throughput (infer/sec),p99 Latency (ms)
ctr_config_2,1:CPU,4,8,Yes,1022.5,16.2
ctr_config_default,1:CPU,256,512,No,1511.4,552.5
ctr_config_3,2:CPU,2,8,Yes,380.0,23.0

"""


def test_report_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics-model-inference.csv"
    path.write_text(REPORT)
    rows = model_analyzer.read(path)
    assert rows[0] == Measured("ctr_config_2", 4, 1, 8, True, 1022.5, 16.2)
    assert [row.instances for row in rows] == [1, 1, 2]
    assert [row.is_within_slo for row in rows] == [True, False, True]


def test_best_is_the_highest_throughput_within_the_slo(tmp_path: Path) -> None:
    path = tmp_path / "metrics-model-inference.csv"
    path.write_text(REPORT)
    rows = model_analyzer.read(path)
    assert model_analyzer.best(rows) == rows[0]
    assert model_analyzer.best(rows[1:2]) is None


@pytest.mark.parametrize("text", ["Model Config Path\nctr\n", REPORT.replace("1:CPU", "1:GPU"), None])
def test_report_that_cannot_be_read_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "metrics-model-inference.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MeasurementError, match="could not be read"):
        model_analyzer.read(path)


def test_launcher_becomes_the_program_with_its_own_arguments_first(tmp_path: Path) -> None:
    core, pids = max(os.sched_getaffinity(0)), tmp_path / "pids"
    path = model_analyzer._launcher(
        tmp_path / "say", Path("/bin/sh"), {"X": "of"}, core, pids, first=["-c", 'echo "$X $0 $1"']
    )
    done = subprocess.run([path, "a", "b"], capture_output=True, text=True, check=True)
    assert done.stdout == "of a b\n"
    assert len(pids.read_text().split()) == 1
