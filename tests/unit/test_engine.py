"""Engines: what is asked of trtexec, and what is left behind. Nothing here runs on a GPU: `trtexec`, `docker` and
`nvidia-smi` are shell scripts that answer in the form of NVIDIA's tools and record what they were asked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper
from unit.onnx_files import identity, save

from tritonpilot import build, engine, model_config, trtexec
from tritonpilot.engine import build_engine, parse_gpus, preview
from tritonpilot.errors import HostError, ModelError, SpecError
from tritonpilot.onnx_traits import read_traits
from tritonpilot.quantize import manifest
from tritonpilot.spec import Service, load_services
from tritonpilot.trtexec import EngineOptions, Trtexec, decide, find_service, parse_range, parse_trtexec, plan_command

ROOT = Path(__file__).parents[2]
#: The build flags that trtexec's own help lists, by version (samples/common/sampleOptions.cpp of NVIDIA/TensorRT).
FLAGS = {
    (
        8,
        5,
        3,
    ): "--onnx --minShapes --optShapes --maxShapes --fp16 --int8 --calib --saveEngine --timingCacheFile --memPoolSize "
    "--device --buildOnly",
    (
        8,
        6,
        1,
    ): "--onnx --minShapes --optShapes --maxShapes --fp16 --int8 --calib --saveEngine --timingCacheFile --memPoolSize "
    "--device --skipInference",
    (10, 5, 0): "--onnx --minShapes --optShapes --maxShapes --fp16 --bf16 --int8 --stronglyTyped --calib --saveEngine "
    "--timingCacheFile --memPoolSize --device --skipInference",
    (
        11,
        1,
        0,
    ): "--onnx --minShapes --optShapes --maxShapes --stronglyTyped --saveEngine --timingCacheFile --memPoolSize "
    "--device --skipInference",
}
TRT8_5, TRT8_6, TRT10, TRT11 = (Trtexec(version, frozenset(flags.split())) for version, flags in FLAGS.items())
SERVICE = """\
service: iris
model: {file: model.onnx, samples: samples.npz}
batching: {max_batch_size: 8}
"""
#: Form of the help and the log: the banner, two sections of options, and what setCudaDevice and the build say.
TRTEXEC = r"""#!/bin/sh
echo "$@" >> "$RECORD"
echo "&&&& RUNNING TensorRT.trtexec [TensorRT v100500] [b18] # trtexec $*"
if [ "$1" = --help ]; then
  printf '=== Build Options ===\n'
  for flag in @FLAGS@; do printf '  %s=spec      Something\n' "$flag"; done
  exit 0
fi
for argument in "$@"; do
  case "$argument" in
    --saveEngine=*) engine=${argument#*=} ;;
    --timingCacheFile=*) cache=${argument#*=} ;;
    --calib=*) test -s "${argument#*=}" || exit 3 ;;
  esac
done
if [ -n "$FAILS" ]; then
  echo partial > "$engine"
  echo "[09/25/2026-10:00:02] [E] Failed to parse onnx file"
  echo "&&&& FAILED TensorRT.trtexec [TensorRT v100500] [b18]"
  exit 1
