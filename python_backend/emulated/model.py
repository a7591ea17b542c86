"""Backend "emulated": takes the time that an accelerator would take, and computes nothing. For experiments that a CPU cannot show.

`row` FP32[input_size] -> `emulated` FP32[output_size], which repeats the first number of the row. An execution lasts what the
curve (a JSON file of the version folder: pilotlib.curve) says for its rows, drawn with its spread, from the moment when its
requests have been read; meanwhile the instance sleeps and the CPU is free. Each instance is a device of its own, or all of them
take turns on one. What is measured with it is emulated, and is called so wherever it is shown.
"""

from __future__ import annotations

import ctypes
import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pilotlib import config_tensors
from pilotlib.curve import Draws, read
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context

PR_SET_TIMERSLACK = 29  # prctl(2)
SLACK_NS = 1000  # the kernel's default of 50 us would make every execution so much longer
SPIN_S = 20e-6  # what a sleep comes late even so, at rest


@dataclass(frozen=True)
class Parameters:
    """What the backend emulated reads."""

    curve: str = parameter("curve.json", "file with the times, in the version folder")
    seed: int = parameter(
        0,
        "of the spread; an instance draws the same times in the same order after every load, another one other times",
        minimum=0,
    )
    input_size: int = parameter(1, "numbers in a row, so that requests may be as large as the real model's", minimum=1)
    output_size: int = parameter(1, "numbers in an answer's row", minimum=1)
    one_device: bool = parameter(False, "all instances share one device: one executes at a time")


class Emulated(Backend[Parameters, Array, Array]):
    """Sleeps."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Read the curve; say in the log that this model is emulated, and after whom."""
        asked = context.parameters
        config_tensors.check(
            context.config,
            {"row": ("TYPE_FP32", (asked.input_size,))},
            {"emulated": ("TYPE_FP32", (asked.output_size,))},
        )
        place = context.version_folder / asked.curve
        curve = read(place)
        self._device = place.open("rb") if asked.one_device else None  # a file that all instances have
        self._is_batched = context.config.get("max_batch_size", 0) > 0
        self._size = asked.output_size
        self._draws = Draws(curve, f"{asked.seed} {context.instance}")
        context.log(f"is emulated: its executions last as those of {curve.name} ({curve.source}) and compute nothing")
        _sleep_exactly()

    def decode(self, inputs: Mapping[str, Array]) -> Array:
        """The rows [rows, input_size], copied as a transfer to a device would."""
        rows = inputs["row"]
        return np.array(rows if self._is_batched else rows[np.newaxis])

    def predict(self, items: Sequence[Array]) -> Sequence[Array | BadRequest]:
        """Wait for as long as all rows of all requests take together."""
        with self._turn():
            began = time.perf_counter()
            _sleep_until(began + self._draws.next_us(sum(len(item) for item in items)) / 1e6)
        return [np.repeat(item[:, :1], self._size, axis=1) for item in items]

    def encode(self, result: Array) -> Mapping[str, Array]:
        """The output."""
        return {"emulated": result if self._is_batched else result[0]}

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the device, when it is shared; the kernel gives it back when an instance dies."""
        if self._device is not None:
            fcntl.flock(self._device, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if self._device is not None:
                fcntl.flock(self._device, fcntl.LOCK_UN)


def _sleep_exactly() -> None:
    """Let this thread, which also executes, sleep to the microsecond. Where the kernel refuses, times are 50 us longer."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.perf_counter() < moment:
        pass


TritonPythonModel = triton_model(Emulated)
