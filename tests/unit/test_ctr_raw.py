"""models/ctr_raw: served features are those of training's own code, also after the way through the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.artefacts import is_complete
from models.ctr import data
from models.ctr.features import Snapshot
from models.ctr_raw import snapshot as script
from pilotlib import testkit
from pilotlib.testkit import Case, check, check_mates, in_process

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "models" / "ctr_raw" / "serving.py"
CONFIG = testkit.config(
    inputs=[
        {"name": "user", "data_type": "BYTES", "dims": [1]},
        {"name": "item", "data_type": "BYTES", "dims": [1]},
        {"name": "timestamp", "data_type": "INT64", "dims": [1]},
    ],
    outputs=[
        {"name": "dense", "data_type": "FP32", "dims": [28]},
        {"name": "categorical", "data_type": "INT64", "dims": [8]},
    ],
    max_batch_size=256,
)


@pytest.fixture(scope="module")
def trained() -> Snapshot:
    """The history at the end of training, never written to a file."""
    return data.snapshot_of_training()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version folder as the build makes it."""
    folder = tmp_path_factory.mktemp("ctr_raw")
    script.make(folder)
    assert is_complete(folder)
    (folder / "features.py").write_text((ROOT / "models/ctr/features.py").read_text())
    return folder


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[testkit.Ask]:
    with in_process(SERVING, CONFIG, folder) as ask:
        yield ask


def row(user: bytes = b"196", item: bytes = b"242", timestamp: int = 0) -> dict[str, Any]:
    return {
        "user": np.array([[user]], object),
        "item": np.array([[item]], object),
        "timestamp": np.array([[timestamp]], np.int64),
    }


def test_served_features_of_all_test_rows_equal_those_of_training(trained: Snapshot, ask: testkit.Ask) -> None:
    events = script.test_events(trained.end)
    assert len(events) == len(data.load().test)
    expected = trained.encode([(event.user, event.item, event.timestamp) for event in events])
    inputs = script.requests(events)
    for start in range(0, len(events), 256):
        rows = {name: array[start : start + 256] for name, array in inputs.items()}
        found = ask({name: a.astype(object) if a.dtype.kind == "S" else a for name, a in rows.items()})
        np.testing.assert_array_equal(found["categorical"], expected["categorical"][start : start + 256])
        np.testing.assert_array_equal(found["dense"], expected["dense"][start : start + 256])


def test_the_first_row_after_training_is_that_of_the_test_split(trained: Snapshot, ask: testkit.Ask) -> None:
    """Later ones differ: the split's counters have followed the click stream since."""
    (first, *_) = script.test_events(trained.end)
    found = ask(row(first.user.encode(), first.item.encode(), first.timestamp))
    test = data.load().test
    np.testing.assert_array_equal(found["dense"][0], test.dense[0])
    np.testing.assert_array_equal(found["categorical"][0], test.categorical[0])


def test_bad_requests_are_refused_by_name_and_their_mates_answered(trained: Snapshot, ask: testkit.Ask) -> None:
    at_end = trained.encode([("196", "242", trained.end)])
    unknown = trained.encode([("nobody", "", trained.end)])
    cases = [
        Case("no time: when the history ends", row(), at_end),
        Case("unknown ids", row(b"nobody", b""), unknown),
        Case("a megabyte", row(b"x" * 1_000_000), {}),
        Case("not UTF-8", row(b"\xff"), error='"user": row 0 is not UTF-8: invalid start byte at byte 0'),
        Case("not UTF-8", row(item=b"a\x80"), error='"item": row 0 is not UTF-8: invalid start byte at byte 1'),
        Case("the past", row(timestamp=trained.end - 1), error='"timestamp": row 0: 889237268 is not between'),
        Case("never", row(timestamp=-1), error='"timestamp": row 0: -1'),
        Case("the far future", row(timestamp=2**62), error='"timestamp": row 0'),
        Case("no rows", {name: array[:0] for name, array in row().items()}, {"dense": np.empty((0, 28), np.float32)}),
    ]
    for case in cases:
        check(ask, case)
    check_mates(ask, cases * 4)


def test_asking_leaves_no_trace_in_the_snapshot(trained: Snapshot) -> None:
    counters = len(trained.history.tallies)
    first = trained.encode([("nobody", "nothing", trained.end)])
    for name, array in trained.encode([("nobody", "nothing", trained.end)]).items():
        np.testing.assert_array_equal(array, first[name])
    assert len(trained.history.tallies) == counters


def test_a_snapshot_is_the_same_after_its_file(trained: Snapshot) -> None:
    again = Snapshot.from_json(trained.to_json())
    assert again.history.tallies == trained.history.tallies
    assert again.vocabulary == trained.vocabulary
    assert (again.history.catalogue, again.history.everything) == (
        trained.history.catalogue,
        trained.history.everything,
    )
    assert again.end == trained.end


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": "other"}'])
def test_a_damaged_snapshot_is_refused_by_name(damage: str) -> None:
    with pytest.raises(ValueError, match="x.json is no snapshot of the click history"):
        Snapshot.from_json(damage, "x.json")


@pytest.mark.parametrize("key", ["end", "users", "items", "everything", "tallies", "vocabulary"])
def test_a_snapshot_that_lacks_a_part_is_refused(key: str) -> None:
    content = {**SMALL, key: None}
    Snapshot.from_json(json.dumps(SMALL))
    with pytest.raises(ValueError, match="is no snapshot"):
        Snapshot.from_json(json.dumps(content))


SMALL: dict[str, Any] = {
    "format": "ctr history 1",
    "end": 1,
    "users": {"u": [24, "M", "student", "8"]},
    "items": {"a": [1995, ["Action"]]},
    "everything": [1, 1.0, 5.0, 0.0, 1.0, 1],
    "tallies": [[["user", "u"], [1, 1.0, 5.0, 0.0, 1.0, 1]]],
    "vocabulary": [["u"], ["a"], ["M"], [1], ["student"], ["8"], [1995], [["Action"]]],
}
