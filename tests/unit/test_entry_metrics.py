"""What the entry tells Prometheus of a class: latencies with its SLO among the edges, and how many answers were later."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import generate_latest

from tritonpilot.entry.metrics import LATENCY_BUCKETS_S, STATUSES, EntryMetrics
from tritonpilot.entry.terms import ClassTerms, ModelTerms
from tritonpilot.entry.ticket import DoneStatus, Refusal, Ticket
from tritonpilot.metrics import parse, value

REALTIME = ClassTerms("realtime", 1, 1000, 0.15, slo_s=0.12)
BATCH = ClassTerms("batch", 2, 1000, None)
TERMS = ModelTerms("m", (REALTIME, BATCH), "realtime", 32, 16)


def ticket(terms: ModelTerms = TERMS, class_name: str = "realtime", waited_s: float = 0.0) -> Ticket:
    made = Ticket(terms, class_name, 1, None, None, lambda _: None, lambda _, __: None)
    made.arrived_s, made.started_s = 10.0, 10.0 + waited_s
    return made


def done(metrics: EntryMetrics, seconds: float, status: DoneStatus = "ok", **of: object) -> None:
    metrics.done(ticket(**of), status, seconds)  # type: ignore[arg-type]


def told(metrics: EntryMetrics, name: str, **labels: str) -> float:
    said = parse(generate_latest(metrics.registry).decode())
    assert any(each.name == name and labels.items() <= dict(each.labels).items() for each in said), (name, labels)
    return value(said, name, **labels)


def counted(metrics: EntryMetrics) -> dict[tuple[str, str], float]:
    """Requests by class and status."""
    said = parse(generate_latest(metrics.registry).decode())
    return {
        (each.labels["class"], each.labels["status"]): each.value
        for each in said
        if each.name == "processed_requests_total"
    }


def edges(metrics: EntryMetrics, class_name: str, name: str = "inference_latency_seconds") -> list[str]:
    said = parse(generate_latest(metrics.registry).decode())
    return [each.labels["le"] for each in said if each.name == f"{name}_bucket" and each.labels["class"] == class_name]


def test_the_edges_are_those_of_every_model_and_the_slos_of_its_classes() -> None:
    metrics = EntryMetrics()
    done(metrics, 0.05)
    expected = sorted({*LATENCY_BUCKETS_S, 0.12})
    for class_name in ("realtime", "batch"):  # the same, so that they can be added
        assert [float(edge) for edge in edges(metrics, class_name)] == [*expected, float("inf")]
        assert edges(metrics, class_name) == edges(metrics, class_name, "request_queue_seconds")
    assert {"0.01", "0.05", "0.1", "0.12", "0.5", "1.0", "+Inf"} <= set(edges(metrics, "realtime"))


def test_latencies_are_counted_up_to_and_with_an_edge() -> None:
    metrics = EntryMetrics()
    for seconds in (0.0, 0.05, 0.0500001, 0.12, 31.0):
        done(metrics, seconds)

    def up_to(edge: str) -> float:
        return told(metrics, "inference_latency_seconds_bucket", model="m", **{"class": "realtime", "le": edge})

    assert [up_to(edge) for edge in ("0.001", "0.05", "0.12", "30.0", "+Inf")] == [1, 2, 4, 4, 5]
    assert told(metrics, "inference_latency_seconds_count", **{"class": "realtime"}) == 5
    assert abs(told(metrics, "inference_latency_seconds_sum", **{"class": "realtime"}) - 31.2200001) < 1e-9


def test_the_wait_is_that_of_started_requests() -> None:
    metrics = EntryMetrics()
    metrics.started(ticket(waited_s=0.02))
    metrics.started(ticket(class_name="batch", waited_s=4.0))
    assert told(metrics, "request_queue_seconds_bucket", **{"class": "realtime", "le": "0.03"}) == 1
    assert told(metrics, "request_queue_seconds_sum", **{"class": "batch"}) == 4.0


def test_only_answers_later_than_the_slo_are_slow() -> None:
    metrics = EntryMetrics()
    done(metrics, 0.12)
    assert told(metrics, "slow_requests_total", model="m", **{"class": "realtime"}) == 0
    done(metrics, 0.1201)
    done(metrics, 9.0, "timeout")
    done(metrics, 9.0, "error")
    done(metrics, 60.0, class_name="batch")
    assert told(metrics, "slow_requests_total", model="m", **{"class": "realtime"}) == 1
    assert told(metrics, "slow_requests_total", model="m", **{"class": "batch"}) == 0, "nothing is promised to it"
    assert told(metrics, "slo_seconds", model="m") == 0.12
    assert told(metrics, "processed_requests_total", **{"class": "realtime", "status": "ok"}) == 2


def test_refused_requests_count_by_their_reason_and_have_no_latency() -> None:
    metrics = EntryMetrics()
    metrics.refused(ticket(), Refusal("queue_full", "full"))
    metrics.refused(ticket(class_name="nobody"), Refusal("unknown_class", "unknown"))
    assert told(metrics, "processed_requests_total", status="refused_queue_full") == 1
    assert edges(metrics, "realtime") == []


def test_a_tenants_first_outcome_starts_all_its_statuses_at_0() -> None:
    metrics = EntryMetrics()
    done(metrics, 0.05)
    assert counted(metrics) == {("realtime", status): float(status == "ok") for status in STATUSES}
    assert {"error", "refused_queue_full", "refused_wait", "refused_rate"} < set(STATUSES)

    metrics.refused(ticket(class_name="batch"), Refusal("wait", "full"))
    metrics.refused(ticket(class_name="batch"), Refusal("wait", "full"))
    of_batch = {status: n for (class_name, status), n in counted(metrics).items() if class_name == "batch"}
    assert of_batch == {status: 2.0 * (status == "refused_wait") for status in STATUSES}


def test_a_class_that_the_model_does_not_have_gets_no_other_status() -> None:
    metrics = EntryMetrics()
    metrics.refused(ticket(class_name="nobody"), Refusal("unknown_class", "unknown"))
    assert counted(metrics) == {("nobody", "refused_unknown_class"): 1}


def test_another_slo_starts_the_models_histograms_anew_and_its_counters_go_on() -> None:
    metrics = EntryMetrics()
    done(metrics, 0.2)
    done(metrics, 0.2, class_name="batch")
    same = replace(TERMS, window_rows=64)
    done(metrics, 0.2, terms=same)
    assert told(metrics, "inference_latency_seconds_count", **{"class": "realtime"}) == 2

    new = replace(TERMS, classes=(replace(REALTIME, slo_s=0.25), BATCH))
    done(metrics, 0.2, terms=new)
    assert "0.25" in edges(metrics, "batch")
    assert told(metrics, "inference_latency_seconds_count", **{"class": "realtime"}) == 1
    assert told(metrics, "slow_requests_total", **{"class": "realtime"}) == 2
    assert told(metrics, "slo_seconds") == 0.25

    done(metrics, 0.2, terms=TERMS)  # one that was still under way
    assert told(metrics, "inference_latency_seconds_count", **{"class": "realtime"}) == 2
    assert told(metrics, "slow_requests_total", **{"class": "realtime"}) == 3