fi
echo "[04/08/2025-23:14:00] [I] Selected Device: NVIDIA L4"
echo "[04/08/2025-23:14:00] [I] Compute Capability: 8.9"
echo "[04/08/2025-23:14:00] [I] TensorRT version: 10.5.0"
echo "plan of $*" > "$engine"
echo timings > "$cache"
echo "&&&& PASSED TensorRT.trtexec [TensorRT v100500] [b18]"
""".replace("@FLAGS@", FLAGS[10, 5, 0])
NVIDIA_SMI = "#!/bin/sh\necho '0, NVIDIA L4, 8.9, 560.35.03'\n"
#: Runs the command with the mounted folders of this machine in the place of the container's.
DOCKER = r"""#!/bin/sh
[ "$2" = version ] && { echo 2.29.7; exit 0; }
echo "docker $*" >> "$RECORD"
shift 4
while [ "$1" != engine ]; do
  case "$1" in
    --volume=*:/model:ro) model=${1#--volume=}; model=${model%:/model:ro} ;;
    --volume=*:/work) work=${1#--volume=}; work=${work%:/work} ;;
  esac
  shift
done
shift 2
set -- $(echo "$*" | sed "s#=/model/#=$model/#; s#=/work/#=$work/#g")
exec "$(dirname "$0")/hidden/trtexec" "$@"
"""


@pytest.fixture
def service(tmp_path: Path) -> Callable[..., Service]:
    """Write a service with an identity model and load it."""
    folder = tmp_path / "models" / "iris"

    def load(text: str = SERVICE, dims: Any = ("batch", 4), element: int = TensorProto.FLOAT) -> Service:
        identity(folder / "model.onnx", dims, element)
        (folder / "service.yaml").write_text(text)
        return load_services(tmp_path / "models")[0]

    folder.mkdir(parents=True)
    np.savez(folder / "samples.npz", x=np.zeros((3, 4), np.float32))
    return load


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Put recording programs on PATH, the only ones of their kind there; gives what they were asked so far."""
    programs, record = tmp_path / "bin", tmp_path / "record"
    programs.mkdir()
    for name in ("dirname", "sed", "sleep"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setattr(engine, "TRTEXEC_ELSEWHERE", tmp_path / "nowhere")

    def put(**scripts: str) -> list[str]:
        for name, text in scripts.items():
            path = programs / name.replace("__", "/").replace("_", "-")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        return record.read_text().splitlines() if record.exists() else []

    return put


def asked(service: Service, trt: Trtexec, **options: Any) -> list[str]:
    made = decide(service, EngineOptions(**options))
    return plan_command(made, trt, model=Path("/model"), work=Path("/work"), device=0)


def quantized(path: Path, element: int = TensorProto.INT8, zero: int = 0) -> Path:
    """x -> QuantizeLinear -> DequantizeLinear -> y."""
    to = np.dtype(helper.tensor_dtype_to_np_dtype(element))
    scale = numpy_helper.from_array(np.float32(0.1), "scale")
    zero_point = numpy_helper.from_array(np.array(zero, to), "zero")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequantize"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", 4)) for name in "xy")
    return save(path, helper.make_graph(nodes, "qdq", [x], [y], [scale, zero_point]))


def holds_pipe(pid: int) -> bool:
    found = False
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found |= str(descriptor.readlink()).startswith("pipe:")
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# What is asked of trtexec


def test_the_command_has_the_profile_and_stops_after_the_build(service: Callable[..., Service]) -> None:
    command = plan_command(
        decide(service(), EngineOptions()), TRT10, model=Path("/model"), work=Path("/work"), workspace_mb=2048
    )

    assert command == [
        "--onnx=/model/model.onnx",
        "--saveEngine=/work/model.plan",
        "--minShapes=x:1x4",
        "--optShapes=x:8x4",
        "--maxShapes=x:8x4",
        "--timingCacheFile=/work/timing.cache",
        "--device=0",
        "--memPoolSize=workspace:2048",
        "--skipInference",
    ]
    assert asked(service(), TRT8_5)[-1] == "--buildOnly"


def test_a_model_without_variable_dimensions_has_no_profile(service: Callable[..., Service]) -> None:
    fixed = service(SERVICE.replace("max_batch_size: 8", "max_batch_size: 0"), dims=(2, 4))

    assert not [argument for argument in asked(fixed, TRT10) if "Shapes" in argument]


def test_kernels_are_chosen_for_the_preferred_batch_or_the_one_that_is_said(service: Callable[..., Service]) -> None:
    preferred = service(SERVICE.replace("max_batch_size: 8", "max_batch_size: 8, preferred_batch_sizes: [2, 4]"))

    assert decide(preferred, EngineOptions()).profile.opt == {"x": (4, 4)}
    assert decide(preferred, EngineOptions(opt_batch=1)).profile.opt == {"x": (1, 4)}
    with pytest.raises(SpecError, match="cannot be tuned for batches of 9, max_batch_size is 8"):
        decide(preferred, EngineOptions(opt_batch=9))
    with pytest.raises(SpecError, match="no batch to tune"):
        decide(service(SERVICE.replace("size: 8", "size: 0"), dims=(2, 4)), EngineOptions(opt_batch=2))


def test_variable_dimensions_reach_to_what_the_samples_show(service: Callable[..., Service]) -> None:
    found = decide(service(dims=("batch", "length")), EngineOptions()).profile

    assert (found.min, found.opt, found.max) == ({"x": (1, 1)}, {"x": (8, 4)}, {"x": (8, 4)})
    assert found.notes == (
        "x: variable dimensions up to 4, as in the samples; larger requests will be refused (a range says otherwise)",
    )


