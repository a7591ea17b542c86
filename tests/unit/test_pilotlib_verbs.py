from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pilotlib.verbs import Backend, BadRequest, InferError, answers, forget_frames, told


class Picky(Backend[Any, Any, Any]):
    """Refuses negative numbers in `predict`, by an error that has a cause."""

    def decode(self, inputs: Mapping[str, Any]) -> Any:
        return inputs["x"]

    def predict(self, items: Any) -> Any:
        if any((item < 0).any() for item in items):
            try:
                raise ValueError("negative")
            except ValueError as error:
                raise RuntimeError("cannot") from error
        return items

    def encode(self, result: Any) -> Mapping[str, Any]:
        return {"y": result}


class Watched(np.ndarray[Any, Any]):
    """An array that can be weakly referenced."""


def test_an_error_that_was_answered_does_not_keep_the_requests_of_its_execution() -> None:
    """Its traceback's frames hold them, and themselves the error: without the collector's help none of it would go."""
    gc.collect()
    gc.disable()
    try:
        arrays = [np.full(3, value, np.float32).view(Watched) for value in (1, -1, 2)]
        seen = [weakref.ref(array) for array in arrays]
        requests: list[Any] = [{"x": array} for array in arrays]
        del arrays
        found = answers(Picky(), requests)
        (error,) = [answer for answer in found if isinstance(answer, Exception)]
        assert str(error) == "cannot"
        assert [isinstance(answer, Exception) for answer in found] == [False, True, False]
        forget_frames(error)
        del found, requests, error
        assert [ref() for ref in seen] == [None, None, None]
    finally:
        gc.enable()


class Quitting(Backend[Any, Any, Any]):
    """Raises in the verb that a request names."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def decode(self, inputs: Mapping[str, Any]) -> Any:
        return self._passed("decode", inputs["at"])

    def predict(self, items: Any) -> Any:
        return [self._passed("predict", item) for item in items]

    def encode(self, result: Any) -> Mapping[str, Any]:
        return {"y": self._passed("encode", result)}

    def _passed(self, verb: str, item: Any) -> Any:
        if item.item() == verb:
            raise self.kind(3)
        return item


def asked(*verbs: str) -> list[dict[str, Any]]:
    return [{"at": np.array(verb)} for verb in verbs]


@pytest.mark.parametrize("at", ["decode", "predict", "encode"])
def test_an_exit_is_the_fault_of_its_request_alone(at: str) -> None:
    found = answers(Quitting(SystemExit), asked("", at, "", ""))
    assert [isinstance(answer, SystemExit) for answer in found] == [False, True, False, False]
    error = found[1]
    assert isinstance(error, BaseException)
    assert told(error) == "SystemExit: 3"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("at", ["decode", "predict", "encode"])
def test_interrupts_end_the_execution(kind: type[BaseException], at: str) -> None:
    with pytest.raises(kind):
        answers(Quitting(kind), asked("", at))


def test_what_is_told_of_an_error_can_be_sent() -> None:
    assert told(BadRequest("x", "caf\udcff\x00")) == r'"x": caf\udcff\x00'
    assert told(InferError("away\x00")) == r"away\x00"
    assert told(RuntimeError("caf\udcff")) == r"RuntimeError: caf\udcff"
