"""Does it pay to keep what is asked most, and does anybody ever get an answer that is not his, or not today's?

What is asked is recorded: the films of 100,000 ratings in the order of time, each asked for by its title. The same order goes
through stores of the same size that keep what is asked most (TinyLFU) and what was asked last (LRU); then titles go to `text`
through the entry. Stale answers and leaks are looked for with models whose answers, or counters, tell who computed them.
"""

from __future__ import annotations

import http.client
import re
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.ctr import data
from perf import callers, generations
from perf.frame import Bench, Outcome, median, spread
from perf.generations import Call, Load, Rate, Subject
from perf.open_loop import Request, Sender
from perf.subjects import command, services, serving_from
from perf.swapping import Site, switched
from tritonpilot import build, repository
from tritonpilot.entry.cache import OVERHEAD_BYTES, Policy, Store
from tritonpilot.entry.tenants import hash_key
from tritonpilot.errors import MeasurementError
from tritonpilot.server import EmbeddedServer, Endpoints
from tritonpilot.spec import Cache

ANSWER_BYTES = 1700  # of an embedding over HTTP
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of all answers, that fit
SHARE = 0.1
ROUNDS, QUICK_ROUNDS = 5, 1
TITLES, QUICK_TITLES = 150, 40
IN_ORDER, QUICK_IN_ORDER = 2500, 300  # of the recorded requests, sent to `text`
SWAPS, QUICK_SWAPS = 5, 1
REST_S = 4.0  # between swaps: the cache is in use again
PER_S = 150.0  # over each protocol
QUESTIONS = 40
HALF = 0.5
TENANTS = ("shop", "bank")


@dataclass(frozen=True)
class Halves:
    """P50 of requests to `text` through the entry, ms, by protocol."""

    miss_ms: dict[str, float]
    hit_ms: dict[str, float]

    @property
    def ratio(self) -> float:
        """Of the protocol where a hit gains least."""
        return max(self.hit_ms[over] / self.miss_ms[over] for over in self.hit_ms)


def cache_lfu(bench: Bench) -> Outcome:
    """Hit ratio of a store that keeps what is asked most, of that of one of the same size that keeps what was asked last."""
    asked = [event.item for event in data.read_events()]
    ratios = {share: _hit_ratios(asked, share) for share in SHARES}
    bench.say(f"hit ratios: {ratios}")
    halves, in_order = _text(bench, asked)
    with switched([_cached_ctr], bench.say) as site:
        fresh = _stale(bench, site)
        leaks = _leaks(site)
    hit_of_miss = [each.ratio for each in halves]
    return Outcome(
        ratios[SHARE]["lfu"] / ratios[SHARE]["lru"],
        rounds=1,
        ok=all(each["lfu"] > each["lru"] for each in ratios.values())
        and median(hit_of_miss) <= HALF
        and not fresh["stale"]
        and not fresh["failed"]
        and not fresh["of_several_generations"]
        and fresh["hit_ratio"] >= HALF
        and not leaks["leaked"],
        details={
            "requests": len(asked),
            "different": len(set(asked)),
            "hit_ratio_by_share_of_answers_that_fit": {f"{share:g}": each for share, each in ratios.items()},
            "text_hit_of_miss_p50": round(median(hit_of_miss), 3),
            "text_hit_of_miss_p50_spread": round(spread(hit_of_miss), 3),
            "text_p50_ms": {
                over: {
                    "miss": round(median([each.miss_ms[over] for each in halves]), 2),
                    "hit": round(median([each.hit_ms[over] for each in halves]), 2),
                }
                for over in ("http", "grpc")
            },
            "text_in_recorded_order": in_order,
            "swaps": fresh,
            "tenants": leaks,
        },
    )


def _hit_ratios(asked: Sequence[str], share: float) -> dict[str, float]:
    """Of stores that hold `share` of all answers; `exact_lru` evicts the one that was asked for longest ago, always."""
    place = len(set(asked)) * share

    def of(policy: Policy) -> float:
        store = Store(int(place * (ANSWER_BYTES + OVERHEAD_BYTES + 16)), None, policy)
        hits, answer = 0, b"." * ANSWER_BYTES
        for film in asked:
            key = film.encode().rjust(16)
            if store.get(key) is not None:
                hits += 1
            else:
                store.set(key, (1, answer, b"", 0.0))
        return round(hits / len(asked), 4)

    return {"lfu": of("tiny_lfu"), "lru": of("lru"), "exact_lru": _exact_lru(asked, int(place))}


def _exact_lru(asked: Sequence[str], place: int) -> float:
    held: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for film in asked:
        if film in held:
            hits += 1
            held.move_to_end(film)
            continue
        held[film] = None
        if len(held) > place:
            held.popitem(last=False)
    return round(hits / len(asked), 4)


# -- text --------------------------------------------------------------------------------------------------------------


