"""Who may call the entry, and how much: the tenants file, its keys and limits, read again whenever it changes.

    keys = KeyFile(Path("tenants.yaml"), time.monotonic)   # raises SpecError
    tenant = keys.current.identify(header)                 # raises KeyRefused
    keys.poll()                                            # every second or so: one stat while the file stays the same

Everything here runs on the event loop of the entry. What callers send is never logged or shown, nor is what stands in the file
where the hash of a key should be.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field, ValidationError

from tritonpilot import written
from tritonpilot.errors import SpecError
from tritonpilot.written import Written

Clock = Callable[[], float]

LONGEST_KEY = 256
LARGEST_FILE_BYTES = 4 * 2**20
DEEPEST = 16  # levels of nesting in the file; a tenant has 4
WIDEST = 1000  # keys of one mapping
MOST_TENANTS = 10_000
MOST_EVENTS = 40 * MOST_TENANTS  # of the YAML parser: each word is one
MOST_TOLD, LONGEST_TOLD = 20, 1000  # problems that one message names, and characters of each
HASH_COMMAND = "tritonpilot tenants hash-key"
HASH = re.compile(r"sha256:[0-9a-f]{64}")
#: A wait this short is none: a clock of float seconds cannot tell it from none after months of uptime.
NO_WAIT_S = 1e-6
#: Two writes within one tick of the file system's clock (4 ms, on some file systems 2 s) leave the same time stamp.
STAMP_TICK_NS = 2_000_000_000

log = logging.getLogger(__name__)

# The parser of libyaml is ten times as fast; PyYAML built without it still has its own.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128)]


class KeyRefused(Exception):  # noqa: N818 -- an answer to the caller, not a fault of this process
    """A call without a key, or with one that opens nothing. The text goes to the caller and does not show the key."""


def new_key() -> str:
    """A new API key: `tp_` and 256 random bits in 43 characters that need no quoting anywhere."""
    return f"tp_{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """What the tenants file holds instead of the key: `sha256:` and 64 hex digits.

    One round of SHA-256 is right for keys of `new_key()`: there are 2^256 to try. It is wrong for a password that a person chose.
    Raises ValueError for what no caller can send as a key.
    """
    if not _can_be_a_key(key):
        raise ValueError(f"a key is 1 to {LONGEST_KEY} printable ASCII characters without spaces")
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class TokenBucket:
    """A rate in rows per second, and how many rows may come at once.

        wait_s = bucket.take(rows)     # 0.0: taken; else nothing was, and so long it takes until it can be

    More rows than the burst are let through when the bucket is full, and leave it in debt: the next rows wait until it is paid.
    So a request of 256 rows passes a burst of 100, and over time no more than the rate goes through.
    """

    __slots__ = ("_at_s", "_clock", "_level", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, clock: Clock) -> None:
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._clock = clock
        self._level = burst
        self._at_s = clock()

    @property
    def level(self) -> float:
        """Rows that could be taken now; below zero is debt."""
        self._fill()
        return self._level

    def take(self, n: int) -> float:
        """Take `n` rows and return 0.0, or take none and return the seconds until they can be taken."""
        self._fill()
        wait_s = (min(n, self.burst) - self._level) / self.rate_per_s
        if wait_s > NO_WAIT_S:
            return wait_s
        self._level -= n
        return 0.0

    def change(self, rate_per_s: float, burst: float) -> None:
        """New limits from now on. The level stays, but never above the burst."""
        self._fill()
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = min(self._level, burst)

    def _fill(self) -> None:
        # What is kept is the level, not a time at which it will be full: rounding is then relative to the burst, not to the uptime.
        now_s = self._clock()
        if now_s > self._at_s:
            self._level = min(self.burst, self._level + (now_s - self._at_s) * self.rate_per_s)
            self._at_s = now_s


class Tenant:
    """One tenant as the file says it now. The object stays the same when the file is read again, so a request may hold it."""

    __slots__ = ("_class_name", "_classes", "_models", "bucket", "concurrency", "in_entry", "name", "queue_share")

    def __init__(self, name: str) -> None:
        self.name = name
        self.bucket: TokenBucket | None = None
        self.concurrency: int | None = None
        self.queue_share: float | None = None
        #: Requests of this tenant in the entry, waiting and running; the gate counts.
        self.in_entry = 0
        self._class_name: str | None = None
        self._classes: Mapping[str, str] = {}
        self._models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether this tenant may call the model."""
        return self._models is None or model in self._models

    def class_for(self, model: str) -> str | None:
        """The class of this tenant's requests to the model; None: the model's default class."""
        return self._classes.get(model, self._class_name)

    def _become(self, said: TenantTerms, clock: Clock) -> None:
        self.concurrency = said.concurrency
        self.queue_share = said.queue_share
        self._class_name = said.class_
        self._classes = said.classes
        self._models = None if said.models is None else frozenset(said.models)
        if said.rate_per_s is None:
            self.bucket = None
            return
        burst = said.burst if said.burst is not None else max(1.0, said.rate_per_s)
        if self.bucket is None:
            self.bucket = TokenBucket(said.rate_per_s, burst, clock)
        else:
            self.bucket.change(said.rate_per_s, burst)

    @property
    def _is_idle(self) -> bool:
        """Nothing in the entry and nothing owed: a new object would be the same."""
        return not self.in_entry and (self.bucket is None or self.bucket.level >= self.bucket.burst)


