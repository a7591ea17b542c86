"""What the README says is what the project is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from perf import readme
from perf.proofs import CLAIMS, OPEN
from tritonpilot.spec import load_service

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_figure_comes_from_a_committed_result() -> None:
    assert readme.filled(README, readme.results()) == README, "run: python -m perf.readme"


def test_every_proof_has_a_committed_result_that_reaches_its_bar() -> None:
    found = readme.results()

    assert {name for name in CLAIMS if name not in found or not found[name]["ok"]} == set(OPEN), (
        "open ones are named, others hold"
    )


def test_the_blocks_are_filled_from_results() -> None:
    result = {
        "value": 0.8123,
        "unit": "of in-process",
        "bar": ">=0.75",
        "ok": True,
        "spread": 0.01,
        "rounds": 5,
        "date": "2026-01-02T03:04",
        "machine": {"cpu": "a CPU"},
    }
    text = "<!-- headline -->\nstale<!-- /headline -->\n<!-- proofs -->\nstale\n<!-- /proofs -->"

    said = readme.filled(text, {"ctr64_efficiency": result})

    assert "**81% of in-process" in said
    assert "| `ctr64_efficiency` | 0.8123 of in-process (spread 0.01, 5 rounds) | >=0.75 |" in said
    assert "stale" not in said


def test_the_shown_service_file_is_the_real_one(tmp_path: Path) -> None:
    shown = next(block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "service: ctr" in block)
    (tmp_path / "service.yaml").write_text(shown)
    real = yaml.safe_load((ROOT / "models/ctr/service.yaml").read_text())
    real.pop("description")

    assert yaml.safe_load(shown) == real
    load_service(tmp_path / "service.yaml")


def test_every_link_leads_to_a_file() -> None:
    documents = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *ROOT.glob("models/*/*.md"),
    ]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_service_files_of_the_guide_are_valid(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "services.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)

    assert len(shown) == 5
    for text in shown:
        (tmp_path / "service.yaml").write_text(text)
        load_service(tmp_path / "service.yaml")
