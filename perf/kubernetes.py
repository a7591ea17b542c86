"""Is the helm chart right? What helm, Kubernetes' own schemas and KEDA's types say about what it makes.

documents = render(CHART, [CHART / "ci" / "gpu-values.yaml"])     # what `helm template` makes, parsed
problems(documents, VERSIONS)                                     # [] when all versions accept all of it
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from perf import programs
from perf.frame import PROJECT
from tritonpilot.errors import MeasurementError

CHART = PROJECT / "deploy" / "helm" / "triton-pilot"
NAMESPACE, RELEASE = "shop", "ctr"
TIMEOUT_S = 120
REQUIREMENTS = ("kubernetes-validate==1.37.0", "cloudcoil==0.6.0", "cloudcoil.models.keda==2.16.1.0")
VERSIONS = tuple(f"1.{minor}" for minor in range(25, 38))  # that these schemas know, and the chart allows
#: Kinds of operators, which Kubernetes has no schema of.
OPERATORS = ("keda.sh/", "monitoring.coreos.com/")

Document = dict[str, Any]


def values_files(chart: Path = CHART) -> list[Path]:
    """The chart's own examples of values: each way of running it is in one of them."""
    return sorted((chart / "ci").glob("*-values.yaml"))


def lint(chart: Path, values: Sequence[Path] = ()) -> list[str]:
    """What `helm lint --strict` finds; empty when it finds nothing."""
    said = _helm("lint", "--strict", str(chart), "--namespace", NAMESPACE, *_values(values))
    lines = [line for line in said.stdout.splitlines() if line.startswith(("[ERROR]", "[WARNING]"))]
    return [] if said.returncode == 0 else lines or [said.stderr.strip()]


def render(
    chart: Path, values: Sequence[Path] = (), sets: Mapping[str, str] | None = None, version: str = ""
) -> list[Document]:
    """What `helm template` makes of the chart. Raises ChartError with what helm says when it makes nothing."""
    flags = [flag for name, value in (sets or {}).items() for flag in ("--set", f"{name}={value}")]
    flags += ["--kube-version", version] if version else []
    said = _helm("template", RELEASE, str(chart), "--namespace", NAMESPACE, *_values(values), *flags)
    if said.returncode != 0:
        raise ChartError("\n".join(line for line in said.stderr.strip().splitlines() if not line.startswith("walk.go")))
    return [document for document in yaml.safe_load_all(said.stdout) if document]


def problems(documents: Sequence[Document], versions: Sequence[str] = VERSIONS) -> list[str]:
    """What is wrong by the strict schemas of these Kubernetes versions and by KEDA's types.

    Kinds of the Prometheus operator have neither, and are left out.
    """
    asked = json.dumps({"documents": documents, "versions": versions, "operators": OPERATORS})
    said = subprocess.run(
        [programs.python_with(*REQUIREMENTS), str(Path(__file__).with_name("kubernetes_schemas.py"))],
        input=asked,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if said.returncode != 0:
        raise MeasurementError(f"The schemas could not be asked, so nothing is known: {said.stderr.strip()[-1000:]}")
    found: list[str] = json.loads(said.stdout)
    return found


class ChartError(MeasurementError):
    """helm made nothing of the chart; the message is helm's."""


def _helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs.find("helm"), *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def _values(files: Sequence[Path]) -> list[str]:
    return [flag for file in files for flag in ("--values", str(file))]
