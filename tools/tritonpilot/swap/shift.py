"""What would a swap, or a rollback, change? Read from the repository and the files that are given; nothing is touched.

shift, files = of_swap(root, "ctr", ["new.onnx"])            # version 1 -> 2 of ctr; {"ctr": {"model.onnx": Path("new.onnx")}}
shift = of_rollback(root, "ctr", journal)                    # version 2 -> 1, which is still there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tritonclient.grpc import model_config_pb2

from tritonpilot import pins
from tritonpilot.errors import ModelError, RepositoryError, SpecError
from tritonpilot.model_config import ModelConfig, parse
from tritonpilot.onnx_model import TensorSignature, external_files, read_signature
from tritonpilot.repository import (
    CANDIDATE,
    CONFIG_FILE,
    SWAPPED_FILE,
    damaged,
    held,
    manifest,
    models,
    sha256,
    versions,
)
from tritonpilot.swap.journal import Journal
from tritonpilot.swap.terms import Candidate, ServedAlreadyError
from tritonpilot.written import nearest

Files = Mapping[str, Mapping[str, Path]]
"""Model -> name in its version folder -> where it is now."""


@dataclass(frozen=True)
class Before:
    """What a model's folder said."""

    config: str
    swapped: str | None


@dataclass(frozen=True)
class Shift:
    """Which versions take the place of which. What the journal notes of it is enough to finish it or to take it back."""

    kind: Literal["swap", "rollback"]
    service: str
    public_version: int
    old: Mapping[str, int]
    new: Mapping[str, int]
    before: Mapping[str, Before]
    instead_of: Mapping[str, Mapping[str, str]]
    """SHA-256 of what the build published, see repository.Held."""
    sha256: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of the files of the new versions, as they were given."""
    keep: int = 2

    @property
    def is_pipeline(self) -> bool:
        """Whether callers ask another model, which calls those that change."""
        return self.service not in self.new

    @property
    def names(self) -> dict[str, str]:
        """Model -> candidate, the public one last."""
        names = [*self.new, self.service] if self.is_pipeline else list(self.new)
        return {name: name + CANDIDATE for name in names} if self.kind == "swap" else {}

    def config(self, model: str) -> ModelConfig:
        """What its config.pbtxt said before."""
        return parse(self.before[model].config, f"the config of {model}")

    def candidate(self, files: Files) -> Candidate:
        """For checks."""
        members = {name: next(iter(files[name].values())) for name in self.new}
        version = next(iter(self.new.values()))
        return Candidate(self.service, self.service, members, version, next(iter(self.old.values())), self.names)

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Shift:
        """From a line of the journal."""
        own = {key: said[key] for key in cls.__dataclass_fields__}
        return cls(**{**own, "before": {name: Before(**each) for name, each in said["before"].items()}})

    def describe(self) -> str:
        """In words."""
        return ", ".join(f"{name} version {self.old[name]} -> {version}" for name, version in self.new.items())


def of_swap(
    root: Path, service: str, given: Sequence[str], checksums: Sequence[str] = (), keep: int = 2
) -> tuple[Shift, Files]:
    """The shift to new files: one file, or MEMBER=FILE for some models of a pipeline.

    `checksums` are SHA-256 that the files must have: one, or MEMBER=SHA256. Raises SpecError, ModelError, RepositoryError.
    """
    public = _config(root, service)
    members = [name for name in pins.called(public) if name.startswith(f"{service}_")]
    paths = _by_member(service, members, given, "file")
    wanted = _by_member(service, members, checksums, "SHA-256") if checksums else {}
    if absent := [name for name in wanted if name not in paths]:
        raise SpecError(f"--sha256 is about {absent[0]}, which gets no file. Nothing was changed.")
    files, sums, old = {}, {}, {}
    for name, path in paths.items():
        config = _config(root, name)
        old[name] = standing(root, name, config)
        files[name] = _files(root, name, old[name], config, Path(path))
        sums[name] = {file: sha256(source) for file, source in files[name].items()}
        main = next(iter(sums[name].values()))
        if name in wanted and wanted[name].strip().lower() != main:
            raise ModelError(
                f"{path} has the SHA-256 {main}, not {wanted[name]}. Nothing was changed. Fetch the file again."
            )
    if all(sums[name].items() <= manifest(root, name, old[name]).items() for name in paths):
        raise ServedAlreadyError(f"{service} serves these files already, {_shown(old)}. Nothing was changed.")
    newest = 1 + max(max(versions(root, name)) for name in paths)
    return _shift("swap", root, service, old, dict.fromkeys(paths, newest), sums, keep), files


def of_rollback(root: Path, service: str, journal: Journal, to: int | None = None) -> Shift:
    """The shift back: to what was served before, or to version `to`. Raises SpecError and RepositoryError."""
    public = _config(root, service)
    is_pipeline = bool(pins.called(public))
    served: dict[str, int] = {}
    choices: list[dict[str, int]] = []  # the best first
    for line in reversed(journal.finished()):
        for known in (line["new"], line["old"]):
            found = {str(name): int(version) for name, version in known.items()}
            if not all(version in versions(root, name) for name, version in found.items()):
                continue
            served |= {name: standing(root, name, _config(root, name)) for name in found if name not in served}
            if found != {name: served[name] for name in found} and found not in choices:
                choices.append(found)
    if not is_pipeline:
        served[service] = standing(root, service, public)
        others = [{service: version} for version in reversed(versions(root, service)) if version != served[service]]
        choices += [each for each in others if each not in choices]
        if to is None:  # what a rollback left is not gone back to
            choices = [each for each in choices if each[service] < served[service]]
    elif to is None:
        choices = [each for each in choices if max(each.values()) < max(served[name] for name in each)]
    chosen = next((each for each in choices if to is None or to in each.values()), None)
    if chosen is None:
        there = ", ".join(_shown(each) for each in choices) or "none"
        raise RepositoryError(
            f"{service} has no version {to if to is not None else 'older than that it serves'} to go back to (there is: {there}). "
            "Nothing was changed. " + ("Name one of them by --to." if choices else "Swap in the model that is meant.")
        )
    for name, version in chosen.items():
        if wrong := damaged(root, name, version):
            raise RepositoryError(
                f"{wrong[0]} of {name} version {version} is not what its manifest says. Nothing was changed. Go back to another "
                "version by --to, or swap in the model that is meant."
            )
    return _shift("rollback", root, service, {name: served[name] for name in chosen}, chosen, {}, 0)


def standing(root: Path, name: str, config: ModelConfig) -> int:
    """The version that the disk says is served. Raises SpecError where there are several, RepositoryError where it is not there."""
    policy, there = config.version_policy, versions(root, name)
    if (
        (policy.HasField("all") and len(there) > 1)
        or policy.latest.num_versions > 1
        or len(policy.specific.versions) > 1
    ):
        raise SpecError(
            f"{name} serves several versions at once (version_policy). Nothing was changed. A swap needs one: let it be "
            "latest: 1."
        )
    stated = list(policy.specific.versions)
    found = int(stated[0]) if stated else max(there, default=0)
    if found not in there:
        raise RepositoryError(
            f"{root / name} has no version {found or ''} to swap. Nothing was changed. Run `tritonpilot build {name}`."
        )
    return found


def _shift(
    kind: Literal["swap", "rollback"], root: Path, service: str, old: dict[str, int], new: dict[str, int],
    sums: Mapping[str, Mapping[str, str]], keep: int,
) -> Shift:  # fmt: skip
    names = [*new, *([service] if service not in new else [])]
    public_version = standing(root, service, _config(root, service))
    instead_of = {}
    for name in names:
        said = held(root, name)
        now = old.get(name, public_version)
        instead_of[name] = dict(said.instead_of) if said is not None else manifest(root, name, now)
    return Shift(
        kind, service, public_version, {name: old[name] for name in new}, new, {name: _before(root, name) for name in names},
        instead_of, sums, keep,
    )  # fmt: skip


def _before(root: Path, name: str) -> Before:
    swapped = root / name / SWAPPED_FILE
    text = (root / name / CONFIG_FILE).read_text(encoding="utf-8")
    return Before(text, swapped.read_text(encoding="utf-8") if swapped.is_file() else None)


def _config(root: Path, name: str) -> ModelConfig:
    path = root / name / CONFIG_FILE
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(
            f"There is no model {name} in {root}{nearest(name, models(root))}: {path.name} cannot be read ({error}). Nothing was "
            "changed. Name a service that is served, or another --repository."
        ) from None


def _by_member(service: str, members: Sequence[str], given: Sequence[str], what: str) -> dict[str, str]:
    """Model -> what is given for it. Steps may be named by their own names."""
    found: dict[str, str] = {}
    known = members or [service]
    for text in given:
        stated, has_name, value = text.partition("=")
        name = next((each for each in known if stated in (each, each.removeprefix(f"{service}_"))), "")
        if not (has_name and name):
            if has_name and not Path(text).exists():
                raise SpecError(
                    f"{service} has no model {stated}{nearest(stated, known)} that a {what} could be for (it has "
                    f"{', '.join(known)}). Nothing was changed."
                )
            if members:
                raise SpecError(
                    f"{service} is a pipeline of {', '.join(members)}. Nothing was changed. Say which of them the {what} is for: "
                    f"{members[0]}={text}"
                )
            name, value = service, text
        if name in found:
            raise SpecError(f"{name} was given two {what}s, {found[name]} and {value}. Nothing was changed.")
        found[name] = value
    if not found:
        raise SpecError(f"No {what} was given for {service}. Nothing was changed.")
    return found


def _files(root: Path, name: str, version: int, config: ModelConfig, path: Path) -> dict[str, Path]:
    """What the new version's folder gets from elsewhere, the given file first. Raises ModelError."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Nothing was changed. Name the new model of {name}.")
    there = list(manifest(root, name, version))
    main = config.default_model_filename or "model.py"
    if path.name in there:
        main = path.name
    elif main not in there and len(there) == 1:
        main = there[0]
    elif main not in there:
        raise ModelError(
            f"{name} has the files {', '.join(there) or '(none)'}, and {path.name} is none of them. Nothing was changed. Name the "
            "new file as that whose place it takes."
        )
    if Path(main).suffix != path.suffix:
        raise ModelError(
            f"{path} cannot take the place of {main} of {name}: its suffix is another one. Nothing was changed."
        )
    files = {main: path}
    if main.endswith(".onnx"):
        _check_signature(name, path, config)
        files |= {each: path.parent / each for each in external_files(path)}
    return files


