"""From a model's FP32 file to an INT8 one that was proved accurate and faster, or to the reason why there is none.

    outcome = quantize(part, say=print)            # part: a service with a model of its own that says `quantize`
    outcome.path, outcome.reason                   # build/model.int8.onnx, "INT8: auc 0.7632 -> 0.7630, ..., 2.6 times ..."

Calibration rows are chosen to cover those that stand for production, candidates are searched, judged and measured, and the chosen
one is put beside the FP32 model with a manifest and a picture of the choice. Nothing is written unless all of it went well.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpilot.errors import HostError, MeasurementError, ModelError, SpecError
from tritonpilot.onnx_model import Signature, read_signature
from tritonpilot.quantize import accuracy, coverage, data, floats, manifest, plots, qdq, search, speed
from tritonpilot.quantize.manifest import Cache, Manifest
from tritonpilot.spec import INT8_SUFFIX, Quantize, Service, int8_file

LEAST_EVALUATION = 30  # rows; of fewer an interval says nothing
MATES_WITHIN = 1e-5  # static INT8 answers the same whatever its batch-mates; floats that are left may round
CACHE = "quantize-cache"

TENSORRT_SUFFIX = ".int8-tensorrt.onnx"

Say = Callable[[str], None]
Runtime = Literal["cpu", "tensorrt"]


@dataclass(frozen=True)
class Outcome:
    """What came of it. `path` is None when FP32 stays: then nothing was written. `accurate` is the fastest INT8 model that is
    accurate enough, in the cache, also when FP32 is faster."""

    model: str
    path: Path | None
    reason: str
    figures: dict[str, Any]
    accurate: Path | None = None


def quantize(
    part: Service,
    say: Say,
    *,
    only: tuple[str, str] | None = None,
    is_forced: bool = False,
    seed: int = 0,
    seconds: float = 2.0,
    runtime: Runtime = "cpu",
) -> Outcome:
    """Quantise the model of a service (or of a step). `only` (slice, value) chooses calibration rows from one slice alone.

    For the runtime "tensorrt" the file has another name, is not served by itself (`tritonpilot engine` makes a plan of it), and is
    chosen by its accuracy alone.

    Raises SpecError without `quantize`, ModelError for data or models that do not do, also when the calibration rows do not cover
    the pool (unless forced), MeasurementError when no INT8 model is accurate enough.
    """
    wanted, source = _asked(part)
    signature = read_signature(source)
    pool = data.read(part.folder / wanted.calibration, signature)
    evaluation = _evaluation(part, wanted, signature)
    output = Path(int8_file(str(source)))
    if runtime == "tensorrt":
        output = output.with_name(output.name.removesuffix(INT8_SUFFIX) + TENSORRT_SUFFIX)
    places = np.arange(pool.count) if only is None else _slice(pool, only)
    count = wanted.samples if only is None else min(wanted.samples, len(places))
    indices = places[coverage.choose(pool.take(places), count, seed)]
    calibration = pool.take(indices)
    covered = coverage.report(pool, calibration)
    say(f"{part.service}: {calibration.count} of {len(places)} rows chosen for calibration")
    if is_forced and (missed := covered.verdict()):
        say(f"{part.service}: {len(missed)} features are not covered, and it was forced: {missed[0]}")
    elif not is_forced:
        covered.ensure()
    result = search.compensate(
        source,
        calibration,
        evaluation,
        wanted.metric,
        search.Target(wanted.max_loss, wanted.least_cosine, wanted.lossless),
        search.Budget(batch_sizes=_batch_sizes(part), threads=part.instances[0].threads, seconds=seconds),
        store=Cache(source.parent / CACHE),
        options=qdq.QdqOptions.for_tensorrt(source) if runtime == "tensorrt" else None,
        progress=lambda doing, done, total: say(f"{part.service}: {doing} ({done} of {total})"),
    )
    if runtime == "tensorrt":
        result = search.least_changed(result)
    figures = _figures(result, covered)
    if result.chosen.recipe is None:
        fate = _withdrawn(output) + (
            " Take `publish` out of the service file, for there is no INT8 file to serve."
            if wanted.publish and runtime == "cpu"
            else ""
        )
        if not any(each.is_accurate for each in result.candidates[1:]):
            raise MeasurementError(
                f"{part.service}: no INT8 model is accurate enough: {result.reason}. Nothing was written, FP32 stays.{fate}"
            )
        return Outcome(part.service, None, result.reason + fate, figures, _accurate(result))
    apart = accuracy.check_batch_mates(result.chosen.path, evaluation)
    if apart > MATES_WITHIN:
        raise ModelError(
            f"{part.service}: answers of the INT8 model differ by {apart:.2g} with their batch-mates. Nothing was written."
        )
    figures["batch_mates_max_difference"] = apart
    history = Manifest(
        method=result.chosen.recipe.options.method,
        options=_plain(dataclasses.asdict(result.chosen.recipe)),
        sample_indices=tuple(int(each) for each in indices),
        samples_sha256=manifest.cache_key(dict(calibration.inputs)),
        seeds={"choice": seed},
        versions=manifest.versions(),
        model_sha256=manifest.hash_file(source),
        data_sha256={
            "calibration": manifest.hash_file(part.folder / wanted.calibration),
            "evaluation": manifest.hash_file(part.folder / wanted.evaluation),
        },
        result_sha256=manifest.hash_file(result.chosen.path),
        gate=figures["gate"],
        speed=figures["speed"],
        coverage=figures["coverage"],
    )
    _publish(result, history, output)
    return Outcome(part.service, output, result.reason, figures, _accurate(result))


def halve(
    part: Service,
    say: Say,
    precision: Literal["fp16", "bf16"],
    *,
    keep: frozenset[str] = frozenset(),
    seconds: float = 2.0,
) -> Outcome:
    """Write the model of a service in half precision, model.fp16.onnx, when its answers pass the same gate. The nodes in `keep`
    stay FP32 (mixed precision). It is for GPUs (`tritonpilot engine NAME --onnx FILE`): CPUs are rarely faster with it.

    Raises SpecError and ModelError as `quantize`, MeasurementError when it is not accurate enough.
    """
    wanted, source = _asked(part)
    evaluation = _evaluation(part, wanted, read_signature(source))
    output = source.with_suffix(f".{precision}.onnx")
    with _beside(output) as aside:
        (floats.to_fp16 if precision == "fp16" else floats.to_bf16)(source, aside, keep)
        threads = part.instances[0].threads
        answers = [accuracy.predict(path, evaluation, 16, threads) for path in (source, aside)]
        verdict = accuracy.gate(
            answers[0], answers[1], evaluation, wanted.metric, wanted.max_loss, lossless=wanted.lossless
        )
        if not verdict.passed:
            raise MeasurementError(
                f"{part.service}: {precision} is not accurate enough: {verdict.reason}. Nothing was written. Keep nodes in FP32."
            )
        say(f"{part.service}: measuring")
        models = {search.FP32: source, precision: aside}
        comparison = speed.compare(models, evaluation, _batch_sizes(part), threads, seconds)
        ratios = _ratios(comparison, precision)
        figures = {
            "ratio_by_batch": ratios,
            "gate": _plain(dataclasses.asdict(verdict)),
            "speed": _plain(dataclasses.asdict(comparison)),
        }
        history = Manifest(
            method=precision,
            options={"keep": sorted(keep)},
            sample_indices=(),
            samples_sha256="",
            seeds={},
            versions=manifest.versions(),
            model_sha256=manifest.hash_file(source),
            data_sha256={"evaluation": manifest.hash_file(part.folder / wanted.evaluation)},
            result_sha256=manifest.hash_file(aside),
            gate=figures["gate"],
            speed=figures["speed"],
        )
        manifest.write(aside, history)
    said = ", ".join(f"{ratio} at batch {batch}" for batch, ratio in ratios.items())
    return Outcome(
        part.service, output, f"{precision}: {verdict.reason}; {said} times the rows per second of FP32", figures
    )


def _asked(part: Service) -> tuple[Quantize, Path]:
    """What the service file says about quantisation, and the FP32 file."""
    model = part.model
    if model is None or model.quantize is None or model.file is None:
        raise SpecError(
            f"{part.path}: {part.service} says nothing about quantisation. Nothing was changed. Give its model a `quantize` with "
            "calibration and evaluation rows (docs/quantization.md)."
        )
    source = part.folder / model.file
    if not source.is_file():
        raise ModelError(
            f"The FP32 model {source} does not exist. Nothing was changed. Make it: `tritonpilot build {part.written_as} "
            "--prepare`."
        )
    return model.quantize, source


def _evaluation(part: Service, wanted: Quantize, signature: Signature) -> data.Rows:
    evaluation = data.read(part.folder / wanted.evaluation, signature)
    if evaluation.count < LEAST_EVALUATION:
        raise ModelError(
            f"{part.folder / wanted.evaluation} has {evaluation.count} rows, of which nobody can tell what INT8 may lose. Nothing "
            f"was changed. Give {LEAST_EVALUATION} or more; some hundreds make the interval of the loss narrow."
        )
    return evaluation


def _batch_sizes(part: Service) -> tuple[int, ...]:
    return tuple(sorted({1, min(part.batching.max_batch_size or 1, 64)}))


def _accurate(result: search.Result) -> Path:
    return max((each for each in result.candidates[1:] if each.is_accurate), key=result.gain).path


def _withdrawn(output: Path) -> str:
    """Remove an INT8 file of an earlier run, which no longer has a proof, and say so; empty when there is none."""
    if not output.is_file():
        return ""
    try:
        for file in (output, manifest.path_beside(output), output.with_suffix(".png"), output.with_suffix(".html")):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"{output} of an earlier run has lost its proof, and cannot be removed: {error}. Remove it, or it will be served."
        ) from error
    return f" {output.name} of an earlier run was removed."


def _slice(pool: data.Rows, only: tuple[str, str]) -> NDArray[np.int64]:
    """Where the rows of a slice are."""
    name, value = only
    if name not in pool.slices:
        raise SpecError(
            f"The calibration rows have no slice {name}; they have {', '.join(pool.slices) or 'none'}. Nothing was changed."
        )
    places = np.flatnonzero([str(each) == value for each in pool.slices[name]])
    if not len(places):
        some = ", ".join(sorted({str(each) for each in pool.slices[name]})[:10])
        raise SpecError(f"The slice {name} has no value {value}; it has {some}. Nothing was changed.")
    return places


def _figures(result: search.Result, covered: coverage.CoverageReport) -> dict[str, Any]:
    verdict = result.chosen.verdict
    return {
        "reason": result.reason,
        "gain": round(result.gain(result.chosen), 3),
        "ratio_by_batch": _ratios(result.comparison, result.chosen.name),
        "gate": None if verdict is None else _plain(dataclasses.asdict(verdict)),
        "speed": _plain(dataclasses.asdict(result.comparison)),
        "coverage": _plain(covered.summary()),
        "candidates": [_candidate(result, each) for each in result.candidates],
    }


def _ratios(comparison: speed.Comparison, name: str) -> dict[str, float]:
    """How many times the rows of FP32 a model answers, by batch size."""
    return {str(batch): round(comparison.ratio(name, search.FP32, batch), 3) for batch in comparison.batch_sizes}


def _candidate(result: search.Result, candidate: search.Candidate) -> dict[str, Any]:
    verdict = candidate.verdict
    said = {} if verdict is None else {"loss": round(verdict.loss, 5), "cosine": _plain(verdict.agreement.cosine)}
    return {
        "name": candidate.name,
        "is_accurate": candidate.is_accurate,
        "gain": round(result.gain(candidate), 3),
        **said,
        "left": list(candidate.left),
    }


def _publish(result: search.Result, history: Manifest, output: Path) -> None:
    """Put model, manifest and pictures in place."""
    with _beside(output) as aside:
        shutil.copyfile(result.chosen.path, aside)
        manifest.write(aside, history)
        for draw, suffix in ((plots.png, ".png"), (plots.html, ".html")):
            draw(result, aside.with_suffix(suffix))


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """The path to write the model to, in a folder whose files are then put in place, each whole; the model last, for it is what
    others read. Nothing is, when the block raises. Raises HostError where they cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            aside = Path(folder, output.name)
            yield aside
            for file in sorted(Path(folder).iterdir(), key=lambda file: file == aside):
                os.replace(file, output.parent / file.name)  # noqa: PTH105 -- of two folders, atomic
    except OSError as error:
        raise HostError(
            f"{output} cannot be written: {error}. An older one there is as it was. Make room, or give yourself permission to "
            "write there, and start this again; finished steps are not repeated."
        ) from error


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if hasattr(value, "item"):
        return value.item()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