class TenantTerms(Written):
    """One tenant, as written in the file."""

    name: _Name
    keys: Annotated[list[str], Field(min_length=1)]
    class_: _Name | None = Field(None, alias="class", description="default: the model's default class")
    classes: dict[_Name, _Name] = Field({}, description="class by model, before `class`")
    models: Annotated[list[_Name], Field(min_length=1)] | None = Field(None, description="default: all")
    rate_per_s: Annotated[float, Field(ge=0.001, le=1e9)] | None = Field(None, description="rows per second")
    burst: Annotated[int, Field(ge=1, le=10**9)] | None = Field(None, description="rows; default: a second's worth")
    concurrency: Annotated[int, Field(ge=1, le=10**6)] | None = Field(None, description="requests in the entry at once")
    queue_share: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="of a class's queue")


class TenantsFile(Written):
    """The tenants file."""

    tenants: Annotated[list[TenantTerms], Field(min_length=1, max_length=MOST_TENANTS)]


class Tenants:
    """All tenants of one reading of the file."""

    def __init__(self, said: TenantsFile, clock: Clock, previous: Tenants | None = None) -> None:
        before: dict[str, Tenant] = {} if previous is None else {**previous._gone, **previous._by_name}
        self._by_name: dict[str, Tenant] = {}
        self._by_digest: dict[bytes, Tenant] = {}
        for terms in said.tenants:
            tenant = before.pop(terms.name, None) or Tenant(terms.name)
            tenant._become(terms, clock)
            self._by_name[terms.name] = tenant
            for key in terms.keys:
                self._by_digest[bytes.fromhex(key.removeprefix("sha256:"))] = tenant
        # A tenant that comes back (a file seen half written, say) finds its count and its debt.
        self._gone: dict[str, Tenant] = {name: tenant for name, tenant in before.items() if not tenant._is_idle}

    @classmethod
    def load(cls, path: Path, clock: Clock, previous: Tenants | None = None) -> Tenants:
        """Read the file. Tenants of `previous` that stay are the same objects, with their bucket's level and their count.

        Raises SpecError, and then `previous` is as it was.
        """
        content, _ = _content_of(path)
        return cls(_parse(path, content), clock, previous)

    def identify(self, key: str | None) -> Tenant:
        """The tenant that this key belongs to. Raises KeyRefused."""
        if not key:
            raise KeyRefused("no API key: send yours as `tritonpilot-key: KEY` or `authorization: Bearer KEY`")
        if not _can_be_a_key(key):
            raise KeyRefused(f"no API key can look like this: 1 to {LONGEST_KEY} printable ASCII characters, no spaces")
        # How long the look-up takes depends on the digest, which nobody can choose byte by byte: it tells nothing about keys.
        tenant = self._by_digest.get(hashlib.sha256(key.encode()).digest())
        if tenant is None:
            raise KeyRefused("this API key is unknown or revoked")
        return tenant

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)


