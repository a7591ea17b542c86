"""What does a page look like, from its encoded bytes? Upright, RGB, on white paper where it is transparent.

    page = read_page(jpeg_bytes, max_pixels=20_000_000, max_bytes=20_000_000)      # UINT8[h,w,3]; PhotoError

Formats, limits and messages are those of pilotlib.image; only what is transparent differs, because text is read on it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from pilotlib.image import PhotoError, Recipe, opened

Pixels = npt.NDArray[np.uint8]

SMALLEST_SIDE = 4  # below that there is nothing to read, and rectangles degenerate


def read_page(page: bytes, max_pixels: int, max_bytes: int) -> Pixels:
    """An encoded image -> UINT8[h,w,3]. Raises PhotoError: "is damaged: ..."."""
    image = opened(page, Recipe(max_pixels=max_pixels, max_bytes=max_bytes))
    if min(image.size) < SMALLEST_SIDE:
        raise PhotoError(f"has {image.width} x {image.height} pixels, at least {SMALLEST_SIDE} a side are needed")
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        pixels = np.asarray(_on_paper(upright))
    except Exception as error:  # decoders of foreign bytes raise OSError, SyntaxError, struct.error, zlib.error, ...
        raise PhotoError(f"is damaged: {error}") from error
    return pixels.astype(np.uint8, copy=False)


def _on_paper(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's convert would cut all above 255 off
        grey = np.clip(np.asarray(image), 0, 65535) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    ink = image.convert("RGBA")
    paper = Image.new("RGBA", ink.size, "white")
    return Image.alpha_composite(paper, ink).convert("RGB")
