"""models/ctr/data.py and features.py: no leakage, a split by time, the same code for serving."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.ctr import data
from models.ctr.features import CATEGORICAL, DENSE, Catalogue, Event, History, Item, User, replay
from tritonpilot.errors import HostError

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Catalogue(
    users={"u": User(24, "M", "student", "8"), "v": User(53, "F", "writer", "9")},
    items={"a": Item(1995, ("Action", "Comedy")), "b": Item(1997, ("Drama",)), "c": Item(0, ())},
)
EVENTS = [
    Event("u", "a", 5, 880_000_000),
    Event("v", "a", 2, 880_000_000),
    Event("u", "b", 3, 880_000_007),
    Event("v", "b", 4, 880_003_600),
    Event("u", "c", 4, 880_090_000),
    Event("w", "a", 1, 881_000_000),
    Event("u", "unknown", 5, 882_000_000),
]


def column(dense: np.ndarray, name: str) -> np.ndarray:
    return dense[:, DENSE.index(name)]


@pytest.mark.parametrize("position", range(1, len(EVENTS)))
def test_a_row_does_not_change_when_its_own_answer_or_later_events_change(position: int) -> None:
    before, before_keys = replay(History(CATALOGUE), EVENTS)
    altered = [
        dataclasses.replace(event, rating=6 - event.rating) if index >= position else event
        for index, event in enumerate(EVENTS)
    ]
    after, after_keys = replay(History(CATALOGUE), altered)
    np.testing.assert_array_equal(before[: position + 1], after[: position + 1])
    assert before_keys == after_keys


def test_removing_later_events_leaves_earlier_rows_as_they_were() -> None:
    whole, _ = replay(History(CATALOGUE), EVENTS)
    start, _ = replay(History(CATALOGUE), EVENTS[:4])
    np.testing.assert_array_equal(whole[:4], start)


def test_earlier_events_do_change_later_rows() -> None:
    """So that the tests above can fail."""
    before, _ = replay(History(CATALOGUE), EVENTS)
    after, _ = replay(History(CATALOGUE), [dataclasses.replace(EVENTS[0], rating=1), *EVENTS[1:]])
    assert np.abs(before[2:] - after[2:]).max() > 0


def test_events_of_one_second_do_not_see_each_other() -> None:
    dense, _ = replay(History(CATALOGUE), EVENTS)
    assert column(dense, "item_count")[:2].tolist() == [0, 0]
    assert column(dense, "item_count")[5] == pytest.approx(np.log1p(2))


def test_rates_and_counts_equal_those_computed_by_hand() -> None:
    dense, _ = replay(History(CATALOGUE), EVENTS)
    row = dense[2]  # u and b, after one click of u on a and one non-click of v on a
    click_rate = (1 + 5 * 0.5) / (2 + 5)
    user_rate = (1 + 5 * click_rate) / (1 + 5)
    assert row[DENSE.index("global_click_rate")] == pytest.approx(click_rate)
    assert row[DENSE.index("user_click_rate")] == pytest.approx(user_rate)
    assert row[DENSE.index("user_count")] == pytest.approx(np.log1p(1))
    assert row[DENSE.index("user_idle")] == pytest.approx(np.log1p(7))
    assert row[DENSE.index("item_click_rate")] == pytest.approx(click_rate)
    assert row[DENSE.index("user_age")] == pytest.approx(2.4)
    assert row[DENSE.index("item_age")] == pytest.approx(0.0)


def test_asking_for_a_row_leaves_no_trace_in_the_history() -> None:
    history = History(CATALOGUE)
    replay(history, EVENTS)
    counters = len(history.tallies)
    first = history.row("nobody", "nothing", 883_000_000)
    assert history.row("nobody", "nothing", 883_000_000) == first
    assert len(history.tallies) == counters


def test_events_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order of time"):
        replay(History(CATALOGUE), EVENTS[::-1])


def test_split_is_by_time_and_no_second_is_in_both() -> None:
    dataset = data.load()
    assert len(dataset.train) + len(dataset.test) == 100_000
    assert abs(len(dataset.train) - 80_000) < 100
    assert dataset.train.timestamp.max() < dataset.test.timestamp.min()
    assert (np.diff(dataset.train.timestamp) >= 0).all()
    assert (np.diff(dataset.test.timestamp) >= 0).all()


def test_split_index_moves_up_to_the_next_second() -> None:
    assert data.split_index(np.array([1, 2, 3, 3, 3, 4]), share=0.5) == 5
    assert data.split_index(np.array([1, 2, 3, 4, 5, 6]), share=0.5) == 3


def test_arrays_have_the_shapes_types_and_label_rate_of_the_contract() -> None:
    dataset = data.load()
    assert (len(DENSE), len(CATEGORICAL)) == (28, 8)
    for split in (dataset.train, dataset.test):
        assert split.dense.shape == (len(split), 28)
        assert split.dense.dtype == np.float32
        assert split.categorical.shape == (len(split), 8)
        assert split.categorical.dtype == np.int64
        assert set(np.unique(split.click)) == {0.0, 1.0}
        assert np.isfinite(split.dense).all()
        assert (split.categorical >= 0).all()
        assert (split.categorical < np.array(dataset.vocabulary_sizes)).all()
    clicks = float(dataset.train.click.sum() + dataset.test.click.sum())
    assert clicks == 55_375  # ratings of four or five stars among the 100,000


def test_vocabulary_comes_from_the_train_split_alone() -> None:
    dataset = data.load()
    # Users who first appear in the test split are "unknown", and no index is without a training row
    assert (dataset.test.categorical[:, 0] == 0).mean() > 0.5
    assert (dataset.train.categorical > 0).all()
    for position, size in enumerate(dataset.vocabulary_sizes):
        assert len(np.unique(dataset.train.categorical[:, position])) == size - 1


def test_test_split_returns_the_models_inputs_and_the_clicks() -> None:
    inputs, labels = data.test_split()
    assert list(inputs) == ["dense", "categorical"]
    assert len(inputs["dense"]) == len(inputs["categorical"]) == len(labels)


def test_serving_gives_the_row_of_training_for_the_same_moment() -> None:
    events = data.read_events()
    begin = 2_000
    while events[begin - 1].timestamp == events[begin].timestamp:
        begin += 1
    history = History(data.read_catalogue())
    replay(history, events[:begin])
    encoder = data.Encoder(history, data.serving_encoder().vocabulary)
    event = events[begin]
    encoded = encoder.encode([(event.user, event.item, event.timestamp)])
    train = data.load().train
    np.testing.assert_array_equal(encoded["dense"][0], train.dense[begin])
    np.testing.assert_array_equal(encoded["categorical"][0], train.categorical[begin])


def test_unknown_user_and_item_are_encoded_as_unknown() -> None:
    encoded = data.serving_encoder().encode([("nobody", "nothing", 893_300_000)])
    assert encoded["dense"].shape == (1, 28)
    assert encoded["categorical"][0, :2].tolist() == [0, 0]


def test_auc_counts_ties_half_and_equals_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    assert data.auc([0, 1], [0.5, 0.5]) == 0.5
    assert data.auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    random = np.random.default_rng(7)
    labels, scores = random.integers(0, 2, 500), random.integers(0, 40, 500) / 40
    assert data.auc(labels, scores.reshape(-1, 1)) == pytest.approx(roc_auc_score(labels, scores))
    with pytest.raises(ValueError, match="one click"):
        data.auc([1, 1], [0.1, 0.2])


def test_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(HostError, match=r"no-such-distribution.*make setup"):
        data.read_events()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "header"),
        ("user_id:token\titem_id:token\n1\t2\n", "line 2"),
        ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t2\t3\t4\n1\t2\n", "line 3"),
    ],
)
def test_damaged_file_is_named_with_the_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "ml-100k.inter"
    path.write_text(text)
    with pytest.raises(HostError, match=f"damaged.*{where}"):
        data.read_events(path)


@pytest.mark.parametrize("script", ["models/ctr/train.py", "models/image/export.py"])
def test_script_without_its_packages_says_make_setup_and_exits_7(script: str) -> None:
    bare = subprocess.run([sys.executable, "-I", "-S", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert bare.returncode == 7
    assert "make setup" in bare.stderr
    assert "Traceback" not in bare.stderr
