"""Would every supported Kubernetes take what the helm chart makes?"""

from __future__ import annotations

import copy
from collections.abc import Callable

from perf import kubernetes
from perf.frame import Bench, Outcome
from perf.kubernetes import CHART, VERSIONS, ChartError, Document
from tritonpilot.errors import MeasurementError

#: Values that the chart has to refuse, beside those of the example `cpu`.
BAD = (
    {"replica": "2"},
    {"models.source": "s3"},
    {"autoscaling.minReplicas": "9"},
    {"autoscaling.kind": "keda"},
    {"entry.maxRequestMb": "4096"},
    {"triton.sharedMemory": "much"},
)


def helm_valid(bench: Bench) -> Outcome:
    """Problems of `helm lint --strict`, Kubernetes' strict schemas and KEDA's types with everything that the chart makes.

    Whoever finds nothing may be blind: what is wrong on purpose has to be found first.
    """
    files = kubernetes.values_files()
    versions = (VERSIONS[0], VERSIONS[-1]) if bench.quick else VERSIONS
    made = {file.name: kubernetes.render(CHART, [file]) for file in files}
    documents = [document for each in made.values() for document in each]
    _check_that_they_see(documents)
    found = [f"{file.name}: {line}" for file in files for line in kubernetes.lint(CHART, [file])]
    bench.say(f"linted {len(files)} sets of values; asking the schemas of {len(versions)} versions")
    found += kubernetes.problems(documents, versions)
    found += [f"not refused: {values}" for values in BAD if not _is_refused(values)]
    return Outcome(
        len(found),
        rounds=len(files),
        details={
            "values": [file.name for file in files],
            "documents": len(documents),
            "kinds": sorted({document["kind"] for document in documents}),
            "kubernetes": list(versions),
            "checked": len([each for each in documents if not each["apiVersion"].startswith(kubernetes.OPERATORS)])
            * len(versions),
            "bad_values_refused": len(BAD),
            "problems": found[:20],
        },
    )


def _check_that_they_see(documents: list[Document]) -> None:
    """Raises MeasurementError when a fault in a document of each kind is not found."""
    faults: dict[str, Callable[[Document], object]] = {
        "Deployment": lambda document: document["spec"]["template"]["spec"].update(container=[]),
        "ScaledObject": lambda document: document["spec"].update(maxReplicas=3),
        "HorizontalPodAutoscaler": lambda document: document.update(apiVersion="autoscaling/v2beta2"),
        "NetworkPolicy": lambda document: document["spec"]["egress"][0].update(ports="53"),
    }
    for kind, fault in faults.items():
        broken = copy.deepcopy(next(each for each in documents if each["kind"] == kind))
        fault(broken)
        if not kubernetes.problems([broken], VERSIONS[-1:]):
            raise MeasurementError(
                f"A {kind} that is wrong on purpose was not found to be, so finding nothing means nothing. No figure is reported. "
                "Look at perf/kubernetes_schemas.py."
            )


def _is_refused(values: dict[str, str]) -> bool:
    try:
        kubernetes.render(CHART, [CHART / "ci" / "cpu-values.yaml"], values)
    except ChartError:
        return True
    return False
