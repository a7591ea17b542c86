"""What do all our backends do when nothing about them is big? A repository with one small model per backend, and its requests.

models = write(root)                      # [SmallModel("image_decode", backend, requests, ...), ...]

Rows, widths and texts differ from request to request; one request in a hundred is bad, in a way that the backend itself finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

from perf.mixed_load import Request, request
from pilotlib import table_file
from pilotlib.table_fit import Column, Hashed, Number, Words, fit

REQUESTS = 200  # different ones per model, sent in turn
BAD = 2  # of them
MAX_ROWS = 16
SIDE = 32
WIDTH = 28
WORDS = ["red", "green", "blue", "and", "the", "a", "small", "wide", "line", "of", "text"]

Inputs = dict[str, npt.NDArray[Any]]
Random = np.random.Generator
Tensor = tuple[str, str, Sequence[int]]  # name, type, dims


@dataclass(frozen=True)
class SmallModel:
    """A model of the repository; without requests it is called by another one, `follows`."""

    name: str
    backend: str
    requests: tuple[Request, ...] = ()
    probe: Mapping[str, npt.NDArray[Any]] | None = None
    """What proves that it answers, where zeros would not."""
    callers: int = 4
    follows: str = ""


@dataclass(frozen=True)
class _Row:
    name: str
    backend: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    files: Callable[[Path], None] = lambda folder: None  # noqa: ARG005
    good: Callable[[Random, int], Inputs] | None = None
    bad: Callable[[Random], Inputs] | None = None
    parameters: Mapping[str, str | int] | None = None
    batching: str = "dynamic_batching { }"
    callers: int = 4
    follows: str = ""


def write(root: Path, seed: int = 7) -> list[SmallModel]:
    """Make the repository in `root`, an empty folder."""
    found = []
    for row in _ROWS:
        folder = root / row.name / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(_config(row), encoding="utf-8")
        row.files(folder)
        random = np.random.default_rng(seed)
        requests: list[Request] = []
        probe = row.good(random, 1) if row.good is not None else None
        if row.good is not None and row.bad is not None:
            counts = random.choice([1, 1, 1, 2, 3, 4, 8, MAX_ROWS], REQUESTS - BAD)
            requests = [request(row.name, row.good(random, int(rows))) for rows in counts]
            for place in np.linspace(0, len(requests), BAD, endpoint=False, dtype=int):
                requests.insert(int(place) + 50, request(row.name, row.bad(random), is_good=False))
        found.append(SmallModel(row.name, row.backend, tuple(requests), probe, row.callers, row.follows))
    return found


def good_requests(model: str, count: int, seed: int = 7) -> list[Inputs]:
    """Different requests of one row each that a model of the repository answers; none for one that others call."""
    row = next(row for row in _ROWS if row.name == model)
    random = np.random.default_rng(seed)
    return [row.good(random, 1) for _ in range(count)] if row.good is not None else []


def _config(row: _Row) -> str:
    tensors = [
        f'{kind} [{{ name: "{name}" data_type: TYPE_{data_type} dims: {list(dims)} }}]'
        for kind, side in (("input", row.inputs), ("output", row.outputs))
        for name, data_type, dims in side
    ]
    parameters = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (row.parameters or {}).items()
    ]
    head = [f'backend: "{row.backend}"', f"max_batch_size: {4 * MAX_ROWS}", row.batching]
    return "\n".join([*head, "instance_group [{ count: 1 kind: KIND_CPU }]", *tensors, *parameters, ""])


# -- files -------------------------------------------------------------------------------------------------------------


def _value(name: str, element: int, dims: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, dims)


def _save(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    **weights: npt.NDArray[Any],
) -> None:
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "small", inputs, outputs, held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx"
    )


def _onnx_picked(folder: Path) -> None:
    """x FP32[b,WIDTH], pick INT64[b,1] -> y FP32[b,3]: a layer, and one of four rows added; other picks fail."""
    random = np.random.default_rng(3)
    _save(
        folder,
        [
            helper.make_node("Gemm", ["x", "w"], ["g"]),
            helper.make_node("Gather", ["rows", "pick"], ["r"]),
            helper.make_node("Squeeze", ["r", "axis"], ["s"]),
            helper.make_node("Add", ["g", "s"], ["y"]),
        ],
        [_value("x", TensorProto.FLOAT, ["b", WIDTH]), _value("pick", TensorProto.INT64, ["b", 1])],
        [_value("y", TensorProto.FLOAT, ["b", 3])],
        w=random.standard_normal((WIDTH, 3)).astype(np.float32),
        rows=random.standard_normal((4, 3)).astype(np.float32),
        axis=np.array([1], np.int64),
    )


def _onnx_shapes(folder: Path) -> None:
    """x FP32[b,n] -> y FP32[b,n]: x plus a row of 1 or 32 columns; other widths fail."""
    _save(
        folder,
        [
            helper.make_node("Reshape", ["x", "shape"], ["parts"]),
            helper.make_node("ReduceSum", ["parts", "axis"], ["y"]),
        ],
        [_value("x", TensorProto.FLOAT, ["b", "n"])],
        [_value("y", TensorProto.FLOAT, ["b", "m", 1])],
        shape=np.array([0, -1, 4], np.int64),
        axis=np.array([2], np.int64),
    )


def _onnx_detector(folder: Path) -> None:
    """page UINT8[b,h,w,3] -> probability FP32[b,1,h,w]: what is dark is text."""
    _save(
        folder,
        [
            helper.make_node("Cast", ["page"], ["p"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["p"], ["grey"], axes=[3], keepdims=0),
            helper.make_node("Div", ["grey", "white"], ["light"]),
            helper.make_node("Sub", ["one", "light"], ["dark"]),
            helper.make_node("Unsqueeze", ["dark", "axis"], ["probability"]),
        ],
        [_value("page", TensorProto.UINT8, ["b", "h", "w", 3])],
        [_value("probability", TensorProto.FLOAT, ["b", 1, "h", "w"])],
        white=np.array(255, np.float32),
        one=np.array(1, np.float32),
        axis=np.array([1], np.int64),
    )


def _onnx_recogniser(folder: Path) -> None:
    """line UINT8[b,48,w,3] -> index INT32[b,w], 1 where it is dark and 2 elsewhere; confidence FP32[b,w], 0.75 and more."""
    _save(
        folder,
        [
            helper.make_node("Cast", ["line"], ["p"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["p"], ["grey"], axes=[1, 3], keepdims=0),
            helper.make_node("Div", ["grey", "white"], ["light"]),
            helper.make_node("Cast", ["light"], ["whole"], to=TensorProto.INT32),
            helper.make_node("Add", ["whole", "first"], ["index"]),
            helper.make_node("Mul", ["light", "quarter"], ["q"]),
            helper.make_node("Add", ["q", "least"], ["confidence"]),
        ],
        [_value("line", TensorProto.UINT8, ["b", 48, "w", 3])],
        [_value("index", TensorProto.INT32, ["b", "w"]), _value("confidence", TensorProto.FLOAT, ["b", "w"])],
        white=np.array(255, np.float32),
        first=np.array(1, np.int32),
        quarter=np.array(0.25, np.float32),
        least=np.array(0.75, np.float32),
    )


class _Picked(torch.nn.Module):
    """As _onnx_picked, in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 3)
        self.rows = torch.nn.Embedding(4, 3)

    def forward(self, x: torch.Tensor, pick: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.rows(pick).squeeze(1)  # type: ignore[no-any-return]


def _torchscript(folder: Path) -> None:
    torch.jit.script(_Picked().eval()).save(str(folder / "model.pt"))  # type: ignore[no-untyped-call]


def _exported(folder: Path) -> None:
    rows = torch.export.Dim("rows")
    samples = torch.ones(2, WIDTH), torch.ones(2, 1, dtype=torch.int64)
    program = torch.export.export(_Picked().eval(), samples, dynamic_shapes=({0: rows}, {0: rows}))
    torch.export.save(program, folder / "model.pt2")


def _labels(folder: Path) -> None:
    (folder / "labels.txt").write_text("\n".join(f"class {number}" for number in range(10)))


def _characters(folder: Path) -> None:
    (folder / "characters.txt").write_text("a\nb\nc\nd\n")


def _tokenizer(folder: Path) -> None:
    known = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))  # noqa: S106  no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _table(folder: Path) -> None:
    random = np.random.default_rng(3)
    columns: list[Column] = [
        Number("amount", log1p=True),
        Number("age", buckets=4),
        Words("colour", unknown="refuse"),
        Hashed("place", 16),
    ]
    data: dict[str, Any] = {
        "amount": random.exponential(100, 200),
        "age": random.uniform(18, 90, 200),
        "colour": random.choice(WORDS[:3], 200),
        "place": [f"place {number}" for number in random.integers(0, 60, 200)],
    }
    table_file.write(fit(columns, data), folder / "features.json")


