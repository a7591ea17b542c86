"""What `tritonpilot report` decides without a Prometheus; tests/integration/test_top_report.py asks a real one."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.console import Console

from tritonpilot import report
from tritonpilot.errors import HostError, MeasurementError, SpecError
from tritonpilot.report import CURVES, SECTIONS, Curve, Report, Source

END = datetime(2026, 5, 4, 13, 30, tzinfo=timezone.utc)
ROW = {"model": "<ctr>", "class": "realtime", "requests": 1234.4, "p99_ms": 12.5, "slo_ms": None}
FOUND = Report(
    "http://127.0.0.1:9090",
    END - timedelta(minutes=10),
    END,
    0.5,
    {section.name: (ROW,) if section.name == "classes" else () for section in SECTIONS},
)


class Clocked(Source):
    """A Source whose Prometheus says that it is END."""

    def now_s(self) -> float:
        return END.timestamp()


def test_ranges_are_what_people_mean() -> None:
    source = Clocked("127.0.0.1:9090")
    start = END - timedelta(hours=1)

    assert source.range(last="1h") == (start, END)
    assert source.range(last="60m", end="2026-05-04T13:30:00Z") == (start, END)
    assert source.range(start="2026-05-04T12:30Z", end="2027-01-01T00:00+00:00") == (start, END), "not beyond now"
    assert source.range(start="2026-05-04T14:30+02:00") == (start, END)
    local = source.range(start="2026-05-01T12:30")[0]
    assert local.astimezone().replace(tzinfo=None) == datetime(2026, 5, 1, 12, 30)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"last": "1 hour"}, "--last is '1 hour', but must be a length as 90s"),
        ({"last": "0s"}, "no range of at least 5 s"),
        ({"last": "999999w"}, "of 3660 days at most"),
        ({"start": "yesterday"}, "--from is 'yesterday', but must be a time"),
        ({"last": "1h", "end": "13:30"}, "--to is '13:30', but must be a time"),
        ({"start": "2026-05-04T14:00Z"}, "Prometheus' clock says 2026-05-04T13:30"),
        ({"start": "2026-05-04T12:00Z", "last": "1h"}, "Give either --last or --from"),
        ({}, "Give either --last or --from"),
    ],
)
def test_other_ranges_are_refused(wanted: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        Clocked("127.0.0.1:9090").range(**wanted)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://a..b"])
def test_without_prometheus_it_says_so(url: str) -> None:
    with pytest.raises(MeasurementError, match="did not answer"):
        Source(url).now_s()


@pytest.mark.parametrize("url", ["", "http://[::", "http://127.0.0.1:99999", "ftp://127.0.0.1", "http://me:secret@"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="--prometheus is") as refused:
        Source(url)
    assert "secret" not in str(refused.value)


def test_a_password_is_not_reported() -> None:
    assert Source("https://me:secret@127.0.0.1:9090/").url == "https://127.0.0.1:9090"


def test_queries_are_filled_for_the_range() -> None:
    span = report._Span(END - timedelta(days=1), END)

    assert span.filled("rate(x[WINDOW]) y[RANGE:STEP] * STEP_S") == "rate(x[360s]) y[86400s:360s] * 360"
    for figure in [*CURVES, *(figure for section in SECTIONS for figure in section.figures)]:
        assert not re.search(r"[A-Z_]{4,}", span.filled(figure.query).replace("REJECTED|CANCELED", "").replace(
            "REJECTED", "").replace("ALERTS", "")), figure.name  # fmt: skip


def test_every_metric_that_is_asked_for_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    asked = " ".join(figure.query for section in SECTIONS for figure in section.figures)
    names = {
        name.removesuffix("_bucket")
        for name in re.findall(r"\b(?:nv|pilot|model|slo|request|processed|slow|inference)_\w+", asked)
    }

    assert len(names) > 15
    assert not {name for name in names if name not in documented}


def test_the_text_has_the_sections_with_rows() -> None:
    out = io.StringIO()
    for part in report.render(FOUND):
        Console(file=out, width=120).print(part)
    said = out.getvalue()

    assert "from http://127.0.0.1:9090" in said
    assert "figures for 50% of this range alone" in said
    for word in ("Classes, as the entry sees them", "<ctr>", "realtime", "1,234", "12.5"):
        assert word in said
    assert "SLO" not in said
    assert "Tenants" not in said


def test_json_has_the_range_in_utc() -> None:
    said = json.loads(json.dumps(FOUND.as_dict(), allow_nan=False))

    assert (said["start"], said["end"]) == ("2026-05-04T13:20:00+00:00", "2026-05-04T13:30:00+00:00")
    assert said["classes"] == [ROW]
    assert said["models"] == []


def test_the_page_has_tables_and_interrupted_curves(tmp_path: Path) -> None:
    begin = FOUND.start.timestamp()
    line = tuple((begin + at, 5.0) for at in (0, 5, 10, 400, 405))
    report.html(FOUND, [Curve(CURVES[0], {"<ctr> realtime": line})], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()

    assert "<td class=word>&lt;ctr&gt;</td>" in text
    assert text.count("<polyline") == 2
    assert "&lt;ctr&gt; realtime</span>" in text
    assert "<script" not in text
    with pytest.raises(HostError, match="was not written"):
        report.html(FOUND, [], tmp_path)