class KeyFile:
    """The tenants in force, from a file that is read again when it changes.

    A file that cannot be used leaves the last good one in force; `trouble` says what is wrong until it is right again.
    """

    def __init__(self, path: Path, clock: Clock, say: Callable[[str], None] = log.warning) -> None:
        """Raises SpecError: the entry does not start with a file that it cannot use."""
        self.path = path
        self.trouble: str | None = None
        self._clock = clock
        self._say = say
        self._stamp: _Stamp | None = None
        self._digest = self._seen = b""
        self._mode = 0
        content, stamp = _content_of(path)
        self.current = Tenants(_parse(path, content), clock)
        self._is_new(content, stamp)
        self._warn_of_writers(stamp.mode)

    def poll(self, *, is_settled: bool = False) -> bool:
        """Read the file if it has changed; whether it was, and is in force. Raises nothing, whatever the file is now.

        `is_settled`: only when the last look found the same content. A file that is being written can be good YAML and yet
        lack its end, so whoever looks every second waits for one.
        """
        try:
            if self._stamp is not None and _Stamp.of(self.path.stat()) == self._stamp:
                return False
            content, stamp = _content_of(self.path)
        except (OSError, SpecError) as failed:
            # Nothing is remembered: the next poll tries again, whether the file has changed or not.
            self._stamp, self._digest = None, b""
            self._keep(
                f"{self.path} cannot be read: {failed.strerror}." if isinstance(failed, OSError) else str(failed)
            )
            return False
        self._warn_of_writers(stamp.mode)
        digest = hashlib.sha256(content).digest()
        if is_settled and digest not in (self._digest, self._seen):
            self._seen = digest
            return False
        if not self._is_new(content, stamp):
            return False
        try:
            self.current = Tenants(_parse(self.path, content), self._clock, self.current)
        except SpecError as wrong:
            self._keep(str(wrong))
            return False
        self.trouble = None
        self._say(f"{self.path} was read: {len(self.current)} tenants")
        return True

    def _is_new(self, content: bytes, stamp: _Stamp) -> bool:
        """Remember what was read; whether it is something else than the last time."""
        # What was written just now could be written again within the same tick: such a stamp proves nothing.
        self._stamp = stamp if stamp.ctime_ns < time.time_ns() - STAMP_TICK_NS else None
        digest = hashlib.sha256(content).digest()
        if digest == self._digest:
            return False
        self._digest = digest
        return True

    def _keep(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._say(f"{trouble} The tenants of the last good file stay in force.")

    def _warn_of_writers(self, mode: int) -> None:
        before, self._mode = self._mode, mode
        if mode != before and mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._say(
                f"{self.path} can be written by others than its owner (mode {stat.S_IMODE(mode):o}): whoever may, can let "
                f"anybody in. Run: chmod go-w {self.path}"
            )


class _Stamp(NamedTuple):
    """What changes when a file is written, replaced, or its permissions change."""

    mtime_ns: int
    ctime_ns: int
    size: int
    inode: int
    device: int
    mode: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Stamp:
        return cls(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev, found.st_mode)


def _can_be_a_key(key: str) -> bool:
    return 1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable() and " " not in key


def _content_of(path: Path) -> tuple[bytes, _Stamp]:
    """The file, and its stamp from before it was read: what is written meanwhile shows at the next look."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never wait for the writer of a pipe
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SpecError(f"{path} is not a regular file. Nothing was changed.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content = file.read(LARGEST_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Nothing was changed.") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise SpecError(f"{path} is larger than {LARGEST_FILE_BYTES >> 20} MiB. Nothing was changed.")
    return content, _Stamp.of(found)


def _parse(path: Path, content: bytes) -> TenantsFile:
    """Raises SpecError, with file and line; values where keys could stand are not in its text."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: is not UTF-8. Nothing was changed.") from None
    try:
        _refuse_bombs(path, text)
        node = yaml.compose(text, Loader=_Loader)
        said = _plain(path, node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else f"{path}"
        what = str(getattr(error, "problem", None) or getattr(error, "reason", ""))
        raise SpecError(f"{at}: is not valid YAML: {_short(what)}. Nothing was changed.") from None
    if not isinstance(said, dict):
        raise SpecError(f"{path} must be a mapping that starts with `tenants:`. Nothing was changed.")
    problems = list(_wrong_keys(said))
    if not problems:
        try:
            file = TenantsFile.model_validate(said)
        except ValidationError as error:
            lines = written._say_all(path, node, TenantsFile, error)
            raise _wrong(re.sub(r"\bclass_(?=[?,)])", "class", line) for line in lines) from None
        problems = list(_contradictions(file))
    if problems:
        raise _wrong(f"{path}:{written._line_of(node, loc)}: {what}" for loc, what in problems)
    return file


def _wrong(problems: Iterable[str]) -> SpecError:
    problems = iter(problems)
    told = [_short(problem) for problem in itertools.islice(problems, MOST_TOLD)]
    return SpecError("\n".join([*told, *(["And more."] if any(problems) else []), "Nothing was changed."]))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TOLD else f"{text[:LONGEST_TOLD]}..."


def _refuse_bombs(path: Path, text: str) -> None:
    """No aliases, which multiply a small file to any size; no nesting that recursion does not survive; no hour of parsing."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if count > MOST_EVENTS:
            raise SpecError(f"{path}:{line}: has too many words for {MOST_TENANTS} tenants. Nothing was changed.")
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(f"{path}:{line}: aliases (*name) are not taken here: write it out. Nothing was changed.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise SpecError(f"{path}:{line}: is nested more than {DEEPEST} levels deep. Nothing was changed.")


def _plain(path: Path, node: yaml.Node) -> Any:
    """The node as dict, list or scalar. Many times faster than PyYAML's own construction: the event loop waits for it."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(path, item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        if len(node.value) > WIDEST:
            line = node.start_mark.line + 1
            raise SpecError(f"{path}:{line}: has more than {WIDEST} keys. Nothing was changed.")
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{path}:{line}: a key must be a word. Nothing was changed.")
            if key_node.value in mapping:
                raise SpecError(f"{path}:{line}: key {_short(key_node.value)!r} is given twice. Nothing was changed.")
            mapping[key_node.value] = _plain(path, value_node)
        return mapping
    if node.tag == "tag:yaml.org,2002:str":
        return node.value
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, OverflowError):
        raise SpecError(f"{path}:{node.start_mark.line + 1}: is not a value. Nothing was changed.") from None


