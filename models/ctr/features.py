"""What does the click model see of a request? One code for training and for serving.

    history = History(catalogue)
    dense, categorical = history.row(user, item, timestamp)      # before the answer is known
    history.observe(Event(user, item, rating, timestamp))        # after it is

    snapshot = Snapshot(history, vocabulary, end)                # what serving loads: snapshot.to_json() in a file
    inputs = snapshot.encode([(user, item, timestamp)])

A row is computed from the catalogue and from the events observed so far, nothing else: what has not been observed
cannot leak. `replay` keeps the order, and observes events of one second only after all rows of that second are made.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime, timezone
from itertools import groupby

import numpy as np
import numpy.typing as npt

CLICK_RATING = 4.0
"""A rating of four stars or more counts as the click."""

DENSE = (
    "global_click_rate",
    "user_count",
    "user_click_rate",
    "user_mean_rating",
    "user_recent_click_rate",
    "user_offset",
    "user_idle",
    "item_count",
    "item_click_rate",
    "item_mean_rating",
    "item_recent_click_rate",
    "item_offset",
    "item_idle",
    "item_click_rate_by_gender",
    "item_click_rate_by_age_group",
    "item_click_rate_by_occupation",
    "genre_click_rate",
    "user_genre_count",
    "user_genre_click_rate_mean",
    "user_genre_click_rate_max",
    "user_genre_click_rate_min",
    "user_decade_click_rate",
    "expected_rating",
    "user_age",
    "item_age",
    "genres",
    "hour_sin",
    "hour_cos",
)
"""Columns of the input `dense` (FP32[b,28]), in order. Unscaled: the model carries the scaling."""

CATEGORICAL = ("user", "item", "gender", "age_group", "occupation", "region", "release_year", "genre_set")
"""Columns of the input `categorical` (INT64[b,8]), in order. 0 is "not seen in training"."""

RATE_WEIGHT = 5.0  # pseudo-events of a smoothed rate: it starts at its prior and is half its own after five events
RECENT_STEP = 0.1  # of the exponential mean over the latest events
OFFSET_WEIGHTS = (8.0, 5.0)  # ridge of the user's and the item's offset from the expected rating, in events
AGE_GROUPS = (18, 25, 35, 45, 50, 56)  # as in the later MovieLens sets


@dataclass(frozen=True)
class Event:
    """A user rated an item (1 to 5 stars) at a time (seconds since 1970, UTC)."""

    user: str
    item: str
    rating: float
    timestamp: int

    @property
    def is_click(self) -> bool:
        return self.rating >= CLICK_RATING


@dataclass(frozen=True)
class User:
    age: int
    gender: str
    occupation: str
    region: str  # first character of the postal code: a digit in the USA


@dataclass(frozen=True)
class Item:
    release_year: int  # 0 when unknown
    genres: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue:
    """What is known of users and items apart from events. Unknown keys get neutral attributes."""

    users: dict[str, User]
    items: dict[str, Item]

    def user(self, key: str) -> User:
        return self.users.get(key, UNKNOWN_USER)

    def item(self, key: str) -> Item:
        return self.items.get(key, UNKNOWN_ITEM)


UNKNOWN_USER = User(age=30, gender="", occupation="", region="")
UNKNOWN_ITEM = Item(release_year=0, genres=())


@dataclass
class Tally:
    """Running count and sum of one key, its latest time and its exponential mean."""

    count: int = 0
    total: float = 0.0
    rating_total: float = 0.0
    offset_total: float = 0.0
    recent: float = 0.0
    latest: int = 0

    def rate(self, prior: float) -> float:
        return (self.total + RATE_WEIGHT * prior) / (self.count + RATE_WEIGHT)


NEVER = Tally()
NO_RATE = 0.5
NO_RATING = 3.5
IDLE_FOREVER_S = 10 * 365 * 86400


@dataclass
class History:
    """State of all counters after the events observed so far."""

    catalogue: Catalogue
    everything: Tally = field(default_factory=Tally)
    tallies: defaultdict[Hashable, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def row(self, user: str, item: str, timestamp: int) -> tuple[list[float], tuple[Hashable, ...]]:
        """The 28 dense values (order of DENSE) and the 8 categorical keys (order of CATEGORICAL; Vocabulary
        turns them into indices) of one request at `timestamp`, from what has been observed until now."""
        person, film = self.catalogue.user(user), self.catalogue.item(item)
        of_user, of_item = self._tally("user", user), self._tally("item", item)
        click_rate = self.everything.rate(NO_RATE)
        mean_rating = self._mean_rating()
        user_rate = of_user.rate(click_rate)
        item_rate = of_item.rate(click_rate)
        user_offset, item_offset = self._offset(of_user, 0), self._offset(of_item, 1)
        by_genre = [self._tally("user genre", user, genre) for genre in film.genres]
        genre_rates = [tally.rate(user_rate) for tally in by_genre] or [user_rate]
        genre_prior = [self._tally("genre", genre).rate(click_rate) for genre in film.genres] or [click_rate]
        group = age_group(person.age)
        when = datetime.fromtimestamp(timestamp, timezone.utc)
        hour = (when.hour + when.minute / 60) / 24 * 2 * math.pi
        dense = [
            click_rate,
            math.log1p(of_user.count),
            user_rate,
            (of_user.rating_total + RATE_WEIGHT * mean_rating) / (of_user.count + RATE_WEIGHT),
            of_user.recent if of_user.count else click_rate,
            user_offset,
            _idle(of_user, timestamp),
            math.log1p(of_item.count),
            item_rate,
            (of_item.rating_total + RATE_WEIGHT * mean_rating) / (of_item.count + RATE_WEIGHT),
            of_item.recent if of_item.count else click_rate,
            item_offset,
            _idle(of_item, timestamp),
            self._tally("item gender", item, person.gender).rate(item_rate),
            self._tally("item age", item, group).rate(item_rate),
            self._tally("item occupation", item, person.occupation).rate(item_rate),
            sum(genre_prior) / len(genre_prior),
            math.log1p(sum(tally.count for tally in by_genre)),
            sum(genre_rates) / len(genre_rates),
            max(genre_rates),
            min(genre_rates),
            self._tally("user decade", user, film.release_year // 10).rate(user_rate),
            mean_rating + user_offset + item_offset,
            person.age / 10,
            min(max(when.year - film.release_year, 0), 80) / 10 if film.release_year else 0.0,
            float(len(film.genres)),
            math.sin(hour),
            math.cos(hour),
        ]
        keys = (user, item, person.gender, group, person.occupation, person.region, film.release_year, film.genres)
        return dense, keys

    def observe(self, event: Event) -> None:
        """Count one event. Call it in the order of time, after the rows of its second have been made."""
        person, film = self.catalogue.user(event.user), self.catalogue.item(event.item)
        of_user, of_item = self.tallies["user", event.user], self.tallies["item", event.item]
        residual = event.rating - self._mean_rating() if self.everything.count else 0.0
        user_offset, item_offset = self._offset(of_user, 0), self._offset(of_item, 1)
        of_user.offset_total += residual - item_offset
        of_item.offset_total += residual - user_offset
        counted = [
            self.everything,
            of_user,
            of_item,
            self.tallies["item gender", event.item, person.gender],
            self.tallies["item age", event.item, age_group(person.age)],
            self.tallies["item occupation", event.item, person.occupation],
            self.tallies["user decade", event.user, film.release_year // 10],
        ]
        for genre in film.genres:
            counted += [self.tallies["genre", genre], self.tallies["user genre", event.user, genre]]
        click = float(event.is_click)
        for tally in counted:
            tally.recent += (RECENT_STEP if tally.count else 1.0) * (click - tally.recent)
            tally.count += 1
            tally.total += click
            tally.rating_total += event.rating
            tally.latest = event.timestamp

    def _tally(self, *key: Hashable) -> Tally:
        return self.tallies.get(key, NEVER)  # reading must not create keys

    def _mean_rating(self) -> float:
        return self.everything.rating_total / self.everything.count if self.everything.count else NO_RATING

    def _offset(self, tally: Tally, side: int) -> float:
        return tally.offset_total / (tally.count + OFFSET_WEIGHTS[side])


@dataclass(frozen=True)
class Vocabulary:
    """Index of each categorical key, one table per column of CATEGORICAL; index 0 stands for every other key."""

    tables: tuple[dict[Hashable, int], ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[Hashable, ...]]) -> Vocabulary:
        """The keys that occur in these rows (the training split), sorted, from index 1 up."""
        columns = [sorted({row[column] for row in rows}, key=repr) for column in range(len(CATEGORICAL))]
        return cls(tuple({key: index for index, key in enumerate(keys, 1)} for keys in columns))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each embedding table, the 0 included."""
        return tuple(len(table) + 1 for table in self.tables)

    def encode(self, rows: Sequence[tuple[Hashable, ...]]) -> npt.NDArray[np.int64]:
        """INT64[n,8] indices of n rows of keys."""
        indices = [[table.get(key, 0) for table, key in zip(self.tables, row, strict=True)] for row in rows]
        return np.array(indices, dtype=np.int64).reshape(len(rows), len(CATEGORICAL))


