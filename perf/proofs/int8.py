"""Is INT8 right, and worth it? `tritonpilot quantize` on the example services' real models and data, in a copy of their folders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.ocr import evaluation as ocr
from perf import callers, memory
from perf.callers import Caller
from perf.frame import PROJECT, Bench, Outcome, median, spread
from perf.subjects import Served, cut, serving_from
from tritonpilot import build, repository, samples
from tritonpilot.errors import MeasurementError, ModelError
from tritonpilot.onnx_model import read_signature
from tritonpilot.pipeline import parts
from tritonpilot.quantize import accuracy, data, run
from tritonpilot.quantize.search import FP32
from tritonpilot.spec import Service, load_services

SECONDS, QUICK_SECONDS = 4.0, 0.5


@dataclass(frozen=True)
class Want:
    """What a model's INT8 has to reach besides its speed: metric loss and size (None: not asked)."""

    loss: float
    cosine: float | None = None
    size: float | None = None


def int8_ctr(bench: Bench) -> Outcome:
    """Rows per CPU second of the chosen ctr model at batch 64, as a ratio to FP32."""
    return _prove(bench, "ctr", "ctr", Want(loss=0.002, size=0.35))


def int8_image(bench: Bench) -> Outcome:
    """The same of the image network; of the 20 labelled photos it must name as many first as FP32."""
    return _prove(bench, "image", "image_net", Want(loss=0.02), _photos_named)


def _photos_named(part: Service, int8: Path) -> dict[str, int]:
    assert part.model is not None
    assert part.model.quantize is not None
    fp32 = part.folder / str(part.model.file)
    rows = data.read(part.folder / part.model.quantize.evaluation, read_signature(fp32))
    photos = rows.take(np.flatnonzero(rows.slices["view"] == "whole"))
    assert photos.label is not None
    named = {}
    for name, file in (("fp32", fp32), ("int8", int8)):
        (logits,) = accuracy.predict(file, photos).values()
        named[name] = int((logits.argmax(axis=1) == photos.label).sum())
    return named


def int8_text(bench: Bench) -> Outcome:
    """The same of the text network."""
    return _prove(bench, "text", "text_net", Want(loss=0.01, cosine=0.99))


def int8_risk(bench: Bench) -> Outcome:
    """AUC that the INT8 risk network loses, relative; measured also where FP32 stays because INT8 is not faster."""
    with _copied(bench, "risk") as services:
        outcome = run.quantize(_part(services, "risk_net"), bench.say, seconds=_seconds(bench))
    losses = [each["loss"] for each in outcome.figures["candidates"] if each["name"] != FP32 and each["is_accurate"]]
    return Outcome(min(losses), rounds=1, details=_details(outcome))


def int8_ocr(bench: Bench) -> Outcome:
    """Known lines that OCR reads exactly as with FP32, with the chosen networks; with accurate INT8 ones in the details."""
    with _copied(bench, "ocr") as services:
        found = {}
        for name in ("ocr_det", "ocr_rec"):
            try:
                found[name] = run.quantize(_part(services, name), bench.say, seconds=_seconds(bench))
            except MeasurementError as error:  # FP32 stays, and it says why
                bench.say(str(error))
        folder = services["ocr"].folder / "build"
        fp32 = {name: folder / f"{name.removeprefix('ocr_')}.onnx" for name in ("ocr_det", "ocr_rec")}
        chosen = {name: found[name].path or file if name in found else file for name, file in fp32.items()}
        smaller = {name: found[name].accurate or file if name in found else file for name, file in fp32.items()}
        characters = next(folder.glob("characters*.txt"))

        def read(networks: dict[str, Path]) -> Any:
            return ocr.read_lines(networks["ocr_det"], networks["ocr_rec"], characters)["text"]

        before = read(fp32)
        equal, equal_int8 = (float((before == read(networks)).mean()) for networks in (chosen, smaller))
    return Outcome(
        equal,
        rounds=1,
        details={
            "lines": len(before),
            "stayed_fp32": sorted(name for name, file in fp32.items() if chosen[name] == file),
            "lines_equal_with_accurate_int8": round(equal_int8, 4),
            **{name: _details(outcome) for name, outcome in found.items()},
        },
    )


