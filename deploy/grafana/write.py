"""What do the dashboards show? Tables of panels, from which the JSON that Grafana reads is written: one form for fifty panels.

python deploy/grafana/write.py           # after a change here, writes dashboards/*.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
SCHEMA_VERSION = 41  # of Grafana 12.1
COLUMNS = 24

Panel = dict[str, Any]
Query = tuple[str, str]
"""PromQL, and the name of its lines."""

# -- what callers choose from ------------------------------------------------------------------------------------------

OF_MODEL = 'model=~"$model"'
OF_CLASS = f'{OF_MODEL},class=~"$class"'
OF_TENANT = f'{OF_MODEL},tenant=~"$tenant"'


def rate(metric: str, matchers: str = "") -> str:
    """Per second, over the least time that Grafana deems right for the shown range."""
    return f"rate({metric}{{{matchers}}}[$__rate_interval])"


def share(part: str, whole: str) -> str:
    """No line, instead of NaN, while there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def variable(name: str, label: str, query: str, description: str) -> dict[str, Any]:
    """A choice at the top of a dashboard: some of the values that Prometheus knows, or all."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "description": description,
        "datasource": SOURCE,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # when the shown time changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


MODEL = variable(
    "model",
    "Model",
    "label_values(nv_inference_request_success, model)",
    "As in Triton: parts of pipelines are models too",
)
CLASS = variable(
    "class",
    "Class",
    f"label_values(inference_latency_seconds_count{{{OF_MODEL}}}, class)",
    "Class of callers, from the service file",
)
TENANT = variable(
    "tenant",
    "Tenant",
    "label_values(processed_requests_total, tenant)",
    "From the tenants file; none for callers without a key",
)

# -- kinds of panels ---------------------------------------------------------------------------------------------------

RED_BELOW_1 = {"mode": "absolute", "steps": [{"color": "red", "value": None}, {"color": "green", "value": 1}]}
RED_FROM_1 = {"mode": "absolute", "steps": [{"color": "green", "value": None}, {"color": "red", "value": 1}]}
BY_THRESHOLD = {"mode": "thresholds"}
LAST = {"values": False, "calcs": ["lastNotNull"], "fields": ""}


def words(zero: str, one: str) -> list[dict[str, Any]]:
    """Show words for 0 and 1."""
    return [{"type": "value", "options": {"0": {"text": zero, "index": 0}, "1": {"text": one, "index": 1}}}]


def row(title: str) -> Panel:
    """A headline."""
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": COLUMNS, "h": 1}}


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    axis: str = "",
    is_stacked: bool = False,
    is_signed: bool = False,
    overrides: Sequence[dict[str, Any]] = (),
    width: int = 12,
    **field: Any,
) -> Panel:
    """Curves over time; `field` is what Grafana's FieldConfig has besides."""
    custom: dict[str, Any] = {"showPoints": "never", "fillOpacity": 30 if is_stacked else 8}
    if axis:
        custom["axisLabel"] = axis
    if is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    field = {"unit": unit, **({} if is_signed else {"min": 0}), **field, "custom": custom}
    return _panel("timeseries", title, description, queries, (width, 8), options, field, overrides=overrides)


