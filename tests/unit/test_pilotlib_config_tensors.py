"""pilotlib.config_tensors: what a config must say of a backend's inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlib.config_tensors import ConfigTensorError, check, dims

INPUTS = {"photo": ("TYPE_STRING", (1,))}
OUTPUTS = {"pixels": ("TYPE_FP32", (3, -1)), "mask": ("TYPE_INT64", (-1,))}


def config(photo: dict[str, Any], *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"backend": "image_decode", "input": [photo], "output": list(outputs)}


PHOTO = {"name": "photo", "data_type": "TYPE_STRING", "dims": ["1"]}  # JSON form of int64
PIXELS = {"name": "pixels", "data_type": "TYPE_FP32", "dims": ["3", "224"]}


def test_a_config_that_fits_passes_and_tells_its_dims() -> None:
    fitting = config(PHOTO, PIXELS)
    check(fitting, INPUTS, OUTPUTS, may_lack=("mask",))
    assert dims(fitting, "pixels") == (3, 224)


@pytest.mark.parametrize(
    ("photo", "output", "said"),
    [
        ({**PHOTO, "dims": ["2"]}, PIXELS, r'input "photo" is TYPE_STRING \[2\], but must be TYPE_STRING \[1\]'),
        (
            {**PHOTO, "name": "image"},
            PIXELS,
            r'input "image" is unknown.*; input "photo" \(TYPE_STRING \[1\]\) is missing',
        ),
        (PHOTO, {**PIXELS, "data_type": "TYPE_FP16"}, r'output "pixels" is TYPE_FP16'),
        (PHOTO, {**PIXELS, "dims": ["3", "4", "5"]}, r"but must be TYPE_FP32 \[3, -1\]"),
    ],
)
def test_what_differs_is_named(photo: dict[str, Any], output: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigTensorError, match=said):
        check(config(photo, output), INPUTS, OUTPUTS, may_lack=("mask",))


def test_every_missing_tensor_is_named() -> None:
    with pytest.raises(ConfigTensorError, match=r'output "mask" .* is missing'):
        check(config(PHOTO, PIXELS), INPUTS, OUTPUTS)