def _text(bench: Bench, asked: Sequence[str]) -> tuple[list[Halves], dict[str, float]]:
    """Hits against misses, and what the cache does for recorded requests, one after the other."""
    titles = data.titles()
    share = int(len(set(asked)) * SHARE) * (ANSWER_BYTES + OVERHEAD_BYTES + 100) / 2**20
    cached = services(["text"])["text"].model_copy(update={"cache": Cache(kind="lfu", max_mb=share)})
    # Each round asks for texts that nobody has asked for: titles with the round's number.
    count = QUICK_TITLES if bench.quick else TITLES
    chosen = list(dict.fromkeys(asked))[:count]
    rounds = iter(range(10**6))
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        root = Path(folder, "model_repository")
        root.mkdir()
        build.prepare([cached], "auto", bench.say)
        repository.publish(root, [plan.folder for plan in build.plan([cached], "auto")])
        with serving_from(root, bench, is_pinned=True) as served, _before(served.server) as entry:
            _wait_for_hits(lambda: _ask_http(entry.http, "text", {"text": _texts(["warm"])}), entry, "text")

            def one() -> Halves:
                number = next(rounds)
                texts = [f"{titles[film]} {number}" for film in chosen]
                return _halves(entry, texts)

            found = bench.rounds(QUICK_ROUNDS if bench.quick else ROUNDS, one, check=served.server.check_alive)
            before = _figures(entry, "text")
            films = asked[: QUICK_IN_ORDER if bench.quick else IN_ORDER]
            began_s = time.perf_counter()
            with _Connection(entry.http) as ask:
                for film in films:
                    ask("text", {"text": _texts([titles[film]])})
            took_s = time.perf_counter() - began_s
            after = _figures(entry, "text")
    hits = after["hit"] - before["hit"]
    return found, {
        "requests": len(films),
        "cache_mb": round(share, 2),
        "hit_ratio": round(hits / len(films), 4),
        "took_s": round(took_s, 1),
        "saved_s": round(after["saved_s"] - before["saved_s"], 1),
        "evicted": after["evicted"] - before["evicted"],
    }


def _halves(entry: Endpoints, texts: Sequence[str]) -> Halves:
    """Each text asked for twice over each protocol: what one protocol was answered is not kept for the other."""
    latencies: dict[str, tuple[list[float], list[float]]] = {"http": ([], []), "grpc": ([], [])}
    before = _figures(entry, "text")
    with _Connection(entry.http) as ask, Sender(entry.grpc) as sender:

        def timed(over: str, text: str) -> float:
            inputs = {"text": _texts([text])}
            began_s = time.perf_counter()
            if over == "http":
                ask("text", inputs)
            else:
                (answer,) = sender.send([Request("text", inputs)])
                if answer.error:
                    raise MeasurementError(f"The model text answers {answer.error}. Nothing is reported.")
            return (time.perf_counter() - began_s) * 1e3

        for text in texts:
            for over, (misses, hits) in latencies.items():
                misses.append(timed(over, text))
                hits.append(timed(over, text))
    after = _figures(entry, "text")
    seen = {name: after[name] - before[name] for name in ("hit", "miss")}
    # A title that is asked for the first time need not stay: TinyLFU compares it with what is there.
    if seen["miss"] + seen["hit"] != 4 * len(texts) or seen["hit"] < len(texts):
        raise MeasurementError(
            f"Of {4 * len(texts)} requests {seen} were hits and misses. Nothing is reported. Repeat."
        )
    return Halves(
        {over: float(np.median(misses)) for over, (misses, _) in latencies.items()},
        {over: float(np.median(hits)) for over, (_, hits) in latencies.items()},
    )


def _texts(texts: Sequence[str]) -> Any:
    return np.array([[text.encode()] for text in texts], object)


# -- fresh and one's own -----------------------------------------------------------------------------------------------


def _cached_ctr(folder: Path) -> Subject:
    subject = generations.ctr(folder)
    file = folder / "models" / "ctr" / "service.yaml"
    file.write_text(file.read_text(encoding="utf-8") + "\ncache: {kind: lfu, max_mb: 8}\n", encoding="utf-8")
    return subject


def _stale(bench: Bench, site: Site) -> dict[str, Any]:
    """Swaps under load through the entry: how many answers of an old model were given to questions asked after it."""
    count = QUICK_SWAPS if bench.quick else SWAPS
    ctr = site.subjects["ctr"]
    for number in range(1, count + 1):
        site.files("ctr", number)
    told: list[tuple[int, float]] = []
    with (
        _before(site.server) as entry,
        Load(entry, [Rate(ctr, over, PER_S) for over in ("http", "grpc")]) as load,
    ):
        load.wait_for_answers()
        for number in range(1, count + 1):
            time.sleep(REST_S)
            done = site.swap("ctr", number)
            told.append((number, done.ended_s))
            bench.say(f"generation {number} after {done.ended_s - done.began_s:.1f} s")
        time.sleep(REST_S)
        figures = _figures(entry, "ctr")
    calls = load.take()
    answered = [call for call in calls if not call.error]
    given = sum(figures[outcome] for outcome in ("hit", "joined"))
    return {
        "swaps": count,
        "requests": len(calls),
        "failed": len(calls) - len(answered),
        "errors": sorted({call.error for call in calls if call.error})[:5],
        "hit_ratio": round(given / len(calls), 4),
        "of_several_generations": sum(len(call.generations) != 1 or -1 in call.generations for call in answered),
        "stale": stale(answered, told),
        "generations_seen": sorted(set().union(*(call.generations for call in answered))),
    }


