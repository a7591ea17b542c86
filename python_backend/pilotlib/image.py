"""How does an encoded photo become the tensor that a vision model takes? The same code trains, exports and serves.

    recipe = Recipe(size=224, crop=0.875, mean=(127, 127, 127), std=(128, 128, 128))
    row = np.empty((3, 224, 224), np.float32)
    read(jpeg_bytes, recipe, row)            # PhotoError says what is wrong with the photo
    Reader(recipe, threads=4).read(photos, rows)     -> {3: PhotoError}: photo 3 is bad, the others are in their rows

JPEG, PNG, WebP, GIF and BMP, of animations the first picture, turned as their EXIF data say. Whatever they hold becomes RGB:
CMYK, palettes and grey are converted, of 16 bits the upper 8 are taken, an alpha channel is dropped (as Pillow's convert, and
so most training code, does it). Sizes are checked before anything is decoded, so a small file that unpacks to gigabytes is
refused for the price of reading its header.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Pillow imports its file formats when it first meets one: here once, not within a request.
from PIL import (
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    JpegImagePlugin,  # noqa: F401
    MpoImagePlugin,  # noqa: F401  what many phones call JPEG
    PngImagePlugin,  # noqa: F401
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MODES = ("crop", "stretch", "fit")
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
DTYPES = {"FP32": np.dtype(np.float32), "FP16": np.dtype(np.float16), "UINT8": np.dtype(np.uint8)}
# Every scan of a progressive JPEG costs a pass over all its pixels; encoders write about 10, an attack thousands.
MAX_SCANS = 100
# With `draft` the decoder still gives at least this many pixels in each direction for one of the result.
DRAFT_PIXELS = 2

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PhotoError(ValueError):
    """What is wrong with a photo, as the end of a sentence that begins with its name: "is empty"."""


@dataclass(frozen=True)
class Recipe:
    """From photo to tensor [3, size, size]: values are (x - mean) / std of x in 0..255, channels red, green, blue."""

    size: int = 224
    crop: float = 0.875
    """With mode "crop": the side of the centre square that is kept, as a share of the photo's shorter side."""
    mean: tuple[float, float, float] = (127.0, 127.0, 127.0)
    std: tuple[float, float, float] = (128.0, 128.0, 128.0)
    resample: str = "bicubic"
    mode: str = "crop"
    """crop: the centre square; stretch: all of it, its proportions lost; fit: all of it, with borders of the mean's colour."""
    max_pixels: int = 50_000_000
    max_bytes: int = 20_000_000
    draft: bool = False
    """Let the JPEG decoder scale photos down that are much larger than needed: faster, other values (see DRAFT_PIXELS)."""


class Reader:
    """Reads many photos, on `threads` threads (Pillow decodes and resizes without the interpreter's lock); 1: none of its own."""

    def __init__(self, recipe: Recipe, threads: int = 1) -> None:
        self.recipe = recipe
        self._pool = ThreadPoolExecutor(threads, "decode") if threads > 1 else None

    def read(self, photos: Sequence[bytes], rows: npt.NDArray[Any]) -> dict[int, PhotoError]:
        """Write every photo into its row of `rows` [n, 3, size, size]; returns the errors of those that cannot be read."""
        each: Callable[..., Any] = map if self._pool is None or len(photos) == 1 else self._pool.map
        found = each(self._attempt, photos, rows)
        return {place: error for place, error in enumerate(found) if error is not None}

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _attempt(self, photo: bytes, row: npt.NDArray[Any]) -> PhotoError | None:
        try:
            read(photo, self.recipe, row)
        except PhotoError as error:
            return error
        return None


def read(photo: bytes, recipe: Recipe, row: npt.NDArray[Any]) -> None:
    """Decode a photo into `row` [3, size, size] of FP32, FP16 or UINT8 (then without mean and std). Raises PhotoError."""
    image = opened(photo, recipe)
    try:
        image.load()
    except Exception as error:  # of foreign bytes decoders raise OSError, SyntaxError, struct.error, zlib.error, ...
        raise PhotoError(f"is damaged: {error}") from error
    write(image, recipe, row)


