"""What do Kubernetes' schemas and KEDA's types say about documents? Run by perf.kubernetes, in an interpreter that has them.

stdin: {"documents": [...], "versions": ["1.32", ...], "operators": ["keda.sh/", ...]}; stdout: a list of problems.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kubernetes_validate
from cloudcoil.models.keda import v1alpha1
from kubernetes_validate.utils import SchemaNotFoundError, ValidationError


def main() -> None:
    asked = json.load(sys.stdin)
    found: list[str] = []
    for document in asked["documents"]:
        name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
        if str(document.get("apiVersion", "")).startswith(tuple(asked["operators"])):
            found += [f"{name}: {said}" for said in of_keda(document)]
            continue
        for version in asked["versions"]:
            found += [f"{name}, Kubernetes {version}: {said}" for said in of_kubernetes(document, version)]
    json.dump(found, sys.stdout)


def of_kubernetes(document: dict[str, Any], version: str) -> list[str]:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:500]}"]
    except (SchemaNotFoundError, KeyError) as error:
        return [f"no such kind ({error!r})"]
    return []


def of_keda(document: dict[str, Any]) -> list[str]:
    if document["kind"] != "ScaledObject":
        return []
    try:
        kept = v1alpha1.ScaledObject.model_validate(document).model_dump(by_alias=True, exclude_unset=True, mode="json")
    except ValueError as error:
        return [str(error)]
    return unknown(document["spec"], kept["spec"], "spec")


def unknown(said: Any, kept: Any, path: str) -> list[str]:
    """Keys that the types did not take: they ignore what they do not know."""
    if isinstance(said, dict) and isinstance(kept, dict):
        lost = [f"{path}.{key}: not known" for key in said if key not in kept]
        return lost + [more for key in said if key in kept for more in unknown(said[key], kept[key], f"{path}.{key}")]
    if isinstance(said, list) and isinstance(kept, list):
        return [
            more
            for at, (one, other) in enumerate(zip(said, kept, strict=False))
            for more in unknown(one, other, f"{path}[{at}]")
        ]
    return []


if __name__ == "__main__":
    main()