@dataclass(frozen=True)
class Snapshot:
    """All that rows are made from at one moment: counters, catalogue and vocabulary. Nothing in it grows when it is asked."""

    history: History
    vocabulary: Vocabulary
    end: int
    """Time of the latest event observed, in seconds since 1970. Rows of an earlier time would know their own future."""

    def encode(self, requests: Sequence[tuple[str, str, int]]) -> dict[str, npt.NDArray[np.generic]]:
        """{"dense": FP32[n,28], "categorical": INT64[n,8]} of n requests (user, item, timestamp). Unknown ids are allowed."""
        rows = [self.history.row(user, item, timestamp) for user, item, timestamp in requests]
        dense = np.array([values for values, _ in rows], dtype=np.float32).reshape(len(rows), len(DENSE))
        return {"dense": dense, "categorical": self.vocabulary.encode([keys for _, keys in rows])}

    def to_json(self) -> str:
        """A text that `from_json` makes the same snapshot of, to the last bit. About 90 bytes a counter."""
        catalogue = self.history.catalogue
        content = {
            "format": SNAPSHOT_FORMAT,
            "end": self.end,
            "users": {key: astuple(user) for key, user in catalogue.users.items()},
            "items": {key: astuple(item) for key, item in catalogue.items.items()},
            "everything": astuple(self.history.everything),
            "tallies": [(key, astuple(tally)) for key, tally in self.history.tallies.items()],
            "vocabulary": [list(table) for table in self.vocabulary.tables],
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "history.json") -> Snapshot:
        """Raises ValueError naming `source` when the text is damaged or of another format."""
        try:
            content = json.loads(text)
            if content["format"] != SNAPSHOT_FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {SNAPSHOT_FORMAT!r}")
            catalogue = Catalogue(
                {key: User(*attributes) for key, attributes in content["users"].items()},
                {key: Item(year, tuple(genres)) for key, (year, genres) in content["items"].items()},
            )
            history = History(catalogue, Tally(*content["everything"]))
            history.tallies.update((_key(key), Tally(*tally)) for key, tally in content["tallies"])
            tables = [{_key(key): index for index, key in enumerate(keys, 1)} for keys in content["vocabulary"]]
            if len(tables) != len(CATEGORICAL):
                raise ValueError(f"it has {len(tables)} vocabularies, not {len(CATEGORICAL)}")
            return cls(history, Vocabulary(tuple(tables)), int(content["end"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{source} is no snapshot of the click history: {error!r}. It is not used. Make it again with its script"
            ) from error


SNAPSHOT_FORMAT = "ctr history 1"


def _key(key: Hashable | list[Hashable]) -> Hashable:
    return tuple(key) if isinstance(key, list) else key


def replay(history: History, events: Iterable[Event]) -> tuple[npt.NDArray[np.float32], list[tuple[Hashable, ...]]]:
    """Rows (FP32[n,28] and n tuples of keys) of events in the order of time, each from the seconds before its own.

    `history` ends with all events observed. Raises ValueError when the events are not in order.
    """
    dense: list[list[float]] = []
    keys: list[tuple[Hashable, ...]] = []
    previous = -1
    for timestamp, group in groupby(events, key=lambda event: event.timestamp):
        if timestamp < previous:
            raise ValueError(f"events are not in the order of time: {timestamp} follows {previous}")
        previous = timestamp
        same_second = list(group)
        for event in same_second:
            values, row_keys = history.row(event.user, event.item, timestamp)
            dense.append(values)
            keys.append(row_keys)
        for event in same_second:
            history.observe(event)
    return np.array(dense, dtype=np.float32).reshape(len(dense), len(DENSE)), keys


def age_group(age: int) -> int:
    """0 (under 18) to 6 (56 and over)."""
    return sum(age >= bound for bound in AGE_GROUPS)


def _idle(tally: Tally, timestamp: int) -> float:
    return math.log1p(timestamp - tally.latest if tally.count else IDLE_FOREVER_S)
