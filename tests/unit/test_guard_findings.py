"""What is read out of the guard's metrics, and when the version before is better."""

from __future__ import annotations

from tritonpilot.guard.findings import Guarded, decide_trip, read
from tritonpilot.metrics import parse

TEXT = """
pilot_guard_version_age_seconds{model="ctr",version="4",previous="3"} 120.0
pilot_guard_comparisons_total{model="ctr",version="4",kind="again",result="same"} 90.0
pilot_guard_comparisons_total{model="ctr",version="4",kind="again",result="different"} 2.0
pilot_guard_comparisons_total{model="ctr",version="4",kind="batch",result="different"} 1.0
pilot_guard_comparisons_total{model="ctr",version="4",kind="version",result="different"} 7.0
pilot_guard_comparisons_total{model="ctr",version="3",kind="again",result="different"} 50.0
pilot_guard_rows_total{model="ctr"} 5000.0
pilot_guard_reference_rows{model="ctr"} 1000.0
pilot_guard_learning{model="ctr"} 0.0
pilot_guard_psi{model="ctr",output="prob",what="value"} 0.61
pilot_guard_ks{model="ctr",output="prob",what="value"} 0.3
pilot_guard_drift{model="ctr",output="prob",what="value"} 1.0
pilot_guard_constant{model="ctr",output="prob",what="value"} 0.0
pilot_guard_not_finite_total{model="ctr",version="4",output="prob"} 3.0
pilot_guard_version_age_seconds{model="text",version="1",previous=""} 9000.0
pilot_guard_comparisons_total{model="text",version="1",kind="again",result="same"} 12.0
pilot_guard_rows_total{model="text"} 0.0
pilot_guard_learning{model="text"} 1.0
processed_requests_total{model="other"} 9
"""


def test_findings_are_those_of_the_version_that_is_served() -> None:
    ctr, text = read(parse(TEXT))
    assert (ctr.model, ctr.version, ctr.previous, ctr.compared, ctr.different) == ("ctr", "4", "3", 93, 3)
    assert [(finding.kind, finding.what) for finding in ctr.findings] == [
        (
            "different",
            "ctr answered the same input differently: 2 when it was sent again, 1 within a batch, of 93 comparisons",
        ),
        ("drift", "ctr: prob (value) is distributed differently than usual (PSI 0.61, KS 0.3)"),
        ("not_finite", "ctr: prob has NaN or infinity in 3 of 5000 rows looked at"),
    ]
    assert (text.findings, text.is_learning) == ((), True)


def test_answers_of_two_versions_may_differ() -> None:
    (ctr, _) = read(parse(TEXT))
    assert (ctr.versions_compared, ctr.versions_different) == (7, 7)


def changed(guarded: Guarded, **what: object) -> Guarded:
    return Guarded(**{**guarded.__dict__, **what})  # type: ignore[arg-type]


def test_only_a_version_that_is_new_and_no_rollback_is_left() -> None:
    ctr, text = read(parse(TEXT))
    (trip,) = decide_trip([ctr, text], 3600)
    assert (trip.model, trip.version, trip.previous, trip.to) == ("ctr", "4", "3", 3)
    assert trip.why.startswith("ctr answered the same input differently")
    assert decide_trip([changed(ctr, version_age_s=3601)], 3600) == []
    assert decide_trip([changed(ctr, previous="5")], 3600) == []
    assert decide_trip([changed(ctr, previous="")], 3600) == []
    assert decide_trip([changed(ctr, findings=())], 3600) == []


def test_of_a_pipeline_the_member_that_changed_goes_back() -> None:
    ctr, _ = read(parse(TEXT))
    (trip,) = decide_trip([changed(ctr, version="1.4.2", previous="1.4.1")], 3600)
    assert (trip.version, trip.to) == ("1.4.2", 1)
    assert decide_trip([changed(ctr, version="1.3.2", previous="1.4.1")], 3600) == []
    assert decide_trip([changed(ctr, version="1.3", previous="1")], 3600) == []
