"""What does one write for a backend of one's own? Four verbs; batching, isolation of errors and Triton itself are done here.

    class Length(Backend[NoParameters, Array, Array]):
        def decode(self, inputs):            # one request: Triton's inputs -> an item; refuse with BadRequest
            return inputs["text"]
        def predict(self, items):            # all requests of an execution together: items -> results, in their order
            return [np.char.str_len(item.astype("S")).astype(np.int32) for item in items]
        def encode(self, result):            # one request: a result -> Triton's outputs
            return {"length": result}

    TritonPythonModel = triton_model(Length)     # pilotlib.triton_model, at the end of the backend's model.py

The fourth verb, `set_up`, runs once per instance. With max_batch_size above 0 every array has the batch dimension first:
FP32[rows, ...]; a request may bring several rows. Strings are object arrays of `bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from pilotlib.tensors import Array
from pilotlib.told import printable, text_of

P = TypeVar("P")  # the parameters
I = TypeVar("I")  # an item: one request, decoded  # noqa: E741
R = TypeVar("R")  # a result: the answer to one item

Infer = Callable[[str, Mapping[str, Array], Sequence[str]], dict[str, Array]]
"""(model, inputs, names of wanted outputs) -> outputs; raises InferError. Safe to call from several threads."""


class BadRequest(ValueError):  # noqa: N818  it is the caller's request that is bad, and this names it
    """A request cannot be answered, through its own fault: `BadRequest("photo", "row 3 is no image")`."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(printable(f'"{field}": {why}'))
        self.field = field


class InferError(RuntimeError):
    """A model that a backend called answered with an error."""


class LateError(InferError):
    """The deadlines of all requests of this execution have passed, so a model that the backend called did not compute."""


@dataclass(frozen=True)
class NoParameters:
    """The parameters of a backend that has none."""


@dataclass(frozen=True)
class Context(Generic[P]):
    """What an instance knows when it is set up."""

    model: str
    version: int
    version_folder: Path
    """Holds the files that the service file lists (`model.files`), such as a vocabulary."""
    config: Mapping[str, Any]
    """The model's ModelConfig in Triton's JSON form."""
    parameters: P
    cores: int
    """How many CPU cores this instance may use."""
    infer: Infer
    """Calls another model of the same server (BLS), from `predict` and not before."""
    device: str = "cpu"
    """Where this instance is to run: "cpu", or "cuda:<index>" for a GPU instance of a backend that `runs_on_gpu`."""
    log: Callable[[str], None] = print
    """Writes a line into the server's log, as a warning."""
    instance: str = ""
    """The name that Triton gave this instance, as ctr_0_1: no other one of the model has it."""


class Backend(Generic[P, I, R]):
    """Base of a backend. One object per instance, used from one thread."""

    parameters: ClassVar[type] = NoParameters
    """A frozen dataclass whose fields are the parameters of config.pbtxt (pilotlib.parameters.parameter)."""

    ignores_unknown_parameters: ClassVar[bool] = False
    """Whether a parameter that the table lacks is only remarked in the log, as Triton's own backends do, or refuses the model."""

    runs_on_gpu: ClassVar[bool] = False
    """Whether GPU instances are taken; otherwise a config that asks for one (Triton's default where there is a GPU) is refused."""

    checks_shapes: ClassVar[bool] = True
    """Whether the shapes of answers must be those of config.pbtxt; otherwise they are passed on, as Triton's own backends do."""

    def set_up(self, context: Context[P]) -> None:
        """Load files, allocate buffers, run a first prediction. A ValueError or OSError refuses the model, its text is shown."""

    def decode(self, inputs: Mapping[str, Array]) -> I:
        """One request's inputs -> an item. Raise BadRequest for what is wrong with them.

        Arrays are views of Triton's memory, valid until this execution has been answered: copy what is kept for longer.
        Optional inputs that a request leaves out are absent.
        """
        raise NotImplementedError

    def predict(self, items: Sequence[I]) -> Sequence[R | BadRequest]:
        """All items of an execution -> as many results in their order; a BadRequest in place of a result is that request's answer.

        When it raises, it is called again with halves, until the item that it cannot take is alone.
        """
        raise NotImplementedError

    def encode(self, result: R) -> Mapping[str, Array]:
        """A result -> one request's outputs, shaped as config.pbtxt says, with the request's rows where the model has rows.

        Arrays may lie in buffers that the next `predict` overwrites.

        Outputs that the request did not ask for are dropped. BF16 is given, and taken, as uint16 bit patterns.
        """
        raise NotImplementedError

    def tear_down(self) -> None:
        """Free what `set_up` took, such as threads."""


def answers(
    backend: Backend[Any, Any, Any], requests: Sequence[Mapping[str, Array] | BadRequest]
) -> list[Mapping[str, Array] | BaseException]:
    """One answer per request, in their order: its outputs, or the error that is its own and nobody else's.

    A BadRequest in place of a request (it could not even be read) is passed through. SystemExit is an error like any other;
    KeyboardInterrupt and GeneratorExit are raised.
    """
    found: list[Mapping[str, Array] | BaseException] = [MISSING] * len(requests)
    places, items = [], []
    for place, request in enumerate(requests):
        if isinstance(request, BadRequest):
            found[place] = request
            continue
        try:
            items.append(backend.decode(request))
        except NOT_A_FAULT:
            raise
        except BaseException as error:  # noqa: BLE001  this request's error is its answer; its mates go on
            found[place] = error
            continue
        places.append(place)
    if items:
        _predict(backend, places, items, found)
    return found


MISSING = RuntimeError("the backend gave no answer")
NOT_A_FAULT = (KeyboardInterrupt, GeneratorExit)


def told(error: BaseException) -> str:
    """What the client is told of an error: a refusal's own words, otherwise the type of the fault and its text."""
    text = text_of(error)
    return text if isinstance(error, (BadRequest, InferError)) else f"{type(error).__name__}: {text}"


def forget_frames(error: BaseException | None) -> None:
    """Break the circle of an error that is kept in a list and the frames of its traceback, which hold that list.

    They hold the requests of the whole execution too, and after `settle` the garbage collector comes rarely.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _predict(
    backend: Backend[Any, Any, Any],
    places: Sequence[int],
    items: Sequence[Any],
    found: list[Mapping[str, Array] | BaseException],
) -> None:
    try:
        results = backend.predict(items)
        if len(results) != len(items):
            raise RuntimeError(f"predict gave {len(results)} results for {len(items)} items")
    except NOT_A_FAULT:
        raise
    except BaseException as error:  # noqa: BLE001  one item must not spoil its mates: halve until it is alone
        if len(items) == 1:
            found[places[0]] = error
            return
        middle = len(items) // 2
        # NOTE: encoded before the second half overwrites the buffers of the first, so these answers are copied.
        _predict(backend, places[:middle], items[:middle], found)
        for place in places[:middle]:
            found[place] = _copied(found[place])
        _predict(backend, places[middle:], items[middle:], found)
        return
    for place, result in zip(places, results, strict=True):
        if isinstance(result, BadRequest):
            found[place] = result
            continue
        try:
            found[place] = backend.encode(result)
        except NOT_A_FAULT:
            raise
        except BaseException as error:  # noqa: BLE001  as above
            found[place] = error


def _copied(answer: Any) -> Any:
    """Of what an answer should be; whoever sends it says what is wrong with another thing."""
    if not isinstance(answer, Mapping):
        return answer
    return {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in answer.items()}
