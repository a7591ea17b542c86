from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from pilotlib.verbs import Backend, answers, forget_frames


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
