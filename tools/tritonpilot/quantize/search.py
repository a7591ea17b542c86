"""Which nodes cost accuracy when they are quantised, and which INT8 model is accurate enough and fastest?

    result = compensate(model, calibration, evaluation, "pearson", store=Cache(folder))
    result.reason        # "INT8 with outlier channels apart in 30 of 36 nodes: mean cosine 0.9950, ..., 1.8 times the rows ..."
    result.chosen.path   # the INT8 file; the FP32 model when nothing is better

Cheap questions come first: the plain INT8 model; if it loses too much, one with corrected biases and then without the extremes of
its ranges, which cost no time; then one whose outlier channels are computed apart (`split`), and one that leaves the nodes in FP32
that cost most accuracy for the time they save (`switched`); then, while none is accurate enough, SmoothQuant and other calibration
methods, each kept if it helps. All are judged by the gate and measured side by side. Steps that end are kept in `store`, so that a
search that was interrupted goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from tritonpilot.errors import MeasurementError
from tritonpilot.quantize import accuracy, qdq, speed
from tritonpilot.quantize.accuracy import Verdict
from tritonpilot.quantize.data import Rows
from tritonpilot.quantize.manifest import cache_key, hash_file
from tritonpilot.quantize.qdq import QdqOptions, Ranges
from tritonpilot.quantize.split import split_outliers
from tritonpilot.quantize.switched import Switched, noise, time_shares

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]
FP32 = "FP32"
#: What INT8 must gain, over the batch sizes on average, to be worth a second file: less is within what runs differ by.
LEAST_GAIN = 1.05
#: And what it must keep of FP32's rows per second at each of them.
LEAST_RATIO = 0.95
#: Outputs beside the one that the metric judges: the most that their squared error may be of their variance.
MOST_NOISE_BESIDE = 0.1
#: Layers whose input's range shrinks so many times without its outlier channels are split. On MiniLM 3 splits 10 of 36 layers
#: (mean cosine .9875 -> .9966, 1.97 times the rows of FP32 at batch 16), 1.5 splits 31 (.9988, 1.82 times).
SPLIT_GAINS = (3.0, 1.5)
#: What costs no time when the model runs; percentiles cut extremes off, one in ten thousand values or in a hundred thousand. Of 220
#: first classes EfficientNet-Lite0 keeps 97.7 % as it is, 99.1 % with corrected biases, all with the larger percentile besides.
CORRECTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("INT8, bias corrected", {"bias_correction": True}),
    ("INT8, bias corrected, percentile 99.99", {"bias_correction": True, "method": "percentile", "percentile": 99.99}),
    (
        "INT8, bias corrected, percentile 99.999",
        {"bias_correction": True, "method": "percentile", "percentile": 99.999},
    ),
)


class Store(Protocol):
    """Files by key, as `manifest.Cache`."""

    def get_or_make(self, key: str, make: Callable[[Path], None], suffix: str = "") -> Path: ...


@dataclass(frozen=True)
class Target:
    """When is a model accurate enough: the gate's `max_loss` by the metric (0.01 is 1 %), and the mean cosine to FP32 where
    answers are vectors (None: not asked); slices that may lose nothing, by name."""

    max_loss: float = 0.01
    least_cosine: float | None = 0.99
    lossless: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """How much a search may cost: rows that each subset of nodes is tried on, INT8 models that are written, and how long each is
    measured at each batch size of the service."""

    rows: int = 48
    models: int = 10
    batch_sizes: tuple[int, ...] = (1, 16)
    threads: int = 1
    seconds: float = 2.0


@dataclass(frozen=True)
class Sensitivity:
    """What quantising one node alone costs and can save. `group` is what nodes of repeated layers have in common.

    `noise` is the squared error of the model's answers over their variance, `time_share` the node's part of the FP32 model's time.
    """

    node: str
    op_type: str
    group: str
    noise: float
    time_share: float


@dataclass(frozen=True)
class Recipe:
    """How an INT8 model is made: options, and where outlier channels are computed apart first: in layers whose input's range
    shrinks at least `split` times by that (None: nowhere)."""

    options: QdqOptions
    split: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A model that was judged. `recipe` and `verdict` are None for FP32; `left` are the nodes kept in FP32 on purpose, `nodes`
    how many can be quantised, `split` how many have outlier channels apart; `noise` is that of the output that is judged, `beside`
    the largest of the others."""

    name: str
    path: Path
    recipe: Recipe | None
    verdict: Verdict | None
    noise: float
    is_accurate: bool
    nodes: int
    left: tuple[str, ...] = ()
    split: int = 0
    beside: float = 0.0

    @property
    def options(self) -> QdqOptions | None:
        return self.recipe.options if self.recipe else None


