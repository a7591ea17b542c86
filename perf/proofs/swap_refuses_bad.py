"""Is a bad model let through? Each kind is swapped in as a person would do it, while callers ask the one that serves.

Of every attempt: it ends with an error, the old version went on answering everybody, and nothing of the new one is left, on disk
or in Triton. A good model, to see that not all are refused, is swapped in at the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perf import bad_models, generations
from perf.bad_models import BAD, FILES
from perf.frame import PROJECT, Bench, Outcome
from perf.generations import Load, Rate, Subject
from perf.swapping import Site, switched
from tritonpilot import repository, samples
from tritonpilot.errors import MeasurementError

PER_S = 20.0  # over each protocol
QUICK = ("wrong checksum", "corrupt", "nan", "swapped_classes", "slow")
PREDICT = "    def predict(self, items):\n"
#: Of a step in Python: its stub ends at its first inference.
CRASH = "        import os; os._exit(1)\n"


@dataclass
class Case:
    """An attempt: arguments of `tritonpilot swap SERVICE`, and what came of it."""

    name: str
    service: str
    arguments: Sequence[str]
    steps: Sequence[str]
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    took_s: float = 0.0


def swap_refuses_bad(bench: Bench) -> Outcome:
    """The number of attempts in which a bad model was not refused, or somebody saw something of it."""
    with switched([generations.ctr if bench.quick else _with_others], bench.say) as site:
        subject = site.subjects["ctr"]
        rates = [Rate(subject, over, PER_S) for over in ("http", "grpc")]
        with Load(site.server.endpoints, rates) as load:
            load.wait_for_answers()
            cases = list(_cases(site, quick=bench.quick))
            for case in cases:
                _attempt(site, load, case)
                bench.say(f"{case.name} ({case.took_s:.1f} s): {'; '.join(case.wrong) or case.said}")
                site.server.check_alive()
            good = _good(site, load)
    through = [case for case in cases if case.wrong]
    return Outcome(
        len(through),
        ok=not good,
        details={
            "cases": {case.name: case.said for case in cases},
            "wrong": {case.name: case.wrong for case in through},
            "seconds": {case.name: round(case.took_s, 1) for case in cases},
            "good_model": good or "let through, and served",
        },
    )


def _cases(site: Site, *, quick: bool) -> Iterator[Case]:
    made = site.folder / "made"
    made.mkdir()
    for service, source, member in _sources(site, quick=quick):
        rows = samples.read(source.with_name("samples.npz"))
        for kind, bad in BAD.items():
            if quick and kind not in QUICK:
                continue
            if service == "image" and kind in ("wrong_shape", "corrupt", "fails_in_warmup", "garbled"):
                continue  # minutes that show what those of ctr do
            file = made / f"{service}_{kind}.onnx"
            bad.write(source, file, rows)
            yield Case(f"{service}: {bad.what}", service, [f"{member}={file}" if member else str(file)], bad.steps)
    file = made / "good.onnx"
    bad_models.good(_source(site, "ctr"), file, {})
    yield Case("ctr: wrong checksum", "ctr", [str(file), "--sha256", "0" * 64], (FILES,))
    if not quick:
        crashing = made / "serving.py"
        text = (site.folder / "models" / "ctr_raw" / "serving.py").read_text(encoding="utf-8")
        assert PREDICT in text
        crashing.write_text(text.replace(PREDICT, PREDICT + CRASH), encoding="utf-8")
        yield Case(
            "ctr_raw: its stub crashes in warm-up", "ctr_raw", [f"ctr_raw_features={crashing}"], ("load", "warm up")
        )


def _attempt(site: Site, load: Load, case: Case) -> None:
    files, index = _files(site.repository), _index(site)
    load.take()
    ran = site.run("swap", case.service, case.arguments)
    case.took_s, case.said = ran.ended_s - ran.began_s, ran.said.splitlines()[-1] if ran.said else ""
    time.sleep(0.5)  # callers whose requests were under way
    if ran.code == 0:
        case.wrong.append("it was let through")
    elif not any(step in ran.said if step == FILES else f": {step}: " in ran.said for step in case.steps):
        case.wrong.append(f"it was refused for something else: {ran.said}")
    case.wrong += _seen(load, generation=0)
    case.wrong += site.left()
    if (now := _index(site)) != index:
        case.wrong.append(f"Triton had {sorted(index)} and has {sorted(now)}")
    changed = sorted({path for path, _ in _files(site.repository) ^ files})
    if changed:
        case.wrong.append(f"changed on disk: {', '.join(changed[:5])}")


def _good(site: Site, load: Load) -> str:
    """Why the good model was not let through; "" when it serves."""
    load.take()
    ran = site.run("swap", "ctr", site.files("ctr", 1))
    if ran.code:
        return f"refused: {ran.said}"
    load.take()
    time.sleep(1.0)
    return "; ".join(_seen(load, generation=1))


def _seen(load: Load, generation: int) -> list[str]:
    """What was wrong with the answers since the last time."""
    calls = load.take()
    if not calls:
        raise MeasurementError("Nobody asked while a model was swapped in. Nothing is reported. Repeat.")
    errors = [call.error for call in calls if call.error]
    strange = [call for call in calls if not call.error and call.generations != {generation}]
    found = [f"{len(errors)} of {len(calls)} requests failed: {errors[0]}"] if errors else []
    if strange:
        found.append(f"{len(strange)} of {len(calls)} answers are not those of the version that should serve")
    return found


def _files(root: Path) -> set[tuple[str, str]]:
    """(path, SHA-256) of all files of models; the journal is no model."""
    return {
        (path.relative_to(root).as_posix(), repository.sha256(path))
        for path in root.rglob("*")
        if path.is_file() and not path.relative_to(root).parts[0].startswith(".")
    }


def _index(site: Site) -> set[tuple[str, str]]:
    with site.server.control() as control:
        return {(each.name, each.version) for each in control.index() if each.state == "READY"}


def _sources(site: Site, *, quick: bool) -> Iterator[tuple[str, Path, str]]:
    """(service, good model file, member) that are made bad."""
    yield "ctr", _source(site, "ctr"), ""
    if not quick:
        yield "image", _source(site, "image"), "image_net"


def _source(site: Site, service: str) -> Path:
    return site.folder / "models" / service / "build" / "model.onnx"


def _with_others(folder: Path) -> Subject:
    """ctr, and the examples that need more than it: `image` and `ctr_raw`, a pipeline with a Python step."""
    for name in ("image", "ctr_raw"):
        shutil.copytree(
            PROJECT / "models" / name, folder / "models" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    (folder / "models" / "ctr").mkdir()
    shutil.copyfile(PROJECT / "models" / "ctr" / "features.py", folder / "models" / "ctr" / "features.py")
    return generations.ctr(folder)