def stat(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "none",
    is_filled: bool = False,
    has_curve: bool = False,
    size: tuple[int, int] = (4, 4),
    **field: Any,
) -> Panel:
    """One number."""
    options = {
        "reduceOptions": LAST,
        "orientation": "auto",
        "textMode": "auto" if len(queries) == 1 else "value_and_name",
        "colorMode": "background" if is_filled else "value",
        "graphMode": "area" if has_curve else "none",
        "justifyMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    return _panel("stat", title, description, queries, size, options, {"unit": unit, "color": BY_THRESHOLD, **field})


def states(title: str, description: str, *queries: Query, zero: str, one: str) -> Panel:
    """When it was 0 and when 1."""
    options = {
        "showValue": "never",
        "rowHeight": 0.8,
        "mergeValues": True,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    field = {"mappings": words(zero, one), "thresholds": RED_BELOW_1, "color": BY_THRESHOLD}
    field["custom"] = {"lineWidth": 0, "fillOpacity": 70}
    return _panel("state-timeline", title, description, queries, (12, 8), options, field)


def bars(title: str, description: str, *queries: Query, unit: str) -> Panel:
    """A bar for each line, of its value at the end."""
    options = {
        "reduceOptions": LAST,
        "orientation": "horizontal",
        "displayMode": "gradient",
        "valueMode": "color",
        "namePlacement": "auto",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 300,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
    }
    field = {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}}
    return _panel("bargauge", title, description, queries, (12, 8), options, field, at="the end")


def table(title: str, description: str, query: str, value: str, size: tuple[int, int] = (12, 8), **field: Any) -> Panel:
    """A row for each set of labels, and the `value` at the end."""
    options = {
        "showHeader": True,
        "frameIndex": 0,
        "cellHeight": "sm",
        "sortBy": [{"displayName": value, "desc": True}],
    }
    field["custom"] = {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False, "filterable": True}
    panel = _panel("table", title, description, [(query, "")], size, options, {"unit": "none", **field}, at="the end")
    panel["transformations"] = [
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": value}}}
    ]
    return panel


def _panel(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[Query],
    size: tuple[int, int],
    options: Mapping[str, Any],
    field: Mapping[str, Any],
    *,
    overrides: Sequence[dict[str, Any]] = (),
    at: str = "",
) -> Panel:
    times = {"range": False, "instant": True, "format": "table" if kind == "table" else "time_series"}
    targets = [
        {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": name, **(times if at else {"range": True})}
        for number, (expr, name) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "gridPos": {"w": size[0], "h": size[1]},
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": dict(field), "overrides": list(overrides)},
        "options": dict(options),
    }


def dashboard(name: str, title: str, description: str, variables: Sequence[dict[str, Any]], *panels: Panel) -> Panel:
    """Panels from left to right, in as many lines as they need."""
    x = y = line_height = 0
    placed = []
    for number, panel in enumerate(panels, 1):
        width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
        if x + width > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        placed.append({"id": number, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
        x, line_height = x + width, max(line_height, height)
    return {
        "uid": f"tritonpilot-{name}",
        "title": title,
        "description": description,
        "tags": ["tritonpilot"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Triton Pilot",
                "tags": ["tritonpilot"],
                "icon": "external link",
                "tooltip": "",
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
            }
        ],
        "annotations": {
            "list": [
                {
                    "name": "Firing alerts",
                    "datasource": SOURCE,
                    "enable": True,
                    "iconColor": "red",
                    "target": {"refId": "Anno", "expr": 'ALERTS{alertstate="firing"}', "interval": "10s"},
                    "titleFormat": "{{alertname}}",
                    "textFormat": "{{model}} {{class}}",
                    "tagKeys": "severity",
                }
            ]
        },
        "templating": {"list": list(variables)},
        "panels": placed,
    }


# -- dashboards --------------------------------------------------------------------------------------------------------

REFUSED = f'{OF_CLASS},status=~"refused_.*|rejected"'
SUCCESS = f"sum by (model) ({rate('nv_inference_request_success', OF_MODEL)})"
EXECUTIONS = f"sum by (model) ({rate('nv_inference_exec_count', OF_MODEL)})"
INFER_S = f"sum by (model) ({rate('nv_inference_compute_infer_duration_us', OF_MODEL)}) / 1e6"
FAILED = f'{OF_MODEL},reason!~"REJECTED|CANCELED"'
ANSWERED = f'{OF_TENANT},status="ok"'
TURNED_AWAY = f'{OF_TENANT},status=~"refused_.*"'
GIVEN_UP = f'{OF_TENANT},status!~"ok|refused_.*"'
OF_CLASSES = f"sum by (model, class) ({rate('processed_requests_total', OF_CLASS)})"
# The entry has all statuses of a tenant at 0 from its first request on.
NOT_SEEN = {
    "matcher": {"id": "byValue", "options": {"reducer": "allIsZero", "op": "gte", "value": 0}},
    "properties": [{"id": "custom.hideFrom", "value": {"legend": True, "tooltip": True, "viz": False}}],
}
DASHED = {
    "matcher": {"id": "byRegexp", "options": "/^SLO /"},
    "properties": [
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        {"id": "custom.fillOpacity", "value": 0},
    ],
}


def wait(quantile: float) -> str:
    """A quantile of the time in the entry's queue."""
    buckets = rate("request_queue_seconds_bucket", OF_CLASS)
    return f"histogram_quantile({quantile:g}, sum by (le, model, class) ({buckets}))"


def inside(step: str) -> str:
    """How many requests are in a step on average: Little's law."""
    return f"sum({rate(f'nv_inference_{step}_duration_us', OF_MODEL)}) / 1e6"


OVERVIEW = dashboard(
    "overview", "Service overview", "What callers get, class by class; the last row is Triton alone.", [MODEL, CLASS],
    stat("Triton", "Whether Triton answers the watch. Down: docs/operations.md#triton-down.",
         ("min(triton_up)", "Triton"), is_filled=True, mappings=words("down", "up"), thresholds=RED_BELOW_1),
    stat("Models that answer", "Models in Triton's index, and those of them that answered the watch's last inference. Fewer: "
         "docs/operations.md#dead-stub.", (f"sum(model_probe_success{{{OF_MODEL}}})", "answer"),
         (f"count(model_ready{{{OF_MODEL}}})", "in the index")),
    stat("Requests per second", "At the entry, whatever became of them.",
         (f"sum({rate('processed_requests_total', OF_CLASS)})", "requests"), unit="reqps", has_curve=True),
    stat("Worst P99", "The highest P99 of a class over a minute, at the entry.",
         (f"max(entry:inference_latency_seconds:p99_1m{{{OF_CLASS}}})", "P99"), unit="s", has_curve=True),
    stat("Within the SLO", "Share of requests that were answered in time over 5 minutes, of the class that does worst. Low: "
         "docs/operations.md#slo-burn.", (f"1 - max(slo:errors_per_request:ratio_rate5m{{{OF_CLASS}}})", "in time"),
         unit="percentunit", decimals=2, min=0, max=1, has_curve=True, thresholds={"mode": "absolute", "steps": [
             {"color": "red", "value": None}, {"color": "orange", "value": 0.98}, {"color": "green", "value": 0.99}]}),
    stat("Alerts firing", "Prometheus shows them at /alerts; each links to its section of docs/operations.md.",
         ('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts"), is_filled=True, thresholds=RED_FROM_1),
    row("Latency at the entry"),
    lines("P99 by class", "From a request's arrival at the entry to its answer, over a minute. Dashed: what is promised.",
          (f"entry:inference_latency_seconds:p99_1m{{{OF_CLASS}}}", "{{model}} {{class}}"),
          (f"slo_seconds{{{OF_CLASS}}}", "SLO {{model}} {{class}}"), unit="s", overrides=[DASHED]),
    lines("P50 by class", "Far below P99: some wait, for a batch, a better class or a stall. Near it: the model is slow.",
          (f"entry:inference_latency_seconds:p50_1m{{{OF_CLASS}}}", "{{model}} {{class}}"), unit="s"),
    lines("Requests that broke the promise", "Share that failed or came later than the SLO, over a short and a long time as in the "
          "alerts: docs/operations.md#slo-burn.", (f"slo:errors_per_request:ratio_rate5m{{{OF_CLASS}}}", "{{model}} {{class}} 5m"),
          (f"slo:errors_per_request:ratio_rate1h{{{OF_CLASS}}}", "{{model}} {{class}} 1h"), unit="percentunit"),
    lines("Answers in time and too late", "By the SLO of their class, over a minute; those in time are the goodput.",
          (f"entry:goodput:rate1m{{{OF_CLASS}}}", "{{model}} {{class}} in time"),
          (f"sum by (model, class) (rate(slow_requests_total{{{OF_CLASS}}}[1m]))", "{{model}} {{class}} too late"), unit="reqps"),
    row("Traffic at the entry"),
    lines("Requests by class", "Whatever became of them.", (OF_CLASSES, "{{model}} {{class}}"), unit="reqps", is_stacked=True),
    lines("Requests by outcome", "docs/metrics.md explains each status.",
          (f"sum by (status) ({rate('processed_requests_total', OF_CLASS)})", "{{status}}"), unit="reqps", is_stacked=True,
          overrides=[NOT_SEEN]),
    lines("Rejections", "Refused at once by the entry, or by Triton's queue: docs/operations.md#rejections.",
          (f"sum by (model, class, status) ({rate('processed_requests_total', REFUSED)})", "{{model}} {{class}} {{status}}"),
          unit="reqps", overrides=[NOT_SEEN]),
    lines("Denied", "Before they had a class: unknown key (401), not their model (403), bad request (400), unknown model (404).",
          (f"sum by (http_status) ({rate('denied_requests_total')})", "{{http_status}}"), unit="reqps"),
    row("Queues and batches"),
    lines("Requests that wait", "In the entry by class, and in Triton's own queue. Growing: docs/operations.md#queue-growth.",
          (f"sum by (model, class) (request_queue_size{{{OF_CLASS}}})", "{{model}} {{class}}"),
          (f"triton:request_queue_size{{{OF_MODEL}}}", "{{model}} in Triton"), unit="none"),
    lines("Batch size", "Mean rows of an execution over a minute. 1 under load: nothing is joined.",
          (f"triton:batch_size:mean1m{{{OF_MODEL}}}", "{{model}}"), unit="none", axis="rows"),
    row("Triton alone, with callers that bypass the entry"),
    lines("Requests by outcome in Triton", "Without the requests that only wake its batcher: docs/metrics.md.",
          (f"triton:processed_requests:rate1m{{{OF_MODEL}}}", "{{model}} {{status}}"), unit="reqps"),
    lines("Mean time in Triton", "With its queue, over a minute.",
          (f"triton:inference_latency_seconds:mean1m{{{OF_MODEL}}}", "{{model}}"), unit="s"),
    lines("P99 in Triton", "Triton's own summary of each model on each server: such figures cannot be added up.",
          (f'nv_inference_request_summary_us{{{OF_MODEL},quantile="0.99"}} / 1e6', "{{model}} {{instance}}"), unit="s"),
    lines("Failures", "Others than rejected and cancelled ones: docs/operations.md#model-fails.",
          (f"sum by (model, reason) ({rate('nv_inference_request_failure', FAILED)})",
           "{{model}} {{reason}}"), unit="reqps"),
)  # fmt: skip

BATCHING = dashboard(
    "batching", "Batching", "Whether requests are joined, what they wait for it, and where their time goes.", [MODEL, CLASS],
    row("Batches"),
    lines("Rows per execution", "The mean batch over a minute.", (f"triton:batch_size:mean1m{{{OF_MODEL}}}", "{{model}}"),
          unit="none", axis="rows"),
    lines("Requests per execution", "How many share an execution. 1: the batcher joins nobody, however large each request is.",
          (share(SUCCESS, EXECUTIONS), "{{model}}"), unit="none", axis="requests"),
    lines("Executions and requests", "Both as Triton counts them.", (EXECUTIONS, "{{model}} executions"),
          (SUCCESS, "{{model}} requests"), unit="ops"),
    lines("Rows and capacity", "Rows per second, and what the model can do: seen by the entry while it was full, absent before.",
          (f"sum by (model) ({rate('nv_inference_count', OF_MODEL)})", "{{model}}"),
          (f"max by (model) (capacity_rows_per_second{{{OF_MODEL}}})", "{{model}} capacity"), unit="rowsps"),
    row("Waiting"),
    lines("Wait in the entry", "Of requests that were started. The entry keeps Triton's own queue short, so they wait here.",
          (wait(0.5), "{{model}} {{class}} P50"), (wait(0.99), "{{model}} {{class}} P99"), unit="s"),
    lines("Mean wait in Triton", "In its queue over a minute, with the queue delay in which a batch forms.",
          (f"triton:queue_seconds:mean1m{{{OF_MODEL}}}", "{{model}}"), unit="s"),
    lines("Wait in Triton", "Triton's own summary. P99 near 0.5 s beside a low P50 is its batcher's stall: docs/adr/0003-waker.md.",
          (f'nv_inference_queue_summary_us{{{OF_MODEL},quantile=~"0.5|0.99"}} / 1e6', "{{model}} {{instance}} {{quantile}}"),
          unit="s"),
    lines("Requests in Triton by step", "How many are in each step on average. Most in the queue: too little capacity, or too long "
          "a queue delay.", *((inside(step), name) for step, name in (
              ("queue", "queue"), ("compute_input", "input"), ("compute_infer", "infer"), ("compute_output", "output"))),
          unit="none", axis="requests", is_stacked=True),
    row("Who goes first"),
    lines("Rows in Triton", "That the entry has let in: at most what the instances execute, and one batch more.",
          (f"sum by (model) (rows_in_flight{{{OF_MODEL}}})", "{{model}}"), unit="none", axis="rows"),
    lines("Promoted requests", "They went before better classes, by their class's share or longest wait.",
          (f"sum by (model, class) ({rate('promoted_requests_total', OF_CLASS)})", "{{model}} {{class}}"), unit="reqps"),
    lines("Too late to be computed", "Their deadline had passed when they were to be executed.",
          (f"sum by (model) ({rate('pilot_late_total', OF_MODEL)})", "{{model}}"), unit="reqps"),
    lines("Wakes of the batcher", "By which a backend or the companion ends the batcher's sleep. Triton counts them as rejected.",
          (" or ".join(f"sum by (model) ({rate(metric, OF_MODEL)})" for metric in (
              "pilot_wakes_total", "pilot_companion_wakes_total")), "{{model}}"), unit="reqps"),
    row("Response cache"),
    lines("Cache hits", "Share of requests that Triton's response cache answered, over 5 minutes: docs/operations.md#cache-hits.",
          (f"triton:cache_hits:ratio_rate5m{{{OF_MODEL}}}", "{{model}}"), unit="percentunit", max=1, width=COLUMNS),
)  # fmt: skip

INSTANCES = dashboard(
    "instances", "Instances, memory, GPU", "Which models answer, what their processes hold, and how busy the machine is.", [MODEL],
    row("Models"),
    states("Ready", "In Triton's repository index.", (f"min by (model, version) (model_ready{{{OF_MODEL}}})",
           "{{model}} {{version}}"), zero="not ready", one="ready"),
    states("Answers", "Whether the watch's inference was answered. Ready without an answer: docs/operations.md#dead-stub.",
           (f"min by (model, version) (model_probe_success{{{OF_MODEL}}})", "{{model}} {{version}}"), zero="no answer",
           one="answers"),
    lines("Time of a probe", "Of one inference in the lowest class: what an unlucky caller sees.",
          (f"max by (model, version) (model_probe_seconds{{{OF_MODEL}}})", "{{model}} {{version}}"), unit="s"),
    lines("Probes by result", "busy: the queue refused it while others were answered; failed: nobody was.",
          (f"sum by (model, result) ({rate('probes_total', OF_MODEL)})", "{{model}} {{result}}"), unit="ops"),
    lines("Busy instances", "How many execute on average. As many as there are: the model is saturated.",
          (share(f"{INFER_S} * {EXECUTIONS}", SUCCESS), "{{model}}"), unit="none", axis="instances"),
    table("Warm-up", "Whether models from a file are warmed up when they are loaded. Missing: docs/operations.md#warm-up.",
          f"max by (model) (model_warmup{{{OF_MODEL}}})", "warm-up", mappings=words("missing", "yes")),
    row("Memory and processor"),
    lines("Memory of Python backends", "Resident, of each instance's process. It only rises: docs/operations.md#memory-growth.",
          (f"pilot_stub_memory_bytes{{{OF_MODEL}}}", "{{stub}}"), unit="bytes"),
    lines("Growth of that memory", "In an hour, from the slope over half an hour.",
          (f"deriv(pilot_stub_memory_bytes{{{OF_MODEL}}}[30m]) * 3600", "{{stub}}"), unit="bytes", is_signed=True),
    lines("Memory of the machine", "As Triton sees it.", ("nv_cpu_memory_used_bytes", "{{instance}} used"),
          ("nv_cpu_memory_total_bytes", "{{instance}} total"), unit="bytes"),
    lines("Processor", "Share of all cores that is busy, with all that runs on the machine.",
          ("nv_cpu_utilization", "{{instance}}"), unit="percentunit", max=1),
    lines("Pinned memory pool", "Host memory for copies to GPUs.", ("nv_pinned_memory_pool_used_bytes", "{{instance}} used"),
          ("nv_pinned_memory_pool_total_bytes", "{{instance}} total"), unit="bytes"),
    states("Scraped", "Whether Prometheus reaches what it scrapes: it explains gaps elsewhere.", ("up", "{{job}} {{instance}}"),
           zero="no", one="yes"),
    row("GPU"),
    lines("GPU utilisation", "Low under load: docs/operations.md#gpu-utilisation.",
          ("triton:gpu_utilization", "{{instance}} {{gpu_uuid}}"),
          unit="percentunit", max=1, noValue="no GPU"),
    lines("GPU memory", "Used now, its peak, and what there is.", ("nv_gpu_memory_used_bytes", "{{gpu_uuid}} used"),
          ("triton:gpu_memory_peak_bytes", "{{gpu_uuid}} peak"), ("nv_gpu_memory_total_bytes", "{{gpu_uuid}} total"),
          unit="bytes", noValue="no GPU"),
)  # fmt: skip

TENANTS = dashboard(
    "tenants", "Tenants", "Who calls, what each gets, and who is refused: docs/tenants.md.", [TENANT, MODEL],
    row("What each gets"),
    lines("Requests by tenant", "Whatever became of them.",
          (f"sum by (tenant) ({rate('processed_requests_total', OF_TENANT)})", "{{tenant}}"), unit="reqps", is_stacked=True),
    lines("Answers by tenant", "Requests of status ok.",
          (f"sum by (tenant) ({rate('processed_requests_total', ANSWERED)})", "{{tenant}}"), unit="reqps", is_stacked=True),
    lines("Share that was answered", "The rest was refused, failed or was given up.",
          (share(f"sum by (tenant) ({rate('processed_requests_total', ANSWERED)})",
                 f"sum by (tenant) ({rate('processed_requests_total', OF_TENANT)})"), "{{tenant}}"), unit="percentunit", max=1),
    bars("Answers in the time shown", "Who uses the models most.",
         (f"sum by (tenant) (increase(processed_requests_total{{{ANSWERED}}}[$__range]))", "{{tenant}}"), unit="none"),
    row("Who is refused"),
    lines("Refused", "refused_rate, refused_concurrency: the tenant's own limits; refused_queue_full, refused_wait: a full model.",
          (f"sum by (tenant, status) ({rate('processed_requests_total', TURNED_AWAY)})",
           "{{tenant}} {{status}}"), unit="reqps", overrides=[NOT_SEEN]),
    lines("Accepted, but not answered", "The model failed, Triton was away or refused, the deadline passed, or the caller went.",
          (f"sum by (tenant, status) ({rate('processed_requests_total', GIVEN_UP)})",
           "{{tenant}} {{status}}"), unit="reqps", overrides=[NOT_SEEN]),
    lines("Denied", "Before the class was known: no or unknown key (401), not the tenant's model (403).",
          (f"sum by (http_status) ({rate('denied_requests_total')})", "{{http_status}}"), unit="reqps"),
    stat("Tenants file", "wrong: the file on disk cannot be used, the one read before is in force, and the entry's log says why.",
         ("max(tenants_file_trouble)", "file"), is_filled=True, size=(12, 8), mappings=words("in force", "wrong"),
         thresholds=RED_FROM_1, noValue="no tenants file"),
    row("In numbers"),
    table("Outcomes in the time shown", "docs/metrics.md explains each status.", "sum by (tenant, model, class, status) "
          f"(increase(processed_requests_total{{{OF_TENANT}}}[$__range])) > 0", "requests", (COLUMNS, 10), decimals=0),
)  # fmt: skip

DASHBOARDS = {"overview": OVERVIEW, "batching": BATCHING, "instances": INSTANCES, "tenants": TENANTS}


def texts() -> dict[str, str]:
    """What each file in dashboards/ holds."""
    return {f"{name}.json": json.dumps(made, indent=2) + "\n" for name, made in DASHBOARDS.items()}


if __name__ == "__main__":
    for file, text in texts().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
