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
