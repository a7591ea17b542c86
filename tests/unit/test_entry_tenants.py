from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tritonpilot.entry import tenants as module
from tritonpilot.entry.tenants import (
    LARGEST_FILE_BYTES,
    LONGEST_KEY,
    KeyFile,
    KeyRefused,
    Tenants,
    TokenBucket,
    hash_key,
    new_key,
)
from tritonpilot.errors import SpecError

ROOT = Path(__file__).parents[2]
SHOP, SHOP_NEXT, SCANS = "shop-key", "shop-next-key", "scans-key"

GOOD = f"""\
tenants:
  - name: shop
    keys:
      - {hash_key(SHOP)}
      - {hash_key(SHOP_NEXT)}
    class: realtime
    classes: {{ocr: batch}}
    models: [ctr, ocr]
    rate_per_s: 100
    burst: 200
    concurrency: 32
    queue_share: 0.25
  - name: scans
    keys: [{hash_key(SCANS)}]
"""


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def write(folder: Path, text: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def replace(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.rename(path)


def tenants_of(folder: Path, text: str, previous: Tenants | None = None, clock: Clock | None = None) -> Tenants:
    return Tenants.load(write(folder, text), clock or Clock(), previous)


def refusal(tenants: Tenants, key: str | None) -> str:
    with pytest.raises(KeyRefused) as refused:
        tenants.identify(key)
    return str(refused.value)


# Keys


def test_new_keys_differ_and_have_256_random_bits_in_characters_that_need_no_quoting() -> None:
    keys = {new_key() for _ in range(1000)}

    assert len(keys) == 1000
    assert all(re.fullmatch(r"tp_[A-Za-z0-9_-]{43}", key) for key in keys)


def test_the_hash_is_sha256_as_any_tool_makes_it() -> None:
    assert hash_key("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("impossible", ["", "a key", "k\n", "schlüssel", "k" * (LONGEST_KEY + 1), "\x7f", "\ud800"])
def test_what_no_caller_can_send_is_not_hashed(impossible: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 printable ASCII characters"):
        hash_key(impossible)


def test_each_key_of_a_tenant_identifies_it(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, GOOD)

    assert tenants.identify(SHOP) is tenants.identify(SHOP_NEXT)
    assert [tenant.name for tenant in tenants] == ["shop", "scans"]
    assert tenants.identify(SCANS).name == "scans"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (None, "no API key: send yours"),
        ("", "no API key: send yours"),
        ("unknown-key", "unknown or revoked"),
        (SHOP.upper(), "unknown or revoked"),
        (SHOP + " ", "can look like this"),
        (f"\t{SHOP}", "can look like this"),
        ("schlüssel", "can look like this"),
        ("\x00", "can look like this"),
        (hash_key(SHOP), "unknown or revoked"),
    ],
)
def test_other_keys_are_refused_and_not_shown(tmp_path: Path, key: str | None, said: str) -> None:
    text = refusal(tenants_of(tmp_path, GOOD), key)

    assert said in text
    assert not key or key not in text


def test_keys_of_256_characters_are_keys_and_longer_ones_are_not_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "k" * LONGEST_KEY
    tenants = tenants_of(tmp_path, f"tenants: [{{name: a, keys: ['{hash_key(longest)}']}}]")
    assert tenants.identify(longest).name == "a"

    monkeypatch.delattr(module.hashlib, "sha256")
    assert "can look like this" in refusal(tenants, longest + "k")
    assert "can look like this" in refusal(tenants, "k" * 10**6)


# The file


def test_a_tenant_has_the_limits_of_the_file(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, GOOD)
    shop, scans = tenants.identify(SHOP), tenants.identify(SCANS)

    assert shop.bucket is not None
    assert (shop.bucket.rate_per_s, shop.bucket.burst, shop.bucket.level) == (100, 200, 200)
    assert (shop.concurrency, shop.queue_share, shop.in_entry) == (32, 0.25, 0)
    assert [shop.may_use(model) for model in ("ctr", "ocr", "image")] == [True, True, False]
    assert [shop.class_for(model) for model in ("ctr", "ocr")] == ["realtime", "batch"]

    assert (scans.bucket, scans.concurrency, scans.queue_share) == (None, None, None)
    assert scans.may_use("anything")
    assert scans.class_for("ctr") is None


@pytest.mark.parametrize(("rate", "burst"), [("0.5", 1), ("7.5", 7.5), ("1000", 1000)])
def test_the_burst_is_a_seconds_worth_and_at_least_one_row(tmp_path: Path, rate: str, burst: float) -> None:
    bucket = tenants_of(tmp_path, GOOD + f"    rate_per_s: {rate}\n").identify(SCANS).bucket

    assert bucket is not None
    assert bucket.burst == burst


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("    rate_per_s", "    rate_per_sec", 9, "unknown key tenants.0.rate_per_sec; did you mean rate_per_s?"),
        ("    class:", "    clas:", 6, "did you mean class?"),
        ("    burst", "    zzz", 10, "(known here: name, keys, class, classes, models,"),
        ("tenants:", "tenant:", 1, "unknown key tenant; did you mean tenants?"),
        ("burst: 200", "burst: 0", 10, "greater than or equal to 1"),
        ("burst: 200", "burst: 1.5", 10, "valid integer"),
        ("rate_per_s: 100", "rate_per_s: 0", 9, "greater than or equal to 0.001"),
        ("rate_per_s: 100", "rate_per_s: .inf", 9, "finite number"),
        ("rate_per_s: 100", "rate_per_s: 2000000000", 9, "less than or equal to 1000000000"),
        ("rate_per_s: 100", "rate_per_s: .nan", 9, "tenants.0.rate_per_s: "),
        ("rate_per_s: 100", "rate_per_s: fast", 9, "valid number (given: 'fast')"),
        ("rate_per_s: 100", "rate_per_s: true", 9, "valid number"),
        ("    rate_per_s: 100\n", "", 9, "burst belongs to a rate: give rate_per_s too"),
        ("concurrency: 32", "concurrency: 0", 11, "greater than or equal to 1"),
        ("concurrency: 32", f"concurrency: {'9' * 5000}", 11, ""),
        ("queue_share: 0.25", "queue_share: 0", 12, "greater than 0"),
        ("queue_share: 0.25", "queue_share: 1.01", 12, "less than or equal to 1"),
        ("name: scans", "name: shop", 13, "two tenants are named shop"),
        ("name: scans", "name: a b", 13, "tenants.1.name: "),
        ("name: scans", "name: 7", 13, "valid string"),
        (hash_key(SCANS), hash_key(SHOP), 14, "tenant shop has this key already"),
        (hash_key(SHOP_NEXT), hash_key(SHOP), 5, "tenant shop has this key already"),
        ("models: [ctr, ocr]", "models: []", 8, "at least 1 item"),
        ("models: [ctr, ocr]", "models: [ctr]", 7, "models of shop does not list ocr"),
        (f"keys: [{hash_key(SCANS)}]", "keys: []", 14, "at least 1 item"),
        (f"    keys: [{hash_key(SCANS)}]", "", 13, "tenants.1.keys is missing"),
        (f"[{hash_key(SCANS)}]", "", 14, "keys must be a list of hashes"),
        ("burst: 200", "burst: 200\n    burst: 300", 11, "key 'burst' is given twice"),
        ("burst: 200", "burst: [200", 11, "is not valid YAML: "),
        ("burst: 200", "burst: !!python/name:os.system", 10, "could not determine a constructor"),
        ("burst: 200", "burst: 0x_", 10, "is not a value"),
        ("burst: 200", "? [burst]\n    : 200", 10, "a key must be a word"),
        ("models: [ctr, ocr]", "models: &m [ctr, ocr]\n    classes: *m", 9, "aliases (*name) are not taken"),
        ("models: [ctr, ocr]", f"models: {'[' * 100}", 8, "nested more than 16 levels deep"),
        ("models: [ctr, ocr]", f"models: {'[' * 1_000_000}", 8, "nest"),
        ("{ocr: batch}", "{" + ", ".join(f"m{i}: batch" for i in range(1001)) + "}", 7, "more than 1000 keys"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, old: str, new: str, line: int, said: str
) -> None:
    if not hasattr(yaml, loader):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(module, "_Loader", getattr(yaml, loader))
    assert GOOD.count(old) == 1

    with pytest.raises(SpecError) as refused:
        tenants_of(tmp_path, GOOD.replace(old, new))

    assert any(
        text.startswith(f"{tmp_path}/tenants.yaml:{line}: ") and said in text
        for text in str(refused.value).splitlines()
    ), str(refused.value)
    assert str(refused.value).endswith("Nothing was changed.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "must be a mapping that starts with `tenants:`"),
        (b"# nothing\n", "must be a mapping that starts with `tenants:`"),
        (b"- a\n", "must be a mapping that starts with `tenants:`"),
        (b"tenants:\n", "nothing is given here"),
        (b"tenants: []\n", "at least 1 item"),
        (b"tenants:\n" + b"  - {q: 1}\n" * 300_000, ":100001: has too many words for 10000 tenants"),
        (b"tenants:\n" + b"  - {}\n" * 10_001, "at most 10000 items"),
        (b"tenants: []\n---\ntenants: []\n", "tenants.yaml:2: is not valid YAML: but found another document"),
        (b"tenants:\n  - name: \xff\n", "tenants.yaml:2: is not UTF-8"),
        (b"tenants: \x00\n", "is not valid YAML"),
        (GOOD.encode("utf-16"), "is not UTF-8"),
        (b"#" * (LARGEST_FILE_BYTES + 1), "is larger than 4 MiB"),
    ],
)
def test_what_is_no_tenants_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes(content)

    with pytest.raises(SpecError, match=re.escape(said)):
        Tenants.load(path, Clock())


def test_of_many_problems_the_first_ones_are_told(tmp_path: Path) -> None:
    tenants = "".join(f"  - {{name: t{i}, zzz: 1, keys: ['{hash_key(str(i))}']}}\n" for i in range(1000))

    with pytest.raises(SpecError) as refused:
        tenants_of(tmp_path, f"tenants:\n{tenants}")

    lines = str(refused.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:20]] == [f"{tmp_path}/tenants.yaml:{2 + i}" for i in range(20)]
    assert lines[20:] == ["And more.", "Nothing was changed."]


