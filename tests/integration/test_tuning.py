from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perf import emulated
from tritonpilot.costs import Costs
from tritonpilot.setting import Setting
from tritonpilot.tune import Space, Wish, rewrite, tune

TEXT = """\
# of the vision team
slo: {p99_ms: 100}
batching: {max_batch_size: 64} # as exported
"""
FEW = Space(max_batch_sizes=(1, 16, 64), queue_delays_us=(0, 10_000))


@pytest.mark.server
def test_a_device_is_tuned_verified_and_written(tmp_path: Path) -> None:
    """13 ms an execution up to 16 rows, 23 ms for 64: 300 requests/s need batches, and 60 ms leave time for them."""
    service = emulated.services_of(tmp_path, {"device": TEXT})["device"]
    lines: list[str] = []

    found = tune(
        service,
        Wish.of(service, rate_per_s=300, slo_ms=80, space=FEW),
        models=tmp_path / "models",
        verified=1,
        verify_s=2,
        on_progress=lines.append,
    )

    assert found.setting.max_batch_size in (16, 64)
    assert found.is_reached
    assert found.measured is not None
    assert found.measured.attainment >= 0.99
    assert found.settings == 5
    assert "On the real server it answered" in found.reason
    assert found.seconds["measuring"] > 2
    evidence = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert evidence["chosen"]["max_batch_size"] == found.setting.max_batch_size
    assert evidence["costs"][0]["rows"][-1] == 64
    assert any(line.startswith("measured delay") for line in lines)
    text = rewrite.rewritten(service.path.read_text(), service, found.setting.applied(service))
    assert "# of the vision team" in text
    said = rewrite.checked(service.path, text, "device", found.setting)
    assert Setting.of(said) == found.setting


def faster(costs: Costs, by: float) -> Costs:
    """Of a device whose executions take so much less."""
    return replace(costs, execution_us=tuple(value * by for value in costs.execution_us))


@pytest.mark.server
@pytest.mark.proof  # half a minute
def test_a_rate_that_the_server_does_not_stand_is_lowered(tmp_path: Path) -> None:
    """Costs that are 30 % too low promise more requests than the device can serve."""
    service = emulated.services_of(tmp_path, {"device": TEXT})["device"]
    wish = Wish.of(service, slo_ms=80, is_rate_open=True, space=FEW)
    true = tune(service, wish, models=tmp_path / "models", verified=0)
    lines: list[str] = []

    found = tune(
        service,
        wish,
        models=tmp_path / "models",
        costs={kind: faster(costs, 0.7) for kind, costs in true.costs.items()},
        verified=1,
        verify_s=2,
        on_progress=lines.append,
    )

    assert any("of that rate is tried" in line for line in lines)
    assert found.measured is not None
    assert found.wish.rate_per_s < true.wish.rate_per_s / 0.7 * 0.94
    assert any("kept the promises with none" in note for note in found.notes)
