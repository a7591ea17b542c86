from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib.instance import AnswerError, Outputs, cores_of_instance, set_up
from pilotlib.parameters import ParameterError, parameter
from pilotlib.verbs import Backend, Context

CONFIG = {
    "max_batch_size": 1,
    "input": [],
    "output": [
        {"name": "label", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "score", "data_type": "TYPE_FP32", "dims": [1]},
    ],
}


@dataclass(frozen=True)
class Table:
    k: int = parameter(5, "how many", minimum=1)


class Remembering(Backend[Table, Any, Any]):
    parameters = Table

    def set_up(self, context: Context[Table]) -> None:
        self.context = context


@dataclass(frozen=True)
class MoreThanTritons(Table):
    pilot_shade: str = parameter("light", "what Triton's own backend does not have")


class Tolerant(Remembering):
    parameters = MoreThanTritons
    ignores_unknown_parameters = True


def make(backend_class: type[Remembering], **parameters: str) -> Any:
    config = {**CONFIG, "parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    return set_up(
        backend_class, config, model="m", version=3, version_folder=Path("there"), infer=lambda *_: {}, device="cuda:1"
    )


def test_a_backend_is_given_its_context() -> None:
    backend, common, remarks = make(Remembering, k="2", pilot_waker="off")
    context = backend.context
    assert (context.model, context.version, context.parameters, context.device) == ("m", 3, Table(2), "cuda:1")
    assert (common.pilot_waker, remarks) == ("off", ())


def test_unknown_parameters_are_refused_or_remarked_as_the_backend_wants() -> None:
    with pytest.raises(ParameterError, match='"kk"'):
        make(Remembering, kk="2")
    assert '"kk" is not known' in make(Tolerant, kk="2")[2][0]
    assert '"pilot_new" is not known' in make(Remembering, pilot_new="2")[2][0]


def test_a_parameter_with_the_common_prefix_can_be_a_backends_own() -> None:
    backend, common, remarks = make(Tolerant, pilot_shade="dark", pilot_waker="off")
    assert (backend.context.parameters.pilot_shade, common.pilot_waker, remarks) == ("dark", "off", ())


def test_instances_share_the_cores() -> None:
    assert cores_of_instance({"instance_group": [{"count": 10**6}]}) == 1
    assert cores_of_instance({}) >= 1


def test_the_wanted_outputs_are_picked_and_strings_become_objects() -> None:
    outputs = Outputs(CONFIG)
    answer = {"label": np.array([["é"]]), "score": np.ones((1, 1), np.float32), "more": np.ones(1)}
    found = outputs.checked(answer, outputs.names)
    assert list(found) == ["label", "score"]
    assert found["label"].dtype == object
    assert found["label"].tolist() == [["é".encode()]]
    assert list(outputs.checked(answer, ["score"])) == ["score"]


def test_an_answer_that_the_config_does_not_promise_is_a_fault_of_the_backend() -> None:
    outputs = Outputs(CONFIG)
    with pytest.raises(AnswerError, match='no output "score", but: label'):
        outputs.checked({"label": np.array([[b"a"]])}, outputs.names)
    with pytest.raises(AnswerError, match='"score" as float64, its config says TYPE_FP32'):
        outputs.checked({"score": np.ones((1, 1))}, ["score"])


def shaped(*dims: int, rows: int = 8, reshape: list[int] | None = None, checks_shapes: bool = True) -> Outputs:
    more = {} if reshape is None else {"reshape": {"shape": reshape}}
    entry = {"name": "y", "data_type": "TYPE_FP32", "dims": [str(dim) for dim in dims], **more}
    config = {"max_batch_size": rows, "input": [{"name": "x", "dims": [1]}], "output": [entry]}
    return Outputs(config, checks_shapes=checks_shapes)


def answered(outputs: Outputs, shape: tuple[int, ...]) -> tuple[int, ...]:
    inputs: Any = {"START": np.ones((1,)), "x": np.ones((2, 1))}
    return outputs.checked({"y": np.ones(shape, np.float32)}, ["y"], outputs.rows_of(inputs))["y"].shape


@pytest.mark.parametrize(
    ("outputs", "shape"),
    [
        (shaped(3), (2, 3)),
        (shaped(-1, 3), (2, 7, 3)),
        (shaped(), (2,)),
        (shaped(3, rows=0), (3,)),
        (shaped(-1, 3, rows=0), (5, 3)),
        (shaped(1, reshape=[]), (2,)),
        (shaped(1, reshape=[]), (2, 1)),
        (shaped(4, reshape=[2, 2]), (2, 2, 2)),
        (shaped(3, checks_shapes=False), (9,)),
    ],
)
def test_shapes_that_the_config_promises_pass(outputs: Outputs, shape: tuple[int, ...]) -> None:
    assert answered(outputs, shape) == shape


@pytest.mark.parametrize(
    ("outputs", "shape", "says"),
    [
        (shaped(3), (4, 3), "of shape [4, 3] for a request of 2 rows, expected is [2, 3]: its rows and then the dims"),
        (shaped(3), (0, 3), "of shape [0, 3] for a request of 2 rows, expected is [2, 3]"),
        (shaped(3), (2, 6), "of shape [2, 6] for a request of 2 rows, expected is [2, 3]"),
        (shaped(3), (2,), "of shape [2] for"),
        (shaped(3), (), "of shape [] for"),
        (shaped(-1, 3), (2, 7, 4), "expected is [2, -1, 3]"),
        (shaped(-1, 3), (2, 3), "expected is [2, -1, 3]"),
        (shaped(3, rows=0), (4,), "of shape [4], expected is [3]: the dims of config.pbtxt"),
        (shaped(4, reshape=[2, 2]), (2, 2, 3), "expected is [2, 2, 2]"),
    ],
)
def test_a_shape_that_the_config_does_not_promise_is_named(outputs: Outputs, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(AnswerError, match='the backend made output "y" of shape') as caught:
        answered(outputs, shape)
    assert says in str(caught.value)


def test_rows_are_checked_only_where_they_are_known() -> None:
    outputs = shaped(3)
    assert outputs.rows_of({"START": np.ones((1,))}) == -1
    assert outputs.checked({"y": np.ones((5, 3), np.float32)}, ["y"])["y"].shape == (5, 3)
    assert shaped(3, rows=0).rows_of({"x": np.ones((2, 1))}) == -1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "no outputs by name, but a value of type NoneType"),
        ([np.ones(1)], "no outputs by name, but a value of type list"),
        ({"y": [[1.0]]}, 'output "y" as list, not as a numpy array'),
        ({"y": np.float32(1)}, 'output "y" as float32, not as a numpy array'),
        ({3: np.ones(1)}, 'no output "y", but: 3'),
    ],
)
def test_an_answer_that_is_no_answer_is_named(answer: Any, says: str) -> None:
    with pytest.raises(AnswerError, match=says):
        shaped(3).checked(answer, ["y"], 1)
