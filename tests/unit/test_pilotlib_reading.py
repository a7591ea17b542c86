"""pilotlib.reading, pilotlib.pages and the backend ocr: pages of several callers, two networks, and what may go wrong with each.

The networks are played by functions whose answers are computed from the pixels: the detector marks what is dark, and the recogniser
spells a line's brightness. The real networks are asked in tests/unit/test_ocr_data.py and tests/integration/test_ocr.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import photos
import pytest
from PIL import Image

from pilotlib import testkit
from pilotlib.image import PhotoError
from pilotlib.pages import read_page
from pilotlib.reading import PageText, Reader, ReadingRules, TooManyLines
from pilotlib.tensors import Array
from pilotlib.testkit import Case, check, check_mates, in_process
from pilotlib.verbs import InferError

BACKEND = Path(__file__).parents[2] / "python_backend" / "ocr" / "model.py"
ALPHABET = np.array(["", *"abcdefghijklmnopqrstuvwxyz"], np.object_)
SIZE = (160, 320)


class Networks:
    """The two networks, and what they were asked."""

    def __init__(self) -> None:
        self.detected: list[tuple[int, ...]] = []
        self.recognised: list[tuple[int, ...]] = []
        self.refuses_pages_of_width = 0
        self.refuses_letter = ""

    def detect(self, pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        self.detected.append(pages.shape)
        if pages.shape[2] == self.refuses_pages_of_width:
            raise InferError("the detector is out of order")
        dark: Any = (pages[:, None, :, :, 0] < 200).astype(np.float32)
        return dark  # type: ignore[no-any-return]

    def recognise(self, lines: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        self.recognised.append(lines.shape)
        letters = lines[:, 24, 30, 0].astype(np.int32) // 5
        if self.refuses_letter and ord(self.refuses_letter) - 96 in letters:
            raise InferError("the recogniser is out of order")
        index = np.zeros((len(lines), 4), np.int32)
        index[:, 1] = letters
        return index, np.full(index.shape, 0.9, np.float32)

    def infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """As a server calls them."""
        if model == "ocr_det":
            return {"probability": self.detect(inputs["page"])}  # type: ignore[arg-type]
        assert (model, list(outputs)) == ("ocr_rec", ["index", "confidence"])
        index, confidence = self.recognise(inputs["line"])  # type: ignore[arg-type]
        return {"index": index, "confidence": confidence}


def page(*letters: str, size: tuple[int, int] = SIZE, width: int = 200) -> npt.NDArray[np.uint8]:
    """A white page with one dark bar for each letter, from the top."""
    found = np.full((*size, 3), 255, np.uint8)
    for row, letter in enumerate(letters):
        found[10 + 30 * row : 26 + 30 * row, 20 : 20 + width] = 5 * (ord(letter) - 96) + 2
    return found


@pytest.fixture
def networks() -> Networks:
    return Networks()


@pytest.fixture
def reader(networks: Networks) -> Iterator[Reader]:
    found = Reader(ReadingRules(detect_batch=2, max_lines=4), ALPHABET, 0, networks.detect, networks.recognise)
    yield found
    found.close()


def texts(read: list[PageText | TooManyLines | InferError]) -> list[Any]:
    return [[line.text for line in each.lines] if isinstance(each, PageText) else each for each in read]


def test_pages_of_all_callers_are_detected_by_size_and_their_lines_read_by_width(
    reader: Reader, networks: Networks
) -> None:
    small, other = page("a", "b"), page("c", size=(96, 320))
    assert texts(reader.read([small, other, page("d"), page("e", "f")])) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert sorted(networks.detected) == [(1, 96, 320, 3), (1, 160, 320, 3), (2, 160, 320, 3)]
    assert [shape[0] for shape in networks.recognised] == [6]  # one call for the lines of four pages


def test_boxes_are_in_pixels_of_the_page_however_much_it_was_shrunk(networks: Networks) -> None:
    large = np.kron(page("a"), np.ones((4, 4, 1), np.uint8))
    reader = Reader(ReadingRules(side_limit=320), ALPHABET, 0, networks.detect, networks.recognise)
    (read,) = reader.read([large])
    reader.close()
    assert isinstance(read, PageText)
    assert (read.height, read.width) == (640, 1280)
    assert read.lines[0].corners.mean(axis=0) == pytest.approx([480, 72], abs=6)


def test_no_pages_and_blank_pages_are_no_error(reader: Reader, networks: Networks) -> None:
    assert reader.read([]) == []
    assert texts(reader.read([page(), page("a")])) == [[], ["a"]]
    networks.recognised.clear()
    assert texts(reader.read([page()])) == [[]]
    assert networks.recognised == []


def test_a_failing_detection_fails_its_pages_only(reader: Reader, networks: Networks) -> None:
    networks.refuses_pages_of_width = 320
    read = reader.read([page("a"), page("b", size=(160, 256)), page("c")])
    assert [isinstance(each, InferError) for each in read] == [True, False, True]
    assert texts(read)[1] == ["b"]


def test_a_failing_recognition_fails_the_pages_with_lines_in_it_only(reader: Reader, networks: Networks) -> None:
    networks.refuses_letter = "x"
    narrow = page("a", "x", width=100)
    read = reader.read([narrow, page("b"), page("c", width=100)])
    assert [type(each) for each in read] == [InferError, PageText, InferError]
    assert texts(read)[1] == ["b"]


def test_a_page_with_too_many_lines_is_refused_alone(reader: Reader) -> None:
    refused, good = reader.read([page("a", "b", "c", "d", "e"), page("f")])
    assert isinstance(refused, TooManyLines)
    assert str(refused) == "has 5 lines of text, max_lines is 4"
    assert texts([good]) == [["f"]]


def test_unsure_lines_are_dropped(networks: Networks) -> None:
    reader = Reader(ReadingRules(min_score=0.95), ALPHABET, 0, networks.detect, networks.recognise)
    assert texts(reader.read([page("a")])) == [[]]
    reader.close()


def test_a_fault_of_the_code_is_not_taken_for_a_failed_call(networks: Networks) -> None:
    reader = Reader(ReadingRules(), ALPHABET[:5], 0, networks.detect, networks.recognise)
    with pytest.raises(ValueError, match="class 26 has no character"):
        reader.read([page("z"), page("a", width=100)])
    reader.close()


# -- pages -------------------------------------------------------------------------------------------------------------

LIMITS = {"max_pixels": 1_000_000, "max_bytes": 1_000_000}


def test_a_page_is_upright_rgb_whatever_its_encoding() -> None:
    expected = np.asarray(photos.scene())
    np.testing.assert_array_equal(read_page(photos.encoded(photos.scene(), "PNG"), **LIMITS), expected)
    for orientation in range(1, 9):
        turned = read_page(photos.turned(orientation), **LIMITS)
        assert turned.shape == expected.shape
        assert np.abs(turned.astype(int) - expected).mean() < 3, orientation


def test_what_is_transparent_lies_on_white_paper() -> None:
    ink = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (5, 2, 15, 8))
    pixels = read_page(photos.encoded(ink, "PNG"), **LIMITS)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[5, 10].tolist() == [0, 0, 0]
    palette = ink.convert("P")
    assert read_page(photos.encoded(palette, "PNG", transparency=palette.getpixel((0, 0))), **LIMITS)[0, 0, 0] == 255


def test_sixteen_bits_grey_cmyk_and_black_and_white_become_rgb() -> None:
    deep = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    assert (read_page(photos.encoded(deep, "PNG"), **LIMITS) == 40_000 >> 8).all()
    assert (read_page(photos.encoded(Image.new("1", (8, 8), 1), "PNG"), **LIMITS) == 255).all()
    assert read_page(photos.encoded(Image.new("CMYK", (8, 8)), "JPEG"), **LIMITS).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"", "is empty"),
        (b"no image at all", "is no image"),
        (photos.encoded(photos.scene(), "PNG")[:1000], "is damaged"),
        (photos.encoded(Image.new("1", (2000, 600)), "PNG"), "max_pixels is 1000000; it was not decoded"),
        (b"\xff\xd8\xff" + bytes(1_000_001), "max_bytes is 1000000"),
        (photos.encoded(Image.new("L", (3, 90)), "PNG"), "has 3 x 90 pixels, at least 4 a side are needed"),
    ],
)
def test_a_page_that_cannot_be_read_says_why(encoded: bytes, why: str) -> None:
    with pytest.raises(PhotoError, match=why):
        read_page(encoded, **LIMITS)


def test_a_page_survives_any_single_damaged_byte() -> None:
    whole = photos.encoded(photos.scene((64, 48)), "PNG")
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        try:
            assert read_page(io.BytesIO(bytes(damaged)).getvalue(), **LIMITS).ndim == 3
        except PhotoError:
            continue


# -- the backend -------------------------------------------------------------------------------------------------------


def config(max_batch_size: int = 8, **parameters: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "page", "data_type": "BYTES", "dims": [1]}],
        outputs=[{"name": name, "data_type": "BYTES", "dims": [1]} for name in ("text", "layout")],
        parameters=parameters,
        max_batch_size=max_batch_size,
    )


def request(*pages: npt.NDArray[np.uint8] | bytes) -> dict[str, Array]:
    encoded = [each if isinstance(each, bytes) else photos.encoded(Image.fromarray(each), "PNG") for each in pages]
    return {"page": np.array([[each] for each in encoded], np.object_)}


def text(*rows: str) -> dict[str, Array]:
    return {"text": np.array([[row.encode()] for row in rows], np.object_)}


@pytest.fixture
def version_folder(tmp_path: Path) -> Path:
    (tmp_path / "characters.txt").write_text("\n".join(ALPHABET[1:]), encoding="utf-8")
    return tmp_path


def test_backend_answers_each_request_and_names_the_row_that_is_wrong(networks: Networks, version_folder: Path) -> None:
    networks.refuses_letter = "x"
    cases = [
        Case("a page", request(page("a", "b")), text("a\nb")),
        Case("rows", request(page("c"), page(), page("d", size=(96, 320))), text("c", "", "d")),
        Case("damaged", request(page("e"), b"\x89PNG\r\n\x1a\nrest"), error='"page": row 1 is '),
        Case("empty", request(b""), error='"page": row 0 is empty'),
        Case("a bomb", request(np.zeros((300, 500, 3), np.uint8)), error="max_pixels is 100000; it was not decoded"),
        Case("too many", request(page("a"), page("b", "c", "d", "e")), error='"page": row 1 has 4 lines of text'),
        Case(
            "call",
            request(page("x", width=100)),
            error='"page": row 0 could not be read: the recogniser is out of order',
        ),
    ]
    with in_process(BACKEND, config(max_pixels=100_000, max_lines=3), version_folder, networks.infer) as ask:
        for case in cases:
            check(ask, case)
        check_mates(ask, cases)


def test_backend_describes_where_the_lines_are(networks: Networks, version_folder: Path) -> None:
    with in_process(BACKEND, config(max_batch_size=0), version_folder, networks.infer) as ask:
        answer = ask({"page": request(page("a"))["page"][0]})
    assert answer["text"].tolist() == [b"a"]
    layout = json.loads(answer["layout"][0])
    assert (layout["width"], layout["height"]) == (320, 160)
    (line,) = layout["lines"]
    assert (line["text"], line["score"]) == ("a", 0.9)
    assert np.mean(line["box"], axis=0) == pytest.approx([119.5, 17.5], abs=1)


def test_backend_refuses_a_model_without_its_characters(networks: Networks, tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"characters\.txt"),
        in_process(BACKEND, config(), tmp_path, networks.infer),
    ):
        pass
