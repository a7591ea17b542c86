from __future__ import annotations

from typing import Any

import pytest

from pilotlib.signature import ContradictionError, Signature, TensorSpec, check, complete
from pilotlib.tensors import DTYPES_BY_CONFIG

FP32 = DTYPES_BY_CONFIG["TYPE_FP32"]
BATCHED = Signature((TensorSpec("x", FP32, (-1, 3)),), (TensorSpec("y", FP32, (-1, -1)),))
FIXED = Signature((TensorSpec("x", FP32, (2, 3)),), (TensorSpec("y", FP32, (2,)),))


def config(**more: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
        **more,
    }


def test_a_batchable_model_gets_tritons_default_batch_and_dynamic_batching() -> None:
    said: dict[str, Any] = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    complete(said, BATCHED)
    assert said == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    check(said, BATCHED)


def test_what_is_said_stays_when_the_rest_is_completed() -> None:
    said: dict[str, Any] = {"name": "m", "max_batch_size": 64, "dynamic_batching": {"priority_levels": 2}, "output": []}
    complete(said, BATCHED)
    assert (said["max_batch_size"], said["dynamic_batching"]) == (64, {"priority_levels": 2})


def test_a_full_config_is_not_completed() -> None:
    said = config(max_batch_size=0)
    complete(said, BATCHED)
    assert said == config(max_batch_size=0)


def test_one_value_per_row_and_scalars_are_written_as_dims_1() -> None:
    said: dict[str, Any] = {"max_batch_size": 2}
    complete(said, Signature((TensorSpec("x", FP32, (-1,)),), (TensorSpec("y", FP32, (-1, 1)),)))
    assert said["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}]
    scalar = Signature((TensorSpec("x", FP32, ()),), (TensorSpec("y", FP32, ()),))
    said = {"max_batch_size": 0}
    complete(said, scalar)
    assert said["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}]
    check(said, scalar)


def test_max_batch_size_needs_a_batch_dimension() -> None:
    for act in (lambda: complete({"max_batch_size": 4}, FIXED), lambda: check(config(), FIXED)):
        with pytest.raises(
            ContradictionError, match=r'max_batch_size: the config says \d, .* not dynamic in "x" \[2, 3\]'
        ):
            act()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": [{"name": "q", "data_type": "TYPE_FP32", "dims": [3]}]}, 'the config names "q", the model has "x"'),
        ({"input": [{"name": "q", "data_type": "TYPE_FP32", "dims": [3]}]}, 'the model needs "x" (TYPE_FP32 [-1, 3])'),
        (
            {"input": [{"name": "x", "data_type": "TYPE_INT8", "dims": [3]}]},
            'input "x" data_type: the config says TYPE_INT8, the model says TYPE_FP32',
        ),
        (
            {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]},
            'input "x" dims: the config says [4], the model says [3] (without the batch dimension)',
        ),
        (
            {"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [5]}]},
            'output "y" dims: the config says [5], the model says [-1]',
        ),
        (
            {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3], "allow_ragged_batch": True}]},
            "allow_ragged_batch",
        ),
        ({"sequence_batching": {"state": [{"input_name": "s"}]}}, "sequence_batching.state"),
    ],
)
def test_a_contradiction_names_the_field_and_both_sides(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ContradictionError) as caught:
        check(config(**change), BATCHED)
    assert says in str(caught.value)


def test_sequence_controls_count_as_inputs() -> None:
    two = Signature((*BATCHED.inputs, TensorSpec("START", FP32, (-1, 1))), BATCHED.outputs)
    check(config(sequence_batching={"control_input": [{"name": "START"}]}), two)


def test_an_always_empty_dim_is_written_as_dynamic() -> None:
    empty = Signature((TensorSpec("x", FP32, (3, 0)),), (TensorSpec("y", FP32, (3, 0)),))
    said: dict[str, Any] = {"max_batch_size": 0}
    complete(said, empty)
    assert said["input"][0]["dims"] == said["output"][0]["dims"] == [3, -1]
    check(said, empty)
