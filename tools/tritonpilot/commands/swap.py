"""`tritonpilot swap` and `tritonpilot rollback`: another model in the place of the served one, while it serves.

app.command("swap", epilog=SWAP_EPILOG)(swap)
app.command("rollback", epilog=ROLLBACK_EPILOG)(rollback)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import typer

from tritonpilot.commands.options import MODELS, REPOSITORY, Json, KeyFile, Models, Repository, finite, narrate
from tritonpilot.errors import RepositoryError, SpecError

if TYPE_CHECKING:
    from tritonpilot.control import Control
    from tritonpilot.swap.terms import Check, Node

SWAP_EPILOG = "Example: tritonpilot swap ctr new.onnx --sha256 9f2c... --max-slower 1.3"
ROLLBACK_EPILOG = "Example: tritonpilot rollback ctr --to 3"

T = TypeVar("T")

ServiceName = Annotated[str, typer.Argument(help="Service.", metavar="SERVICE")]
TritonGrpc = Annotated[str, typer.Option(help="Triton's gRPC service.")]
TritonHttp = Annotated[str, typer.Option(help="Triton's HTTP service.")]
Nodes = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--node", help="One of several Tritons, which are changed one by one, all or none; repeat it.",
        metavar="GRPC,HTTP,REPOSITORY",
    ),
]  # fmt: skip
LoadTimeout = Annotated[
    float, typer.Option(help="Seconds that a model may take to load.", min=1, max=86400, callback=finite)
]


def swap(
    service: ServiceName,
    files: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="The new model file; of a pipeline MEMBER=FILE, several times.", metavar="[MEMBER=]FILE"),
    ] = None,
    sha256: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--sha256", help="SHA-256 that the file must have; of a pipeline MEMBER=SHA256.", metavar="HEX"),
    ] = None,
    golden: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Right answers to compare with (.npz, docs/swapping.md); default: the old version's."),
    ] = None,
    tolerance: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="How far answers may be off: 0.01, 5%, or for one output prob=0.01.", metavar="[OUTPUT=]LIMIT"
        ),
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Loss by the task's metric, where labelled rows are there.", callback=finite)
    ] = 0.02,
    max_slower: Annotated[
        float, typer.Option(help="So many times as long may an execution take.", callback=finite)
    ] = 1.5,
    entry: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Metrics of an entry before this Triton, for --shadow and --canary; repeat it."),
    ] = None,
    shadow: Annotated[float, typer.Option(help="Share of live requests that the candidate gets copies of.")] = 0.0,
    shadow_requests: Annotated[int, typer.Option(help="How many copies it has to answer.")] = 200,
    canary: Annotated[float, typer.Option(help="Share of live requests that the candidate answers.")] = 0.0,
    canary_requests: Annotated[int, typer.Option(help="How many requests it has to answer.")] = 200,
    patience: Annotated[
        float, typer.Option(help="Seconds in which so many live requests have to come.", min=1, callback=finite)
    ] = 300.0,
    keep: Annotated[int, typer.Option(help="Older versions that stay on disk, for rollback.", min=0, max=100)] = 2,
    node: Nodes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and check the files.")] = False,
    is_resume: Annotated[
        bool, typer.Option("--resume", help="Finish a swap that was killed, or take it back; nothing else.")
    ] = False,
    history: Annotated[bool, typer.Option("--history", help="Show what was swapped, by whom and when.")] = False,
    triton_grpc: TritonGrpc = "127.0.0.1:8001",
    triton_http: TritonHttp = "127.0.0.1:8000",
    control_key_file: KeyFile = None,
    models: Models = MODELS,
    repository: Repository = REPOSITORY,
    load_timeout: LoadTimeout = 120.0,
    as_json: Json = False,
) -> None:
    """Let a service serve a new model: published, loaded beside the old one, checked, and only then put in its place."""
    from tritonpilot.swap import run  # gRPC, numpy and ONNX, which --help does not need
    from tritonpilot.swap.journal import Journal, told
    from tritonpilot.swap.rollback import rollback as go_back

    nodes = _nodes(node, triton_grpc, triton_http, repository)
    if history:
        for each in nodes:
            lines = Journal(each.repository, service).lines()
            for line in lines if as_json else told(lines):
                print(json.dumps(line) if as_json else line)
        return

    def checks(root: Path) -> list[Check]:
        return _checks(
            service, models, root, tolerance or (),
            golden=golden, max_loss=max_loss, max_slower=max_slower, entries=entry or (), shadow_share=shadow,
            shadow_requests=shadow_requests, canary_share=canary, canary_requests=canary_requests, patience_s=patience,
        )  # fmt: skip

    if is_resume:
        results = [
            {"service": service, "resumed": _with(each, control_key_file, lambda control, each=each: run.resume(  # type: ignore[misc]
                control, each.repository, service, load_timeout_s=load_timeout, say=narrate)) or "nothing"}
            for each in nodes
        ]  # fmt: skip
        _show(results, as_json, lambda found: f"{found['service']}: {found['resumed']}")
        return
    if not files:
        raise SpecError("No new model was named. Nothing was changed. Give its file: tritonpilot swap ctr new.onnx")
    if len(nodes) > 1 and not keep:
        raise SpecError(
            "--keep 0 leaves no node anything to go back to when a later one fails. Nothing was changed. Keep 1 or more."
        )
    if dry_run:
        for each in nodes:
            steps = run.dry_run(each.repository, service, files, checks(each.repository), sha256 or ())
            if as_json:
                print(json.dumps({"service": service, "would": steps}))
            else:
                print("\n".join(steps))
        return

    def change(each: Node) -> dict[str, Any]:
        return _with(each, control_key_file, lambda control: run.swap(
            control, each.repository, service, files, checks(each.repository), checksums=sha256 or (), keep=keep,
            load_timeout_s=load_timeout, say=narrate,
        ).as_dict())  # fmt: skip

    def undo(each: Node) -> None:
        _with(each, control_key_file, lambda control: go_back(
            control, each.repository, service, load_timeout_s=load_timeout, say=narrate))  # fmt: skip

    _show(_one_by_one(nodes, change, undo), as_json, _words)


def rollback(
    service: ServiceName,
    to: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Version; default: what was served before the last swap.", min=1),
    ] = None,
    node: Nodes = None,
    triton_grpc: TritonGrpc = "127.0.0.1:8001",
    triton_http: TritonHttp = "127.0.0.1:8000",
    control_key_file: KeyFile = None,
    models: Models = MODELS,  # noqa: ARG001 -- as `swap` has it
    repository: Repository = REPOSITORY,
    load_timeout: LoadTimeout = 120.0,
    as_json: Json = False,
) -> None:
    """Let a service serve an older version that is still on disk, without a gap."""
    from tritonpilot.swap.rollback import rollback as go_back

    def change(each: Node) -> dict[str, Any]:
        return _with(each, control_key_file, lambda control: go_back(
            control, each.repository, service, to=to, load_timeout_s=load_timeout, say=narrate).as_dict())  # fmt: skip

    def undo(each: Node) -> None:
        version = max(undone[each.grpc].values())
        _with(each, control_key_file, lambda control: go_back(
            control, each.repository, service, to=version, load_timeout_s=load_timeout, say=narrate))  # fmt: skip

    undone: dict[str, dict[str, int]] = {}

    def noted(each: Node) -> dict[str, Any]:
        found = change(each)
        undone[each.grpc] = found["old"]
        return found

    _show(_one_by_one(_nodes(node, triton_grpc, triton_http, repository), noted, undo), as_json, _words)


def check_none_under_way(repository: Path, services: Sequence[str]) -> None:
    """Raise RepositoryError where a swap runs, or was killed and not resumed: what it has on disk is not to be built upon."""
    from tritonpilot.swap.journal import Journal

    for service in services:
        if (left := Journal(repository, service).unfinished()) is not None:
            raise RepositoryError(
                f"A swap of {service} is not ended, begun by {left.began['who']} (process {left.began['pid']}). Nothing was "
                f"changed. Wait for it, or, when it was killed, run `tritonpilot swap {service} --resume`."
            )


def _nodes(stated: Sequence[str] | None, grpc: str, http: str, repository: Path) -> list[Node]:
    from tritonpilot.swap import nodes
    from tritonpilot.swap.terms import Node

    if stated:
        found = [nodes.node(text) for text in stated]
        nodes.check(found)
        return found
    if not repository.is_dir():
        raise RepositoryError(
            f"There is no model repository at {repository}. Nothing was changed. Name the one that Triton serves by --repository."
        )
    return [Node(grpc, http, repository)]


def _one_by_one(
    nodes: Sequence[Node], change: Callable[[Node], dict[str, Any]], undo: Callable[[Node], None]
) -> list[dict[str, Any]]:
    from tritonpilot.swap.nodes import one_by_one

    if len(nodes) == 1:
        return [change(nodes[0])]
    return [
        {"node": each.grpc, **(found or {"is_unchanged": True})}
        for each, found in zip(nodes, one_by_one(nodes, change, undo, narrate), strict=True)
    ]


def _with(node: Node, key_file: Path | None, act: Callable[[Control], T]) -> T:
    from tritonpilot.control import Control
    from tritonpilot.watch import control_key

    with Control(node.grpc, control_key(key_file)) as control:
        return act(control)


def _checks(service: str, models: Path, root: Path, tolerances: Sequence[str], **options: Any) -> list[Check]:
    """What the service's file and the options ask for."""
    from tritonpilot.model_config import parse
    from tritonpilot.repository import CONFIG_FILE
    from tritonpilot.spec import load_services
    from tritonpilot.swap.checks import Asked, checks_of

    path = root / service / CONFIG_FILE
    outputs = (
        [tensor.name for tensor in parse(path.read_text(encoding="utf-8"), str(path)).output] if path.is_file() else []
    )
    limits: dict[str, str] = {}
    for text in tolerances:
        output, has_name, limit = text.rpartition("=")
        limits |= {output: limit} if has_name else dict.fromkeys(outputs, limit)
    (described,) = load_services(models, [service])
    return checks_of(described, Asked(tolerances=limits, **options), root)


def _show(results: Sequence[dict[str, Any]], as_json: bool, words: Callable[[dict[str, Any]], str]) -> None:
    for found in results:
        print(json.dumps(found) if as_json else words(found))


def _words(found: dict[str, Any]) -> str:
    if found.get("is_unchanged"):
        return f"{found['node']} serves these files already"
    shifted = ", ".join(f"{name} version {found['old'][name]} -> {version}" for name, version in found["new"].items())
    return f"{found.get('node', '')} {shifted} in {found['seconds']:.1f} s".strip()
