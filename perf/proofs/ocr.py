"""Does ocr read three pages whose text is known, and what does it cost to call two models from a driver?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import tritonclient.http as httpclient

from models.ocr import data, export
from perf import efficiency
from perf.closed_loop import ClosedLoop
from perf.frame import PROJECT, Bench, Outcome
from perf.inprocess import InProcess
from perf.open_loop import Request, outputs_of
from perf.subjects import Arrays, Served, cut, part, sample_rows, services, serving
from pilotlib.pages import read_page
from pilotlib.reading import Reader, ReadingRules

BUILD = PROJECT / "models" / "ocr" / "build"
CALLERS = 4
IN_FLIGHT = 6
TURN_S = 1.5  # some 6 pages
TURNS, QUICK_TURNS = 8, 2


def ocr_lines(bench: Bench) -> Outcome:
    """Share of the expected lines that are read within the documented tolerance: the least of gRPC, HTTP and many callers at once.

    The details compare the CPU time of a page with that of the same code in one process.
    """
    pages = data.pages()
    rows = {"page": np.array([[page.image] for page in pages], np.object_)}
    requests = [Request("ocr", cut(rows, i, 1)) for i in range(len(pages))]
    with serving(bench, ["ocr"], is_pinned=True) as served:
        bench.say("reading three pages over gRPC, over HTTP, and in requests at the same time")
        found = {
            "grpc": _texts(outputs_of(served.sender.send(requests, in_flight=1))),
            "http": _over_http(served, rows),
        }
        crowd = _texts(outputs_of(served.sender.send(requests * IN_FLIGHT, in_flight=IN_FLIGHT * len(pages))))
        cost = _cost(bench, served)
        served.server.check_alive()
    read = {how: [_lines_read(*each) for each in zip(pages, texts, strict=True)] for how, texts in found.items()}
    expected = [len(page.lines) for page in pages]
    shares = [sum(each) / sum(expected) for each in read.values()]
    return Outcome(
        min(shares),
        spread=max(shares) - min(shares),
        rounds=len(shares),
        ok=found["http"] == found["grpc"] and crowd == found["grpc"] * IN_FLIGHT,
        details={
            "pages": {page.name: len(page.lines) for page in pages},
            "lines_read": read,
            "tolerance": f"one edit per {data.TOLERANCE} characters of a line, blanks collapsed; every line in its place",
            "lines_without_any_difference": _equal_lines(pages, found["grpc"]),
            "edits": sum(
                data.edits(want, got)
                for page, text in zip(pages, found["grpc"], strict=True)
                for want, got in zip(page.lines, text.split("\n"), strict=False)
            ),
            "characters": sum(len(line) for page in pages for line in page.lines),
            "same_text_for_callers_at_once": crowd == found["grpc"] * IN_FLIGHT,
            "cost": cost,
        },
    )


def read_alone(recogniser: Any, batch: dict[str, npt.NDArray[Any]]) -> list[str]:  # noqa: ARG001  InProcess gives one model
    """What the service does with pages, in one process without a server."""
    pages = [read_page(page, 10**8, 10**8) for page in batch["page"].ravel().tolist()]
    found = []
    for text in _reader().read(pages):
        assert not isinstance(text, Exception)
        found.append(json.dumps([(line.text, line.score, line.corners.tolist()) for line in text.lines]))
    return found


def _cost(bench: Bench, served: Served) -> dict[str, object]:
    """CPU milliseconds of a page, the three in turn: by process of the server, and in one process alone, in turns on one core."""
    batches = [cut(rows, i, 1) for rows in [sample_rows(services(["ocr"])["ocr"])] for i in range(3)]
    bench.say("comparing the CPU time of a page with one process alone")
    with (
        InProcess(BUILD / export.RECOGNISER, bench.cores.server, read_alone) as alone,
        ClosedLoop(served.server.endpoints.http, "ocr", _as_bytes(batches), CALLERS) as callers,
    ):
        alone.prepare(_as_bytes(batches))
        callers.run(TURN_S)
        found = efficiency.measure(served.server.pid, callers, alone, TURN_S, QUICK_TURNS if bench.quick else TURNS)
    return {
        "served_ms_per_page": {
            name: round(1e3 * seconds / found.served_rows, 1) for name, seconds in sorted(found.served_s.items())
        },
        "served_ms_per_page_in_all": round(1e3 / found.served_rate, 1),
        "alone_ms_per_page": round(1e3 / found.alone_rate, 1),
        "of_one_process": round(found.ratio, 3),
        "pages": found.served_rows,
    }


def _as_bytes(batches: Sequence[Arrays]) -> list[dict[str, npt.NDArray[Any]]]:
    return [{name: array.astype(np.object_) for name, array in batch.items()} for batch in batches]


@cache
def _reader() -> Reader:
    cv2.setNumThreads(1)
    driver = part("ocr").model
    assert driver is not None
    return export.in_process(Path(BUILD), ReadingRules(min_score=float(driver.parameters["min_score"]), workers=1))


def _over_http(served: Served, rows: Arrays) -> list[str]:
    with httpclient.InferenceServerClient(served.server.endpoints.http) as client:
        answers = []
        for place in range(len(rows["page"])):
            tensor = httpclient.InferInput("page", [1, 1], "BYTES")
            tensor.set_data_from_numpy(cut(rows, place, 1)["page"])
            answers.append({"text": client.infer("ocr", [tensor]).as_numpy("text")})
    return _texts(answers)


def _texts(answers: Sequence[Arrays]) -> list[str]:
    return [answer["text"][0, 0].decode() for answer in answers]


def _lines_read(page: data.Page, text: str) -> int:
    """Lines of a page that were read; none when there is one too many or too few."""
    lines = text.split("\n")
    return data.lines_read(page.lines, lines) if len(lines) == len(page.lines) else 0


def _equal_lines(pages: Sequence[data.Page], texts: Sequence[str]) -> int:
    return sum(
        want == got
        for page, text in zip(pages, texts, strict=True)
        for want, got in zip(page.lines, text.split("\n"), strict=False)
    )