def test_a_stated_range_needs_no_samples(service: Callable[..., Service]) -> None:
    bare = service(SERVICE.replace(", samples: samples.npz", ""), dims=("batch", "h", 3, "w"))
    name, ranges = parse_range("x=32:640:960,16:320:480")
    found = decide(bare, EngineOptions(ranges={name: ranges})).profile

    assert found.min == {"x": (1, 32, 3, 16)}
    assert found.opt == {"x": (8, 640, 3, 320)}
    assert found.max == {"x": (8, 960, 3, 480)}
    with pytest.raises(SpecError, match="names no samples to see their sizes in"):
        decide(bare, EngineOptions())


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"z": [(1, 2, 3)]}, r"there is no input z to give a range for \(x\)"),
        ({"x": [(1, 2, 3)]}, r"input x has 2 variable dimensions besides the batch \(\[-1, -1\]\), but ranges for 1"),
        ({"x": [(1, 4, 3), (1, 2, 3)]}, "the range 1:4:3 of input x is not min:opt:max"),
        ({}, r"no rows of input x with the dimensions \[-1, -1\]"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(service: Callable[..., Service], ranges: Any, message: str) -> None:
    with pytest.raises((SpecError, ModelError), match=message):
        decide(service(dims=("batch", "h", "w")), EngineOptions(ranges=ranges))


@pytest.mark.parametrize("text", ["x", "x=1:2", "x=1:2:3:4", "x=a:b:c", "=1:2:3"])
def test_a_range_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="Write INPUT=MIN:OPT:MAX"):
        parse_range(text)


@pytest.mark.parametrize(
    ("element", "precision", "trt", "flags"),
    [
        (TensorProto.FLOAT, "fp32", TRT8_6, []),
        (TensorProto.FLOAT, "fp32", TRT11, []),
        (TensorProto.FLOAT, "fp16", TRT8_6, ["--fp16"]),
        (TensorProto.FLOAT, "fp16", TRT10, ["--fp16"]),
        (TensorProto.FLOAT, "bf16", TRT10, ["--bf16"]),
        (TensorProto.FLOAT16, "auto", TRT8_6, ["--fp16"]),
        (TensorProto.FLOAT16, "fp16", TRT10, ["--stronglyTyped"]),
        (TensorProto.FLOAT16, "fp16", TRT11, []),
        (TensorProto.BFLOAT16, "auto", TRT10, ["--stronglyTyped"]),
    ],
)
def test_precision_is_asked_for_as_the_version_wants_it(
    service: Callable[..., Service], element: int, precision: Any, trt: Trtexec, flags: list[str]
) -> None:
    precisions = {"--fp16", "--bf16", "--int8", "--stronglyTyped"}
    command = asked(service(element=element), trt, precision=precision)

    assert [argument for argument in command if argument in precisions] == flags


@pytest.mark.parametrize(("trt", "flags"), [(TRT8_6, ["--int8"]), (TRT10, ["--stronglyTyped"]), (TRT11, [])])
def test_a_quantised_file_needs_no_calibration(
    service: Callable[..., Service], tmp_path: Path, trt: Trtexec, flags: list[str]
) -> None:
    command = asked(service(), trt, onnx=quantized(tmp_path / "int8.onnx"))

    assert [a for a in command if a in ("--int8", "--fp16", "--stronglyTyped")] == flags
    assert not [a for a in command if a.startswith("--calib")]


@pytest.mark.parametrize(
    ("element", "precision", "trt", "message"),
    [
        (TensorProto.FLOAT, "fp16", TRT11, "TensorRT no longer chooses lower precisions itself.*Give the FP16 file"),
        (TensorProto.FLOAT, "int8", TRT11, "not quantised, and calibrators are gone"),
        (TensorProto.FLOAT, "int8", TRT10, "trtexec would invent the ranges"),
        (TensorProto.FLOAT16, "fp32", TRT10, "has FP16 tensors.*Choose fp16, or give the FP32 file"),
        (TensorProto.BFLOAT16, "bf16", TRT8_6, "BF16 files need TensorRT 10"),
        (TensorProto.FLOAT, "bf16", TRT8_6, "BF16 needs TensorRT 10"),
    ],
)
def test_file_precision_and_version_that_do_not_go_together_are_refused(
    service: Callable[..., Service], element: int, precision: Any, trt: Trtexec, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        asked(service(element=element), trt, precision=precision)


def test_a_quantised_file_is_not_built_in_another_precision(service: Callable[..., Service], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this file is quantised .*Choose int8"):
        asked(service(), TRT10, onnx=quantized(tmp_path / "int8.onnx"), precision="fp16")


@pytest.mark.parametrize(
    ("element", "zero", "obstacle"),
    [
        (TensorProto.UINT8, 128, "quantisation to UINT8 (2 nodes, first quantize)"),
        (TensorProto.INT8, 3, "zero points other than 0 (2 nodes, first quantize)"),
    ],
)
def test_quantisation_that_tensorrt_refuses_is_named(
    service: Callable[..., Service], tmp_path: Path, element: int, zero: int, obstacle: str
) -> None:
    path = quantized(tmp_path / "int8.onnx", element, zero)

    assert obstacle in read_traits(path).obstacles
    with pytest.raises(ModelError, match=f"{re.escape(obstacle)}.*Quantise it for TensorRT"):
        asked(service(), TRT10, onnx=path)


def linear(path: Path) -> Path:
    """x[b, 4] -> Gemm with a bias -> y[b, 2]."""
    weights = [
        numpy_helper.from_array(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), "w"),
        numpy_helper.from_array(np.array([0.5, -0.5], np.float32), "b"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 4))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 2))
    return save(path, helper.make_graph([helper.make_node("Gemm", ["x", "w", "b"], ["y"])], "g", [x], [y], weights))


