"""docs/operations.md has a command for every symptom, and perf/faults.py provokes each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import faults

ROOT = Path(__file__).parents[2]
TROUBLE = (ROOT / "docs" / "operations.md").read_text().partition("\n## Troubleshooting\n")[2]
SYMPTOMS = [title.lower().replace(" ", "-") for title in re.findall(r"^### (.*)$", TROUBLE, re.MULTILINE)]


def test_every_symptom_is_in_the_table_and_has_a_fault() -> None:
    assert re.findall(r"^\|.*\(#([a-z-]+)\) \|$", TROUBLE, re.MULTILINE) == SYMPTOMS
    assert set(SYMPTOMS) <= set(faults.FAULTS)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_every_symptom_has_a_command(symptom: str) -> None:
    assert faults.command_of(symptom).count("\n") == 1


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ('a{q="0.99"} 12\nb{q="0.99"} 521332', "^b", 521332),
        ("Used Use%\n  1024   3%", "%", 3),
        ("0.001540\n", "", 0.00154),
        ("nothing", "", 0),
    ],
)
def test_the_figure_of_a_command_is_the_last_number_of_its_line(text: str, pattern: str, found: float) -> None:
    assert faults.number(text, pattern) == found
