"""quantize/run.py: a folder that cannot be written is said in words, though every step before came from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from unit.onnx_files import identity

from tritonpilot.errors import HostError, ModelError
from tritonpilot.quantize import manifest
from tritonpilot.quantize.run import _publish, _withdrawn


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file", encoding="utf-8")
    nothing = cast(Any, None)
    with pytest.raises(HostError, match=r"model\.int8\.onnx cannot be written.*older one there is as it was"):
        _publish(nothing, nothing, tmp_path / "build/model.int8.onnx")


def test_an_int8_file_that_lost_its_proof_goes_with_all_that_lies_beside_it(tmp_path: Path) -> None:
    kept = tmp_path / "model.onnx"
    for name in ("model.onnx", "model.int8.onnx", "model.int8.json", "model.int8.png", "model.int8.html"):
        (tmp_path / name).touch()
    assert _withdrawn(tmp_path / "model.int8.onnx") == " model.int8.onnx of an earlier run was removed."
    assert list(tmp_path.iterdir()) == [kept]
    assert _withdrawn(tmp_path / "model.int8.onnx") == ""


def test_an_int8_file_of_another_fp32_model_or_another_content_is_refused(tmp_path: Path) -> None:
    source, model = tmp_path / "model.onnx", tmp_path / "model.int8.onnx"
    identity(source)
    identity(model, dims=("batch", 8))
    history = manifest.Manifest("minmax", {}, (), "", {}, {}, manifest.hash_file(source), {}, manifest.hash_file(model))
    manifest.write(model, history)
    manifest.ensure_of(model, source)

    identity(source, dims=("batch", 5))
    with pytest.raises(ModelError, match=r"made of another model\.onnx than the one beside it.*Quantise it again"):
        manifest.ensure_of(model, source)
    identity(model, dims=("batch", 9))
    with pytest.raises(ModelError, match="describes another file"):
        manifest.ensure_of(model, source)
    manifest.path_beside(model).unlink()
    with pytest.raises(ModelError, match="has no manifest"):
        manifest.ensure_of(model, source)
