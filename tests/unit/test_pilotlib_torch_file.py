from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from unit import torch_files

from pilotlib.torch_file import ModelFileError, ResultError, load, model_path

CPU = torch.device("cpu")
X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])


@pytest.mark.parametrize("suffix", ["pt", "pt2"])
def test_both_formats_are_called_alike(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch_files.script(torch_files.Difference(), path)
    else:
        torch_files.export(torch_files.Difference(), path, [X, Y])
    forward = load(path, CPU)
    assert forward.arguments == ("x", "y")
    less, more = forward.call([X, Y])
    assert less.tolist() == (X - Y).tolist()
    assert more.tolist() == (X + Y).tolist()


def test_the_format_is_seen_from_the_content(tmp_path: Path) -> None:
    path = torch_files.script(torch_files.Scale(), tmp_path / "model.pt2")
    assert load(path, CPU).outputs == ()
    path = torch_files.export(torch_files.Scale(), tmp_path / "model.bin", [X])
    assert [spec.dims for spec in load(path, CPU).outputs] == [(-1, 2)]


def test_a_torchscript_model_may_take_one_dict(tmp_path: Path) -> None:
    path = torch_files.script(torch_files.KeyedSum(), tmp_path / "model.pt")
    forward = load(path, CPU, keys=["b", "a"])
    assert forward.arguments == ("b", "a")
    assert forward.call([Y, X])[0].tolist() == (X + 10 * Y).tolist()


def test_an_exported_program_has_nested_results_with_paths(tmp_path: Path) -> None:
    forward = load(torch_files.export(torch_files.Keyed(), tmp_path / "model.pt2", [X]), CPU)
    assert forward.result_paths == ("RESULT[twice]", "RESULT[parts][0]", "RESULT[parts][1]")
    assert [each.tolist() for each in forward.call([X])] == [(2 * X).tolist(), (X + 1).tolist(), (X + 2).tolist()]
    assert [(spec.name, spec.dtype.config, spec.dims) for spec in forward.inputs] == [("ARGS[0]", "TYPE_FP32", (-1, 2))]


def test_an_exported_program_may_take_nested_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(torch_files.KeyedSum(), ({"b": Y, "a": X},)), path)
    forward = load(path, CPU)
    assert forward.arguments == ("ARGS[0][b]", "ARGS[0][a]")
    assert forward.call([Y, X])[0].tolist() == (X + 10 * Y).tolist()


def test_an_exported_program_guards_its_shapes(tmp_path: Path) -> None:
    forward = load(torch_files.export(torch_files.Difference(), tmp_path / "model.pt2", [X, Y]), CPU)
    with pytest.raises(AssertionError, match="Guard failed"):
        forward.call([X, Y[:1]])


def test_a_dictionary_from_torchscript_is_refused_as_in_triton(tmp_path: Path) -> None:
    class Dict(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x}

    path = tmp_path / "model.pt"
    torch.jit.trace(Dict(), X, strict=False).save(str(path))
    with pytest.raises(ResultError, match="gave a dict"):
        load(path, CPU).call([X])


def test_a_model_saved_in_training_mode_is_remarked(tmp_path: Path) -> None:
    torch.jit.script(torch_files.Scale()).save(str(tmp_path / "model.pt"))
    assert "training mode" in load(tmp_path / "model.pt", CPU).remarks[0]


def test_lists_of_strings_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = torch_files.script(torch_files.Words(), tmp_path / "model.pt")
    with pytest.raises(ModelFileError, match=r'"words" of forward\(\) is a List\[str\].*C\+\+ pytorch backend'):
        load(path, CPU)


def write_broken(folder: Path) -> None:
    whole = torch_files.script(torch_files.Dense(), folder / "whole.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "text.pt").write_text("no model")
    torch.save(torch_files.Dense().state_dict(), folder / "weights.pt")
    with zipfile.ZipFile(folder / "whole.pt") as source, zipfile.ZipFile(folder / "damaged.pt", "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, b"no code" if name.endswith(".py") else content)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cut.pt", "or it is damaged"),
        ("text.pt", "is no TorchScript or torch.export file"),
        ("weights.pt", "holds weights or a pickled module"),
        ("damaged.pt", "cannot load"),
    ],
)
def test_files_that_are_no_models_say_why(tmp_path: Path, name: str, says: str) -> None:
    write_broken(tmp_path)
    with pytest.raises(ModelFileError, match=says):
        load(tmp_path / name, CPU)


def test_the_file_is_the_stated_one_or_the_usual_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"model\.pt or .*model\.pt2"):
        model_path({}, tmp_path)
    (tmp_path / "model.pt2").touch()
    assert model_path({"default_model_filename": "model.pt"}, tmp_path).name == "model.pt2"  # Triton fills that in
    (tmp_path / "model.pt").touch()
    assert model_path({}, tmp_path).name == "model.pt"
    with pytest.raises(ModelFileError, match="net.pt"):
        model_path({"default_model_filename": "net.pt"}, tmp_path)
