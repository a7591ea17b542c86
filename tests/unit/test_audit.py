"""tools/audit.py: a package that could not be looked up does not count as free of vulnerabilities."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "audit.py"
CLEAN = {"name": "numpy", "version": "1.26.4", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
VULNERABLE = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "PYSEC-2014-8", "fix_versions": ["2.7.3"]}]}


@pytest.fixture(scope="module")
def audit() -> Any:
    described = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ([CLEAN], 0, "audit: 1 versions were looked up, 0 known vulnerabilities"),
        ([CLEAN, VULNERABLE, VULNERABLE], 1, "audit: jinja2 2.4.1: PYSEC-2014-8, mended in 2.7.3"),
        ([CLEAN, SKIPPED], 3, "audit: nothing could be learnt about 1 packages: torch ..."),
        ([VULNERABLE, SKIPPED], 1, "audit: nothing could be learnt about 1 packages: torch ..."),
        ([], 3, "audit: 0 versions were looked up, 0 known vulnerabilities"),
    ],
)
def test_the_verdict_tells_clean_from_not_asked(audit: Any, report: list[dict[str, Any]], code: int, said: str) -> None:
    lines, found = audit.verdict(report)

    assert (found, said in lines) == (code, True), lines


def test_without_pip_audit_or_a_file_nobody_was_asked(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(tmp_path / "absent.lock") == 3
    assert "audit: nobody could be asked: " in capsys.readouterr().err
