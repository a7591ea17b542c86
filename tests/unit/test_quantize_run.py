"""quantize/run.py: a folder that cannot be written is said in words, though every step before came from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from unit.onnx_files import identity

from tritonpilot import build, samples
from tritonpilot.errors import HostError, ModelError
from tritonpilot.pipeline import parts
from tritonpilot.quantize import manifest
from tritonpilot.quantize.run import _publish, _withdrawn, halve, quantize
from tritonpilot.spec import Service, load_services

MODELS = Path(__file__).parents[2] / "models"


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


@pytest.fixture
def scorer(tmp_path: Path) -> Service:
    folder = tmp_path / "models" / "scorer"
    identity(folder / "model.onnx")
    (folder / "service.yaml").write_text(
        "service: scorer\nbatching: {max_batch_size: 8}\n"
        "model: {file: model.onnx, quantize: {calibration: c.npz, evaluation: e.npz, publish: instead}}\n"
    )
    for name, count in (("c.npz", 300), ("e.npz", 29)):
        np.savez(folder / name, x=np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32))
    return load_services(tmp_path / "models")[0]


def test_a_missing_fp32_model_names_the_command_that_makes_it(scorer: Service) -> None:
    (scorer.folder / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"FP32 model .* does not exist.*`tritonpilot build scorer --prepare`"):
        quantize(scorer, lambda _: None)


def test_few_evaluation_rows_are_no_proof(scorer: Service) -> None:
    with pytest.raises(ModelError, match=r"e\.npz has 29 rows.*Give 30 or more"):
        quantize(scorer, lambda _: None)


def test_build_serves_no_int8_file_of_an_earlier_fp32_model(scorer: Service) -> None:
    source, model = scorer.folder / "model.onnx", scorer.folder / "model.int8.onnx"
    identity(model)
    hashes = manifest.hash_file(source), manifest.hash_file(model)
    manifest.write(model, manifest.Manifest("minmax", {}, (), "", {}, {}, hashes[0], {}, hashes[1]))
    assert [plan.folder.name for plan in build.plan([scorer])] == ["scorer"]

    onnx.save(onnx.helper.make_model(onnx.load(str(source)).graph, producer_name="trained again"), str(source))
    with pytest.raises(ModelError, match=r"made of another model\.onnx.*Quantise it again"):
        build.plan([scorer])


def test_half_precision_passes_the_same_gate_and_has_a_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "risk"
    (folder / "build").mkdir(parents=True)
    build.prepare(load_services(MODELS, ["risk"]), "auto", lambda _: None)
    part = next(each for each in parts(load_services(MODELS, ["risk"])[0]) if each.service == "risk_net")
    rows = samples.read(part.folder / "build" / "samples.npz")
    (folder / "build" / "model.onnx").write_bytes((part.folder / "build" / "model.onnx").read_bytes())
    for name in ("c.npz", "e.npz"):
        np.savez(folder / "build" / name, **{key: array[:200] for key, array in rows.items()})
    (folder / "service.yaml").write_text(
        "service: risk\nbatching: {max_batch_size: 8}\n"
        "model: {file: build/model.onnx, quantize: {calibration: build/c.npz, evaluation: build/e.npz}}\n"
    )
    (service,) = load_services(tmp_path / "models")

    outcome = halve(service, lambda _: None, "fp16", seconds=0.05)

    assert outcome.path == folder / "build" / "model.fp16.onnx"
    assert manifest.read(outcome.path).method == "fp16"
    assert outcome.figures["gate"]["loss"] < 0.001
    assert set(outcome.figures["ratio_by_batch"]) == {"1", "8"}
    with pytest.raises(ModelError, match="no BF16 kernels"):
        halve(service, lambda _: None, "bf16")
    with pytest.raises(ModelError, match="has no node nothing to exclude"):
        halve(service, lambda _: None, "fp16", keep=frozenset({"nothing"}))
    assert sorted(file.name for file in (folder / "build").iterdir()) == [
        "c.npz",
        "e.npz",
        "model.fp16.json",
        "model.fp16.onnx",
        "model.onnx",
    ]
