"""What this machine is and does."""

from __future__ import annotations

import pytest

from tritonpilot.machine import slice_us


@pytest.mark.parametrize(
    ("cpus", "release", "us"),
    [
        (1, "6.18.44-fc", 700),
        (2, "6.18.44-fc", 1400),
        (6, "6.15.0", 2100),
        (128, "6.15.0-1-amd64", 2800),
        (8, "6.12.9+deb13-cloud-amd64", 3000),
        (8, "5.15.0-91-generic", 0),
        (8, "strange", 0),
    ],
)
def test_a_slice_follows_the_kernel_and_the_number_of_cpus(cpus: int, release: str, us: float) -> None:
    assert slice_us(cpus, release) == us
