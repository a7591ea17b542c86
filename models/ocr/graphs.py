"""How do the published networks become what Triton serves well? Pixels go in as bytes, best classes come out.

    det = with_pixels_in(onnx.load(path), DETECTOR)       # `page` UINT8[b,h,w,3] -> `probability` FP32[b,1,h,w]
    rec = with_best_out(with_pixels_in(onnx.load(path), RECOGNISER))     # `line` UINT8[b,48,w,3] -> `index`, `confidence`

Between the models of a pipeline tensors are copied. A page as bytes is a quarter of one in FP32, and the best class of a step is
8 bytes where the probabilities of 6,906 classes are 27 kB. Normalisation inside the graph also cannot differ from training.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OLD_INPUT, OLD_OUTPUT = "x", "fetch_name_0"


class Look(NamedTuple):
    """How a network wants to see an image: blue, green, red, (x / 255 - mean) / std."""

    input: str
    """Name of the new input"""
    height: int | str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


# As PaddleOCR's configurations of the two networks say; they read images by OpenCV, so the channels are BGR.
DETECTOR = Look("page", "height", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RECOGNISER = Look("line", 48, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def with_pixels_in(model: onnx.ModelProto, look: Look) -> onnx.ModelProto:
    """The model with an input UINT8[b,h,w,3], RGB, in place of its normalised FP32[b,3,h,w]. The network itself is untouched."""
    graph = model.graph
    nodes = [
        helper.make_node("Cast", [look.input], ["pilot_floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["pilot_floats"], ["pilot_channels"], perm=[0, 3, 1, 2]),
        # One convolution of 1 x 1 swaps the channels and normalises them.
        helper.make_node("Conv", ["pilot_channels", "pilot_scale", "pilot_shift"], [OLD_INPUT]),
    ]
    mean, std = np.array(look.mean), np.array(look.std)
    scale = np.zeros((3, 3, 1, 1), np.float32)
    scale[[0, 1, 2], [2, 1, 0], 0, 0] = 1 / (255 * std)
    constants = [
        numpy_helper.from_array(scale, "pilot_scale"),
        numpy_helper.from_array((-mean / std).astype(np.float32), "pilot_shift"),
    ]
    shape: list[str | int | None] = ["batch", look.height, "width", 3]
    _replace(graph.node, [*nodes, *graph.node])
    graph.initializer.extend(constants)
    _replace(graph.input, [helper.make_tensor_value_info(look.input, TensorProto.UINT8, shape)])
    return model


def with_name_out(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """A detector whose output FP32[b,1,h,w] is called `name`."""
    for node in model.graph.node:
        for place, output in enumerate(node.output):
            if output == OLD_OUTPUT:
                node.output[place] = name
    shape: list[str | int | None] = ["batch", 1, "height", "width"]
    _replace(model.graph.output, [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)])
    return _checked(model)


def with_best_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """A recogniser with outputs `index` INT32[b,t] and `confidence` FP32[b,t] in place of its probabilities FP32[b,t,c]."""
    graph = model.graph
    graph.node.extend(
        [
            helper.make_node("ArgMax", [OLD_OUTPUT], ["pilot_index"], axis=2, keepdims=0),
            helper.make_node("Cast", ["pilot_index"], ["index"], to=TensorProto.INT32),
            helper.make_node("ReduceMax", [OLD_OUTPUT], ["confidence"], axes=[2], keepdims=0),
        ]
    )
    outputs = (("index", TensorProto.INT32), ("confidence", TensorProto.FLOAT))
    _replace(graph.output, [helper.make_tensor_value_info(name, code, ["batch", "steps"]) for name, code in outputs])
    return _checked(model)


def classes(model: onnx.ModelProto) -> int:
    """How many classes the published recogniser tells apart."""
    return int(model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value)


def characters(model: onnx.ModelProto) -> list[str]:
    """What the classes of the published recogniser spell, from class 1 on; class 0 is the blank, the last one the space."""
    listed = next(entry.value for entry in model.metadata_props if entry.key == "character")
    return [*listed.split("\n"), " "]


def _checked(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.value_info[:]  # shapes that the exporter noted under names of its own
    onnx.checker.check_model(model, full_check=True)
    return model


def _replace(field: object, items: list[object]) -> None:
    del field[:]  # type: ignore[attr-defined]
    field.extend(items)  # type: ignore[attr-defined]
