from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot.host import Host, findings, observe

STUBS = [(3, 10), (3, 11), (3, 12), (3, 13)]
GOOD = Host(
    system="Linux",
    machine="x86_64",
    glibc=(2, 36),
    implementation="cpython",
    python=(3, 11),
    executable=Path("/venv/bin/python"),
    python3=Path("/venv/bin/python"),
    libpython_name="libpython3.11.so.1.0",
    libpython=Path("/usr/lib/libpython3.11.so.1.0"),
    numpy="1.26.4",
)


def test_a_good_host_has_no_findings() -> None:
    assert findings(GOOD, STUBS) == []


@pytest.mark.parametrize(
    ("wrong", "says", "advises"),
    [
        ({"machine": "aarch64"}, "Linux on aarch64", "Use such a machine"),
        ({"system": "Darwin", "machine": "arm64", "glibc": None}, "Darwin on arm64", "a Triton elsewhere"),
        ({"glibc": (2, 31)}, "glibc 2.31", "Debian 12"),
        ({"glibc": None}, "another C library than glibc", "a container"),
        ({"python": (3, 13)}, "cpython 3.13", "3.10, 3.11, 3.12"),
        ({"python": (3, 9)}, "cpython 3.9", "3.10, 3.11, 3.12"),
        ({"implementation": "pypy"}, "pypy 3.11", "CPython 3.10, 3.11, 3.12"),
        ({"libpython": None}, "no shared libpython3.11.so.1.0", "--enable-shared"),
        ({"python3": None}, "no python3", "virtual environment"),
        ({"python3": Path("/usr/bin/env")}, "another Python (/usr/bin/env)", "virtual environment"),
        ({"numpy": "2.1.0"}, "numpy 2.1.0", "pip install 'numpy>=1.26,<2'"),
        ({"numpy": None}, "no numpy", "pip install 'numpy>=1.26,<2'"),
    ],
)
def test_each_thing_that_is_wrong_is_named_with_what_to_do(wrong: dict[str, object], says: str, advises: str) -> None:
    (finding,) = findings(replace(GOOD, **wrong), STUBS)  # type: ignore[arg-type]
    assert says in finding
    assert advises in finding


def test_a_python_without_a_stub_is_told_which_ones_have_one() -> None:
    (finding,) = findings(GOOD, [(3, 10)])
    assert "stubs for: 3.10" in finding
    assert "TRITONPILOT_TRITONSERVER" in finding


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert len(findings(replace(GOOD, glibc=(2, 31), libpython=None, numpy="2.0.0"), STUBS)) == 3


def test_this_host_can_run_it() -> None:
    assert findings(observe(), STUBS) == []
