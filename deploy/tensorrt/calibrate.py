"""Which ranges do a model's activations have? Runs real rows through TensorRT's INT8 calibrator and writes its cache.

    python3 calibrate.py calibration.json

`tritonpilot engine` writes the job and then gives the cache to `trtexec --calib`. For TensorRT 8.5 to 10; later ones have no
calibrator. Needs TensorRT's Python package, numpy and CUDA's runtime, as in NVIDIA's TensorRT container.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Rows = dict[str, "np.ndarray[Any, Any]"]

CUDART = ("libcudart.so.12", "libcudart.so.11.0", "libcudart.so", "/usr/local/cuda/lib64/libcudart.so")
HOST_TO_DEVICE = 1


def main(path: str) -> None:
    """Calibrate as the job in `path` says."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        import tensorrt
    except ImportError as error:
        sys.exit(
            f"calibrate.py: Python has no tensorrt here ({error}). Install the TensorRT wheel of trtexec's version."
        )
    if not hasattr(tensorrt, "IInt8EntropyCalibrator2"):
        sys.exit(f"calibrate.py: TensorRT {tensorrt.__version__} has no calibrator. Quantise the ONNX file instead.")
    with np.load(job["rows"], allow_pickle=False) as archive:
        rows = {name: archive[name] for name in archive.files}
    device = Device(int(job["device"]))
    cache = calibrate(tensorrt, job, rows, device)
    Path(job["cache"]).write_bytes(cache)
    count = len(next(iter(rows.values())))
    sys.stdout.write(f"calibrate.py: {count} rows in batches of {job['batch']}, {len(cache)} bytes of ranges\n")


class Device:
    """Memory of one GPU, through CUDA's runtime library: pycuda and cuda-python are not in every container."""

    def __init__(self, index: int) -> None:
        self._cuda = _load_cudart()
        self._buffers: dict[str, ctypes.c_void_p] = {}
        self._check("cudaSetDevice", self._cuda.cudaSetDevice(ctypes.c_int(index)))

    def put(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Copy an array to the buffer of this name, which has the size of the first array; its address."""
        array = np.ascontiguousarray(array)
        if name not in self._buffers:
            buffer = ctypes.c_void_p()
            self._check("cudaMalloc", self._cuda.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(array.nbytes)))
            self._buffers[name] = buffer
        buffer = self._buffers[name]
        source = array.ctypes.data_as(ctypes.c_void_p)
        size = ctypes.c_size_t(array.nbytes)
        self._check("cudaMemcpy", self._cuda.cudaMemcpy(buffer, source, size, ctypes.c_int(HOST_TO_DEVICE)))
        assert buffer.value is not None
        return buffer.value

    def _check(self, what: str, code: int) -> None:
        if code != 0:
            sys.exit(f"calibrate.py: {what} failed with CUDA error {code}.")


def batches(rows: Rows, size: int) -> Iterator[Rows]:
    """The rows in whole batches; `size` divides their number."""
    count = len(next(iter(rows.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in rows.items()}


def calibrate(tensorrt: Any, job: dict[str, Any], rows: Rows, device: Device) -> bytes:
    """The calibration cache: the scale of every tensor, in TensorRT's own text form."""
    logger = tensorrt.Logger(tensorrt.Logger.INFO)
    tensorrt.init_libnvinfer_plugins(logger, "")
    builder = tensorrt.Builder(logger)
    # Bit 0 is EXPLICIT_BATCH: needed below 10, ignored from there on.
    network = builder.create_network(1)
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(job["onnx"]):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        sys.exit(f"calibrate.py: {job['onnx']} cannot be parsed: {errors}")
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    rows = {tensor.name: rows[tensor.name].astype(tensorrt.nptype(tensor.dtype), copy=False) for tensor in inputs}
    config = builder.create_builder_config()
    config.set_flag(tensorrt.BuilderFlag.INT8)
    if hasattr(config, "builder_optimization_level"):
        config.builder_optimization_level = 0  # the engine of this build is thrown away
    if job["profile"]["min"]:
        config.add_optimization_profile(_profile(builder, job["profile"]))
        exact = {name: [job["batch"], *rows[name].shape[1:]] for name in job["profile"]["min"]}
        config.set_calibration_profile(_profile(builder, {"min": exact, "opt": exact, "max": exact}))
    calibrator = _calibrator(tensorrt, rows, int(job["batch"]), device)
    config.int8_calibrator = calibrator
    if builder.build_serialized_network(network, config) is None or not calibrator.cache:
        sys.exit("calibrate.py: TensorRT did not calibrate; its messages are above.")
    cache: bytes = calibrator.cache
    return cache


def _profile(builder: Any, shapes: dict[str, dict[str, list[int]]]) -> Any:
    profile = builder.create_optimization_profile()
    for name in shapes["min"]:
        profile.set_shape(name, shapes["min"][name], shapes["opt"][name], shapes["max"][name])
    return profile


def _calibrator(tensorrt: Any, rows: Rows, size: int, device: Device) -> Any:
    class Calibrator(tensorrt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        """The algorithm that trtexec reads a cache of; it calibrates before layers are fused."""

        def __init__(self) -> None:
            super().__init__()
            self.cache = b""
            self._batches = batches(rows, size)

        def get_batch_size(self) -> int:
            return size

        def get_batch(self, names: list[str]) -> list[int] | None:
            batch = next(self._batches, None)
            return None if batch is None else [device.put(name, batch[name]) for name in names]

        def read_calibration_cache(self) -> None:
            return None

        def write_calibration_cache(self, cache: memoryview) -> None:
            self.cache = bytes(cache)

    return Calibrator()


def _load_cudart() -> ctypes.CDLL:
    for name in CUDART:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    sys.exit(f"calibrate.py: there is none of {', '.join(CUDART)}.")


if __name__ == "__main__":
    main(sys.argv[1])