def opened(photo: bytes, recipe: Recipe) -> Image.Image:
    """A photo with its header read, within the limits, nothing decoded. Raises PhotoError."""
    if not photo:
        raise PhotoError("is empty")
    if len(photo) > recipe.max_bytes:
        raise PhotoError(f"has {len(photo)} bytes, max_bytes is {recipe.max_bytes}")
    try:
        image: Image.Image = Image.open(io.BytesIO(photo), formats=FORMATS)
    except UnidentifiedImageError:
        raise PhotoError(f"is no image: its {len(photo)} bytes do not begin as JPEG, PNG, WebP, GIF or BMP") from None
    except Image.DecompressionBombError as error:
        raise PhotoError(f"has too many pixels ({error}); it was not decoded") from None
    except Exception as error:  # as in `read`
        raise PhotoError(f"is damaged: {error}") from error
    width, height = image.size
    if width * height > recipe.max_pixels:
        raise PhotoError(f"has {width} x {height} pixels, max_pixels is {recipe.max_pixels}; it was not decoded")
    if "progressive" in image.info and (scans := photo.count(b"\xff\xda")) > MAX_SCANS:
        raise PhotoError(f"is a progressive JPEG of {scans} scans, {MAX_SCANS} are allowed; it was not decoded")
    if recipe.draft:
        _let_decoder_shrink(image, recipe)
    return image


def write(image: Image.Image, recipe: Recipe, row: npt.NDArray[Any]) -> None:
    """Turn, crop, resize and normalise a decoded image into `row` [3, size, size]."""
    turn = _turn(image)
    square = _square(_rgb(image), recipe)
    if turn is not None:  # after the resizing: the crop is symmetric, and there is less to turn
        square = square.transpose(turn)
    if row.dtype == np.float16:
        exact = np.empty(row.shape, np.float32)
        _normalise(square, recipe, exact)
        row[...] = exact
    elif row.dtype == np.uint8:
        _separate(square, row)
    else:
        _normalise(square, recipe, row)


def _normalise(square: Image.Image, recipe: Recipe, row: npt.NDArray[np.float32]) -> None:
    # Exactly (x - mean) / std in FP32, but without a temporary array: 115 us instead of 205 for 3 x 224 x 224.
    _separate(square, row)
    mean, std = recipe.mean, recipe.std
    np.subtract(row, _factor(mean), out=row)
    if all(math.frexp(value)[0] == 0.5 for value in std):  # a power of two: its reciprocal is exact, and faster
        np.multiply(row, _factor([1 / value for value in std]), out=row)
    else:
        np.divide(row, _factor(std), out=row)


def _separate(square: Image.Image, row: npt.NDArray[Any]) -> None:
    for channel, band in zip(row, square.split(), strict=True):
        channel[...] = band


def _factor(values: Sequence[float]) -> npt.NDArray[np.float32]:
    """A scalar where all channels have the same value: faster than a broadcast."""
    array = np.array(values, np.float32)
    return array[0] if (array == array[0]).all() else array[:, np.newaxis, np.newaxis]


def _square(rgb: Image.Image, recipe: Recipe) -> Image.Image:
    size, how = recipe.size, FILTERS[recipe.resample]
    if recipe.mode == "crop":
        side = recipe.crop * min(rgb.size)
        left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
        return rgb.resize((size, size), how, box=(left, top, left + side, top + side))
    if recipe.mode == "stretch":
        return rgb.resize((size, size), how)
    scale = size / max(rgb.size)
    width, height = (max(1, round(edge * scale)) for edge in rgb.size)
    red, green, blue = (round(min(max(value, 0.0), 255.0)) for value in recipe.mean)
    square = Image.new("RGB", (size, size), (red, green, blue))
    square.paste(rgb.resize((width, height), how), ((size - width) // 2, (size - height) // 2))
    return square


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image  # convert would copy it: 90 us for 512 x 512
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's convert would cut all above 255 off
        grey = np.clip(np.asarray(image), 0, 65535) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # the same, without Pillow's warning
    return image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  broken EXIF data raise anything, and are no reason to refuse a picture
        return None


def _let_decoder_shrink(image: Image.Image, recipe: Recipe) -> None:
    """Choose the scale of JPEG's inverse DCT, 1/2, 1/4 or 1/8; no effect on other formats."""
    edge, needed = (
        (max(image.size), recipe.size) if recipe.mode == "fit" else (min(image.size), recipe.size / recipe.crop)
    )
    times = int(edge // (DRAFT_PIXELS * needed))
    if times > 1:
        image.draft("RGB", (max(1, image.width // times), max(1, image.height // times)))
