from __future__ import annotations

from typing import Any

import pytest

from pilotlib.signature import ContradictionError, TensorSpec
from pilotlib.tensors import DTYPES_BY_CONFIG
from pilotlib.torch_config import check, check_program, inputs_of

X = {"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}
Y = {"name": "y", "data_type": "TYPE_FP32", "dims": ["1"]}
FP32 = DTYPES_BY_CONFIG["TYPE_FP32"]


def config(**more: Any) -> dict[str, Any]:
    return {"name": "net", "max_batch_size": 8, "input": [X], "output": [Y], **more}


def test_an_ordinary_config_is_accepted() -> None:
    check(config())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"input": []}, "input: a PyTorch file does not tell them"),
        ({"output": []}, "output: a PyTorch file does not tell them"),
        ({"input": [{**X, "data_type": "TYPE_STRING"}]}, 'input "x": PyTorch has no tensors of strings.*tokenizer'),
        ({"output": [{**Y, "data_type": "TYPE_BF16"}]}, 'output "y": .* does not carry TYPE_BF16'),
        ({"input": [{**X, "data_type": "TYPE_UINT16"}]}, "does not carry TYPE_UINT16"),
        ({"input": [{**X, "optional": True}]}, "no optional arguments"),
        ({"input": [{**X, "allow_ragged_batch": True}]}, "allow_ragged_batch"),
        ({"batch_input": [{}]}, "batch_input"),
        ({"sequence_batching": {"state": [{}]}}, "implicit state"),
        ({"platform": "torch_aoti"}, "AOT Inductor"),
    ],
)
def test_what_the_backend_does_not_do_is_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ContradictionError, match=says):
        check(config(**more))


def test_sequence_controls_are_inputs_too() -> None:
    controls = [{"name": "START__1", "control": []}]
    assert inputs_of(config(sequence_batching={"control_input": controls})) == ("x", "START__1")


def test_a_program_with_wider_dims_fits() -> None:
    check_program(config(), [(X, TensorSpec("x", FP32, (-1, -1))), (Y, TensorSpec("y", FP32, (-1, 1)))])
    check_program(config(), [({**Y, "reshape": {"shape": []}}, TensorSpec("y", FP32, (-1,)))])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (TensorSpec("x", FP32, (-1, 4)), r'"x" dims: the config says \[3\], the model says \[4\] \(without'),
        (TensorSpec("x", FP32, (-1, 3, 1)), r"the model says \[3, 1\]"),
        (TensorSpec("x", DTYPES_BY_CONFIG["TYPE_INT64"], (-1, 3)), "the model says TYPE_INT64"),
        (TensorSpec("x", FP32, (2, 3)), "export it with dynamic_shapes"),
    ],
)
def test_a_program_that_contradicts_is_named(spec: TensorSpec, says: str) -> None:
    with pytest.raises(ContradictionError, match=says):
        check_program(config(), [(X, spec)])