def stale(calls: Sequence[Call], told: Sequence[tuple[int, float]]) -> int:
    """Answers of a generation before the one that was said to serve when the question was sent; `told`: (generation, when)."""
    found = 0
    for call in calls:
        served = max((generation for generation, at_s in told if at_s <= call.sent_s), default=0)
        found += min(call.generations, default=served) < served
    return found


def _leaks(site: Site) -> dict[str, int]:
    """Two tenants ask the same: how often the second was answered with what the first had caused to be computed."""
    questions = site.subjects["ctr"].questions[:QUESTIONS]
    keys = {name: f"tp_{name}_of_the_proof" for name in TENANTS}
    lines = [f'  - {{name: {name}, keys: ["{hash_key(key)}"]}}' for name, key in keys.items()]
    tenants = site.folder / "tenants.yaml"
    tenants.write_text("\n".join(["tenants:", *lines]) + "\n", encoding="utf-8")
    with _before(site.server, "--tenants", str(tenants)) as entry, _Connection(entry.http) as ask:
        warm = {name: {"tritonpilot-key": key} for name, key in keys.items()}
        _wait_for_hits(lambda: ask("ctr", site.subjects["ctr"].questions[-1].inputs, warm["shop"]), entry, "ctr")
        before = _figures(entry, "ctr"), _executed(site)
        for name in TENANTS:
            for question in questions:
                ask("ctr", question.inputs, warm[name])
                ask("ctr", question.inputs, warm[name])
        after = _figures(entry, "ctr"), _executed(site)
    return {
        "tenants": len(TENANTS),
        "questions": len(questions),
        "hits": int(after[0]["hit"] - before[0]["hit"]),
        "computed": after[1] - before[1],
        "leaked": len(TENANTS) * len(questions) - (after[1] - before[1]),
    }


def _executed(site: Site) -> int:
    """Requests that Triton has answered."""
    with site.server.control() as control:
        return sum(each.success.count for each in control.statistics("ctr"))


# -- the entry ---------------------------------------------------------------------------------------------------------


@contextmanager
def _before(server: EmbeddedServer, *options: str) -> Iterator[Endpoints]:
    """The addresses of an entry in front of a server."""
    argv = [
        *("--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *options),
    ]
    with command("entry", argv) as (endpoints, _):
        yield Endpoints(endpoints["http"], endpoints["grpc"], endpoints["metrics"])


class _Connection:
    """One connection over HTTP; called, it asks, and raises MeasurementError for anything but an answer."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=callers.TIMEOUT_S)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def __call__(self, model: str, inputs: generations.Arrays, headers: dict[str, str] | None = None) -> bytes:
        body = callers.body(model, inputs)
        self._connection.request("POST", body.path, body.content, {**body.headers, **(headers or {})})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise MeasurementError(
                f"The model {model} answers {answer.status}: {content[:200]!r}. Nothing is reported."
            )
        return content


def _ask_http(address: str, model: str, inputs: generations.Arrays) -> None:
    with _Connection(address) as ask:
        ask(model, inputs)


def _wait_for_hits(ask: Callable[[], object], entry: Endpoints, model: str) -> None:
    """The entry looks at a model when it is first asked for it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ask()
        if _figures(entry, model)["hit"]:
            return
        time.sleep(0.1)
    raise MeasurementError(f"The entry answers nothing of {model} from its cache. Nothing is reported.")


def _figures(entry: Endpoints, model: str) -> dict[str, float]:
    """Requests by what became of them, and what the cache has saved and evicted."""
    with urllib.request.urlopen(f"http://{entry.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = dict.fromkeys(("hit", "joined", "miss", "unsure", "uncacheable", "saved_s", "evicted"), 0.0)
    for name, labels, value in re.findall(r"^(pilot_cache_\w+)\{(.*?)\} (\S+)$", text, re.MULTILINE):
        if f'model="{model}"' not in labels:
            continue
        outcome = re.search(r'outcome="(\w+)"', labels)
        if name == "pilot_cache_requests_total" and outcome:
            found[outcome[1]] += float(value)
        elif name == "pilot_cache_saved_seconds_total":
            found["saved_s"] += float(value)
        elif name == "pilot_cache_evictions_total":
            found["evicted"] += float(value)
    return found
