from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pilotlib.alarm import Alarm


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    one = Alarm(0.02)
    yield one
    one.close()


def test_it_rings_after_its_time(alarm: Alarm) -> None:
    start = time.monotonic()
    alarm.set()
    alarm.wait()
    assert time.monotonic() - start >= 0.02


def test_setting_it_again_starts_anew_and_clearing_takes_back_what_has_rung(alarm: Alarm) -> None:
    rung = threading.Event()
    alarm.set()
    time.sleep(0.05)
    alarm.clear()
    waiting = threading.Thread(target=lambda: (alarm.wait(), rung.set()))
    waiting.start()
    assert not rung.wait(0.05)
    alarm.ring()
    assert rung.wait(5)
    waiting.join()


def test_waiting_ends_after_a_time_without_ringing(alarm: Alarm) -> None:
    assert not alarm.wait(0.01)
    alarm.ring()
    assert alarm.wait(1.0)
