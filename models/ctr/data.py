"""What are the click model trained and tested on? MovieLens 100k as an advertiser would see it, split by time.

    data = load()                        # train and test arrays, vocabulary sizes
    inputs, labels = test_split()        # what the test AUC is computed from
    encoder = serving_encoder()          # the same code, for a request of today

The files are those inside the installed `recbole` package; nothing is downloaded and recbole is not imported.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.ctr.features import Catalogue, Event, History, Item, Snapshot, User, Vocabulary, replay
from models.packages import data_file
from tritonpilot.errors import HostError

DISTRIBUTION = "recbole"
FOLDER = "recbole/dataset_example/ml-100k"
COLUMNS = {
    "ml-100k.inter": ("user_id:token", "item_id:token", "rating:float", "timestamp:float"),
    "ml-100k.user": ("user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"),
    "ml-100k.item": ("item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"),
}
TRAIN_SHARE = 0.8


@dataclass(frozen=True)
class Split:
    """n rows in the order of time: dense FP32[n,28], categorical INT64[n,8], click FP32[n] (0 or 1),
    timestamp INT64[n] (seconds since 1970). Read-only arrays."""

    dense: npt.NDArray[np.float32]
    categorical: npt.NDArray[np.int64]
    click: npt.NDArray[np.float32]
    timestamp: npt.NDArray[np.int64]

    @property
    def inputs(self) -> dict[str, npt.NDArray[np.generic]]:
        """The model's inputs under their ONNX names."""
        return {"dense": self.dense, "categorical": self.categorical}

    def part(self, start: int, stop: int) -> Split:
        """Rows `start` to `stop`, not included."""
        rows = slice(start, stop)
        return Split(self.dense[rows], self.categorical[rows], self.click[rows], self.timestamp[rows])

    def __len__(self) -> int:
        return len(self.click)


@dataclass(frozen=True)
class Dataset:
    """`train` ends before `test` begins. `vocabulary_sizes` are the rows of the eight embedding tables."""

    train: Split
    test: Split
    vocabulary_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Encoder:
    """Turns requests into the model's inputs with the features of training."""

    history: History
    vocabulary: Vocabulary

    def encode(self, requests: Sequence[tuple[str, str, int]]) -> dict[str, npt.NDArray[np.generic]]:
        """{"dense": FP32[n,28], "categorical": INT64[n,8]} of n requests (user id, item id, timestamp in seconds).

        Unknown ids are allowed. Report what happened with `history.observe(Event(...))` to keep the features fresh.
        """
        rows = [self.history.row(user, item, timestamp) for user, item, timestamp in requests]
        dense = np.array([values for values, _ in rows], dtype=np.float32)
        return {"dense": dense, "categorical": self.vocabulary.encode([keys for _, keys in rows])}


def load() -> Dataset:
    """The 100,000 ratings as a click data set. Takes about six seconds once; later calls of the process reuse it.

    The first 80 % of the time line are `train`, the rest is `test` (cut between two seconds). A row's features come
    from the events of earlier seconds only; test rows see the test events before them, as a feature store fed by
    the click stream would. The vocabulary is that of `train`. Raises HostError when the files are absent or damaged.
    """
    return _replayed()[0]


def test_split() -> tuple[dict[str, npt.NDArray[np.generic]], npt.NDArray[np.float32]]:
    """({"dense": FP32[n,28], "categorical": INT64[n,8]}, clicks FP32[n]) of the whole test split."""
    test = load().test
    return test.inputs, test.click


def serving_encoder() -> Encoder:
    """An encoder that has observed all 100,000 events: requests of a time after them get the features of training."""
    return _replayed()[1]


