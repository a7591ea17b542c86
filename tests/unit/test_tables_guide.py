"""What docs/tables.md shows is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pilotlib import table_file

GUIDE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return str(text)


def test_the_training_script_of_the_guide_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    exec(block("python"), names)  # noqa: S102

    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*?# (.*)$", block("python"), re.MULTILINE)
    table = table_file.read(tmp_path / "features.json")
    numbers, texts, dense = (names[name] for name in ("numbers", "texts", "dense"))
    assert isinstance(numbers, np.ndarray)
    assert isinstance(texts, np.ndarray)
    assert (numbers.shape, texts.shape) == ((4, 2), (4, 3))
    np.testing.assert_array_equal(table.transform(numbers, texts)[0], dense)


def test_the_features_file_of_the_guide_is_one() -> None:
    table = table_file.from_json(block("json"))
    assert table.widths == json.loads(block("json"))["widths"]