def test_what_onnx_runtime_quantises_by_default_is_refused_and_symmetric_int8_without_biases_is_not(
    tmp_path: Path,
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)]

        def get_next(self) -> dict[str, Any] | None:
            return {"x": self.left.pop()} if self.left else None

    source = linear(tmp_path / "model.onnx")
    quantize_static(source, tmp_path / "default.onnx", Rows(), activation_type=QuantType.QUInt8)
    symmetric = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    quantize_static(source, tmp_path / "trt.onnx", Rows(), activation_type=QuantType.QInt8, extra_options=symmetric)

    default = read_traits(tmp_path / "default.onnx")
    assert default.is_quantized
    assert sorted(obstacle.partition(" (")[0] for obstacle in default.obstacles) == [
        "biases quantised to INT32",
        "quantisation to UINT8",
    ]
    assert read_traits(tmp_path / "trt.onnx") == trtexec.Traits(True, None, ())


def test_types_that_no_engine_has_are_refused(service: Callable[..., Service]) -> None:
    with pytest.raises(ModelError, match="x is BYTES, which no TensorRT engine takes"):
        decide(service(element=TensorProto.STRING), EngineOptions())
    with pytest.raises(ModelError, match=r"x is INT64, which TensorRT 8\.6\.1 makes INT32"):
        asked(service(element=TensorProto.INT64), TRT8_6)
    assert "--maxShapes=x:8x4" in asked(service(element=TensorProto.INT64), TRT10)


def test_a_trtexec_without_our_flags_is_refused(service: Callable[..., Service]) -> None:
    with pytest.raises(HostError, match="does not know --timingCacheFile"):
        asked(service(), Trtexec((7, 2, 3), TRT8_5.flags - {"--timingCacheFile"}))


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --help\n", (8, 6, 1)),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v9300] # trtexec --help\n", (9, 3, 0)),
        (
            "==========\n== TensorRT ==\n==========\n\n&&&& RUNNING TensorRT.trtexec [TensorRT v100500] [b18]\n",
            (10, 5, 0),
        ),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9]\n", (10, 13, 3)),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v110100] [b106]\n", (11, 1, 0)),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8.6.1]\n", (8, 6, 1)),
        ("[04/11/2025-15:15:48] [I] TensorRT version: 10.7.0\n", (10, 7, 0)),
    ],
)
def test_the_version_is_read_from_the_banner(said: str, version: tuple[int, int, int]) -> None:
    found = parse_trtexec(said + "  --onnx=<file>       ONNX model\n  --fp16     Enable fp16 (ex: --profile=0 --no)\n")

    assert found == Trtexec(version, frozenset({"--onnx", "--fp16"}))


@pytest.mark.parametrize("said", ["", "trtexec: command not found", "TensorRT v"])
def test_what_is_no_trtexec_is_not_taken_for_one(said: str) -> None:
    assert parse_trtexec(said) is None


def test_gpus_are_read_from_nvidia_smi() -> None:
    said = "0, NVIDIA A10G, 8.6, 535.183.01\n1, NVIDIA H200, 9.0, 560.35.03\n\nWarning: infoROM is corrupted\n"

    assert [(gpu.index, gpu.name, gpu.compute_capability) for gpu in parse_gpus(said)] == [
        (0, "NVIDIA A10G", "8.6"),
        (1, "NVIDIA H200", "9.0"),
    ]
    assert parse_gpus("No devices were found") == []


# Which service


def test_the_part_of_a_pipeline_is_found_by_either_name() -> None:
    services = load_services(ROOT / "models")

    assert find_service(services, "text").service == "text_net"
    assert find_service(services, "ocr_rec").service == "ocr_rec"
    with pytest.raises(SpecError, match="ocr has several ONNX models .* Name one of: ocr_det, ocr_rec"):
        find_service(services, "ocr")
    with pytest.raises(SpecError, match="nobody has no ONNX model to build an engine from"):
        find_service(services, "nobody")


