"""pilotlib.image and the backend image_decode: every kind of photo, and every kind of what is none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import photos
import pytest
from PIL import Image

from pilotlib import image, testkit
from pilotlib.image import PhotoError, Reader, Recipe
from pilotlib.testkit import Case, check, check_mates, in_process

BACKEND = Path(__file__).parents[2] / "python_backend" / "image_decode" / "model.py"
GOOD = photos.good()
BAD = photos.bad()


def tensor(photo: bytes, recipe: Recipe | None = None, dtype: Any = np.float32) -> npt.NDArray[Any]:
    recipe = recipe or Recipe()
    row = np.full((3, recipe.size, recipe.size), -9, dtype)
    image.read(photo, recipe, row)
    return row


def config(max_batch_size: int = 32, dims: tuple[int, ...] = (3, 224, 224), **parameters: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "photo", "data_type": "BYTES", "dims": [1]}],
        outputs=[{"name": "pixels", "data_type": parameters.get("data_type", "FP32"), "dims": list(dims)}],
        parameters=parameters,
        max_batch_size=max_batch_size,
    )


def request(*bytes_of_photos: bytes) -> dict[str, npt.NDArray[Any]]:
    column = np.empty((len(bytes_of_photos), 1), np.object_)
    column[:, 0] = bytes_of_photos
    return {"photo": column}


# -- what photos become ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_of_photo_becomes_finite_numbers(kind: str) -> None:
    found = tensor(GOOD[kind])
    assert found.min() >= -127 / 128
    assert found.max() <= 1


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("jpeg", 0), ("png", 0.05), ("rgba png", 0.05), ("webp", 0.12), ("lossless webp", 0.05), ("bmp", 0.05), ("rotated jpeg", 0.1),
     ("progressive jpeg", 1e-6), ("gif", 0.5), ("palette png", 0.5), ("transparent palette png", 0.5), ("cmyk jpeg", 0.1)],
)  # fmt: skip
def test_the_same_picture_gives_the_same_tensor_whatever_encodes_it(kind: str, tolerance: float) -> None:
    assert np.abs(tensor(GOOD[kind]) - tensor(GOOD["jpeg"])).max() <= tolerance


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_exif_data_say(orientation: int) -> None:
    found = tensor(photos.turned(orientation), Recipe(mode="stretch"))
    assert np.abs(found - tensor(photos.turned(1), Recipe(mode="stretch"))).max() < 0.1


def test_broken_exif_data_do_not_spoil_a_photo() -> None:
    photo = photos.encoded(photos.scene(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff nonsense", quality=95)
    np.testing.assert_array_equal(tensor(photo), tensor(GOOD["jpeg"]))


@pytest.mark.parametrize("kind", ["animated gif", "animated webp", "animated png"])
def test_of_an_animation_the_first_picture_is_taken(kind: str) -> None:
    red, green, blue = tensor(GOOD[kind]).mean(axis=(1, 2))
    assert red > 0.9
    assert max(green, blue) < -0.9


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    found = tensor(GOOD["16-bit png"], Recipe(mode="stretch"))
    assert found[0, 100, 0] < -0.95
    assert found[0, 100, 112] == pytest.approx(0, abs=0.02)
    assert found[0, 100, -1] > 0.98
    np.testing.assert_array_equal(found[0], found[2])


def test_mean_and_std_hold_for_each_channel_exactly_as_plain_arithmetic() -> None:
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    raw = tensor(GOOD["png"], dtype=np.uint8).astype(np.float32)
    expected = (raw - np.float32(mean).reshape(3, 1, 1)) / np.float32(std).reshape(3, 1, 1)
    np.testing.assert_array_equal(tensor(GOOD["png"], Recipe(mean=mean, std=std)), expected)
    half = tensor(GOOD["png"], Recipe(mean=mean, std=std), np.float16)
    np.testing.assert_array_equal(half, expected.astype(np.float16))


def test_fit_keeps_all_of_the_photo_between_borders_of_the_mean() -> None:
    photo = photos.encoded(Image.new("RGB", (400, 200), (255, 255, 255)), "PNG")
    found = tensor(photo, Recipe(size=100, mode="fit"))
    assert (found[:, :25] == 0).all()
    assert (found[:, 25:75] == 1).all()
    assert (found[:, 75:] == 0).all()


def test_stretch_reaches_into_the_corners() -> None:
    found = tensor(GOOD["png"], Recipe(size=50, mode="stretch", resample="bilinear"))
    assert found[0, 0, 0] < -0.95
    assert found[0, 0, -1] > 0.95


def test_draft_shrinks_only_photos_far_larger_than_needed() -> None:
    exact, draft = Recipe(), Recipe(draft=True)
    np.testing.assert_array_equal(tensor(GOOD["jpeg"], draft), tensor(GOOD["jpeg"], exact))
    np.testing.assert_array_equal(tensor(GOOD["png"], draft), tensor(GOOD["png"], exact))
    large = photos.encoded(photos.scene((2400, 1800)), quality=95)
    opened = image.opened(large, draft)
    assert opened.size == (1200, 900)
    assert np.abs(tensor(large, draft) - tensor(large, exact)).max() < 0.03


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_photo_is_refused_in_words(kind: str) -> None:
    photo, words = BAD[kind]
    with pytest.raises(PhotoError) as refused:
        tensor(photo)
    assert words in str(refused.value)


def test_a_bomb_is_refused_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = GOOD["png"]
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(PhotoError, match="has 320 x 240 pixels, max_pixels is 76799; it was not decoded"):
        tensor(photo, Recipe(max_pixels=320 * 240 - 1))


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_reader_tells_which_photos_are_bad_and_reads_the_others(threads: int) -> None:
    reader = Reader(Recipe(size=64), threads)
    batch = [GOOD["jpeg"], b"", GOOD["png"], BAD["half a jpeg"][0], GOOD["webp"]]
    rows = np.zeros((5, 3, 64, 64), np.float32)
    errors = reader.read(batch, rows)
    reader.close()
    assert {place: str(error)[:8] for place, error in errors.items()} == {1: "is empty", 3: "is damag"}
    for place in (0, 2, 4):
        np.testing.assert_array_equal(rows[place], tensor(batch[place], Recipe(size=64)))


def test_closed_reader_leaves_no_thread() -> None:
    before = threading.active_count()
    reader = Reader(Recipe(size=8), 4)
    reader.read([GOOD["png"]] * 8, np.zeros((8, 3, 8, 8), np.float32))
    reader.close()
    assert threading.active_count() == before


# -- the backend -------------------------------------------------------------------------------------------------------


def test_one_bad_photo_among_32_requests_fails_alone_and_is_named() -> None:
    cases = [Case(f"{i}", request(GOOD["jpeg"]), {"pixels": tensor(GOOD["jpeg"])[np.newaxis]}) for i in range(31)]
    cases.insert(17, Case("bad", request(BAD["half a jpeg"][0]), error='"photo": row 0 is damaged'))
    with in_process(BACKEND, config()) as ask:
        check_mates(ask, cases)


def test_a_request_of_several_rows_is_named_by_its_bad_row() -> None:
    with in_process(BACKEND, config(decode_threads=2)) as ask:
        check(ask, Case("bad", request(GOOD["png"], GOOD["jpeg"], b"oh", b""), error='"photo": row 2 is no image'))
        expected = np.stack([tensor(GOOD["png"]), tensor(GOOD["gif"])])
        check(ask, Case("good", request(GOOD["png"], GOOD["gif"]), {"pixels": expected}))


@pytest.mark.parametrize("kind", BAD)
def test_backend_answers_every_bad_photo_with_its_field(kind: str) -> None:
    photo, words = BAD[kind]
    with in_process(BACKEND, config()) as ask:
        check(ask, Case(kind, request(photo), error='"photo": row 0 '))
        check(ask, Case(kind, request(photo), error=words))
        check(ask, Case("next", request(GOOD["jpeg"]), {"pixels": tensor(GOOD["jpeg"])[np.newaxis]}))


def test_parameters_steer_the_backend() -> None:
    said = config(
        dims=(3, 32, 32), size=32, mode="fit", mean="123,116,103", std="58,57,57", resample="bilinear", max_pixels=80000
    )
    recipe = Recipe(size=32, mode="fit", mean=(123, 116, 103), std=(58, 57, 57), resample="bilinear")
    with in_process(BACKEND, said) as ask:
        check(ask, Case("photo", request(GOOD["png"]), {"pixels": tensor(GOOD["png"], recipe)[np.newaxis]}))
        large = photos.encoded(photos.scene((400, 300)))
        check(ask, Case("large", request(large), error="has 400 x 300 pixels, max_pixels is 80000"))


def test_uint8_and_unbatched_models_work() -> None:
    said = config(max_batch_size=0, data_type="UINT8", decode_threads=0)
    with in_process(BACKEND, said) as ask:
        check(
            ask,
            Case("one", {"photo": request(GOOD["png"])["photo"][0]}, {"pixels": tensor(GOOD["png"], dtype=np.uint8)}),
        )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (config(mean="1,2"), 'parameter "mean" .* is "1,2", but must be one number or three'),
        (config(std="1,0,1"), 'parameter "std" .* none of them 0'),
        (config(resample="nearest"), 'parameter "resample"'),
        (config(siez=224), 'parameter "siez"'),
        (config(size=64), r'output "pixels" is TYPE_FP32 \[3, 224, 224\], but must be TYPE_FP32 \[3, 64, 64\]'),
    ],
)
def test_what_cannot_be_served_is_refused_when_the_model_is_loaded(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words), in_process(BACKEND, said):
        pass
