"""A real day of traffic: when the visitors of a large shop were shown recommendations (Open Bandit Dataset, CC BY 4.0).

    path = recording(folder)                    # CSV of 60,000 arrivals within 24 hours
    part(path, folder, 0.55, 0.7)               # only from 55 % to 70 % of the day

The package obp carries a sample of each of six campaigns over the same seven days, to the microsecond; laid over each other by the
time of day they are one day of a busier shop, with its nights, its evening, and a campaign that begins at the same minute each day.
Its data are loaded, never published here.
"""

from __future__ import annotations

import csv
import datetime
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perf.programs import DOWNLOAD_TIMEOUT_S, FOLDER
from tritonpilot.arrivals import TIME_COLUMNS, read_recording
from tritonpilot.errors import MeasurementError

REQUIREMENT = "obp==0.5.7 --hash=sha256:3060d67fedfcfadf1e7a6f2608987f74412b5eb74d2c567edeb147595c68f2a0"
DAY_S = 86_400


def recording(folder: Path = FOLDER) -> Path:
    """The recording, made once from the package's source distribution. Raises MeasurementError when that cannot be downloaded."""
    path = folder / "day.csv"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        times = np.sort(np.array(list(_times_s()), dtype=np.float64) % DAY_S)
        _write(path, times)
    return path


def part(path: Path, folder: Path, first: float, last: float) -> Path:
    """A recording of its own from one share of the day to another, in `folder`."""
    at_s = read_recording(path).at_s
    kept = at_s[(at_s >= first * at_s[-1]) & (at_s < last * at_s[-1])]
    found = folder / "part.csv"
    _write(found, kept)
    return found


def _write(path: Path, at_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text("\n".join([TIME_COLUMNS[0], *(f"{moment:.6f}" for moment in at_s)]) + "\n", encoding="utf-8")
    aside.replace(path)


def _times_s() -> Iterator[float]:
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as work:
        Path(work, "requirements.txt").write_text(f"{REQUIREMENT}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        options = ["--no-deps", "--no-binary=:all:", "--ignore-requires-python", "--require-hashes"]
        done = subprocess.run(
            [*pip, *options, "-r", "requirements.txt"],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise MeasurementError(
                f"The recorded day could not be downloaded: {done.stderr.strip()[-500:]} Nothing was measured. Check that "
                "pip reaches its index, and repeat."
            )
        (package,) = Path(work).glob("*.tar.gz")
        with tarfile.open(package) as files:
            for member in files.getmembers():
                if (
                    "/dataset/obd/" in member.name
                    and member.name.endswith(".csv")
                    and "item_context" not in member.name
                ):
                    content = files.extractfile(member)
                    assert content is not None
                    for row in csv.DictReader(io.TextIOWrapper(content, encoding="utf-8")):
                        yield datetime.datetime.fromisoformat(row["timestamp"]).timestamp()