@pytest.mark.parametrize(
    "text", ["tenants: {}", "tenants: !{} 1", "{}: 1", "tenants: {? {} : 1, ? {} : 1}", "tenants: '{}"]
)
def test_a_long_word_is_told_shortened(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError) as refused:
        tenants_of(tmp_path, text.replace("{}", "a" * 100_000))

    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize(
    "keys",
    [
        "[{key}]",
        "{key}",
        "['sha256:{key}']",
        "['sha256:0000', {key}]",
        "[{key}",
        "{{a: {key}}}",
        "[!!int {key}]",
        "[!!binary {key}]",
        "[!!float '{key}']",
        "[{key}, @]",
        '["{key}\\q"]',
    ],
)
def test_a_key_instead_of_its_hash_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, keys: str
) -> None:
    if not hasattr(yaml, loader):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(module, "_Loader", getattr(yaml, loader))
    secret = new_key()

    with pytest.raises(SpecError) as refused:
        tenants_of(tmp_path, f"tenants:\n  - name: a\n    keys: {keys.format(key=secret)}\n")

    assert secret not in str(refused.value)
    assert "tenants.yaml:3: " in str(refused.value) or "is not valid YAML" in str(refused.value)


def test_a_key_instead_of_its_hash_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r":4: .*64 digits.* hash it with `tritonpilot tenants hash-key`"):
        tenants_of(tmp_path, GOOD.replace(hash_key(SHOP), new_key()))