def snapshot_of_training() -> Snapshot:
    """What serving starts from: the counters after the last event of the train split, and its vocabulary. Takes about
    five seconds. The test split's rows of `load` have seen the test events before them, this has not."""
    events = read_events()
    seen = events[: split_index(np.array([event.timestamp for event in events], dtype=np.int64))]
    history = History(read_catalogue())
    _, keys = replay(history, seen)
    return Snapshot(history, Vocabulary.of(keys), seen[-1].timestamp)


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Area under the ROC curve: the chance that a click scores above a non-click, ties counting half.

    `labels` (0 or 1) and `scores` have n entries in any shape. Raises ValueError when one class is absent.
    """
    is_click = np.asarray(labels).ravel() > 0.5
    score = np.asarray(scores).ravel()
    clicks, others = int(is_click.sum()), int((~is_click).sum())
    if not clicks or not others:
        raise ValueError("AUC needs at least one click and one non-click")
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    # Mann-Whitney U over the number of pairs
    return float((mean_rank[inverse][is_click].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def read_events(path: Path | None = None) -> list[Event]:
    """The ratings in the order of time (of the file within one second). Raises HostError on a damaged file."""
    rows = _rows("ml-100k.inter", path)
    events = [Event(user, item, float(rating), int(float(timestamp))) for user, item, rating, timestamp in rows]
    return sorted(events, key=lambda event: event.timestamp)


def read_catalogue() -> Catalogue:
    """Users and films. Raises HostError when the files are absent or damaged."""
    users = {
        key: User(int(age), gender, occupation, zip_code[:1])
        for key, age, gender, occupation, zip_code in _rows("ml-100k.user")
    }
    items = {
        key: Item(int(year) if year.isdigit() else 0, tuple(genres.split()))
        for key, _, year, genres in _rows("ml-100k.item")
    }
    return Catalogue(users, items)


def titles() -> dict[str, str]:
    """The films' titles by id. Raises HostError when the file is absent or damaged."""
    return {key: title for key, title, *_ in _rows("ml-100k.item")}


def split_index(timestamps: npt.NDArray[np.int64], share: float = TRAIN_SHARE) -> int:
    """First row of the test split: at `share` of the sorted rows, moved up so that no second is in both splits."""
    cut = int(len(timestamps) * share)
    return int(np.searchsorted(timestamps, timestamps[cut - 1], side="right")) if cut else 0


@cache
def _replayed() -> tuple[Dataset, Encoder]:
    events = read_events()
    history = History(read_catalogue())
    dense, keys = replay(history, events)
    timestamps = np.array([event.timestamp for event in events], dtype=np.int64)
    click = np.array([event.is_click for event in events], dtype=np.float32)
    cut = split_index(timestamps)
    vocabulary = Vocabulary.of(keys[:cut])
    train = _split(dense[:cut], keys[:cut], click[:cut], timestamps[:cut], vocabulary)
    test = _split(dense[cut:], keys[cut:], click[cut:], timestamps[cut:], vocabulary)
    return Dataset(train, test, vocabulary.sizes), Encoder(history, vocabulary)


def _split(
    dense: npt.NDArray[np.float32],
    keys: Sequence[tuple[Hashable, ...]],
    click: npt.NDArray[np.float32],
    timestamps: npt.NDArray[np.int64],
    vocabulary: Vocabulary,
) -> Split:
    split = Split(dense, vocabulary.encode(keys), click, timestamps)
    for array in (split.dense, split.categorical, split.click, split.timestamp):
        array.flags.writeable = False
    return split


def _rows(name: str, path: Path | None = None) -> list[list[str]]:
    path = path or data_file(DISTRIBUTION, f"{FOLDER}/{name}")
    # Split by hand: titles hold quotation marks that mean nothing
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    rows = [line.split("\t") for line in lines]
    expected = COLUMNS[name]
    bad = next((number for number, row in enumerate(rows, 2) if len(row) != len(expected)), None)
    if tuple(header.split("\t")) != expected or bad is not None or not rows:
        where = f"line {bad}" if bad is not None else "its header line"
        raise HostError(
            f"{path} is damaged or not MovieLens 100k in RecBole's form: {where} does not have the columns "
            f"{', '.join(expected)}. Nothing has been written. Reinstall the pinned {DISTRIBUTION} of "
            "models/requirements.txt: remove .venv/.ready and run `make setup`."
        )
    return rows