def test_a_missing_file_says_how_to_make_it(service: Callable[..., Service]) -> None:
    with pytest.raises(ModelError, match="other.onnx does not exist.*tritonpilot build iris --prepare"):
        decide(service(), EngineOptions(onnx=Path("other.onnx")))


# Calibration


def test_calibration_rows_make_a_cache_that_trtexec_reads(service: Callable[..., Service], tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    np.savez(tmp_path / "calibration.npz", x=rows, **{"slice.hour": np.arange(10)})
    options = EngineOptions(calibration=tmp_path / "calibration.npz", calibration_rows=(0, 3, 9))
    made = decide(service(), options)

    assert made.precision == "int8"
    assert made.calibration is not None
    assert made.calibration.rows["x"].tolist() == rows[[0, 3, 9]].tolist()
    assert set(made.calibration.rows) == {"x"}
    for trt in (TRT8_6, TRT10):
        command = plan_command(made, trt, model=Path("/model"), work=Path("/work"))
        assert command[5:7] == ["--int8", "--calib=/work/calibration.cache"]
    with pytest.raises(ModelError, match="calibrators are gone"):
        plan_command(made, TRT11, model=Path("/model"), work=Path("/work"))


def test_the_rows_that_quantize_chose_are_taken(service: Callable[..., Service], tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    archive, model = tmp_path / "calibration.npz", tmp_path / "model.int8.onnx"
    np.savez(archive, x=rows, **{"columns.x": np.array(["a", "b", "c", "d"])})
    identity(model)
    hashes = (manifest.hash_file(model), {"calibration": manifest.hash_file(archive)})
    manifest.write(model, manifest.Manifest("minmax", {}, (1, 4), "", {}, {}, hashes[0], hashes[1], hashes[0]))

    made = decide(service(), EngineOptions(calibration=archive))

    assert made.calibration is not None
    assert made.calibration.rows["x"].tolist() == rows[[1, 4]].tolist()


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (32, 32), (100, 25), (101, 1), (200, 25), (64, 32)])
def test_every_calibration_row_is_used_once_in_whole_batches(count: int, batch: int) -> None:
    assert trtexec.Calibration(Path("c.npz"), {"x": np.zeros((count, 4), np.float32)}).batch == batch


@pytest.mark.parametrize(
    ("arrays", "rows", "message"),
    [
        ({"z": np.zeros((2, 4), np.float32)}, None, r"input x is missing, but the model takes FP32\[4\]"),
        ({"x": np.zeros((2, 5), np.float32)}, None, r"input x is float32\[5\] a row, but the model takes FP32\[4\]"),
        ({"x": np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]], np.float32)}, None, "row 1 of input x has NaN or Inf"),
        ({"x": np.zeros((2, 4), np.float32)}, (0, 2), "has the rows 0 to 1, not all that were chosen"),
        ({"x": np.zeros((2, 4), np.float32)}, (), "has the rows 0 to 1, not all that were chosen"),
    ],
)
def test_calibration_rows_that_do_not_fit_are_refused(
    service: Callable[..., Service], tmp_path: Path, arrays: Any, rows: Any, message: str
) -> None:
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(ModelError, match=message):
        decide(service(), EngineOptions(calibration=tmp_path / "c.npz", calibration_rows=rows))


def test_calibration_rows_that_nobody_needs_are_refused(service: Callable[..., Service], tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 4), np.float32))
    with pytest.raises(SpecError, match="the file is quantised already"):
        decide(service(), EngineOptions(onnx=quantized(tmp_path / "q.onnx"), calibration=tmp_path / "c.npz"))
    with pytest.raises(SpecError, match="fp16 needs none"):
        decide(service(), EngineOptions(precision="fp16", calibration=tmp_path / "c.npz"))