def test_digits_without_quotes_are_no_hash_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        tenants_of(tmp_path, GOOD.replace(hash_key(SHOP), "1234567890123456789"))
    assert "12345" not in str(refused.value)


# The bucket


def test_a_full_bucket_gives_its_burst_and_then_the_rate() -> None:
    clock = Clock(1e6)
    bucket = TokenBucket(10.0, 20, clock)

    assert [bucket.take(5) for _ in range(4)] == [0.0] * 4
    assert bucket.take(1) == 0.1
    clock.now_s += 0.5
    assert bucket.take(5) == 0.0
    assert bucket.take(1) == 0.1


def test_a_refused_take_takes_nothing_and_a_full_bucket_stays_full() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 20, clock)
    bucket.take(15)
    for _ in range(100):
        assert bucket.take(10) == 0.5
    assert bucket.level == 5

    clock.now_s = 1e9
    assert bucket.level == 20


def test_more_rows_than_the_burst_need_a_full_bucket_and_leave_a_debt() -> None:
    clock = Clock()
    bucket = TokenBucket(100.0, 100, clock)

    assert bucket.take(256) == 0.0
    assert bucket.level == -156
    assert bucket.take(1) == pytest.approx(1.57)
    assert bucket.take(256) == pytest.approx(2.56)
    clock.now_s = 2.0
    assert bucket.take(256) == pytest.approx(0.56)
    clock.now_s = 2.56
    assert bucket.take(256) == 0.0


