"""Models that must not be let through, each made of a good one.

    write = BAD["nan"].write
    write(Path("models/ctr/build/model.onnx"), Path("bad.onnx"), rows)

A good model is one whose first output is a float [batch, n]: probabilities or scores. `rows` are real inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Arrays = Mapping[str, npt.NDArray[Any]]
Write = Callable[[Path, Path, Arrays], None]

BROKEN_PART = 0.03  # of the rows that become NaN
FACTOR = 3
FILES = "Nothing was changed"  # says who has only read files
BESIDE = 1e-3  # between the inputs of copies: ONNX Runtime computes equal ones once


@dataclass(frozen=True)
class Bad:
    """A way to be wrong. `steps` are those of `tritonpilot swap` that may find it, FILES before the first of them."""

    what: str
    write: Write
    steps: tuple[str, ...]


def good(source: Path, target: Path, _: Arrays) -> None:
    """As a model that was trained anew: answers a little apart."""
    model, output = _opened(source)
    _append(model, output, [helper.make_node("Mul", ["was", "factor"], [output])], factor=np.float32(0.99))
    onnx.save(model, str(target))


def wrong_shape(source: Path, target: Path, _: Arrays) -> None:
    """Every answer twice."""
    model, output = _opened(source)
    _append(model, output, [helper.make_node("Concat", ["was", "was"], [output], axis=1)])
    dims = _value(model, output).type.tensor_type.shape.dim
    dims[1].dim_value *= 2
    onnx.save(model, str(target))


def nan(source: Path, target: Path, rows: Arrays) -> None:
    """NaN for the rows with the highest answers, a few in a hundred."""
    model, output = _opened(source)
    answers = _answers(source, rows, output).max(axis=1)
    edge = np.float32(np.quantile(answers, 1 - BROKEN_PART))
    nodes = [
        helper.make_node("Sub", ["edge", "was"], ["below"]),
        helper.make_node("Sqrt", ["below"], ["root"]),
        helper.make_node("Mul", ["root", "zero"], ["nothing"]),
        helper.make_node("Add", ["was", "nothing"], [output]),
    ]
    _append(model, output, nodes, edge=edge, zero=np.float32(0))
    onnx.save(model, str(target))


def swapped_classes(source: Path, target: Path, _: Arrays) -> None:
    """Yes for no; where there are several classes, each for its neighbour."""
    model, output = _opened(source)
    columns = _value(model, output).type.tensor_type.shape.dim[1].dim_value
    if columns == 1:
        _append(model, output, [helper.make_node("Sub", ["one", "was"], [output])], one=np.float32(1))
    else:
        places = np.roll(np.arange(columns), 1)
        _append(model, output, [helper.make_node("Gather", ["was", "places"], [output], axis=1)], places=places)
    onnx.save(model, str(target))


def slow(source: Path, target: Path, _: Arrays) -> None:
    """The mean of three copies: right, and three times the work."""
    model, output = _opened(source)
    graph = model.graph
    floats = [each.name for each in graph.input if each.type.tensor_type.elem_type == TensorProto.FLOAT]
    nodes, added = list(graph.node), []
    weights = {each.name for each in graph.initializer}
    for copy in range(1, FACTOR):
        graph.initializer.append(numpy_helper.from_array(np.array(BESIDE * copy, np.float32), f"beside.{copy}"))
        renamed = {name: f"twin{copy}.{name}" for name in floats}
        added += [helper.make_node("Add", [name, f"beside.{copy}"], [new]) for name, new in renamed.items()]
        renamed |= {name: f"twin{copy}.{name}" for node in nodes for name in node.output if name}
        for node in nodes:
            twin = onnx.NodeProto()
            twin.CopyFrom(node)
            twin.name = f"twin{copy}.{node.name}" if node.name else ""
            twin.input[:] = [renamed.get(name, name) if name not in weights else name for name in node.input]
            twin.output[:] = [renamed.get(name, name) for name in node.output]
            added.append(twin)
    graph.node.extend(added)
    _append(
        model, output, [helper.make_node("Mean", ["was", *(f"twin{copy}.was" for copy in range(1, FACTOR))], [output])]
    )
    onnx.save(model, str(target))


def corrupt(source: Path, target: Path, _: Arrays) -> None:
    """A copy that broke off."""
    content = source.read_bytes()
    target.write_bytes(content[: len(content) * 2 // 3])


def garbled(source: Path, target: Path, _: Arrays) -> None:
    """A file of the right size that still can be read, with other weights: bits that fell over."""
    model = onnx.load(str(source))
    largest = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    bits = np.frombuffer(largest.raw_data, np.uint8).copy()
    np.random.default_rng(0).shuffle(bits)
    largest.raw_data = bits.tobytes()
    onnx.save(model, str(target))


def fails_in_warmup(source: Path, target: Path, _: Arrays) -> None:
    """Answers single rows alone, and the model's warmup asks for more."""
    model, output = _opened(source)
    columns = _value(model, output).type.tensor_type.shape.dim[1].dim_value
    shape = np.array([1, columns], np.int64)
    _append(model, output, [helper.make_node("Reshape", ["was", "shape"], [output])], shape=shape)
    onnx.save(model, str(target))


#: Every way, by the name of its case.
BAD: Mapping[str, Bad] = {
    "wrong_shape": Bad("answers of another shape", wrong_shape, (FILES,)),
    "nan": Bad("NaN for 3 of 100 rows", nan, ("golden",)),
    "swapped_classes": Bad("classes swapped", swapped_classes, ("golden",)),
    "slow": Bad("three times the work", slow, ("latency",)),
    "corrupt": Bad("a file that breaks off", corrupt, (FILES,)),
    "garbled": Bad("a file whose bytes were shuffled", garbled, ("golden",)),
    "fails_in_warmup": Bad("fails at the batch size of its warmup", fails_in_warmup, ("load", "warm up")),
}


def _opened(source: Path) -> tuple[onnx.ModelProto, str]:
    """The model, whose first output is called `was` inside, and that output's name."""
    model = onnx.load(str(source))
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["was" if name == output else name for name in node.output]
        node.input[:] = ["was" if name == output else name for name in node.input]
    return model, output


def _append(model: onnx.ModelProto, output: str, nodes: list[onnx.NodeProto], **constants: Any) -> None:
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    assert any(output in node.output for node in nodes)
    model.graph.node.extend(nodes)


def _value(model: onnx.ModelProto, output: str) -> onnx.ValueInfoProto:
    found: onnx.ValueInfoProto = next(each for each in model.graph.output if each.name == output)
    return found


def _answers(source: Path, rows: Arrays, output: str) -> npt.NDArray[Any]:
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    (found,) = session.run([output], {name: array for name, array in rows.items() if name in names})
    answers: npt.NDArray[Any] = found
    return answers
