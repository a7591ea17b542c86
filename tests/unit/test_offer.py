"""When is a load worth a figure, and what is the highest rate that is kept?"""

import pytest

from perf.frame import NoisyRoundError
from perf.offer import Offered, highest_rate
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.load import SenderFacts
from tritonpilot.outcome import Outcome, summarise

STREAM = Stream("all", 100.0, slo_ms=50)


def _answers() -> Outcome:
    sent = traffic([STREAM], 1.0, seed=1)
    return summarise(sent, [STREAM], latency_us=sent.at_s * 0 + 1000.0, error=sent.stream * 0, kinds=())


def _facts(*, busiest_core: float, is_limit: bool) -> SenderFacts:
    return SenderFacts(
        schedule_p50_ms=0.1,
        schedule_p99_ms=0.2,
        schedule_max_ms=0.3,
        cores=busiest_core,
        busiest_core=busiest_core,
        processes=1,
        most_in_flight=3,
        is_limit=is_limit,
        reason="5 requests were due while every connection was waiting",
        errors={},
    )


def test_sender_in_time_leaves_the_answers_as_they_are() -> None:
    answers = _answers()
    assert Offered(answers, _facts(busiest_core=0.4, is_limit=False)).undisturbed() is answers


def test_sender_that_was_the_limit_makes_the_round_noise() -> None:
    with pytest.raises(NoisyRoundError, match=r"the sender was the limit: 5 requests"):
        Offered(_answers(), _facts(busiest_core=0.4, is_limit=True)).undisturbed()


@pytest.mark.parametrize(("busiest_core", "is_noise"), [(0.4, False), (0.95, True)])
def test_sender_that_waits_for_a_server_behind_is_the_limit_only_without_cpu_time(
    busiest_core: float, is_noise: bool
) -> None:
    offered = Offered(_answers(), _facts(busiest_core=busiest_core, is_limit=True))
    if is_noise:
        with pytest.raises(NoisyRoundError):
            offered.undisturbed(may_be_behind=True)
    else:
        assert offered.undisturbed(may_be_behind=True).goodput_per_s > 0


@pytest.mark.parametrize("start_per_s", [3.0, 90.0, 100.0, 101.0, 2500.0])
def test_highest_rate_is_found_from_far_below_and_far_above(start_per_s: float) -> None:
    asked: list[float] = []

    def keeps(rate_per_s: float) -> bool:
        asked.append(rate_per_s)
        return rate_per_s <= 100.0

    found = highest_rate(keeps, start_per_s, step=1.03)
    assert 100.0 / 1.03 <= found <= 100.0
    assert found in asked
    assert len(asked) == len(set(asked)) <= 24


@pytest.mark.parametrize("is_kept", [True, False])
def test_rate_that_is_kept_everywhere_or_nowhere_is_an_error(is_kept: bool) -> None:
    with pytest.raises(MeasurementError, match="factor of 64"):
        highest_rate(lambda _: is_kept, 10.0, step=1.1)
