"""Write the rows that a smaller image network is calibrated on and judged by.

    python models/image/evaluation.py --output models/image/build

Leaves calibration.npz and evaluation.npz in --output. Calibration: other pictures than those that are judged, 12 views of each
of 17 pictures of scikit-image and scikit-learn, and 40 thumbnails of foolbox. Evaluation: the 20 labelled photos as they are and
10 views of each, which keep its label. A view is a square part, mirrored or not, darker or brighter. `slice.brightness` and
`slice.view` are in both, the label is the class index.
Exit codes: those of tritonpilot.errors (7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from models.image import data
    from models.packages import data_file, data_files
    from models.rows_script import CALIBRATION, EVALUATION, write_rows
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

PICTURES = {
    "scikit-image": [
        f"skimage/data/{name}"
        for name in (
            *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png"),
            *("gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png"),
            *("retina.jpg", "rocket.jpg"),
        )
    ],
    "scikit-learn": ["sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"],
}
THUMBNAILS = ("foolbox/data/cifar10_", "foolbox/data/cifar100_")
CALIBRATION_VIEWS, EVALUATION_VIEWS = 12, 10
SEED = 20
SIDES = (0.5, 1.0)  # of the shorter side
BRIGHTNESS = (0.6, 1.4)
# Means of the network's input, -0.99 to 1; a third of ordinary photos is in each
BRIGHTNESS_NAMES, BRIGHTNESS_BOUNDS = ("dark", "medium", "bright"), (-0.25, 0.05)

Images = npt.NDArray[np.float32]


def main(argv: list[str] | None = None) -> int:
    return write_rows(
        argv,
        Path(__file__).parent / "build",
        "Write the image network's calibration and evaluation rows.",
        "image: cutting views out of 37 pictures, about 10 s",
        lambda _: dict(zip((CALIBRATION, EVALUATION), make(), strict=True)),
    )


def make() -> tuple[Rows, Rows]:
    """(calibration, evaluation). Raises HostError when the pictures are absent or damaged."""
    random = np.random.default_rng(SEED)
    pictures = [data_file(package, name) for package, names in PICTURES.items() for name in names]
    thumbnails = [path for name, path in sorted(data_files(data.PHOTOS).items()) if name.startswith(THUMBNAILS)]
    seen = [view for path in pictures for view in _views(path, CALIBRATION_VIEWS, random)]
    small = [data.preprocess(path) for path in thumbnails]
    calibration = _rows([*seen, *small], ["part"] * len(seen) + ["thumbnail"] * len(small))
    photos = data.photos()
    views = [[data.preprocess(photo.path), *_views(photo.path, EVALUATION_VIEWS, random)] for photo in photos]
    labels = np.repeat([photo.label for photo in photos], 1 + EVALUATION_VIEWS)
    names = (["whole"] + ["part"] * EVALUATION_VIEWS) * len(photos)
    return calibration, _rows([view for of_photo in views for view in of_photo], names, labels)


def _views(path: Path, count: int, random: np.random.Generator) -> Iterable[Images]:
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    for _ in range(count):
        side = round(min(picture.size) * random.uniform(*SIDES))
        left, top = (int(random.integers(room - side + 1)) for room in picture.size)
        view = picture.crop((left, top, left + side, top + side))
        if random.random() < 0.5:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        brightness = random.uniform(*BRIGHTNESS)
        yield data.preprocess(view.point([min(255, round(value * brightness)) for value in range(256)] * 3))


def _rows(images: Sequence[Images], views: Sequence[str], labels: npt.NDArray[np.int64] | None = None) -> Rows:
    image = np.stack(images)
    brightness = np.array(BRIGHTNESS_NAMES)[np.digitize(image.mean(axis=(1, 2, 3)), BRIGHTNESS_BOUNDS)]
    return Rows({"image": image}, {"brightness": brightness, "view": np.array(views)}, labels)


if __name__ == "__main__":
    sys.exit(main())
