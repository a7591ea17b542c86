from __future__ import annotations

import pytest

from perf.proofs.single_row import Cost, _parts


def test_the_parts_of_a_request_add_up_to_its_cost() -> None:
    ctr = Cost(requests=1000, front_s=0.090, stub_s=0.085)
    floor = Cost(requests=1000, front_s=0.080, stub_s=0.020)
    health = Cost(requests=1000, front_s=0.030, stub_s=0.0)
    costs = {f"{kind}{protocol}": cost for protocol in ("http", "grpc")
             for kind, cost in (("", ctr), ("floor_", floor), ("health_", health))}  # fmt: skip
    for parts in _parts(costs, {1: 70.0, 4: 30.0}, {"http": 4, "grpc": 1}).values():
        assert parts.pop("total") == pytest.approx(175) == pytest.approx(sum(parts.values()))
    assert _parts(costs, {1: 70.0, 4: 30.0}, {"http": 4, "grpc": 1})["http"]["python"] == pytest.approx(35)
