"""What do callers send that they should not? Cases for any model from its config, and for photos and texts by their kind.

cases_of(served, good_row)      # served: tritonpilot.client.served.Served; [Case, ...]

A case says whether it must be refused, must be answered, or may be either; a refusal has to name the field at fault.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from tritonpilot.client.served import Served, Tensor

Arrays = Mapping[str, npt.NDArray[Any]]
Must = Literal["refuse", "answer", "either"]

SIZE = (320, 240)
BATCH = "batch"  # Triton's word for the rows of a request; too many are no single input's fault
MEGABYTE = 1_000_000
PICTURES = ("photo", "page")  # inputs that hold an encoded picture


@dataclass(frozen=True)
class Case:
    """One bad (or just odd) request."""

    name: str
    inputs: Arrays
    must: Must
    names: tuple[str, ...]  # a refusal has one of these words

    def is_named_by(self, said: str) -> bool:
        return any(name in said for name in self.names)


def cases_of(served: Served, row: Arrays) -> list[Case]:
    """All cases for a model, made from a good request of one row."""
    found = list(_shapes(served, row))
    for name, tensor in served.inputs.items():
        if tensor.data_type == "BYTES":
            found += _pictures(tensor, row) if name in PICTURES else []
            found += _strings(tensor, row)
        else:
            found += _numbers(tensor, row)
    return found


def _shapes(served: Served, row: Arrays) -> Iterator[Case]:
    all_names = tuple(served.inputs)
    first = all_names[0]
    array = row[first]
    yield Case("wrong rank", {**row, first: array[..., np.newaxis]}, "refuse", (first,))
    if array.dtype != np.object_ and -1 not in served.inputs[first].dims:
        yield Case("a dimension too long", {**row, first: np.repeat(array, 2, axis=-1)}, "refuse", (first,))
    other = np.float64 if array.dtype != np.float64 else np.float32
    wrong = np.zeros(array.shape, other)
    yield Case("wrong type", {**row, first: wrong}, "refuse", (first,))
    yield Case("an input that there is not", {**row, "nonsense": np.zeros((1, 1), np.float32)}, "refuse", ("nonsense",))
    if len(row) > 1:
        yield Case("an input left out", {name: row[name] for name in all_names[1:]}, "refuse", (first,))
    else:
        yield Case("no inputs", {}, "refuse", (first, "input"))
    if served.max_batch_size:
        yield Case("zero rows", {name: each[:0] for name, each in row.items()}, "either", (*all_names, BATCH))
        many = {name: np.repeat(each, served.max_batch_size + 1, axis=0) for name, each in row.items()}
        yield Case("more rows than the maximum", many, "refuse", (*all_names, BATCH))
        if len(row) > 1:
            uneven = {**row, first: np.repeat(array, 2, axis=0)}
            yield Case("inputs with different rows", uneven, "refuse", all_names)


def _numbers(tensor: Tensor, row: Arrays) -> Iterator[Case]:
    array = row[tensor.name]

    def changed(value: Any) -> Arrays:
        copy = array.copy()
        copy.reshape(-1)[0] = value
        return {**row, tensor.name: copy}

    if array.dtype.kind == "f":
        for label, value in (
            ("NaN", np.nan),
            ("Inf", np.inf),
            ("-Inf", -np.inf),
            ("largest", np.finfo(array.dtype).max),
        ):
            yield Case(f"{label} in {tensor.name}", changed(value), "either", (tensor.name,))
        yield Case(
            f"all of {tensor.name} NaN", {**row, tensor.name: np.full_like(array, np.nan)}, "either", (tensor.name,)
        )
    elif array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        for label, value in (("smallest", limits.min), ("largest", limits.max)):
            yield Case(f"unknown category in {tensor.name}: {label}", changed(value), "either", (tensor.name,))


def _strings(tensor: Tensor, row: Arrays) -> Iterator[Case]:
    array = row[tensor.name]

    def changed(value: bytes) -> Arrays:
        copy = array.copy()
        copy.reshape(-1)[0] = value
        return {**row, tensor.name: copy}

    for label, value in (
        ("empty string", b""),
        ("a megabyte of one letter", b"a" * MEGABYTE),
        ("a megabyte of words", b"wide open fields " * (MEGABYTE // 17)),
        ("invalid UTF-8", b"\xff\xfe\xc3("),
        ("zero bytes", b"\0\0\0"),
        ("unknown category", b"no such thing at all"),
    ):
        yield Case(f"{label} in {tensor.name}", changed(value), "either", (tensor.name,))


def _pictures(tensor: Tensor, row: Arrays) -> Iterator[Case]:
    good = row[tensor.name].reshape(-1)[0]
    scene = _scene()
    refused = {
        "truncated": good[: len(good) // 2],
        "header only": good[:20],
        "decompression bomb, honest": _bomb(12_000, 12_000),
        "decompression bomb, header only": _png(60_000, 60_000, 8, 2, b""),
        "absurd size": _png(2**31 - 1, 2**31 - 1, 8, 2, b""),
        "text instead of a picture": b"this is no picture",
        "zero pixels": _png(0, 0, 8, 2, b""),
    }
    answered = {
        "animated GIF": _animated("GIF"),
        "animated WebP": _animated("WEBP"),
        "CMYK": _encoded(scene.convert("CMYK"), "JPEG"),
        "16-bit": _encoded(
            Image.fromarray(np.linspace(0, 65535, 320 * 240).astype(np.uint16).reshape(240, 320)), "PNG"
        ),
        "rotated by EXIF": _rotated(scene),
        "palette with transparency": _encoded(scene.convert("P"), "PNG", transparency=0),
        "grey with alpha": _encoded(scene.convert("LA"), "PNG"),
    }
    either = {"one pixel": _encoded(Image.new("RGB", (1, 1)), "PNG")}
    for pictures, must in ((refused, "refuse"), (answered, "answer"), (either, "either")):
        for label, picture in pictures.items():
            array = np.empty(row[tensor.name].shape, np.object_)
            array.fill(picture)
            yield Case(f"{label} as {tensor.name}", {**row, tensor.name: array}, must, (tensor.name,))  # type: ignore[arg-type]


def _scene() -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, SIZE[0]), np.linspace(0, 255, SIZE[1]))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def _encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def _rotated(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned by 90 degrees
    return _encoded(image, "JPEG", exif=exif)


def _animated(kind: str) -> bytes:
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue", "green")]
    return _encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=40)


@cache
def _bomb(width: int, height: int) -> bytes:
    """A valid black-and-white PNG of that size in a few kilobytes."""
    packer = zlib.compressobj(9)
    line = bytes(1 + (width + 7) // 8)
    return _png(width, height, 1, 0, b"".join(packer.compress(line) for _ in range(height)) + packer.flush())


def _png(width: int, height: int, depth: int, colour: int, data: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