def test_the_calibration_script_says_what_it_lacks_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"cache": str(tmp_path / "cache")}))
    command = [sys.executable, str(ROOT / engine.CALIBRATE), str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.startswith("calibrate.py: Python has no tensorrt here")
    assert files(tmp_path) == {"job.json"}


class FakeTensorRT:
    """The calls of calibrate.py, named as in TensorRT's Python bindings; the build asks for batches as the real one does."""

    class Logger:
        INFO = 1

        def __init__(self, severity: int) -> None: ...

    class IInt8EntropyCalibrator2:
        pass

    class BuilderFlag:
        INT8 = "INT8"

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.fails = fails
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse_from_file=lambda path: True)  # noqa: ARG005
        self.Builder = lambda logger: self  # noqa: ARG005

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> None: ...

    def nptype(self, dtype: str) -> Any:
        return np.dtype(dtype)

    def create_network(self, flags: int) -> Any:
        assert flags == 1
        tensors = [SimpleNamespace(name="ids", dtype="int64"), SimpleNamespace(name="x", dtype="float32")]
        return SimpleNamespace(num_inputs=2, get_input=tensors.__getitem__)

    def create_builder_config(self) -> Any:
        return SimpleNamespace(
            set_flag=lambda flag: self.calls.append(flag),
            builder_optimization_level=3,
            add_optimization_profile=lambda profile: self.calls.append(("profile", profile)),
            set_calibration_profile=lambda profile: self.calls.append(("calibration", profile)),
        )

    def create_optimization_profile(self) -> Any:
        return Shapes()

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:  # noqa: ARG002
        calibrator = config.int8_calibrator
        assert config.builder_optimization_level == 0
        assert calibrator.read_calibration_cache() is None
        self.calls.append(calibrator.get_batch_size())
        while calibrator.get_batch(["x", "ids"]) is not None:
            pass
        if self.fails:
            return None
        calibrator.write_calibration_cache(memoryview(b"TRT-100500-EntropyCalibration2\nx: 3c010a14\n"))
        return b"engine"


class Shapes(dict[str, Any]):
    """An optimisation profile."""

    def set_shape(self, name: str, low: Any, middle: Any, high: Any) -> None:
        self[name] = [low, middle, high]


def calibration_job(tmp_path: Path) -> dict[str, Any]:
    rows = {"x": np.arange(24, dtype=np.float32).reshape(6, 4), "ids": np.arange(6, dtype=np.int64).reshape(6, 1)}
    np.savez(tmp_path / "rows.npz", **rows)
    profile = {
        "min": {"x": [1, 4], "ids": [1, 1]},
        "opt": {"x": [8, 4], "ids": [8, 1]},
        "max": {"x": [8, 4], "ids": [8, 1]},
    }
    return {"onnx": "/model/model.onnx", "batch": 3, "device": 0, "profile": profile}