def _check_signature(name: str, path: Path, config: ModelConfig) -> None:
    """Raise ModelError where the inputs and outputs of an ONNX file are not those of the model that it is to be."""
    signature = read_signature(path)
    for kind, stated, found in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in found}
        for tensor in stated:
            other = by_name.pop(tensor.name, None)
            if other is None or not _fits(tensor, other, is_batched=config.max_batch_size > 0):
                has = f"has it as {other.data_type} {list(other.shape)}" if other is not None else "has no such"
                data_type = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                raise ModelError(
                    f"{name} serves the {kind} {tensor.name} ({data_type} {list(tensor.dims)}), and {path} {has}. Nothing was "
                    "changed. A model with another signature is another service."
                )
        if by_name and kind == "input":
            raise ModelError(
                f"{path} also wants the input {next(iter(by_name))}, which callers of {name} do not send. Nothing was changed."
            )


def _fits(stated: Any, found: TensorSignature, *, is_batched: bool) -> bool:
    if ("STRING" if found.data_type == "BYTES" else found.data_type) != model_config_pb2.DataType.Name(
        stated.data_type
    ).removeprefix("TYPE_"):
        return False
    if is_batched and (not found.shape or found.shape[0] != -1):
        return False
    shape = list(found.shape[1:] if is_batched else found.shape)
    dims = [] if stated.HasField("reshape") and not stated.reshape.shape else list(stated.dims)
    return len(shape) == len(dims) and all(-1 in (a, b) or a == b for a, b in zip(shape, dims, strict=True))


def _shown(versions_of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} version {version}" for name, version in versions_of.items())
