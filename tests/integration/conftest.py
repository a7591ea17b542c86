from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tritonpilot import build, repository, spec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def example_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example services, trained or exported when they are missing, built into a repository of their own."""
    services = spec.load_services(ROOT / "models", ["ctr", "image"])
    build.prepare(services, "auto", lambda line: print(line, file=sys.stderr))
    root = tmp_path_factory.mktemp("examples") / "model_repository"
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    return root
