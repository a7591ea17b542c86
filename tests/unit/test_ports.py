from __future__ import annotations

import os
import socket

import pytest

from tritonpilot.errors import PortError
from tritonpilot.ports import choose_ports, holder


def test_zeros_become_distinct_ports_and_given_ones_stay(free_port: int) -> None:
    chosen = choose_ports([0, free_port, 0])
    assert chosen[1] == free_port
    assert len(set(chosen)) == 3
    assert all(chosen)


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")],  # noqa: S104
)
def test_a_busy_port_is_refused_with_its_holder(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as one:
        try:
            one.bind((address, 0))
        except OSError:
            pytest.skip(f"no {family.name} here")
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(PortError, match=rf"Port {port} is taken by process {os.getpid()} \(.*pytest.*\)"):
            choose_ports([0, port])


def test_a_port_on_another_address_is_no_holder() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        one.listen()
        assert holder(one.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("wanted", "says"), [([70000], "is no port"), ([-1], "is no port"), ([9999, 9999], "given twice")]
)
def test_impossible_ports_are_refused(wanted: list[int], says: str) -> None:
    with pytest.raises(PortError, match=says):
        choose_ports(wanted)
