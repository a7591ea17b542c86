"""Write the pages and lines that smaller OCR networks are calibrated on and judged by; read the known pages with any networks.

    python models/ocr/evaluation.py --output models/ocr/build

    rows = known_lines()                                                  # 31 lines of three pages, the label is their text
    fp32, int8 = (read_lines(det, rec, characters) for det, rec in (...))  # {"text": [31]} by the whole chain in this process
    gate(fp32, int8, rows, "exact", max_loss=0).passed                    # as many lines without any difference

Leaves {det,rec}_{calibration,evaluation}.npz in --output, where export.py has left the networks. Pages are news texts, printed on
paper or on signs before photos; for calibration also photos without text. Those for evaluation have other texts, and the three
pages whose lines are known are among them. Lines are what the detector finds on the same pages. There is no label: the networks
answer with maps and classes, judged by agreement with FP32; `read_lines` judges what is read. `slice.kind` is in all four.
Exit codes: those of tritonpilot.errors (4 the networks have not been exported, 7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image, ImageDraw, ImageFont

    from models.image.evaluation import PICTURES
    from models.ocr import data, export
    from models.onnx_export import session
    from models.packages import data_file
    from models.rows_script import write_rows
    from pilotlib import crops
    from pilotlib.ctc import read_characters
    from pilotlib.pages import Pixels, read_page
    from pilotlib.reading import PageText, Reader, ReadingRules
    from tritonpilot.errors import ModelError
    from tritonpilot.quantize.data import Rows
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which this needs. Nothing has been written. "
        "Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

TEXTS, TEXTS_FILE = "gensim", "gensim/test/test_data/lee_background.cor"
SEED = 48
PAGE = (448, 640)  # height and width of all pages, as the detector sees them
LINE_WIDTH = 960  # of all lines, padded on the right; wider ones are left out
CALIBRATION_PAGES = {"paper": 48, "sign": 48, "photo": 24}
EVALUATION_PAGES = {"paper": 20, "sign": 20}
MOST_LINES = 200
PHOTOS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "coins.png", "gravel.png", "motorcycle_left.png", "rocket.jpg"),
    "flower.jpg",
)
RULES = ReadingRules(min_score=export.MIN_SCORE, workers=1)


class Drawn(NamedTuple):
    """A page UINT8[448,640,3] and what kind it is."""

    pixels: Pixels
    kind: str


def main(argv: list[str] | None = None) -> int:
    return write_rows(
        argv,
        Path(__file__).parent / "build",
        "Write the OCR networks' calibration and evaluation rows.",
        "ocr: drawing 160 pages and finding their lines, about 50 s",
        make,
    )


def make(networks: Path) -> dict[str, Rows]:
    """Rows by file name. Raises ModelError when the folder lacks the networks, HostError when texts or pictures are absent."""
    texts = data_file(TEXTS, TEXTS_FILE).read_text("latin-1").strip("\n").split("\n")
    half = len(texts) // 2
    random = np.random.default_rng(SEED)
    pages = {
        "calibration": list(_drawn(CALIBRATION_PAGES, texts[:half], random)),
        "evaluation": [*_known(), *_drawn(EVALUATION_PAGES, texts[half:], random)],
    }
    found = {}
    for use, drawn in pages.items():
        kinds = {"kind": np.array([page.kind for page in drawn])}
        found[f"det_{use}.npz"] = Rows({"page": np.stack([page.pixels for page in drawn])}, kinds)
        found[f"rec_{use}.npz"] = _lines(networks, drawn)
    return found


def known_lines() -> Rows:
    """The 31 lines of the three known pages: their places as input, `slice.page`, and as label what is written there."""
    pages = data.pages()
    return Rows(
        {"place": np.arange(sum(len(page.lines) for page in pages))},
        {"page": np.array([page.name for page in pages for _ in page.lines])},
        np.array([line for page in pages for line in page.lines]),
    )


def read_lines(detector: Path, recogniser: Path, characters: Path) -> dict[str, npt.NDArray[np.str_]]:
    """{"text": what the chain of two networks reads in the place of each known line}; nothing on a page of which it finds a line
    too many or too few."""
    pages = data.pages()
    pixels = [read_page(page.image, **export.LIMITS) for page in pages]
    reader = _reader(detector, recogniser, characters)
    try:
        texts = reader.read(pixels)
    finally:
        reader.close()
    read = []
    for page, text in zip(pages, texts, strict=True):
        lines = [line.text for line in text.lines] if isinstance(text, PageText) else []
        read += lines if len(lines) == len(page.lines) else [""] * len(page.lines)
    return {"text": np.array(read)}


def _reader(detector: Path, recogniser: Path, characters: Path, seen: list[Pixels] | None = None) -> Reader:
    """A reader on two networks in this process; `seen` gets the groups of lines that the recogniser is given."""
    det, rec = session(detector), session(recogniser)

    def detect(pages: Pixels) -> Any:
        return det.run(["probability"], {"page": pages})[0]

    def recognise(lines: Pixels) -> Any:
        if seen is not None:
            seen.append(lines)
        return rec.run(["index", "confidence"], {"line": lines})

    return Reader(RULES, read_characters(characters), 0, detect, recognise)


def _lines(networks: Path, pages: Sequence[Drawn]) -> Rows:
    """The lines that the detector finds on pages, at most MOST_LINES, evenly taken."""
    files = (networks / export.DETECTOR, networks / export.RECOGNISER, networks / export.CHARACTERS)
    if absent := [str(path) for path in files if not path.is_file()]:
        raise ModelError(
            f"{', '.join(absent)} does not exist; lines are what the exported detector finds. Nothing has been written. Run "
            f"`python models/ocr/export.py --output {networks}` first."
        )
    lines, kinds = [], []
    for kind in dict.fromkeys(page.kind for page in pages):
        seen: list[Pixels] = []
        reader = _reader(*files, seen=seen)
        try:
            reader.read([page.pixels for page in pages if page.kind == kind])
        finally:
            reader.close()
        fitting = [line for group in seen for line in group if line.shape[1] <= LINE_WIDTH]
        lines += [crops.pad_lines([line], LINE_WIDTH)[0] for line in fitting]
        kinds += [kind] * len(fitting)
    taken = np.unique(np.linspace(0, len(lines) - 1, MOST_LINES).round().astype(np.int64))
    return Rows({"line": np.stack(lines)}, {"kind": np.array(kinds)}).take(taken)


def _known() -> Iterator[Drawn]:
    """The three known pages as the detector sees them, in parts of PAGE that overlap; a small page on paper of its own colour."""
    height, width = PAGE
    for page in data.pages():
        pixels = read_page(page.image, **export.LIMITS)
        seen = crops.shrink_to(pixels, crops.detector_size(pixels.shape[0], pixels.shape[1], RULES.side_limit))
        paper = np.empty((max(height, seen.shape[0]), max(width, seen.shape[1]), 3), np.uint8)
        paper[:] = np.median(seen, axis=(0, 1))
        paper[: seen.shape[0], : seen.shape[1]] = seen
        for top in _starts(paper.shape[0], height):
            for left in _starts(paper.shape[1], width):
                yield Drawn(paper[top : top + height, left : left + width], page.name)


def _starts(length: int, part: int) -> list[int]:
    return [round(start) for start in np.linspace(0, length - part, -(-length // part)).tolist()]


def _drawn(kinds: Mapping[str, int], texts: Sequence[str], random: np.random.Generator) -> Iterator[Drawn]:
    names = {Path(name).name: (package, name) for package, files in PICTURES.items() for name in files}
    for kind, count in kinds.items():
        for _ in range(count):
            picture = data_file(*names[PHOTOS[random.integers(len(PHOTOS))]])
            words = texts[random.integers(len(texts))].split()
            if kind == "paper":
                sheet = _sheet(PAGE, words, random)
            else:
                sheet = _part(picture, random)
                if kind == "sign":
                    size = (int(random.integers(120, 260)), int(random.integers(260, 480)))
                    sign = _sheet(size, words, random, is_sign=True)
                    left, top = (int(random.integers(10, PAGE[1 - i] - size[1 - i] - 10)) for i in (0, 1))
                    sheet.paste(sign, (left, top))
            yield Drawn(_photographed(sheet, random), kind)


def _sheet(
    size: tuple[int, int], words: Sequence[str], random: np.random.Generator, is_sign: bool = False
) -> Image.Image:
    """Words in lines of two or three sizes, dark on light or, on signs, the other way round too."""
    height, width = size
    light, dark = random.integers(190, 256, 3), random.integers(0, 90, 3)
    ground, ink = (dark, light) if is_sign and random.random() < 0.5 else (light, dark)
    paper = Image.new("RGB", (width, height), tuple(ground.tolist()))
    pen = ImageDraw.Draw(paper)
    left, top, rest = 20, 16, list(words)
    while rest:
        points = int(random.integers(24, 48) if is_sign else random.integers(14, 36))
        font: Any = ImageFont.load_default(points)
        if top + points * 1.4 > height:
            break
        line = rest.pop(0)
        while rest and font.getlength(f"{line} {rest[0]}") < (width - 2 * left) * random.uniform(0.6, 1.0):
            line = f"{line} {rest.pop(0)}"
        pen.text((left, top), line, font=font, fill=tuple(ink.tolist()))
        top += round(points * random.uniform(1.4, 2.2))
    return paper


def _part(picture: Path, random: np.random.Generator) -> Image.Image:
    """A part of a photo, at the size of a page."""
    with Image.open(picture) as opened:
        photo = opened.convert("RGB")
    share = random.uniform(0.5, 1.0)
    width = round(share * min(photo.width, photo.height * PAGE[1] / PAGE[0]))
    height = round(width * PAGE[0] / PAGE[1])
    left, top = int(random.integers(photo.width - width + 1)), int(random.integers(max(1, photo.height - height + 1)))
    box = (left, top, left + width, min(photo.height, top + height))
    part: Image.Image = photo.resize(PAGE[::-1], Image.Resampling.BICUBIC, box=box)
    return part


def _photographed(sheet: Image.Image, random: np.random.Generator) -> Pixels:
    """Turned a little, unevenly lit, with noise."""
    corner: Any = sheet.getpixel((0, 0))
    turned = sheet.rotate(random.uniform(-2, 2), Image.Resampling.BICUBIC, fillcolor=corner)
    left, right = random.uniform(0.6, 1.1, 2).tolist()
    light = np.linspace(left, right, PAGE[1], dtype=np.float32)[None, :, None]
    noise = random.normal(0.0, random.uniform(0, 10), (*PAGE, 3))
    pixels: Pixels = np.clip(np.asarray(turned, np.float32) * light + noise, 0, 255).astype(np.uint8)
    return pixels


if __name__ == "__main__":
    sys.exit(main())
