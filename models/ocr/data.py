"""Three pages whose text is known: a scan from a package, a letter and a photo with signs, both drawn here.

    for page in pages():
        page.name, page.image, page.lines          # "scan", PNG or JPEG bytes, ("Region-based segmentation", ...)
    read = lines_read(page.lines, answer.splitlines())       # how many of the lines an answer has right, see TOLERANCE

The expected lines are in pages/*.txt. Drawing is deterministic: fonts come with Pillow and OpenCV, noise from a seed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from models.packages import data_file

SCAN = "scikit-image"
SCAN_FILE = "skimage/data/page.png"
PHOTO = "scikit-learn"
PHOTO_FILE = "sklearn/datasets/images/china.jpg"
TEXTS = Path(__file__).resolve().parent / "pages"

#: A line counts as read when, blanks collapsed, it differs from the expected one by at most one edit (a character
#: inserted, deleted or changed) per this many characters; a shorter line must be equal.
TOLERANCE = 12

Pixels = npt.NDArray[np.uint8]


class Page(NamedTuple):
    """An encoded page and what is written on it."""

    name: str
    image: bytes
    lines: tuple[str, ...]


def pages() -> tuple[Page, ...]:
    """The scan, the letter, the street. Raises HostError when a package that carries one is absent."""
    scan = data_file(SCAN, SCAN_FILE).read_bytes()
    letter = _jpeg(_letter(expected("letter")), quality=80)
    street = _jpeg(_street(expected("street")), quality=90)
    images = {"scan": scan, "letter": letter, "street": street}
    return tuple(Page(name, image, expected(name)) for name, image in images.items())


def expected(name: str) -> tuple[str, ...]:
    """The lines of a page, from the top."""
    return tuple((TEXTS / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def lines_read(expected: Sequence[str], found: Sequence[str]) -> int:
    """How many of the expected lines stand in the right place of `found` within TOLERANCE; none when one is too much or missing
    before them."""
    return sum(
        edits(want, got) <= len(_collapsed(want)) // TOLERANCE for want, got in zip(expected, found, strict=False)
    )


def edits(expected: str, found: str) -> int:
    """The Levenshtein distance of two lines with their blanks collapsed."""
    want, got = _collapsed(expected), _collapsed(found)
    above = list(range(len(got) + 1))
    for row, character in enumerate(want, start=1):
        current = [row]
        for column, other in enumerate(got, start=1):
            current.append(min(current[-1] + 1, above[column] + 1, above[column - 1] + (character != other)))
        above = current
    return above[-1]


def _collapsed(line: str) -> str:
    return " ".join(line.split())


def _letter(lines: Sequence[str]) -> Pixels:
    """Dark print of several sizes on yellowish paper, turned by 1.2 degrees, unevenly lit, with noise."""
    height, width = 1180, 900
    paper = Image.new("RGB", (width, height), (247, 243, 232))
    pen = ImageDraw.Draw(paper)
    top = 60
    for row, line in enumerate(lines):
        size = 44 if row == 0 else 32 if row in (2, 13) else 25
        left = 520 if row in (11, 12, 13) else 110 if row in (8, 9, 10) else 70
        pen.text((left, top), line, font=_font(size), fill=(38, 36, 48))
        top += round(size * 1.45) + (30 if row in (1, 3, 4, 7, 10, 13, 15) else 0)
    pixels = np.asarray(paper.rotate(1.2, Image.Resampling.BICUBIC, fillcolor=(247, 243, 232)), np.float32)
    light = np.linspace(1.0, 0.72, width, dtype=np.float32)[None, :, None]
    noise = np.random.default_rng(17).normal(0.0, 9.0, pixels.shape).astype(np.float32)
    return np.clip(pixels * light + noise, 0, 255).astype(np.uint8)


def _street(lines: Sequence[str]) -> Pixels:
    """Two signs in perspective before a photo."""
    with Image.open(data_file(PHOTO, PHOTO_FILE)) as photo:
        scene = np.asarray(photo.convert("RGB").resize((1280, 854), Image.Resampling.BICUBIC))
    board = Image.new("RGB", (620, 300), (20, 70, 60))
    pen = ImageDraw.Draw(board)
    pen.rectangle((8, 8, 611, 291), outline=(235, 225, 190), width=4)
    for row, (line, size) in enumerate(zip(lines[:4], (60, 44, 36, 36), strict=True)):
        pen.text((40, 28 + (0, 82, 146, 202)[row]), line, font=_font(size), fill=(240, 232, 205))
    scene = _mounted(scene, np.asarray(board), [(70, 120), (640, 160), (630, 430), (80, 420)])
    plate = np.full((170, 420, 3), (225, 225, 215), np.uint8)
    for row, line in enumerate(lines[4:]):  # stencil-like letters of OpenCV
        cv2.putText(plate, line, (24, 66 + 74 * row), cv2.FONT_HERSHEY_DUPLEX, 1.7, (150, 20, 30), 4, cv2.LINE_AA)
    return _mounted(scene, plate, [(800, 560), (1195, 540), (1200, 700), (795, 735)])


def _mounted(scene: Pixels, sign: Pixels, corners: Sequence[tuple[int, int]]) -> Pixels:
    height, width = sign.shape[:2]
    flat = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    transform = cv2.getPerspectiveTransform(flat, np.array(corners, np.float32))
    size = (scene.shape[1], scene.shape[0])
    covers = cv2.warpPerspective(np.full((height, width), 255, np.uint8), transform, size, flags=cv2.INTER_LINEAR)
    warped = cv2.warpPerspective(sign, transform, size, flags=cv2.INTER_AREA)
    mixed: Any = np.where(covers[..., None] > 127, warped, scene)
    return mixed.astype(np.uint8, copy=False)  # type: ignore[no-any-return]


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _jpeg(pixels: Pixels, quality: int) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()