def compensation_text(bench: Bench) -> Outcome:
    """Mean cosine to FP32 that the search reaches for MiniLM; the plain INT8 model's is in the details."""
    with _copied(bench, "text") as services:
        outcome = run.quantize(_part(services, "text_net"), bench.say, seconds=_seconds(bench))
    cosine = float(outcome.figures["gate"]["agreement"]["cosine"]) if outcome.path is not None else 0.0
    return Outcome(cosine, rounds=1, details=_details(outcome))


def coverage_refusal(bench: Bench) -> Outcome:
    """One-sided calibration sets that are refused with the uncovered features named, of those tried; covering ones pass."""
    tried = (
        ("ctr", "ctr", ("hour", "21")),
        ("risk", "risk_net", ("grade", "B")),
        ("risk", "risk_net", ("state", "CA")),
    )
    refused: dict[str, str] = {}
    passed: dict[str, bool] = {}
    for service, model, only in tried:
        with _copied(bench, service) as services:
            part = _part(services, model)
            if model not in passed:
                outcome = run.quantize(part, bench.say, seconds=QUICK_SECONDS)
                passed[model] = not outcome.figures["coverage"]["uncovered"]
            try:
                run.quantize(part, bench.say, only=only, seconds=QUICK_SECONDS)
            except ModelError as error:
                if "do not cover" in str(error):
                    refused[f"{model}, {only[0]}={only[1]}"] = str(error).split("\n")[1].strip()
    return Outcome(
        len(refused) / len(tried),
        rounds=len(tried),
        ok=all(passed.values()),
        details={"first_feature_named": refused, "covering_set_passes": passed},
    )


SERVED, SERVED_INT8 = "image_net", "image_net_int8"
CONCURRENCIES = (1, 2, 4, 8)
SERVED_ROUNDS = 3


def int8_served(bench: Bench) -> Outcome:
    """Answers per second within the SLO of the INT8 image network, served by Triton, as a ratio to FP32; memory of both stubs."""
    with _copied(bench, "image") as services, tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        run.quantize(_part(services, SERVED), bench.say, seconds=_seconds(bench))
        service = services["image"]
        text = service.path.read_text(encoding="utf-8")
        service.path.write_text(
            text.replace("          metric:", "          publish: beside\n          metric:"), encoding="utf-8"
        )
        (published,) = load_services(service.folder.parent)
        slo_ms = published.slo.p99_ms if published.slo else float("inf")
        plans = build.plan([published], "auto")
        root = Path(folder, "model_repository")
        root.mkdir()
        repository.publish(root, [plan.folder for plan in plans if plan.folder.name in (SERVED, SERVED_INT8)])
        rows = samples.read(_part(services, SERVED).samples or Path())
        with serving_from(root, bench, is_pinned=True) as served:
            stubs = {memory.model_of(name): pid for name, pid in memory.stubs(served.server.pid).items()}

            def one() -> dict[str, float]:
                return {
                    name: _best_per_s(served, name, rows, slo_ms, _seconds(bench)) for name in (SERVED, SERVED_INT8)
                }

            kept = bench.rounds(1 if bench.quick else SERVED_ROUNDS, one, check=served.server.check_alive)
            rss_mb = {name: round(memory.of_process(stubs[name]).rss_mb, 1) for name in (SERVED, SERVED_INT8)}
    ratios = [found[SERVED_INT8] / found[SERVED] for found in kept]
    return Outcome(
        median(ratios),
        spread=spread(ratios),
        rounds=len(kept),
        details={
            "slo_ms": slo_ms,
            "answers_per_s": {name: [round(found[name], 1) for found in kept] for name in (SERVED, SERVED_INT8)},
            "rss_mb": rss_mb,
        },
    )