def test_a_clock_that_goes_back_gives_nothing_twice() -> None:
    clock = Clock(100.0)
    bucket = TokenBucket(10.0, 10, clock)
    bucket.take(10)
    for now_s in (101.0, 50.0, 101.0, 50.0, 101.0):
        clock.now_s = now_s
        assert bucket.level == 10.0
    clock.now_s = 50.0
    bucket.take(10)
    clock.now_s = 101.0
    assert bucket.level == 0.0


@pytest.mark.parametrize("start_s", [0.0, 1e4, 1e7])
@pytest.mark.parametrize(("rate", "burst", "rows"), [(3.0, 7, 2), (0.1, 1, 1), (1e6, 100, 256), (7e4, 7e4, 1)])
def test_who_comes_back_after_the_stated_wait_is_always_let_through_and_never_gets_more_than_the_rate(
    start_s: float, rate: float, burst: float, rows: int
) -> None:
    clock = Clock(start_s)
    bucket = TokenBucket(rate, burst, clock)
    taken, turns = 0, 20_000
    while bucket.take(rows) == 0.0:
        taken += rows
    first = taken
    for _ in range(turns):
        clock.now_s += bucket.take(rows)
        assert bucket.take(rows) == 0.0
        taken += rows

    passed_s = clock.now_s - start_s
    assert first <= burst + rows
    # Each wait is exact to the float clock: at 1e7 s of uptime that is 2 ns, 20,000 times.
    assert taken - first == pytest.approx(passed_s * rate, rel=1e-9, abs=burst + rows)


def test_a_million_takes_do_not_drift() -> None:
    start_s, rate, burst = 123_456.789, 1000.0, 50
    clock = Clock(start_s)
    bucket = TokenBucket(rate, burst, clock)
    dice = random.Random(7)
    taken = burst
    assert bucket.take(burst) == 0.0
    for _ in range(1_000_000):
        clock.now_s += (
            dice.random() * 1e-3
        )  # half a row comes in, so half of the takes are refused and the bucket never fills
        taken += bucket.take(1) == 0.0

    assert taken + bucket.level == pytest.approx(burst + (clock.now_s - start_s) * rate, abs=1e-6)
    assert -0.01 < bucket.level < 2


def test_new_limits_keep_the_level() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 100, clock)
    bucket.take(60)
    clock.now_s = 1.0

    bucket.change(1000.0, 200)
    assert bucket.level == 50  # the second that has passed counts at the old rate
    bucket.change(1000.0, 20)
    assert bucket.level == 20
    bucket.take(50)
    bucket.change(1.0, 100)
    assert bucket.level == -30


# Reading again


def watched(folder: Path, text: str = GOOD) -> tuple[KeyFile, list[str]]:
    said: list[str] = []
    return KeyFile(write(folder, text), Clock(), said.append), said


def test_the_entry_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be read: No such file"):
        KeyFile(tmp_path / "none.yaml", Clock())
    with pytest.raises(SpecError, match="valid list"):
        watched(tmp_path, "tenants: 1")


