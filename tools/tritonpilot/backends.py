"""Which tensors does a generic backend take and make? They follow from its parameters and files.

    signature("labels", {"k": "5"}, {"labels.txt": path}, is_batched=True)     -> Signature, or None for an unknown backend

The backends themselves are in python_backend/, never imported here; each checks when it is loaded that its config says
the same, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tritonpilot import assets
from tritonpilot.errors import ModelError, SpecError
from tritonpilot.onnx_model import Signature, TensorSignature
from tritonpilot.spec import INT32_MAX, DataType


class _Tensor(NamedTuple):
    name: str
    data_type: DataType
    dims: tuple[int, ...]


Tensors = tuple[Sequence[_Tensor], Sequence[_Tensor]]
Parameters = Mapping[str, str]
Files = Mapping[str, Path]
"""Name in the version folder -> where the file is now."""


def signature(backend: str, parameters: Parameters, files: Files, *, is_batched: bool) -> Signature | None:
    """Full shapes, with the batch dimension first where there is one; None when the backend is none of ours.

    Raises SpecError for a parameter, ModelError for a file that they follow from and that cannot be read.
    """
    tensors = _TENSORS.get(backend)
    if tensors is None:
        return None
    batch = (-1,) if is_batched else ()
    inputs, outputs = (
        tuple(TensorSignature(t.name, t.data_type, (*batch, *t.dims)) for t in side)
        for side in tensors(parameters, files)
    )
    return Signature(inputs, outputs)


def check_files(backend: str | None, parameters: Parameters, files: Files) -> None:
    """Raise ModelError for a file of the version folder that its reader will refuse, as far as that is cheap to see."""
    for path in files.values():
        assets.check(path)
    if backend is not None and backend in _TEXTS:
        parameter, default = _TEXTS[backend]
        if (named := files.get(parameters.get(parameter, default))) is not None:
            assets.text(named)


def _image_decode(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001  one form for all rows
    size = _number(parameters, "size", 224)
    stated = parameters.get("data_type", "FP32")
    data_type: DataType = "UINT8" if stated == "UINT8" else "FP16" if stated == "FP16" else "FP32"
    return [_Tensor("photo", "BYTES", (1,))], [_Tensor("pixels", data_type, (3, size, size))]


def _labels(parameters: Parameters, files: Files) -> Tensors:
    k = _number(parameters, "k", 5)
    names = assets.text(_file(files, parameters.get("labels", "labels.txt"), "labels")).splitlines()
    outputs = [_Tensor("label", "BYTES", (k,)), _Tensor("score", "FP32", (k,)), _Tensor("index", "INT32", (k,))]
    return [_Tensor("logits", "FP32", (len(names),))], outputs


def _tokenize(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001
    return [_Tensor("text", "BYTES", (1,))], [
        _Tensor("input_ids", "INT64", (-1,)),
        _Tensor("attention_mask", "INT64", (-1,)),
    ]


def _embedding(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001
    dims = _number(parameters, "dims", 0, least=0) or -1
    if parameters.get("pooling", "mean") == "none":
        inputs = [_Tensor("embedding", "FP32", (-1,))]
    else:
        inputs = [_Tensor("token_embeddings", "FP32", (-1, -1)), _Tensor("attention_mask", "INT64", (-1,))]
    return inputs, [_Tensor("embedding", "FP32", (dims,))]


def _table(parameters: Parameters, files: Files) -> Tensors:
    path = _file(files, parameters.get("features", "features.json"), "table")
    content = assets.json_content(path)
    try:
        widths = content["widths"]
        numbers, texts, dense, categorical = (
            int(widths[name]) for name in ("numbers", "texts", "dense", "categorical")
        )
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(
            f"{path} is no features file of the backend table: its widths do not hold numbers, texts, dense and categorical "
            "as whole numbers. Nothing was changed. Make it again with the training script."
        ) from error
    inputs = [_Tensor("numbers", "FP32", (numbers,)), _Tensor("texts", "BYTES", (texts,))]
    outputs = [_Tensor("dense", "FP32", (dense,)), _Tensor("categorical", "INT64", (categorical,))]
    return [t for t in inputs if t.dims[0]], [t for t in outputs if t.dims[0]]


def _boxes(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001
    most = _number(parameters, "max_boxes", 100)
    outputs = [
        _Tensor("boxes", "FP32", (most, 4, 2)),
        _Tensor("scores", "FP32", (most,)),
        _Tensor("count", "INT32", (1,)),
    ]
    return [_Tensor("probability", "FP32", (1, -1, -1))], outputs


def _ctc(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001
    return [_Tensor("logits", "FP32", (-1, -1))], [_Tensor("text", "BYTES", (1,)), _Tensor("score", "FP32", (1,))]


def _emulated(parameters: Parameters, files: Files) -> Tensors:  # noqa: ARG001
    takes, makes = (_number(parameters, f"{side}_size", 1) for side in ("input", "output"))
    return [_Tensor("row", "FP32", (takes,))], [_Tensor("emulated", "FP32", (makes,))]


_TENSORS: Mapping[str, Callable[[Parameters, Files], Tensors]] = {
    "image_decode": _image_decode,
    "labels": _labels,
    "tokenize": _tokenize,
    "embedding": _embedding,
    "table": _table,
    "boxes": _boxes,
    "ctc": _ctc,
    "emulated": _emulated,
}


#: Backend -> the parameter that names a text file of its own, and the name when it is not given.
_TEXTS: Mapping[str, tuple[str, str]] = {
    "labels": ("labels", "labels.txt"),
    "ctc": ("characters", "characters.txt"),
    "ocr": ("characters", "characters.txt"),
}


def _number(parameters: Parameters, name: str, default: int, least: int = 1) -> int:
    text = parameters.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= INT32_MAX:
        raise SpecError(
            f'The parameter {name} is "{text}", but must be a whole number of at least {least}. Nothing was changed. '
            "Correct it in the service file."
        )
    return number


def _file(files: Files, name: str, backend: str) -> Path:
    path = files.get(name)
    if path is None or not path.is_file():
        raise ModelError(
            f"The backend {backend} reads {name}, which is not there. Nothing was changed. List it under model.files; "
            "`tritonpilot build --prepare` makes what a prepare script makes."
        )
    return path