def _best_per_s(served: Served, model: str, rows: Any, slo_ms: float, seconds: float) -> float:
    """The highest rate, over the concurrencies, whose P99 is within the SLO."""
    body = callers.body(model, cut(rows, 0, 1))
    best = 0.0
    for concurrency in CONCURRENCIES:
        calls = callers.in_turn(served.server.endpoints.http, [Caller(model, body)] * concurrency, seconds / 2)
        if all(call.ok for call in calls) and callers.quantile_ms(calls, 0.99) <= slo_ms:
            best = max(best, len(calls) / max(call.answered_s for call in calls))
    return best


def _prove(
    bench: Bench, service: str, model: str, want: Want, count: Callable[[Service, Path], dict[str, int]] | None = None
) -> Outcome:
    with _copied(bench, service) as services:
        part = _part(services, model)
        outcome = run.quantize(part, bench.say, seconds=_seconds(bench))
        source = part.folder / str(part.model.file if part.model else "")
        size = outcome.path.stat().st_size / source.stat().st_size if outcome.path is not None else 1.0
        counted = count(part, outcome.path) if count is not None and outcome.path is not None else {}
    figures = outcome.figures
    gate = figures["gate"]
    ratios = {int(batch): ratio for batch, ratio in figures["ratio_by_batch"].items()}
    ok = (
        outcome.path is not None
        and gate["loss"] <= want.loss
        and (want.size is None or size <= want.size)
        and (want.cosine is None or gate["agreement"]["cosine"] >= want.cosine)
        and len(set(counted.values())) <= 1
    )
    return Outcome(
        ratios[max(ratios)] if outcome.path is not None else 1.0,
        spread=max(ratios.values()) - min(ratios.values()),
        rounds=5,
        ok=ok,
        details={**_details(outcome), "file_of_fp32": round(size, 3), **({"right": counted} if counted else {})},
    )


def _details(outcome: run.Outcome) -> dict[str, Any]:
    gate = outcome.figures["gate"]
    return {
        "reason": outcome.reason,
        "ratio_by_batch": outcome.figures["ratio_by_batch"],
        "metric": None if gate is None else [gate["metric"], round(gate["reference"], 5), round(gate["candidate"], 5)],
        "loss": None if gate is None else round(gate["loss"], 5),
        "loss_ci95": None if gate is None else [round(each, 5) for each in gate["ci95"]],
        "agreement": None if gate is None else gate["agreement"],
        "batch_mates_max_difference": outcome.figures.get("batch_mates_max_difference"),
        "candidates": outcome.figures["candidates"],
        "coverage": {
            key: value for key, value in outcome.figures["coverage"].items() if key not in ("uncovered", "by_feature")
        },
    }


def _seconds(bench: Bench) -> float:
    return QUICK_SECONDS if bench.quick else SECONDS


def _part(services: dict[str, Service], model: str) -> Service:
    return next(part for service in services.values() for part in parts(service) if part.service == model)


@contextmanager
def _copied(bench: Bench, service: str) -> Iterator[dict[str, Service]]:
    """The service in a folder of its own, with what its model is made and judged from: nothing of an earlier run is used."""
    original = load_services(PROJECT / "models", [service])
    build.prepare(original, "auto", bench.say)
    for part in parts(original[0]):
        wanted = part.model.quantize if part.model is not None else None
        if wanted is not None and wanted.prepare is not None:
            files = [part.folder / wanted.calibration, part.folder / wanted.evaluation]
            build.run_script(part.folder / wanted.prepare, files, bench.say)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        copy = Path(folder, service)
        shutil.copytree(original[0].folder, copy, ignore=_what_was_made)
        yield {each.service: each for each in load_services(Path(folder))}


def _what_was_made(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == run.CACHE or ".int8." in name or name == "__pycache__"]