def test_a_revoked_key_is_refused_after_the_next_poll(tmp_path: Path) -> None:
    file, said = watched(tmp_path)
    replace(file.path, GOOD.replace(f"      - {hash_key(SHOP)}\n", ""))
    assert file.current.identify(SHOP).name == "shop"

    assert file.poll()

    assert "revoked" in refusal(file.current, SHOP)
    assert file.current.identify(SHOP_NEXT).name == "shop"
    assert said == [f"{file.path} was read: 2 tenants"]
    assert not file.poll()


def test_tenants_that_stay_keep_level_and_count_and_get_the_new_limits(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    shop = file.current.identify(SHOP)
    assert shop.bucket is not None
    shop.bucket.take(150)
    shop.in_entry = 5

    replace(file.path, GOOD.replace("burst: 200", "burst: 300").replace("concurrency: 32", "concurrency: 4"))
    file.poll()

    assert file.current.identify(SHOP) is shop
    assert (shop.bucket.level, shop.bucket.burst, shop.concurrency, shop.in_entry) == (50, 300, 4, 5)


def test_a_limit_can_go_and_come(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    shop = file.current.identify(SHOP)
    limits = GOOD[GOOD.index("    class:") : GOOD.index("  - name: scans")]

    replace(file.path, GOOD.replace(limits, ""))
    file.poll()
    assert (shop.bucket, shop.concurrency, shop.queue_share, shop.class_for("ocr")) == (None, None, None, None)
    assert shop.may_use("image")

    replace(file.path, GOOD)
    file.poll()
    assert shop.bucket is not None
    assert (shop.bucket.level, shop.class_for("ocr"), shop.may_use("image")) == (200, "batch", False)


def test_a_wrong_file_changes_no_tenant(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    shop = file.current.identify(SHOP)

    replace(file.path, GOOD.replace("concurrency: 32", "concurrency: 1") + "    burst: 9\n")

    assert not file.poll()
    assert file.current.identify(SHOP) is shop
    assert shop.concurrency == 32


def test_a_tenant_removed_with_requests_in_flight_keeps_its_count_also_when_it_comes_back(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    shop, scans = file.current.identify(SHOP), file.current.identify(SCANS)
    scans.in_entry = 3
    without = GOOD[: GOOD.index("  - name: scans")]

    replace(file.path, without)
    file.poll()
    refusal(file.current, SCANS)
    scans.in_entry -= 1  # the gate finishes one of them
    replace(file.path, GOOD)
    file.poll()
    assert file.current.identify(SCANS) is scans
    assert scans.in_entry == 2

    scans.in_entry = 0
    replace(file.path, without)
    file.poll()
    replace(file.path, GOOD)
    file.poll()
    assert file.current.identify(SCANS) is not scans, "nothing is kept for tenants that are gone and idle"
    assert file.current.identify(SHOP) is shop


def test_a_tenant_that_comes_back_still_has_its_debt(tmp_path: Path) -> None:
    clock = Clock()
    tenants = tenants_of(tmp_path, GOOD, clock=clock)
    bucket = tenants.identify(SHOP).bucket
    assert bucket is not None
    bucket.take(1000)
    others = f"tenants: [{{name: scans, keys: ['{hash_key(SCANS)}']}}]"

    tenants = tenants_of(tmp_path, others, tenants, clock)
    clock.now_s = 5.0
    tenants = tenants_of(tmp_path, GOOD, tenants, clock)

    assert tenants.identify(SHOP).bucket is bucket
    assert bucket.level == -300


def in_place(path: Path) -> None:
    path.write_text("tenants:\n  - name: shop\n    keys: [")


def truncated(path: Path) -> None:
    os.truncate(path, 0)


def deleted(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def huge(path: Path) -> None:
    os.truncate(path, 10**12)  # sparse


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (in_place, "is not valid YAML"),
        (truncated, "must be a mapping"),
        (deleted, "cannot be read: No such file"),
        (a_folder, "is not a regular file"),
        (a_pipe, "is not a regular file"),
        (a_link_to_nothing, "cannot be read: No such file"),
        (a_link_to_itself, "cannot be read: Too many levels of symbolic links"),
        (not_text, "is not UTF-8"),
        (huge, "is larger than 4 MiB"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_file_that_cannot_be_used_leaves_the_old_one_in_force_and_says_so_once(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    file, lines = watched(tmp_path)
    before = file.current
    open_files = len(list(Path("/proc/self/fd").iterdir()))

    spoil(file.path)
    assert [file.poll() for _ in range(5)] == [False] * 5

    assert file.current is before
    assert file.current.identify(SHOP).name == "shop"
    assert file.trouble is not None
    assert said in file.trouble
    assert lines == [f"{file.trouble} The tenants of the last good file stay in force."]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files

    if file.path.is_dir():
        file.path.rmdir()
    replace(file.path, GOOD)
    assert file.poll()
    assert file.trouble is None
    assert not file.poll()


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_file_without_permission_leaves_the_old_one_in_force(tmp_path: Path, closed: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, lines = watched(folder)
    (file.path if closed == "file" else folder).chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)  # root reads everything
    try:
        assert [file.poll() for _ in range(3)] == [False] * 3
    finally:
        os.seteuid(me)
    assert file.trouble is not None
    assert "cannot be read: Permission denied" in file.trouble
    assert len(lines) == 1

    folder.chmod(0o700)
    file.path.chmod(0o600)
    assert file.poll()
    assert file.trouble is None


def test_a_file_that_is_gone_and_then_wrong_says_the_latter(tmp_path: Path) -> None:
    file, lines = watched(tmp_path, GOOD)
    spoiled = GOOD.replace("burst: 200", "burst: 0")
    replace(file.path, spoiled)
    file.poll()
    deleted(file.path)
    file.poll()
    replace(file.path, spoiled)
    file.poll()

    assert [re.sub(r".*(burst|No such file).*", r"\1", line, flags=re.DOTALL) for line in lines] == [
        "burst", "No such file", "burst",
    ]  # fmt: skip


def test_other_content_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    seen = file.path.stat()
    other = GOOD.replace(hash_key(SCANS), hash_key("other-key"))
    assert len(other) == len(GOOD)

    file.path.write_text(other)  # the same inode
    os.utime(file.path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert file.poll()
    assert file.current.identify("other-key").name == "scans"

    replace(file.path, GOOD)  # another inode
    os.utime(file.path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert file.poll()
    assert file.current.identify(SCANS).name == "scans"


def test_two_writes_within_one_tick_of_the_file_systems_clock_are_seen(tmp_path: Path) -> None:
    file, _ = watched(tmp_path)
    for round_ in range(200):
        key = f"key-{round_:04}"
        file.path.write_text(GOOD.replace(hash_key(SCANS), hash_key(key)))
        assert file.poll()
        assert file.current.identify(key).name == "scans"


def test_a_link_that_is_turned_to_another_file_is_followed(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text(GOOD)
    second.write_text(GOOD.replace(hash_key(SCANS), hash_key("other-key")))
    link = tmp_path / "tenants.yaml"
    link.symlink_to(first)
    file = KeyFile(link, Clock())

    (tmp_path / "aside").symlink_to(second)
    (tmp_path / "aside").rename(link)

    assert file.poll()
    assert file.current.identify("other-key").name == "scans"


def test_a_file_that_stays_the_same_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAMP_TICK_NS", -time.time_ns())  # as if the file had been written long ago
    file, _ = watched(tmp_path)
    monkeypatch.setattr(module, "_content_of", lambda path: pytest.fail(f"{path} was opened"))

    assert [file.poll() for _ in range(3)] == [False] * 3


def test_a_file_that_others_may_write_to_is_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0o664)
    said: list[str] = []
    file = KeyFile(path, Clock(), said.append)
    assert len(said) == 1
    assert "(mode 664)" in said[0]
    assert said[0].endswith(f"Run: chmod go-w {path}")

    path.chmod(0o644)
    replace(path, GOOD.replace("concurrency: 32", "concurrency: 33"))
    file.poll()
    assert said[1:] == [f"{path} was read: 2 tenants"]

    path.chmod(0o602)
    assert [file.poll() for _ in range(3)] == [False] * 3
    assert len(said) == 3
    assert "(mode 602)" in said[2]


def test_the_file_is_replaced_a_thousand_times_while_callers_are_identified(tmp_path: Path) -> None:
    file, said = watched(tmp_path)
    shop = file.current.identify(SHOP)
    shop.in_entry = 1
    rounds, asked = 1000, 0
    is_over = False

    async def callers() -> None:
        nonlocal asked
        while not is_over:
            assert file.current.identify(SHOP) is shop
            tenants = file.current
            odd = tenants._by_name["scans"].concurrency
            # One reading is in force as a whole: its key opens, the other one does not.
            assert tenants.identify(f"scans-{odd}").name == "scans"
            assert "unknown" in refusal(tenants, f"scans-{(odd or 0) + 1}")
            asked += 1
            await asyncio.sleep(0)

    async def operator() -> None:
        nonlocal is_over
        for round_ in range(1, rounds + 1):
            text = GOOD.replace(hash_key(SCANS), hash_key(f"scans-{round_}")) + f"    concurrency: {round_}\n"
            replace(file.path, text if round_ % 10 else text + "  - name: half\n")
            if round_ % 10 == 0:
                assert not file.poll(), "half a file"
                replace(file.path, text)
            assert file.poll()
            await asyncio.sleep(0)
        is_over = True

    async def both() -> None:
        replace(file.path, GOOD.replace(hash_key(SCANS), hash_key("scans-0")) + "    concurrency: 1000000\n")
        replace(file.path, GOOD.replace(hash_key(SCANS), hash_key("scans-7")) + "    concurrency: 7\n")
        file.poll()
        await asyncio.gather(callers(), callers(), operator())

    asyncio.run(both())

    assert asked >= rounds
    assert file.current.identify(f"scans-{rounds}").concurrency == rounds
    assert shop.in_entry == 1
    assert sum("was read" in line for line in said) == rounds + 1


@pytest.mark.parametrize("seed", range(4))
def test_no_content_whatever_breaks_the_watch(tmp_path: Path, seed: int) -> None:
    file, _ = watched(tmp_path)
    dice = random.Random(seed)
    pieces = [*rb"[ { &a *a <<: : - \n !!int !!set ' 1:60 0x_ | %".split(), b"\n", b"\xff", b"\x00"]
    for _ in range(150):
        content = bytearray(GOOD.encode())
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(content))
            content[at : at + dice.randint(0, 9)] = dice.choice(pieces)
        file.path.write_bytes(content)
        is_read = file.poll()
        assert is_read or file.trouble is not None
        assert len(file.current) >= 1


def test_the_example_is_valid_and_is_the_one_of_the_guide() -> None:
    example = ROOT / "examples" / "tenants.yaml"
    guide = (ROOT / "docs" / "tenants.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)

    assert yaml.safe_load(shown) == yaml.safe_load(example.read_text(encoding="utf-8"))
    assert [tenant.name for tenant in Tenants.load(example, Clock())] == ["shop", "scans"]


def test_the_guide_names_every_key_of_the_file() -> None:
    guide = (ROOT / "docs" / "tenants.md").read_text(encoding="utf-8")
    names = [field.alias or name for name, field in module.TenantTerms.model_fields.items()]

    assert re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE) == names


def test_a_file_is_taken_when_it_has_stayed_the_same_for_a_look(tmp_path: Path) -> None:
    """One that is being written can be good YAML and lack its end, and with it what forbids."""
    keys, _ = watched(tmp_path)
    first = keys.current
    write(tmp_path, GOOD.replace("shop", "cut"))
    assert not keys.poll(is_settled=True)
    write(tmp_path, GOOD.replace("shop", "whole"))
    assert not keys.poll(is_settled=True)
    assert keys.current is first
    assert keys.poll(is_settled=True)
    assert "whole" in [tenant.name for tenant in keys.current]