_Problem = tuple[Sequence[object], str]


def _wrong_keys(said: Mapping[str, Any]) -> Iterator[_Problem]:
    """What stands where hashes should; looked at before the rest, whose messages show what was given."""
    tenants = said.get("tenants")
    for i, tenant in enumerate(tenants if isinstance(tenants, list) else []):
        keys = tenant.get("keys", []) if isinstance(tenant, dict) else []
        if not isinstance(keys, list):
            yield ("tenants", i, "keys"), "keys must be a list of hashes: keys: [sha256:...]"
            continue
        for k, key in enumerate(keys):
            if not (isinstance(key, str) and HASH.fullmatch(key)):
                yield (
                    ("tenants", i, "keys", k),
                    f"this is no hash of a key, which is sha256: and 64 digits (0-9, a-f). A key itself does not belong in this "
                    f"file: hash it with `{HASH_COMMAND}`",
                )


def _contradictions(file: TenantsFile) -> Iterator[_Problem]:
    names: set[str] = set()
    owners: dict[str, str] = {}
    for i, tenant in enumerate(file.tenants):
        if tenant.name in names:
            yield ("tenants", i, "name"), f"two tenants are named {tenant.name}; give each its own name"
        names.add(tenant.name)
        for k, key in enumerate(tenant.keys):
            if key in owners:
                yield (
                    ("tenants", i, "keys", k),
                    f"tenant {owners[key]} has this key already; give each tenant its own, once",
                )
            owners.setdefault(key, tenant.name)
        if tenant.burst is not None and tenant.rate_per_s is None:
            yield ("tenants", i, "burst"), "burst belongs to a rate: give rate_per_s too"
        for model in tenant.classes:
            if tenant.models is not None and model not in tenant.models:
                yield ("tenants", i, "classes", model), f"models of {tenant.name} does not list {model}"
