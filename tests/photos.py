"""Pictures of every kind that callers send, good and bad, made here in a moment: name -> bytes."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

SIZE = (320, 240)


def scene(size: tuple[int, int] = SIZE) -> Image.Image:
    """A smooth coloured picture whose corners differ, so that a turned or mirrored one is another one."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray(np.stack([255 * x, 255 * y, 127 * (1 - x * y)], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    """A JPEG that says in its EXIF data how it is to be turned; upright it is `scene()`."""
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = scene() if undo is None else scene().transpose(undo)
    return encoded(stored, quality=95, exif=exif)


def animated(kind: str) -> bytes:
    """Red, then blue."""
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue")]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=40, loop=0)


def grey16(size: tuple[int, int] = SIZE) -> bytes:
    """A PNG of 16 bits of grey, from black on the left to white on the right."""
    return encoded(Image.fromarray(np.tile(np.linspace(0, 65535, size[0]).astype(np.uint16), (size[1], 1))), "PNG")


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes whose header promises width x height pixels: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10000)))
        + chunk(b"IEND", b"")
    )


def jpeg_that_claims(width: int, height: int) -> bytes:
    """A real JPEG with its header changed to promise more pixels than it has."""
    photo = bytearray(encoded(scene()))
    start = photo.index(b"\xff\xc0")
    photo[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(photo)


def good() -> dict[str, bytes]:
    """All that must be readable."""
    picture = scene()
    palette = picture.convert("P")
    return {
        "jpeg": encoded(picture, quality=95),
        "progressive jpeg": encoded(picture, quality=95, progressive=True),
        "cmyk jpeg": encoded(picture.convert("CMYK"), quality=95),
        "grey jpeg": encoded(picture.convert("L"), quality=95),
        "png": encoded(picture, "PNG"),
        "rgba png": encoded(picture.convert("RGBA"), "PNG"),
        "palette png": encoded(palette, "PNG"),
        "transparent palette png": encoded(palette, "PNG", transparency=bytes(range(256))),
        "grey alpha png": encoded(picture.convert("LA"), "PNG"),
        "black and white png": encoded(picture.convert("1"), "PNG"),
        "16-bit png": grey16(),
        "webp": encoded(picture, "WEBP", quality=95),
        "lossless webp": encoded(picture, "WEBP", lossless=True),
        "gif": encoded(picture, "GIF"),
        "bmp": encoded(picture, "BMP"),
        "animated gif": animated("GIF"),
        "animated webp": animated("WEBP"),
        "animated png": animated("PNG"),
        "rotated jpeg": turned(6),
        "one pixel": encoded(Image.new("RGB", (1, 1)), "PNG"),
        "a line": encoded(Image.new("RGB", (4000, 1)), "PNG"),
    }


def bad() -> dict[str, tuple[bytes, str]]:
    """All that must be refused, and words of the refusal."""
    jpeg, png, webp = good()["jpeg"], good()["png"], good()["webp"]
    garbage = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
    scans = encoded(scene(), progressive=True)
    last = scans.rindex(b"\xff\xda")
    return {
        "empty": (b"", "is empty"),
        "text": (b"Ein Bild vom Wald, ohne Bild.", "is no image"),
        "a megabyte of garbage": (garbage, "is no image"),
        "html": (b"<html><body>404</body></html>" * 40, "is no image"),
        "half a jpeg": (jpeg[: len(jpeg) // 2], "is damaged"),
        "jpeg header": (jpeg[:200], "is "),
        "half a png": (png[: len(png) // 2], "is damaged"),
        "half a webp": (webp[: len(webp) // 2], "is "),
        "png bomb": (png_that_claims(60000, 60000), "it was not decoded"),
        "jpeg bomb": (jpeg_that_claims(65000, 65000), "it was not decoded"),
        "jpeg of many scans": (scans[:-2] + scans[last:-2] * 200 + scans[-2:], "scans, 100 are allowed"),
        "too long": (jpeg + bytes(20_000_000), "max_bytes is 20000000"),
        "png of garbage": (png[:100] + garbage[:5000], "is "),
        "tiff": (encoded(scene(), "TIFF"), "is no image"),
        "zero pixels": (png_that_claims(0, 10), "is "),
    }
