"""models/image/data.py: photos, labels and preprocessing."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from models.image import data
from tritonpilot.errors import HostError


def test_preprocess_gives_nchw_float32_in_the_range_of_the_network() -> None:
    image = data.preprocess(data.photos()[0].path)
    assert image.shape == (3, 224, 224)
    assert image.dtype == np.float32
    assert image.flags["C_CONTIGUOUS"]
    assert image.min() >= -127 / 128
    assert image.max() <= 1.0
    assert image.std() > 0.1


def test_preprocess_keeps_the_order_of_channels_and_scales_each_pixel() -> None:
    image = data.preprocess(Image.new("RGB", (300, 200), (255, 127, 0)))
    assert image[:, 100, 50].tolist() == [1.0, 0.0, -127 / 128]


def test_preprocess_of_a_square_that_needs_no_resizing_equals_the_pixels() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    image = data.preprocess(Image.fromarray(pixels))
    # .875 of 256 is 224: rows and columns 16 to 239, unfiltered
    assert image[1, 0, 0] == (float(pixels[16, 16, 1]) - 127) / 128
    assert image[2, 223, 10] == (float(pixels[239, 26, 2]) - 127) / 128


def test_preprocess_crops_the_centre_of_a_wide_photo() -> None:
    photo = Image.new("RGB", (600, 256), (0, 0, 0))
    photo.paste((255, 255, 255), (172, 0, 428, 256))
    assert data.preprocess(photo).min() == 1.0


def test_preprocess_takes_bytes_files_and_grey_images_alike() -> None:
    path = data.photos()[3].path
    np.testing.assert_array_equal(data.preprocess(path), data.preprocess(path.read_bytes()))
    encoded = io.BytesIO()
    Image.new("L", (256, 256), 255).save(encoded, "PNG")
    assert (data.preprocess(encoded.getvalue()) == 1.0).all()


def test_bytes_that_are_no_image_are_refused() -> None:
    with pytest.raises(ValueError, match="the photo is no image"):
        data.preprocess(b"not a jpg")
    whole = data.photos()[0].path.read_bytes()
    with pytest.raises(ValueError, match="the photo is damaged"):
        data.preprocess(whole[: len(whole) // 2])


def test_preprocess_gives_the_bits_of_the_plain_recipe() -> None:
    for photo in data.photos():
        rgb = Image.open(photo.path).convert("RGB")
        side = 0.875 * min(rgb.size)
        left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
        box = (left, top, left + side, top + side)
        plain = np.asarray(rgb.resize((224, 224), Image.Resampling.BICUBIC, box=box), dtype=np.float32)
        np.testing.assert_array_equal(data.preprocess(photo.path), ((plain - 127) / 128).transpose(2, 0, 1))


def test_requests_are_the_photos_whole() -> None:
    requests = data.requests()["photo"]
    assert requests.shape == (20, 1)
    assert [photo[0] for photo in requests.tolist()] == [photo.path.read_bytes() for photo in data.photos()]


def test_labelled_photos_are_twenty_with_the_labels_of_their_names() -> None:
    inputs, labels = data.labelled_photos()
    assert inputs["image"].shape == (20, 3, 224, 224)
    assert labels.dtype == np.int64
    assert labels[:4].tolist() == [243, 559, 438, 990]


def test_class_names_fit_the_photos() -> None:
    names = data.class_names()
    assert len(names) == 1000
    assert names[1] == "goldfish"
    assert names[949] == "strawberry"


def test_missing_packages_name_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PHOTOS", "no-such-photos")
    monkeypatch.setattr(data, "CLASS_NAMES", "no-such-names")
    with pytest.raises(HostError, match=r"no-such-photos.*make setup"):
        data.labelled_photos()
    with pytest.raises(HostError, match=r"no-such-names.*make setup"):
        data.class_names()


def test_package_without_its_photos_is_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PHOTOS", "numpy")
    with pytest.raises(HostError, match="has 0 of the 20 photos"):
        data.photos()
