"""docs/security.md: its variables are those of the balancer, its commands work, and what it points at is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "security.md").read_text()
VARIABLE = re.compile(r"BALANCER_[A-Z_]+")


def test_every_variable_of_the_balancer_is_explained() -> None:
    folder = ROOT / "deploy" / "balancer"
    used = {name for path in ("haproxy.cfg", "start.sh") for name in VARIABLE.findall((folder / path).read_text())}
    table = GUIDE.partition("| Variable |")[2].partition("\n\n")[0]
    explained = set(VARIABLE.findall(table))

    assert explained == used - {"BALANCER_TLS_WORDS"}


def test_the_files_and_sections_that_it_names_are_there() -> None:
    files = re.findall(r"`(tests/[a-z0-9_/]+\.py)`", GUIDE)
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", GUIDE)

    assert [path for path in files if not (ROOT / path).is_file()] == []
    for path, anchor in links:
        target = (ROOT / "docs" / path).resolve()
        assert target.is_file(), path
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{path}#{anchor}"


def test_its_commands_make_a_certificate_that_the_ca_vouches_for(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here (apt-get install openssl)")
    (block,) = [text for text in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) if "-CAcreateserial" in text]
    commands = [line for line in block.splitlines() if line.startswith("openssl")]
    assert len(commands) == 3

    for command in [*commands, "openssl verify -CAfile ca.pem shop.pem"]:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True)
