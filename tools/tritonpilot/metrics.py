"""What did a Triton do between two moments? Its counters, over gRPC or from /metrics, and their differences.

before = statistics("127.0.0.1:8001", "ctr")
...                                             # load
delta = statistics("127.0.0.1:8001", "ctr") - before
delta.mean_batch, delta.queue_us

samples = scrape("127.0.0.1:8002")              # the Prometheus text, parsed
failures(samples, "ctr")                        # {"REJECTED": 3.0, "BACKEND": 0.0, ...}
"""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from tritonpilot.control import Control, ModelStatistics
from tritonpilot.errors import MeasurementError

TIMEOUT_S = 10
PENDING = "nv_inference_pending_request_count"
FAILURES = "nv_inference_request_failure"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # http_proxy is for the way out, not for loopback


@dataclass(frozen=True)
class Statistics:
    """Counters of one model, summed over its versions, since it was loaded; a difference of two is a Statistics too.

    An inference is one row, an execution one batch, a request what a client sends. Times are totals in ns.
    """

    success: int
    fail: int
    inferences: int
    executions: int
    cache_hits: int
    request_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    def __sub__(self, earlier: Statistics) -> Statistics:
        """What happened since `earlier`. Raises MeasurementError when a counter ran backwards."""
        delta = Statistics(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))
        if min(getattr(delta, f.name) for f in fields(delta)) < 0:
            raise MeasurementError(
                f"The model's counters ran backwards ({earlier} -> {self}): it was reloaded or the server restarted "
                "during the measurement. What was measured spans two models and is not reported. Measure again."
            )
        return delta

    @property
    def mean_batch(self) -> float:
        """Rows per execution; nan without executions."""
        return self.inferences / self.executions if self.executions else float("nan")

    @property
    def queue_us(self) -> float:
        """Mean time in the queue per successful request, us."""
        return self._per_request_us(self.queue_ns)

    @property
    def compute_us(self) -> float:
        """Mean time of input, inference and output per successful request, us. Batch-mates each count the whole."""
        return self._per_request_us(self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns)

    @property
    def request_us(self) -> float:
        """Mean time inside the server per successful request, us."""
        return self._per_request_us(self.request_ns)

    def _per_request_us(self, total_ns: int) -> float:
        return total_ns / self.success / 1e3 if self.success else float("nan")


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


def statistics(grpc_url: str, model: str) -> Statistics:
    """The model's counters now. Raises ServerError when the server or the model is not there."""
    with Control(grpc_url) as control:
        return total(control.statistics(model))


def total(versions: Iterable[ModelStatistics]) -> Statistics:
    """The sum over the versions of a model."""
    every = list(versions)
    return Statistics(
        success=sum(v.success.count for v in every),
        fail=sum(v.fail.count for v in every),
        inferences=sum(v.inference_count for v in every),
        executions=sum(v.execution_count for v in every),
        cache_hits=sum(v.cache_hit.count for v in every),
        request_ns=sum(v.success.ns for v in every),
        queue_ns=sum(v.queue.ns for v in every),
        compute_input_ns=sum(v.compute_input.ns for v in every),
        compute_infer_ns=sum(v.compute_infer.ns for v in every),
        compute_output_ns=sum(v.compute_output.ns for v in every),
    )


def scrape(metrics_url: str) -> tuple[Sample, ...]:
    """Every sample of a Triton's /metrics; `metrics_url` is "host:port". Raises MeasurementError."""
    url = f"http://{metrics_url}/metrics"
    try:
        with DIRECT.open(url, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8")
    except (http.client.HTTPException, ValueError) as error:  # another protocol, no text, or no host's name
        raise MeasurementError(
            f"What answers at {url} is no HTTP server with metrics ({error!r}). There are no figures from it. Check that this is "
            "the server's metrics port (by default 8002 of Triton, 8102 of an entry)."
        ) from error
    except OSError as error:
        raise MeasurementError(
            f"The metrics at {url} cannot be read ({error}). There are no figures from them. Check that the server runs "
            "and that this is its metrics port (by default 8002 of Triton, 8102 of an entry)."
        ) from error
    return parse(text)


def parse(text: str) -> tuple[Sample, ...]:
    """Samples of the Prometheus text format 0.0.4; comments, timestamps and blank lines are dropped.

    Raises MeasurementError for a line that is none of these.
    """
    samples = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise MeasurementError(
                f"A line of the metrics is no Prometheus sample: {line!r}. None of them are used. Check that the address "
                "is that of a metrics port."
            )
        labels = {key: _unescape(value) for key, value in _LABEL.findall(match["labels"] or "")}
        samples.append(Sample(match["name"], labels, float(match["value"])))
    return tuple(samples)


def value(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """The sum of the samples of that name that carry these labels; 0 when there is none."""
    return sum(s.value for s in samples if s.name == name and labels.items() <= dict(s.labels).items())


def pending(samples: Iterable[Sample], model: str) -> int:
    """Requests of the model that wait in its queue: accepted, not yet executing."""
    return int(value(samples, PENDING, model=model))


def failures(samples: Iterable[Sample], model: str) -> dict[str, float]:
    """Failed requests of the model by Triton's reason (REJECTED, CANCELED, BACKEND, OTHER).

    NOTE: with the waker on, REJECTED also counts the wake requests that a backend sends to its own model.
    """
    reasons = sorted({s.labels["reason"] for s in samples if s.name == FAILURES and s.labels.get("model") == model})
    return {reason: value(samples, FAILURES, model=model, reason=reason) for reason in reasons}


_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*"
    r'(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s+'
    r"(?P<value>[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|Inf|NaN))(?:\s+-?\d+)?",
    re.IGNORECASE,
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text)
