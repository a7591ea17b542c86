"""What an autopilot.yaml may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tritonpilot.autopilot import policy
from tritonpilot.errors import SpecError

GOOD = """
interval_s: 2
models:
  - model: ctr
    policy: model
    slo_ms: 50
    costs: ctr.costs.json
    instances: {min: 1, max: 4}
    queue_delay_us: {min: 0, max: 20000}
    max_queue_sizes: {batch: {min: 8, max: 500}}
    delay_by: live
    cooldown_s: 30
    on_foreign_change: respect
    queue_depth: {grow_above: 50, shrink_below: 10}
  - model: image_net
    policy: off
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "autopilot.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    found = policy.read(written(tmp_path, GOOD))
    ctr, image = found.models
    assert found.interval_s == 2
    assert found.folder == tmp_path
    assert (ctr.instances.max, ctr.max_queue_sizes["batch"].min, ctr.hysteresis) == (4, 8, 0.1)
    assert image.policy == "off"
    assert image.queue_delay_us is None


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("{min: 1, max: 4}", "{min: 5, max: 4}", "min 5 is above max 4"),
        ("{min: 1, max: 4}", "{min: 0, max: 4}", "greater than or equal to 1"),
        ("{min: 0, max: 20000}", "{min: 50000, max: 60000}", "leaves nothing of slo_ms 50"),
        ("{min: 8, max: 500}", "{min: 800, max: 500}", "min 800 is above max 500"),
        ("    costs: ctr.costs.json\n", "", "tritonpilot costs"),
        ("grow_above: 50, shrink_below: 10", "grow_above: 10, shrink_below: 10", "grow and shrink at once"),
        ("cooldown_s: 30", "cooldown: 30", "did you mean cooldown_s?"),
        ("cooldown_s: 30", "cooldown_s: soon", "cooldown_s"),
        ("slo_ms: 50", "slo_ms: 0", "greater than 0"),
        ("model: image_net", "model: ctr", "model ctr has two entries"),
        ("interval_s: 2", "interval_s: 0", "greater than 0"),
        ("interval_s: 2", "interval_s:", "nothing is given here"),
        ("policy: off", "policy: on", "policy"),  # YAML reads a bare on as true
    ],
)
def test_a_contradiction_is_refused_with_its_line(tmp_path: Path, was: str, now: str, says: str) -> None:
    assert was in GOOD
    with pytest.raises(SpecError, match=r"autopilot\.yaml:\d+: ") as refused:
        policy.read(written(tmp_path, GOOD.replace(was, now)))
    assert says in str(refused.value)
    assert str(refused.value).endswith("Nothing was changed.")


@pytest.mark.parametrize("text", ["", "models: []", "- ctr", "models: [{model: ctr", "interval_s: 5"])
def test_half_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match=r"autopilot\.yaml"):
        policy.read(written(tmp_path, text))


def test_a_file_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not valid YAML"):
        policy.read(written(tmp_path, "models: " + "[" * 5000 + "]" * 5000))


def test_what_the_config_promises_fills_what_the_file_does_not_say(tmp_path: Path) -> None:
    ctr = policy.read(written(tmp_path, GOOD.replace("    slo_ms: 50\n", ""))).models[0]
    filled = ctr.with_defaults(slo_ms=40, patience_ms={"batch": 300, "other": 5})
    assert filled.slo_ms == 40
    assert filled.max_queue_sizes["batch"].patience_ms == 300
    assert filled.with_defaults(slo_ms=10).slo_ms == 40