@dataclass(frozen=True)
class Result:
    """All candidates, FP32 first; `front` are those that no other beats in both accuracy and speed, `reason` says why `chosen`."""

    candidates: tuple[Candidate, ...]
    comparison: speed.Comparison
    front: tuple[Candidate, ...]
    chosen: Candidate
    reason: str
    sensitivities: tuple[Sensitivity, ...]

    def gain(self, candidate: Candidate) -> float:
        """How many times the rows of FP32 it answers, over the batch sizes (geometric mean)."""
        return gain(self.comparison, candidate.name)


def sensitivity(
    model: Path,
    ranges: Ranges,
    rows: Rows,
    options: QdqOptions,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """Each node quantised alone, in the model's order. `model` is prepared; `ranges` come from `qdq.calibrate` with `options`."""
    switched = Switched(model, ranges, options, threads)
    shares = time_shares(model, rows, threads=threads)
    groups = _groups(model)
    exact = switched.answers(rows)
    found = []
    for done, node in enumerate(switched.nodes):
        _tell(progress, f"quantising {node.name} alone", done, len(switched.nodes))
        lost = noise(exact, switched.answers(rows, [node.name]))
        share = shares.get(node.name, 0.0)
        found.append(Sensitivity(node.name, node.op_type, groups[node.name], lost, share))
    _tell(progress, "quantising nodes alone", len(switched.nodes), len(switched.nodes))
    return found


def worst_first(sensitivities: Sequence[Sensitivity]) -> list[str]:
    """The nodes by the accuracy that leaving them in FP32 brings for the time that it costs."""
    ordered = sorted(sensitivities, key=lambda each: each.noise / max(each.time_share, 1e-4), reverse=True)
    return [each.node for each in ordered]


def least_excluded(order: Sequence[str], noise_without: Callable[[Sequence[str]], float], most_noise: float) -> int:
    """How many nodes, from the front of `order`, must stay FP32 for the noise of the rest to be at most `most_noise`.

    Bisection: noise falls as more are left out, but for rounding.
    """
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if noise_without(order[:middle]) <= most_noise:
            high = middle
        else:
            low = middle + 1
    return low


def compensate(
    model: Path,
    calibration: Rows,
    evaluation: Rows,
    metric: str,
    target: Target | None = None,
    budget: Budget | None = None,
    *,
    store: Store,
    options: QdqOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Search for the fastest INT8 model that is accurate enough. Raises ModelError when the model cannot be quantised at all."""
    search = _Search(model, calibration, evaluation, metric, target or Target(), budget or Budget(), store, progress)
    plain = Recipe(options or QdqOptions.for_cpu(model))
    found = [search.fp32(), search.judged("INT8", plain)]
    sensitivities: list[Sensitivity] = []
    if search.has_biases():
        for words, change in CORRECTIONS:
            if found[-1].is_accurate:
                break
            found.append(search.judged(words, Recipe(dataclasses.replace(plain.options, **change))))
    if not found[-1].is_accurate:
        recipe = min(found[1:], key=lambda each: each.noise).recipe or plain
        found += search.split(recipe)
        sensitivities = search.sensitivities(plain)
        found += search.without_worst("INT8", recipe, sensitivities)
        if not any(each.is_accurate for each in found[1:]):
            best = min(found[1:], key=lambda each: each.noise)
            found += search.climb(best)
    return _decide(search, found, sensitivities)


@dataclass
class _Search:
    model: Path
    calibration: Rows
    evaluation: Rows
    metric: str
    target: Target
    budget: Budget
    store: Store
    progress: Progress | None
    written: int = 0

    def __post_init__(self) -> None:
        self.source = hash_file(self.model)
        self.prepared = self._kept("prepare", (self.source,), lambda path: qdq.prepare(self.model, path), ".onnx")
        self.reference = self._answers(self.model, (self.source,))
        places = np.linspace(0, self.evaluation.count - 1, min(self.budget.rows, self.evaluation.count))
        self.few = self.evaluation.take(np.unique(places.astype(np.int64)))

    def fp32(self) -> Candidate:
        return Candidate(FP32, self.model, None, None, 0.0, True, len(qdq.quantizable_nodes(self.prepared)))

    def has_biases(self) -> bool:
        """Whether there are nodes whose bias can be corrected."""
        return any(node.op_type in qdq.WITH_BIAS for node in qdq.quantizable_nodes(self.prepared))

    def judged(self, name: str, recipe: Recipe) -> Candidate:
        """The INT8 model of a recipe, made and held against FP32."""
        _tell(self.progress, f"trying {name}", self.written, self.budget.models)
        self.written += 1
        source, apart = self._source(recipe)
        made = dataclasses.replace(recipe.options, exclude=recipe.options.exclude | frozenset(apart))

        def make(path: Path) -> None:
            ranges = self._ranges(recipe)
            qdq.quantize_static(source, self.calibration, path, made, self.progress, ranges=ranges)

        parts = (self.source, self.calibration, made, recipe.split)
        path = self._kept("int8", parts, make, ".onnx")
        answers = self._answers(path, parts)
        limit, lossless = self.target.max_loss, self.target.lossless
        verdict = accuracy.gate(self.reference, answers, self.evaluation, self.metric, limit, lossless=lossless)
        cosine, least = verdict.agreement.cosine, self.target.least_cosine
        _, *others = self.reference
        beside = max(
            (noise(self.reference[name], answers[name]) for name in others if answers[name].dtype.kind in "biuf"),
            default=0.0,
        )
        return Candidate(
            name=name,
            path=path,
            recipe=recipe,
            verdict=verdict,
            noise=noise(_first(self.reference), _first(answers)),
            is_accurate=verdict.passed
            and (cosine is None or least is None or cosine >= least)
            and beside <= MOST_NOISE_BESIDE,
            nodes=len(qdq.quantizable_nodes(self.prepared, dataclasses.replace(recipe.options, exclude=frozenset()))),
            left=tuple(sorted(recipe.options.exclude)),
            split=len(apart),
            beside=beside,
        )

    def split(self, plain: Recipe) -> list[Candidate]:
        """Outlier channels apart in few layers, and in more of them when few are not enough."""
        found: list[Candidate] = []
        for least_gain in SPLIT_GAINS:
            recipe = dataclasses.replace(plain, split=least_gain)
            _, apart = self._source(recipe)
            if len(apart) > (found[-1].split if found else 0):
                found.append(self.judged(f"INT8, outliers apart in {len(apart)}", recipe))
            if found and found[-1].is_accurate:
                break
        return found

    def sensitivities(self, recipe: Recipe) -> list[Sensitivity]:
        def make(path: Path) -> None:
            source, _ = self._source(recipe)
            found = sensitivity(
                source,
                self._ranges(recipe),
                self.few,
                recipe.options,
                threads=self.budget.threads,
                progress=self.progress,
            )
            path.write_text(json.dumps([dataclasses.asdict(each) for each in found]), encoding="utf-8")

        parts = (self.source, self.calibration, self.few, recipe.options, recipe.split)
        text = self._kept("sensitivity", parts, make, ".json").read_text(encoding="utf-8")
        return [Sensitivity(**each) for each in json.loads(text)]

    def without_worst(self, name: str, recipe: Recipe, sensitivities: Sequence[Sensitivity]) -> list[Candidate]:
        """INT8 models with as few nodes in FP32 as reach the target, more of them when the gate still says no."""
        source, apart = self._source(recipe)
        switched = Switched(source, self._ranges(recipe), recipe.options, self.budget.threads)
        exact = switched.answers(self.few)
        everything = {node.name for node in switched.nodes}
        order = [node for node in worst_first(sensitivities) if node not in apart]

        def noise_without(left: Sequence[str]) -> float:
            return noise(exact, switched.answers(self.few, everything - set(left) - set(apart)))

        # Vectors of length 1 at a cosine of c have a noise of 2 (1 - c); half of that, since few rows say it.
        most = 1 - (self.target.least_cosine or 0.99)
        count = min(max(1, least_excluded(order, noise_without, most)), len(order) - 1)
        found: list[Candidate] = []
        while 0 < count < len(order) and self.written < self.budget.models:
            found.append(self.judged(f"{name}, {count} in FP32", _left(recipe, order[:count])))
            if found[-1].is_accurate:
                break
            count = max(count + 1, math.ceil(count * 1.5))
        if found and found[-1].is_accurate:
            found += self.without_needless(found[-1].name, recipe, order[:count], sensitivities)
        return found

    def without_needless(
        self, name: str, recipe: Recipe, left: Sequence[str], sensitivities: Sequence[Sensitivity]
    ) -> list[Candidate]:
        """INT8 models with fewer of the nodes `left` in FP32 that are accurate still: dear ones are quantised again first."""
        shares = {each.node: each.time_share for each in sensitivities}
        found: list[Candidate] = []
        for node in sorted(left, key=lambda each: -shares[each]):
            fewer = [each for each in left if each != node]
            if not fewer or self.written >= self.budget.models:
                break
            found.append(self.judged(f"{name} less {node}", _left(recipe, fewer)))
            if found[-1].is_accurate:
                left, name = fewer, found[-1].name
        return found

    def climb(self, best: Candidate) -> list[Candidate]:
        """What else can help the best model, one after the other; what does not is taken back."""
        found: list[Candidate] = []
        changes: tuple[tuple[str, dict[str, Any]], ...] = (
            ("smoothed", {"smooth": 0.5}),
            ("percentile", {"method": "percentile"}),
            ("entropy", {"method": "entropy"}),
        )
        for word, change in changes:
            if best.is_accurate or best.recipe is None or self.written >= self.budget.models:
                break
            options = dataclasses.replace(best.recipe.options, **change)
            found.append(self.judged(f"{best.name}, {word}", dataclasses.replace(best.recipe, options=options)))
            best = min(best, found[-1], key=lambda each: (not each.is_accurate, each.noise))
        return found

    def _source(self, recipe: Recipe) -> tuple[Path, tuple[str, ...]]:
        """The FP32 model that is quantised, and its nodes that hold outlier channels."""
        least_gain = recipe.split
        if least_gain is None:
            return self.prepared, ()

        def make(path: Path) -> None:
            batch, progress = recipe.options.batch, self.progress
            split_outliers(self.prepared, self.calibration, path, least_gain=least_gain, batch=batch, progress=progress)

        parts = (self.source, self.calibration, least_gain)
        path = self._kept("split", parts, make, ".onnx")
        nodes = qdq.quantizable_nodes(path)
        return path, tuple(node.name for node in nodes if node.name.endswith("/outliers"))

    def _ranges(self, recipe: Recipe) -> Ranges:
        source, apart = self._source(recipe)
        options = dataclasses.replace(recipe.options, exclude=recipe.options.exclude | frozenset(apart))

        def make(path: Path) -> None:
            found = qdq.calibrate(source, self.calibration, options, self.progress)
            path.write_text(json.dumps(dict(found)), encoding="utf-8")

        shape = (options.method, options.percentile, options.activation, options.op_types, options.batch, recipe.split)
        smoothed = (
            () if options.smooth is None else (options.smooth, options.exclude)
        )  # what is excluded is not smoothed
        path = self._kept("ranges", (self.source, self.calibration, *shape, *smoothed), make, ".json")
        return {name: (low, high) for name, (low, high) in json.loads(path.read_text(encoding="utf-8")).items()}

    def _answers(self, model: Path, made_from: tuple[Any, ...]) -> dict[str, NDArray[Any]]:
        def make(path: Path) -> None:
            found = accuracy.predict(model, self.evaluation, 16, self.budget.threads)
            with path.open("wb") as file:
                np.savez(file, **found)

        with np.load(self._kept("answers", (*made_from, self.evaluation), make, ".npz")) as archive:
            return {name: archive[name] for name in archive.files}

    def _kept(self, step: str, parts: tuple[Any, ...], make: Callable[[Path], None], suffix: str) -> Path:
        return self.store.get_or_make(cache_key(step, *parts), make, suffix)


def _left(recipe: Recipe, nodes: Sequence[str]) -> Recipe:
    """The recipe with these nodes in FP32 too."""
    options = dataclasses.replace(recipe.options, exclude=recipe.options.exclude | frozenset(nodes))
    return dataclasses.replace(recipe, options=options)


def _decide(search: _Search, found: list[Candidate], sensitivities: list[Sensitivity]) -> Result:
    budget = search.budget
    comparison = speed.compare(
        {each.name: each.path for each in found},
        search.evaluation,
        budget.batch_sizes,
        budget.threads,
        budget.seconds,
        progress=search.progress,
    )
    chosen, reason = choose(found, comparison, search.target)
    return Result(tuple(found), comparison, front(found, comparison), chosen, reason, tuple(sensitivities))


def least_changed(result: Result) -> Result:
    """The same with the accurate model that was changed least as the chosen one: for a runtime whose speed is not this CPU's."""
    chosen = next((each for each in result.candidates[1:] if each.is_accurate), None)
    if chosen is None:
        return result
    return dataclasses.replace(
        result, chosen=chosen, reason=f"{_described(chosen)}; its speed is to be measured where it runs"
    )


def gain(comparison: speed.Comparison, name: str) -> float:
    """How many times the rows of FP32 a model answers, over the batch sizes (geometric mean)."""
    ratios = [comparison.ratio(name, FP32, batch) for batch in comparison.batch_sizes]
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def front(candidates: Sequence[Candidate], comparison: speed.Comparison) -> tuple[Candidate, ...]:
    """The Pareto front: those that no other candidate equals in both noise and speed and beats in one; fastest last."""
    points = [(each, each.noise, gain(comparison, each.name)) for each in candidates]
    kept = [
        (each, fast)
        for each, lost, fast in points
        if not any(n <= lost and f >= fast and (n < lost or f > fast) for _, n, f in points)
    ]
    return tuple(each for each, _ in sorted(kept, key=lambda pair: pair[1]))


def choose(candidates: Sequence[Candidate], comparison: speed.Comparison, target: Target) -> tuple[Candidate, str]:
    """The fastest candidate that is accurate and faster than FP32, else FP32; and why, in one sentence."""
    fp32 = next((each for each in candidates if each.recipe is None), None)
    if fp32 is None:
        raise MeasurementError("There is no FP32 model among the candidates to compare with. Nothing was changed.")
    others = [each for each in candidates if each.recipe is not None]
    accurate = [each for each in others if each.is_accurate]
    if not accurate:
        best = min(others, key=lambda each: each.noise, default=None)
        nearest = f"; nearest is {_described(best)}" if best is not None else ""
        return fp32, f"FP32 stays: no INT8 model is accurate enough (limits: {_limits(target)}){nearest}"
    fastest = max(
        accurate,
        key=lambda each: (comparison.least_ratio(each.name, FP32) >= LEAST_RATIO, gain(comparison, each.name)),
    )
    said = f"{_described(fastest)}, {_speeds(comparison, fastest.name)}"
    if gain(comparison, fastest.name) < LEAST_GAIN or comparison.least_ratio(fastest.name, FP32) < LEAST_RATIO:
        return (
            fp32,
            f"FP32 stays: no accurate INT8 model is faster at the service's batch sizes; the fastest is {said}",
        )
    return fastest, said


def _described(candidate: Candidate) -> str:
    words = [f"with {len(candidate.left)} of {candidate.nodes} nodes left in FP32"] if candidate.left else []
    if candidate.split:
        words.append(f"with outlier channels apart in {candidate.split} of {candidate.nodes} nodes")
    options = candidate.options
    if options is not None:
        words += ["with SmoothQuant"] if options.smooth is not None else []
        words += ["with corrected biases"] if options.bias_correction else []
        words += [f"calibrated by {options.method}"] if options.method != "minmax" else []
    verdict = candidate.verdict
    assert verdict is not None
    cosine = verdict.agreement.cosine
    facts = [] if cosine is None else [f"mean cosine {cosine:.4f}"]
    facts.append(
        f"{verdict.metric} {verdict.reference:.4f} -> {verdict.candidate:.4f} (loss {100 * verdict.loss:.2f} %)"
    )
    if candidate.beside > MOST_NOISE_BESIDE:
        facts.append(f"another output is wrong by {100 * candidate.beside:.0f} % of its variance")
    return f"INT8 {' and '.join(words) or 'of all nodes'}: {', '.join(facts)}"


def _speeds(comparison: speed.Comparison, name: str) -> str:
    parts = [f"{comparison.ratio(name, FP32, batch):.2f} at batch {batch}" for batch in comparison.batch_sizes]
    return f"{', '.join(parts)} times the rows per second of FP32"


def _limits(target: Target) -> str:
    cosine = "" if target.least_cosine is None else f", mean cosine {target.least_cosine}"
    lossless = "".join(f", none in {name}={value}" for name, value in target.lossless.items())
    return f"loss {100 * target.max_loss:g} %{lossless}{cosine}"


def _groups(model: Path) -> dict[str, str]:
    """node -> the name of its weights with numbers left open, such as layers.*.down."""
    groups = {}
    for node in onnx.load(str(model)).graph.node:
        index = qdq.WEIGHTS.get(node.op_type)
        if index is not None and index < len(node.input):
            groups[node.name] = re.sub(r"\d+", "*", node.input[index].removesuffix(".weight"))
    return groups


def _first(outputs: dict[str, NDArray[Any]]) -> NDArray[Any]:
    return next(iter(outputs.values()))


def _tell(progress: Progress | None, doing: str, done: int, total: int) -> None:
    if progress is not None:
        progress(doing, done, total)
