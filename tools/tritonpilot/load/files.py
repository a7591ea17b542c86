"""The files that a load leaves behind: histograms that merge, and a line per second.

check_writable(path)                              # before a load of minutes
write_histograms(path, outcome)
merged([read_histograms(path), read_histograms(other)])["all"].quantile_us(0.99)
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from tritonpilot.arrivals import ALL
from tritonpilot.errors import HostError, SpecError
from tritonpilot.histogram import Histogram
from tritonpilot.outcome import Outcome, Second


def check_writable(path: Path) -> None:
    """Raise HostError unless a file can be written there."""
    reasons = {
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "it is a folder": path.is_dir(),
        "it is no ordinary file": path.exists() and not (path.is_dir() or path.is_file()),
    }
    reason = next((words for words, is_so in reasons.items() if is_so), "")
    if not reason:
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = f"nothing may be written into {path.parent} ({error.strerror})"
    if reason:
        raise HostError(
            f"{path} cannot be written: {reason}. Nothing was sent. Name a file in a folder that may be written."
        )


def write_histograms(path: Path, histograms: Mapping[str, Histogram]) -> None:
    """One histogram of latencies per stream, and one of all."""
    _write(path, json.dumps({"histograms": {name: each.as_dict() for name, each in histograms.items()}}) + "\n")


def histograms(outcome: Outcome) -> dict[str, Histogram]:
    """The latencies of an outcome: of each stream, and of all."""
    return {**{name: each.latency for name, each in outcome.by_stream.items()}, ALL: outcome.latency}


def read_histograms(path: Path) -> dict[str, Histogram]:
    """The histograms of a file. Raises SpecError when it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {str(name): Histogram.of_dict(each) for name, each in content["histograms"].items()}
    except OSError as error:
        raise SpecError(f"The histograms {path} cannot be read: {error}. Nothing was merged.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{path} holds no histograms of a load: {error!r}. Nothing was merged. Name a file of `tritonpilot load --histogram`."
        ) from error
    return found


def merged(every: Sequence[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """The sums by name; `all` comes last."""
    found: dict[str, Histogram] = {}
    for each in every:
        for name, histogram in each.items():
            found.setdefault(name, Histogram()).merge(histogram)
    if ALL in found:
        found[ALL] = found.pop(ALL)
    return found


def write_series(path: Path, series: Sequence[Second]) -> None:
    """A CSV with a line per second of the load."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([field.name for field in fields(Second)])
    lines.writerows(astuple(second) for second in series)
    _write(path, text.getvalue())


def _write(path: Path, text: str) -> None:
    """All or nothing, under the rights that a new file has."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            aside = Path(folder, path.name)
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error}. What was there is there still.") from error
