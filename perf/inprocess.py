"""How fast is the work without a server? ONNX Runtime alone, or a loop around it, in a process pinned to one core.

with InProcess(model_file, core=0) as alone:
    alone.prepare([inputs])
    rows, cpu_s = alone.run(seconds=2.0)
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

THREADS = 1

Work = Callable[[Any, dict[str, npt.NDArray[Any]]], object]
"""(session, batch): what is done with a batch."""


def session(model_file: Path, threads: int = THREADS) -> Any:
    """An ONNX Runtime session on the CPU with that many threads inside an operator."""
    # Imported here: a process must be pinned before ONNX Runtime starts its threads. Its package has no type hints.
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model_file), options, providers=["CPUExecutionProvider"])


def run_tensors(model: Any, batch: Mapping[str, npt.NDArray[Any]]) -> object:
    """The model alone: a batch holds its inputs."""
    return model.run(None, batch)


class InProcess:
    """One child process with the model loaded; it ends with the block.

    `work(session, batch)` is what is done with a batch: a function of a module, for the child imports it.
    """

    def __init__(self, model_file: Path, core: int, work: Work = run_tensors) -> None:
        self._pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(str(model_file), core, work),
        )

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def prepare(self, batches: Sequence[Mapping[str, npt.NDArray[Any]]]) -> None:
        """Hand over the batches (input name -> rows) that `run` takes in turn, and run each once."""
        self._pool.submit(_prepare, [dict(batch) for batch in batches]).result()

    def run(self, seconds: float) -> tuple[int, float]:
        """(rows, CPU seconds) of running the batches in turn for that long."""
        return self._pool.submit(_run, seconds).result()


_session: Any = None
_work: Work = run_tensors
_turns: Iterator[tuple[dict[str, npt.NDArray[Any]], int]] = iter(())


def _start(model_file: str, core: int, work: Work) -> None:
    global _session, _work
    os.sched_setaffinity(0, [core])
    _work = work
    _session = session(Path(model_file))


def _prepare(batches: list[dict[str, npt.NDArray[Any]]]) -> None:
    global _turns
    for batch in batches:
        _work(_session, batch)
    _turns = itertools.cycle([(batch, len(next(iter(batch.values())))) for batch in batches])


def _run(seconds: float) -> tuple[int, float]:
    done = 0
    start, cpu_start = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        batch, rows = next(_turns)
        _work(_session, batch)
        done += rows
    return done, time.process_time() - cpu_start
