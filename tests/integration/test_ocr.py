"""The service ocr in the real server: pages over HTTP and gRPC, many callers at a time, and pages that cannot be read."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import photos
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException

from models.ocr import data, export
from pilotlib.deadlines import LATE
from pilotlib.pages import read_page
from tritonpilot import build, metrics, repository, spec
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> tuple[data.Page, ...]:
    return data.pages()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("ocr") / "model_repository"
    services = spec.load_services(ROOT / "models", ["ocr"])
    build.prepare(services, "auto", print)
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    with EmbeddedServer(root, probe_inputs=build.probe_inputs(ROOT / "models", root)) as server:
        yield server


@pytest.fixture
def ask(served: EmbeddedServer) -> Iterator[Any]:
    """`ask(page, ...)`: one request over gRPC with a row for each page -> the texts of its rows."""
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        yield lambda *rows: _texts(client, tritonclient.grpc, rows)
    served.check_alive()


def _texts(
    client: Any, module: Any, rows: Sequence[bytes], output: str = "text", parameters: dict[str, int] | None = None
) -> list[str]:
    tensor = module.InferInput("page", [len(rows), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[row] for row in rows], np.object_))
    answer = client.infer("ocr", [tensor], parameters=parameters).as_numpy(output)
    return [text.decode() for text in answer[:, 0]]


def white(size: tuple[int, int] = (300, 200)) -> bytes:
    return photos.encoded(Image.new("RGB", size, "white"), "PNG")


def test_three_pages_have_their_lines_over_http_and_grpc_alike(
    served: EmbeddedServer, pages: tuple[data.Page, ...], ask: Any
) -> None:
    over_grpc = [ask(page.image)[0] for page in pages]
    for page, text in zip(pages, over_grpc, strict=True):
        found = text.split("\n")
        assert len(found) == len(page.lines), page.name
        assert data.lines_read(page.lines, found) == len(page.lines), page.name
    with tritonclient.http.InferenceServerClient(served.endpoints.http) as client:
        assert [_texts(client, tritonclient.http, [page.image])[0] for page in pages] == over_grpc
        assert _texts(client, tritonclient.http, [page.image for page in pages]) == over_grpc


def test_served_text_is_that_of_the_same_code_without_a_server(pages: tuple[data.Page, ...], ask: Any) -> None:
    pixels = [read_page(page.image, 10**7, 10**7) for page in pages]
    alone = export.read_pages(ROOT / "models/ocr/build", pixels)
    assert ask(*(page.image for page in pages)) == ["\n".join(line.text for line in text.lines) for text in alone]


def test_layout_says_where_each_line_is(served: EmbeddedServer, pages: tuple[data.Page, ...]) -> None:
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        (found,) = _texts(client, tritonclient.grpc, [pages[2].image], "layout")
    layout = json.loads(found)
    assert (layout["width"], layout["height"]) == (1280, 854)
    assert [line["text"] for line in layout["lines"]] == list(pages[2].lines)
    sign, plate = layout["lines"][0], layout["lines"][4]
    assert np.mean(sign["box"], axis=0) == pytest.approx([338, 200], abs=25)
    assert np.mean(plate["box"], axis=0) == pytest.approx([985, 600], abs=25)
    assert all(0.7 <= line["score"] <= 1 for line in layout["lines"])


def test_callers_at_the_same_time_get_what_each_gets_alone_and_their_lines_are_read_together(
    served: EmbeddedServer, pages: tuple[data.Page, ...], ask: Any
) -> None:
    images = [*(page.image for page in pages), white()]
    before = metrics.statistics(served.endpoints.grpc, "ocr_rec")
    alone = [ask(image)[0] for image in images]
    between = metrics.statistics(served.endpoints.grpc, "ocr_rec")
    rounds = 6
    with ThreadPoolExecutor(rounds * len(images)) as callers:
        together = list(callers.map(lambda image: ask(image)[0], images * rounds))
    after = metrics.statistics(served.endpoints.grpc, "ocr_rec")

    assert together == alone * rounds
    groups_alone, lines_alone = between.executions - before.executions, between.inferences - before.inferences
    assert after.inferences - between.inferences == rounds * lines_alone
    # Alone, every page has groups of its own; together, lines of one width from many pages make one.
    assert after.executions - between.executions < 0.6 * rounds * groups_alone


def test_pages_whose_deadline_passes_between_the_steps_are_given_up(
    served: EmbeddedServer, pages: tuple[data.Page, ...]
) -> None:
    images = [page.image for page in pages] * 2
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        in_an_hour = {"pilot_deadline_ns": time.monotonic_ns() + 3600 * 10**9}
        assert len(_texts(client, tritonclient.grpc, images, parameters=in_an_hour)) == len(images)
        before = metrics.statistics(served.endpoints.grpc, "ocr_rec")
        # A tenth of what the pages take: it passes while they are decoded, or detected.
        soon = {"pilot_deadline_ns": time.monotonic_ns() + 30 * 10**6}
        with pytest.raises(InferenceServerException, match=LATE) as raised:
            _texts(client, tritonclient.grpc, images, parameters=soon)
        after = metrics.statistics(served.endpoints.grpc, "ocr_rec")

    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert after.inferences == before.inferences


def test_a_blank_page_has_no_lines_and_no_error(served: EmbeddedServer, ask: Any) -> None:
    assert ask(white()) == [""]
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        (layout,) = _texts(client, tritonclient.grpc, [white((64, 40))], "layout")
    assert json.loads(layout) == {"width": 64, "height": 40, "lines": []}


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"", "is empty"),
        (b"no image", "is no image"),
        (data.expected("scan")[0].encode() * 1000, "is no image"),
        (photos.encoded(photos.scene(), "JPEG")[:3000], "is damaged"),
        (photos.encoded(Image.new("1", (20_000, 20_000)), "PNG"), "max_pixels is 20000000; it was not decoded"),
        (photos.encoded(Image.new("L", (2, 2)), "PNG"), "at least 4 a side are needed"),
    ],
)
def test_a_page_that_cannot_be_read_fails_alone_and_is_named(ask: Any, page: bytes, why: str) -> None:
    with pytest.raises(InferenceServerException, match=f'"page": row 1 .*{why}'):
        ask(white(), page)
    with ThreadPoolExecutor(5) as callers:
        found = list(callers.map(lambda image: _answer(ask, image), [white(), white(), page, white(), white()]))
    assert [found[i] for i in (0, 1, 3, 4)] == [""] * 4
    assert why in found[2]


def _answer(ask: Any, page: bytes) -> str:
    try:
        return str(ask(page)[0])
    except InferenceServerException as error:
        return str(error)


def test_pages_of_every_kind_are_read(pages: tuple[data.Page, ...], ask: Any) -> None:
    letter = Image.open(io.BytesIO(pages[1].image))
    expected = ask(photos.encoded(letter, "PNG"))[0].split("\n")
    assert len(expected) == 18
    kinds = {
        "WebP": photos.encoded(letter, "WEBP", quality=90),
        "grey": photos.encoded(letter.convert("L"), "PNG"),
        "CMYK": photos.encoded(letter.convert("CMYK"), "JPEG", quality=90),
        "alpha": photos.encoded(letter.convert("RGBA"), "PNG"),
        "16 bits": photos.encoded(Image.fromarray(np.asarray(letter.convert("L"), np.uint16) * 256), "PNG"),
    }
    for kind, image in kinds.items():
        assert data.lines_read(pages[1].lines, ask(image)[0].split("\n")) >= 16, kind


def test_a_detector_that_fails_is_named_and_the_server_goes_on(served: EmbeddedServer, ask: Any) -> None:
    served.unload("ocr_det")
    try:
        with pytest.raises(InferenceServerException, match='"page": row 0 could not be read: model "ocr_det"'):
            ask(white())
    finally:
        served.load("ocr_det")
    assert ask(white()) == [""]
