"""Backend "image_decode": photos as they are sent, tensors as models take them. `photo` BYTES[1] -> `pixels` [3,size,size], NCHW.

Decode, turn as EXIF says, convert to RGB, crop, resize, normalise (pilotlib.image), on `decode_threads` threads, straight into
rows of one buffer. A photo that cannot be read gets its request an error that names its row and what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from pilotlib import config_tensors
from pilotlib.image import DTYPES, FILTERS, MODES, Reader, Recipe
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context


@dataclass(frozen=True)
class Parameters:
    """What the backend image_decode reads."""

    size: int = parameter(224, "edge of the square in pixels", minimum=1)
    mode: str = parameter(
        "crop",
        "crop: the centre square; stretch: the whole photo, its proportions lost; fit: the whole photo, with borders of the "
        "mean's colour",
        choices=MODES,
    )
    crop: float = parameter(
        0.875, "with mode crop: side of the centre square, as a share of the photo's shorter side", minimum=0.01
    )
    resample: str = parameter("bicubic", "filter of the resizing", choices=tuple(FILTERS))
    mean: str = parameter("127", "subtracted from the values 0 to 255: one number, or one each for red, green and blue")
    std: str = parameter("128", "the difference is divided by this: one number, or three")
    data_type: str = parameter(
        "FP32", "of `pixels`; UINT8: 0 to 255, without mean and std, a quarter of the bytes", choices=tuple(DTYPES)
    )
    max_pixels: int = parameter(50_000_000, "a photo of more is refused before it is decoded", minimum=1)
    max_bytes: int = parameter(20_000_000, "a longer one is refused unread", minimum=1)
    decode_threads: int = parameter(1, "photos decoded at the same time; 0 = the cores of the instance", minimum=0)
    draft: bool = parameter(
        False,
        "let the JPEG decoder scale down photos of more than 4 times the needed size: faster, pixels differ a little",
    )


class ImageDecode(Backend[Parameters, list[bytes], Array]):
    """Decodes photos into tensors."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Check the parameters, make the buffer, start the threads, decode one picture."""
        asked = context.parameters
        recipe = Recipe(
            size=asked.size,
            crop=asked.crop,
            mean=_three("mean", asked.mean),
            std=_three("std", asked.std),
            resample=asked.resample,
            mode=asked.mode,
            max_pixels=asked.max_pixels,
            max_bytes=asked.max_bytes,
            draft=asked.draft,
        )
        config_tensors.check(
            context.config,
            {"photo": ("TYPE_STRING", (1,))},
            {"pixels": (f"TYPE_{asked.data_type}", (3, asked.size, asked.size))},
        )
        # max_pixels counts here, and is checked before decoding; Pillow's own limit would make it a lie above 179 million.
        Image.MAX_IMAGE_PIXELS = None
        self._is_batched = context.config.get("max_batch_size", 0) > 0
        rows = max(1, context.config.get("max_batch_size", 0))
        self._pixels = np.zeros((rows, 3, asked.size, asked.size), DTYPES[asked.data_type])
        self._pixels.fill(0)  # the pages that zeros only promises
        self._reader = Reader(recipe, asked.decode_threads or context.cores)
        first = BytesIO()
        Image.new("RGB", (8, 8)).save(first, "JPEG")
        self.predict([[first.getvalue()]])

    def decode(self, inputs: Mapping[str, Array]) -> list[bytes]:
        """The encoded photos of one request."""
        photos: list[bytes] = inputs["photo"].ravel().tolist()
        return photos

    def predict(self, items: Sequence[list[bytes]]) -> Sequence[Array | BadRequest]:
        """Decode all photos of all requests; a request with a bad one is refused."""
        photos = [photo for item in items for photo in item]
        pixels = self._pixels
        if len(photos) > len(pixels):
            pixels = np.empty((len(photos), *pixels.shape[1:]), pixels.dtype)
        errors = self._reader.read(photos, pixels)
        found: list[Array | BadRequest] = []
        start = 0
        for item in items:
            stop = start + len(item)
            bad = next((place for place in range(start, stop) if place in errors), None) if errors else None
            if bad is None:
                found.append(pixels[start:stop])
            else:
                found.append(BadRequest("photo", f"row {bad - start} {errors[bad]}"))
            start = stop
        return found

    def encode(self, result: Array) -> Mapping[str, Array]:
        """The tensors of one request."""
        return {"pixels": result if self._is_batched else result[0]}

    def tear_down(self) -> None:
        """End the threads."""
        self._reader.close()


def _three(name: str, text: str) -> tuple[float, float, float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or not np.isfinite(numbers).all() or (name == "std" and 0 in numbers):
        raise ValueError(
            f'parameter "{name}" in config.pbtxt is "{text}", but must be one number or three, separated by commas'
            f"{', none of them 0' if name == 'std' else ''}. The model is not loaded: correct it"
        )
    return numbers[0], numbers[1], numbers[2]


TritonPythonModel = triton_model(ImageDecode)
