"""What was done to a model is kept beside it, and slow steps are kept by content."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tritonpilot.errors import HostError, ModelError
from tritonpilot.quantize import manifest
from tritonpilot.quantize.manifest import Cache, Manifest, cache_key
from tritonpilot.quantize.qdq import QdqOptions

HISTORY = Manifest(
    method="minmax",
    options={"exclude": ["a"], "smooth": None},
    sample_indices=(3, 1, 2),
    samples_sha256="ab",
    seeds={"coverage": 7},
    versions={"onnx": "1.22.0"},
    model_sha256="cd",
    data_sha256={"calibration.npz": "ef"},
    result_sha256="",
    gate={"loss": 0.001},
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.int8.onnx"
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 2])
    answer = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [answer])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), path)
    return path


def test_a_manifest_is_read_as_it_was_written(model: Path) -> None:
    history = dataclasses.replace(HISTORY, result_sha256=manifest.hash_file(model))
    path = manifest.write(model, history)
    assert path.name == "model.int8.json"
    assert manifest.read(model) == history
    assert sorted(file.name for file in model.parent.iterdir()) == ["model.int8.json", "model.int8.onnx"]


def test_a_manifest_of_another_file_is_refused(model: Path) -> None:
    manifest.write(model, dataclasses.replace(HISTORY, result_sha256="0" * 64))
    with pytest.raises(ModelError, match="describes another file"):
        manifest.read(model)


def test_a_model_without_manifest_is_named(model: Path) -> None:
    with pytest.raises(ModelError, match=r"no manifest model\.int8\.json"):
        manifest.read(model)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"method": "minmax"}', "\x00"])
def test_a_damaged_manifest_is_refused(model: Path, text: str) -> None:
    manifest.path_beside(model).write_text(text)
    with pytest.raises(ModelError, match="damaged"):
        manifest.read(model)


def test_a_manifest_that_is_no_json_leaves_the_old_one(model: Path) -> None:
    manifest.path_beside(model).write_text("old")
    with pytest.raises(TypeError):
        manifest.write(model, dataclasses.replace(HISTORY, gate={"object": object()}))
    assert manifest.path_beside(model).read_text() == "old"


def test_numbers_that_are_not_finite_are_null(model: Path) -> None:
    manifest.write(model, dataclasses.replace(HISTORY, speed={"ratio": float("nan"), "rows": np.int64(3)}))
    assert json.loads(manifest.path_beside(model).read_text())["speed"] == {"ratio": None, "rows": 3}


def test_keys_are_equal_for_equal_content_and_differ_otherwise() -> None:
    options = QdqOptions(exclude=frozenset({"a", "b", "c"}))
    same = QdqOptions(exclude=frozenset({"c", "b", "a"}))
    array = np.arange(6, dtype=np.float32)
    assert cache_key("x", options, array) == cache_key("x", same, array.copy())
    keys = {
        cache_key("x", options, array),
        cache_key("x", options, array.reshape(2, 3)),
        cache_key("x", options, array.astype(np.float64)),
        cache_key("x", dataclasses.replace(options, smooth=0.5), array),
        cache_key("x", options),
        cache_key(["x", options], array),
    }
    assert len(keys) == 6


def test_what_has_no_content_makes_no_key() -> None:
    with pytest.raises(TypeError, match="object has no content"):
        cache_key(object())


def test_the_hash_of_a_model_covers_its_external_files(model: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = onnx.load(model)
    graph.graph.initializer.append(weight)
    onnx.save(graph, model, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = manifest.hash_file(model)
    data = bytearray((model.parent / "w.bin").read_bytes())
    data[0] ^= 1
    (model.parent / "w.bin").write_bytes(data)
    assert manifest.hash_file(model) != before


def test_a_step_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("result")

    cache = Cache(tmp_path / "cache")
    first = cache.get_or_make("key", make, ".txt")
    assert cache.get_or_make("key", make, ".txt") == first
    assert (first.name, first.read_text(), len(made)) == ("key.txt", "result", 1)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ModelError, MemoryError])
def test_an_interrupted_step_leaves_nothing_and_is_made_again(tmp_path: Path, failure: type[BaseException]) -> None:
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise failure

    cache = Cache(tmp_path)
    with pytest.raises(failure):
        cache.get_or_make("key", interrupted)
    assert list(tmp_path.iterdir()) == []
    assert cache.get_or_make("key", lambda path: _write(path, "whole")).read_text() == "whole"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written"):
        Cache(tmp_path / "file" / "cache").get_or_make("key", lambda path: _write(path, ""))


def test_versions_name_what_the_result_depends_on() -> None:
    assert set(manifest.versions()) == {"tritonpilot", "onnx", "onnxruntime", "numpy", "python"}
    assert manifest.versions()["onnx"] == onnx.__version__


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def test_a_cached_file_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = cache.get_or_make("key", lambda path: _write(path, "whole"))
    path.write_text("who")
    assert cache.get_or_make("key", lambda path: _write(path, "whole")).read_text() == "whole"