def calibrate_module() -> Any:
    found = importlib.util.spec_from_file_location("calibrate", ROOT / engine.CALIBRATE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_calibrator_gets_every_row_once_in_the_order_that_it_asks_for(tmp_path: Path) -> None:
    job, given, tensorrt = calibration_job(tmp_path), [], FakeTensorRT()
    rows = dict(np.load(tmp_path / "rows.npz"))
    device = SimpleNamespace(put=lambda name, array: given.append((name, array.tolist())) or len(given))
    cache = calibrate_module().calibrate(tensorrt, job, rows, device)

    assert cache == b"TRT-100500-EntropyCalibration2\nx: 3c010a14\n"
    assert [name for name, _ in given] == ["x", "ids", "x", "ids"]
    assert [row for name, array in given if name == "x" for row in array] == rows["x"].tolist()
    assert tensorrt.calls == [
        "INT8",
        ("profile", {"x": [[1, 4], [8, 4], [8, 4]], "ids": [[1, 1], [8, 1], [8, 1]]}),
        ("calibration", {"x": [[3, 4]] * 3, "ids": [[3, 1]] * 3}),
        3,
    ]


def test_a_calibration_that_fails_gives_no_cache(tmp_path: Path) -> None:
    job = calibration_job(tmp_path)
    device = SimpleNamespace(put=lambda name, array: 1)  # noqa: ARG005
    with pytest.raises(SystemExit, match="TensorRT did not calibrate"):
        calibrate_module().calibrate(FakeTensorRT(fails=True), job, dict(np.load(tmp_path / "rows.npz")), device)


# Building


def test_without_a_gpu_nothing_is_written(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(trtexec=TRTEXEC)
    made, before = service(), files(tmp_path / "models")
    with pytest.raises(
        HostError, match=r"has no GPU 0: there is no nvidia-smi.*Nothing was written\..*--dry-run"
    ) as caught:
        build_engine(made, EngineOptions(), print)

    assert caught.value.exit_code == 7
    tools(nvidia_smi="#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9\n")
    with pytest.raises(HostError, match="an nvidia-smi that says: NVIDIA-SMI has failed"):
        build_engine(made, EngineOptions(), print)
    tools(nvidia_smi=NVIDIA_SMI)
    with pytest.raises(HostError, match=r"has no GPU 2: there is only 0 \(NVIDIA L4\)"):
        build_engine(made, EngineOptions(device=2), print)
    assert files(tmp_path / "models") == before
    assert not (tmp_path / "record").exists()


def test_without_trtexec_and_docker_nothing_is_written(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(nvidia_smi=NVIDIA_SMI)
    made, before = service(), files(tmp_path / "models")
    for where, lacks in (
        ("auto", "trtexec and Docker Compose 2"),
        ("host", "trtexec"),
        ("container", "Docker Compose 2"),
    ):
        with pytest.raises(HostError, match=f"has no {lacks}, and") as caught:
            build_engine(made, EngineOptions(where=where), print)  # type: ignore[arg-type]
        assert caught.value.exit_code == 7
    tools(docker=DOCKER)
    with pytest.raises(HostError, match="There is no .*docker-compose.engines.yml"):
        build_engine(made, EngineOptions(project=tmp_path), print)
    tools(trtexec="#!/bin/sh\necho 'error while loading shared libraries: libnvinfer.so.10'; exit 127\n")
    with pytest.raises(HostError, match=r"exit code 127\) did not answer as trtexec does: error while loading"):
        build_engine(made, EngineOptions(), print)
    assert files(tmp_path / "models") == before


def test_a_plan_and_its_manifest_appear_together(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(trtexec=TRTEXEC, nvidia_smi=NVIDIA_SMI)
    made, said = service(), []
    before = files(tmp_path / "models")
    result = build_engine(made, EngineOptions(precision="fp16"), said.append)

    folder = tmp_path / "models" / "iris"
    assert files(tmp_path / "models") - before == {
        "iris/model.plan",
        "iris/model.plan.json",
        "iris/timing-10.5.0-sm89.cache",
    }
    assert result.built
    facts = json.loads((folder / "model.plan.json").read_text())
    assert facts == result.facts
    assert facts["tensorrt"] == "10.5.0"
    assert facts["gpu"] == {"index": 0, "name": "NVIDIA L4", "compute_capability": "8.9", "driver": "560.35.03"}
    assert facts["plan"]["sha256"] == engine.sha256(folder / "model.plan")
    assert facts["inputs"]["files"] == {"model.onnx": engine.sha256(folder / "model.onnx")}
    assert facts["profile"] == {"min": {"x": [1, 4]}, "opt": {"x": [8, 4]}, "max": {"x": [8, 4]}}
    (command,) = facts["commands"]
    assert tools()[-1] == shlex.join(shlex.split(command)[1:])
    assert {"--fp16", f"--onnx={folder / 'model.onnx'}"} <= set(shlex.split(command))
    assert said[0].startswith("iris: TensorRT 10.5.0 of ")


def test_a_plan_is_built_again_only_when_something_differs(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(trtexec=TRTEXEC, nvidia_smi=NVIDIA_SMI)
    made = service()
    assert build_engine(made, EngineOptions(), print).built
    again = build_engine(made, EngineOptions(), print)
    assert not again.built
    assert again.describe().startswith(f"{again.plan} up to date: fp32, 0.0 MB, for NVIDIA L4 and TensorRT 10.5.0")

    assert build_engine(made, EngineOptions(force=True), print).built
    assert build_engine(made, EngineOptions(opt_batch=2), print).built
    (tmp_path / "models/iris/model.plan").write_bytes(b"cut")
    assert build_engine(made, EngineOptions(opt_batch=2), print).built
    tools(nvidia_smi=NVIDIA_SMI.replace("L4, 8.9", "H200, 9.0"))
    assert build_engine(made, EngineOptions(opt_batch=2), print).built


def test_a_build_that_fails_leaves_the_old_plan(
    service: Callable[..., Service],
    tools: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools(trtexec=TRTEXEC, nvidia_smi=NVIDIA_SMI)
    made = service()
    plan = build_engine(made, EngineOptions(), print).plan
    old = plan.read_bytes()
    monkeypatch.setenv("FAILS", "yes")
    with pytest.raises(ModelError, match=r"failed with exit code 1: Failed to parse onnx file\. No plan was written"):
        build_engine(made, EngineOptions(precision="fp16"), print)

    assert plan.read_bytes() == old
    assert json.loads(plan.with_name("model.plan.json").read_text())["precision"] == "fp32"
    assert not [name for name in files(tmp_path / "models") if ".engine-" in name]


def test_ctrl_c_ends_trtexec_and_leaves_nothing(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    waits = TRTEXEC.replace('if [ -n "$FAILS" ]', 'echo $$ > "$RECORD.pid"; exec sleep 600\nif [ -n "$FAILS" ]')
    tools(trtexec=waits, nvidia_smi=NVIDIA_SMI)
    service()
    before = files(tmp_path / "models")
    script = (
        "import sys; from pathlib import Path; from tritonpilot.spec import load_services\n"
        "from tritonpilot.engine import build_engine, EngineOptions\n"
        f"build_engine(load_services(Path({str(tmp_path / 'models')!r}))[0], EngineOptions(), print)\n"
    )
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
    pid_file = tmp_path / "record.pid"
    while process.poll() is None and not (pid_file.exists() and pid_file.read_text().strip()):
        os.sched_yield()
    # Until Popen is done starting the child, it holds a pipe to it.
    while process.poll() is None and holds_pipe(process.pid):
        os.sched_yield()
    process.send_signal(2)
    process.wait()

    assert (tmp_path / "stderr").read_text().rstrip().endswith("KeyboardInterrupt")
    assert files(tmp_path / "models") == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_in_the_container_the_model_is_read_only_and_the_plan_is_the_callers(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(docker=DOCKER, nvidia_smi=NVIDIA_SMI, hidden__trtexec=TRTEXEC)
    result = build_engine(service(), EngineOptions(project=ROOT), print)

    docker = shlex.split([line for line in tools() if line.startswith("docker ")][-1])
    folder = tmp_path / "models" / "iris"
    assert docker[:7] == ["docker", "compose", "-f", str(ROOT / "docker-compose.engines.yml"), "run", "--rm", "-T"]
    assert docker[7:9] == [f"--user={os.getuid()}:{os.getgid()}", f"--volume={folder}:/model:ro"]
    assert docker[10:13] == ["engine", "trtexec", "--onnx=/model/model.onnx"]
    assert result.plan.read_text().startswith("plan of --onnx=")
    assert result.facts["commands"] == [shlex.join(docker[11:])]


def test_the_preview_is_the_command_of_the_container_on_any_machine(
    service: Callable[..., Service], tmp_path: Path
) -> None:
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 4), np.float32))
    calibrate, command = preview(service(), EngineOptions(calibration=tmp_path / "c.npz"))

    assert " engine python3 /opt/tritonpilot/calibrate.py /work/calibration.json" in calibrate
    assert command.startswith("docker compose -f docker-compose.engines.yml run --rm -T --user=")
    assert command.endswith(
        "engine trtexec --onnx=/model/model.onnx --saveEngine=/work/model.plan --minShapes=x:1x4 --optShapes=x:8x4 "
        "--maxShapes=x:8x4 --int8 --calib=/work/calibration.cache --timingCacheFile=/work/timing.cache --device=0 "
        "--skipInference"
    )


# The repository


def test_the_lines_for_the_service_file_make_a_tensorrt_model_with_the_matching_config(
    service: Callable[..., Service], tools: Callable[..., list[str]], tmp_path: Path
) -> None:
    tools(trtexec=TRTEXEC, nvidia_smi=NVIDIA_SMI)
    lines = build_engine(service(), EngineOptions(), print).service_lines
    stated = yaml.safe_load(SERVICE)
    stated["model"].update(yaml.safe_load(lines)["model"])
    written = service(yaml.safe_dump(stated))
    (plan,) = build.plan([written], "gpu")
    config = model_config.parse(plan.folder.config_text, "iris")

    assert (config.backend, config.default_model_filename, config.max_batch_size) == ("tensorrt", "model.plan", 8)
    assert [(t.name, list(t.dims)) for t in (*config.input, *config.output)] == [("x", [4]), ("y", [4])]
    assert plan.folder.version_files == {"model.plan": tmp_path / "models/iris/model.plan"}
    assert build_engine(written, EngineOptions(), print).service_lines == ""
    (cpu,) = build.plan([written], "cpu")
    assert 'backend: "onnxruntime"' in cpu.folder.config_text


def test_the_plan_goes_where_the_service_file_says(service: Callable[..., Service], tmp_path: Path) -> None:
    made = service(SERVICE.replace("samples: samples.npz", "samples: samples.npz, gpu: {file: gpu/iris.plan}"))

    assert decide(made, EngineOptions()).output == tmp_path / "models/iris/gpu/iris.plan"
    with pytest.raises(SpecError, match=r"plan\.bin does not end in \.plan"):
        decide(made, EngineOptions(output=tmp_path / "plan.bin"))


# The compose file


def test_engines_are_built_in_the_release_that_serves_them() -> None:
    engines = yaml.safe_load((ROOT / engine.COMPOSE_FILE).read_text())
    server = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    container = engines["services"][engine.COMPOSE_SERVICE]

    assert container["image"].rpartition(":")[0] == "nvcr.io/nvidia/tensorrt:${TRITON_TAG"
    assert container["image"].partition(":")[2] == server["services"]["triton"]["image"].partition(":")[2]
    assert container["network_mode"] == "none"
    assert container["cap_drop"] == ["ALL"]
    assert engines["name"] != server["name"]
    (scripts,) = container["volumes"]
    assert (ROOT / scripts["source"] / engine.CALIBRATE.name).is_file()
    assert scripts["target"] == str(engine.INSIDE_SCRIPTS)