# -- requests ----------------------------------------------------------------------------------------------------------


def _strings(values: Sequence[bytes]) -> npt.NDArray[Any]:
    return np.array([[value] for value in values], np.object_)


def _floats(random: Random, *shape: int) -> npt.NDArray[Any]:
    return random.standard_normal(shape).astype(np.float32)


def _with_nan(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flat[0] = np.nan
    return array


def _encoded(image: Image.Image, kind: str) -> bytes:
    written = BytesIO()
    image.save(written, kind)
    return written.getvalue()


def _photo(random: Random) -> bytes:
    shape = (SIDE + int(random.integers(0, 9)), SIDE, 3)
    return _encoded(Image.fromarray(random.integers(0, 256, shape, np.uint8)), "JPEG")


def _page(random: Random) -> bytes:
    """White paper with one or two dark bars, which stand for lines."""
    paper = Image.new("RGB", (96, 64), "white")
    pen = ImageDraw.Draw(paper)
    for top in (8, 36)[: int(random.integers(1, 3))]:
        pen.rectangle((8, top, int(random.integers(40, 88)), top + 10), "black")
    return _encoded(paper, "PNG")


def _text(random: Random) -> bytes:
    return " ".join(random.choice(WORDS, int(random.integers(1, 40)))).encode()


def _few(rows: int) -> int:
    """For what costs much a row."""
    return min(rows, 2)


def _picks(random: Random, rows: int) -> Inputs:
    return {"x": _floats(random, rows, WIDTH), "pick": random.integers(0, 4, (rows, 1))}


def _bad_pick(random: Random) -> Inputs:
    return {"x": _floats(random, 1, WIDTH), "pick": np.array([[99]])}


def _tokens(random: Random, rows: int) -> Inputs:
    width = int(random.integers(1, 24))
    return {"token_embeddings": _floats(random, rows, width, 16), "attention_mask": np.ones((rows, width), np.int64)}


def _bad_tokens(random: Random) -> Inputs:
    tokens = _tokens(random, 1)
    return {**tokens, "token_embeddings": _with_nan(tokens["token_embeddings"])}


def _columns(random: Random, rows: int) -> Inputs:
    texts = [[random.choice(WORDS[:3]).encode(), f"place {random.integers(0, 99)}".encode()] for _ in range(rows)]
    return {"numbers": np.abs(_floats(random, rows, 2)), "texts": np.array(texts, np.object_)}


def _bad_columns(random: Random) -> Inputs:
    columns = _columns(random, 1)
    columns["texts"][0, 0] = b"no colour"
    return columns


PICK_IN = (("x", "FP32", [WIDTH]), ("pick", "INT64", [1]))
PICK_OUT = (("y", "FP32", [3]),)
#: Queues with a policy, so that the waker (pilotlib.waker) is at work too.
WAKEFUL = (
    "dynamic_batching { priority_levels: 2 default_priority_level: 1 default_queue_policy { "
    "default_timeout_microseconds: 3600000000 allow_timeout_override: true } }"
)

_ROWS = (
    _Row("onnx", "onnxruntime", PICK_IN, PICK_OUT, _onnx_picked, _picks, _bad_pick, batching=WAKEFUL),
    _Row(
        "onnx_shapes",
        "onnxruntime",
        [("x", "FP32", [-1])],
        [("y", "FP32", [-1, 1])],
        _onnx_shapes,
        lambda random, rows: {"x": _floats(random, rows, 4 * int(random.integers(1, 17)))},
        lambda random: {"x": _floats(random, 1, 5)},
    ),
    _Row("torchscript", "pytorch", PICK_IN, PICK_OUT, _torchscript, _picks, _bad_pick),
    _Row("exported", "pytorch", PICK_IN, PICK_OUT, _exported, _picks, _bad_pick),
    _Row(
        "image_decode",
        "image_decode",
        [("photo", "STRING", [1])],
        [("pixels", "FP32", [3, SIDE, SIDE])],
        good=lambda random, rows: {"photo": _strings([_photo(random) for _ in range(_few(rows))])},
        bad=lambda random: {"photo": _strings([_photo(random)[:200]])},
        parameters={"size": SIDE},
    ),
    _Row(
        "labels",
        "labels",
        [("logits", "FP32", [10])],
        [("label", "STRING", [3]), ("score", "FP32", [3]), ("index", "INT32", [3])],
        _labels,
        lambda random, rows: {"logits": _floats(random, rows, 10)},
        lambda random: {"logits": _with_nan(_floats(random, 1, 10))},
        {"k": 3},
    ),
    _Row(
        "tokenize",
        "tokenize",
        [("text", "STRING", [1])],
        [("input_ids", "INT64", [-1]), ("attention_mask", "INT64", [-1])],
        _tokenizer,
        lambda random, rows: {"text": _strings([_text(random) for _ in range(rows)])},
        lambda random: {"text": _strings([_text(random) + b"\xff"])},
    ),
    _Row(
        "embedding",
        "embedding",
        [("token_embeddings", "FP32", [-1, 16]), ("attention_mask", "INT64", [-1])],
        [("embedding", "FP32", [16])],
        good=_tokens,
        bad=_bad_tokens,
    ),
    _Row(
        "table",
        "table",
        [("numbers", "FP32", [2]), ("texts", "STRING", [2])],
        [("dense", "FP32", [4]), ("categorical", "INT64", [3])],
        _table,
        _columns,
        _bad_columns,
    ),
    _Row(
        "boxes",
        "boxes",
        [("probability", "FP32", [1, -1, -1])],
        [("boxes", "FP32", [4, 4, 2]), ("scores", "FP32", [4]), ("count", "INT32", [1])],
        good=lambda random, rows: {
            "probability": np.kron(random.integers(0, 2, (_few(rows), 1, 4, 4)), np.ones((8, 8))).astype(np.float32)
        },
        bad=lambda random: {"probability": np.ones((1, 1, 0, SIDE), np.float32)},  # noqa: ARG005
        parameters={"max_boxes": 4},
    ),
    _Row(
        "ctc",
        "ctc",
        [("logits", "FP32", [-1, -1])],
        [("text", "STRING", [1]), ("score", "FP32", [1])],
        _characters,
        lambda random, rows: {"logits": random.random((_few(rows), int(random.integers(4, 30)), 5), np.float32)},
        lambda random: {"logits": random.random((1, 8, 6), np.float32)},
    ),
    _Row(
        "ocr",
        "ocr",
        [("page", "STRING", [1])],
        [("text", "STRING", [1]), ("layout", "STRING", [1])],
        _characters,
        lambda random, rows: {"page": _strings([_page(random) for _ in range(min(rows, 1))])},
        lambda random: {"page": _strings([_page(random)[:60]])},
        {"det": "ocr_det", "rec": "ocr_rec"},
        callers=12,
    ),
    _Row(
        "ocr_det",
        "onnxruntime",
        [("page", "UINT8", [-1, -1, 3])],
        [("probability", "FP32", [1, -1, -1])],
        _onnx_detector,
        follows="ocr",
    ),
    _Row(
        "ocr_rec",
        "onnxruntime",
        [("line", "UINT8", [48, -1, 3])],
        [("index", "INT32", [-1]), ("confidence", "FP32", [-1])],
        _onnx_recogniser,
        follows="ocr",
    ),
)
