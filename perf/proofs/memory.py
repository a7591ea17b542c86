"""Does anything grow with requests? Every backend of ours under hundreds of thousands of mixed requests, some of them bad."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perf import machine, memory, small_models
from perf.frame import PROJECT, Bench, Outcome
from perf.mixed_load import MixedLoad, Stream
from perf.small_models import SmallModel
from tritonpilot.errors import MeasurementError
from tritonpilot.server import EmbeddedServer

# Requests through each backend, shared by its models. The first half is warm-up: until malloc's heaps have their final size,
# which the rarest mix of requests decides, a stub takes up to 250,000.
TOTAL = 400_000
QUICK_TOTAL = 10_000
# In so few requests a growth of less cannot be told from the first steps of malloc: it counts as none.
QUICK_STEP_MB = 3.0
TICK_S = 2.0
QUICK_TICK_S = 0.5
TOLD_TICKS = 10  # one line for the reader after so many samples
FRONT = "tritonserver"
UNASKED = "companion"  # nobody's requests go through it


@dataclass
class Watched:
    """One process: what it had done, and its memory then."""

    pid: int
    streams: tuple[Stream, ...]  # whose requests reach it
    requests: list[int] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    anonymous_mb: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Take a sample, if there were requests since the last."""
        done = sum(stream.done for stream in self.streams)
        if self.requests and done == self.requests[-1]:
            return
        found = memory.of_process(self.pid)
        self.requests.append(done)
        self.rss_mb.append(found.rss_mb)
        self.anonymous_mb.append(found.anonymous_mb)


def memory_flat(bench: Bench) -> Outcome:
    """The largest growth of resident memory among tritonserver and all stubs, MB per 100,000 requests that reach the process.

    Over the later 200,000 of its requests: what the first ones allocate, they allocate once. Resident memory is all that counts
    as RSS, shared memory with Triton included.
    """
    total = QUICK_TOTAL if bench.quick else TOTAL
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        root = Path(folder, "model_repository")
        root.mkdir()
        models = small_models.write(root)
        _check_all_backends_are_there(models)
        probes = {model.name: model.probe for model in models if model.probe is not None}
        with EmbeddedServer(root, on_progress=bench.say, probe_inputs=probes, startup_timeout_s=600) as server:
            asked = [model for model in models if model.requests]
            sharing = Counter(model.backend for model in asked)
            streams = [Stream(m.name, m.requests, m.callers, total // sharing[m.backend]) for m in asked]
            watched = _watched(server.pid, models, streams)
            regions_mb: list[float] = []
            began, began_cpu_s = time.monotonic(), time.process_time()

            def look() -> None:
                server.check_alive()
                for each in watched.values():
                    each.look()
                regions_mb.append(sum(memory.own_regions().values()))
                if len(regions_mb) % TOLD_TICKS == 0:
                    done, front_mb = watched[FRONT].requests[-1], watched[FRONT].rss_mb[-1]
                    bench.say(f"{done} requests, {front_mb:.0f} MB in tritonserver")

            with MixedLoad(server.endpoints.http, streams) as load:
                load.run(look, QUICK_TICK_S if bench.quick else TICK_S)
            took_s = time.monotonic() - began
            cpu_s = {"callers": time.process_time() - began_cpu_s, FRONT: machine.process_cpu_s(server.pid)}
            cpu_s = {name: round(s) for name, s in {**cpu_s, **machine.stub_cpu_s(server.pid)}.items()}
            if not memory.own_regions():
                raise MeasurementError(
                    "The server's shared memory was not found in /dev/shm, so that nothing can be said of its end. Nothing "
                    "is reported. Look how the server names it."
                )
    left = sorted(memory.own_regions())
    slopes = {name: memory.slope(each.requests, each.rss_mb) for name, each in watched.items()}
    values = [_told(slopes[name], each, bench.quick) for name, each in watched.items()]
    return Outcome(
        max(values),
        spread=max(values) - min(values),
        rounds=1,
        ok=not left,
        details={
            "requests": sum(stream.done for stream in streams),
            "refused": sum(stream.refused for stream in streams),
            "seconds": round(took_s),
            "cpu_s": cpu_s,
            "shared_memory_left": left,
            "shared_memory_mb": [round(regions_mb[0], 1), round(max(regions_mb), 1), round(regions_mb[-1], 1)],
            "rss_mb_per_100000": {name: round(value, 3) for name, value in slopes.items()},
            "anonymous_mb_per_100000": {
                name: round(memory.slope(each.requests, each.anonymous_mb), 3) for name, each in watched.items()
            },
            "rss_mb": {name: [round(each.rss_mb[0], 1), round(each.rss_mb[-1], 1)] for name, each in watched.items()},
            "samples": {name: len(each.requests) for name, each in watched.items()},
        },
    )


def _told(slope: float, watched: Watched, is_quick: bool) -> float:
    risen_mb = slope * watched.requests[-1] / 2 / memory.PER_REQUESTS
    return 0.0 if is_quick and risen_mb < QUICK_STEP_MB else slope


def _watched(server: int, models: list[SmallModel], streams: list[Stream]) -> dict[str, Watched]:
    by_model: Mapping[str, Stream] = {stream.model: stream for stream in streams}
    follows = {model.name: model.follows or model.name for model in models}
    found = {FRONT: Watched(server, tuple(streams))}
    for instance, pid in sorted(memory.stubs(server).items()):
        model = memory.model_of(instance)
        found[model] = Watched(pid, (by_model[follows[model]],))
    absent = sorted(set(follows) - set(found))
    if absent:
        raise MeasurementError(
            f"The stub of {absent[0]} was not found among the processes of tritonserver. Nothing is reported. Look how Triton "
            "names its stubs."
        )
    return found


def _check_all_backends_are_there(models: list[SmallModel]) -> None:
    have = {path.parent.name for path in (PROJECT / "python_backend").glob("*/model.py")}
    absent = sorted(have - {model.backend for model in models} - {UNASKED})
    if absent:
        raise MeasurementError(
            f"No model of this proof runs in the backend {absent[0]}. Nothing is reported. Give it a row in "
            "perf/small_models.py."
        )
