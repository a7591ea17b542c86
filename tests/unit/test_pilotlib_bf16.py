from __future__ import annotations

import numpy as np
import pytest
import torch

from pilotlib.bf16 import bits_from_dlpack, bits_from_float, dlpack_from_bits, float_from_bits


@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (2, 3)])
def test_bits_survive_the_way_through_a_capsule(shape: tuple[int, ...]) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, shape).astype(np.uint16)
    assert bits_from_dlpack(dlpack_from_bits(bits)).tolist() == bits.tolist()


def test_torch_reads_our_capsule_and_we_read_its() -> None:
    numbers = np.array([[1.5, -2.0], [0.0, 2.0**100]], np.float32)
    theirs = torch.utils.dlpack.from_dlpack(dlpack_from_bits(bits_from_float(numbers)))
    assert theirs.dtype == torch.bfloat16
    assert theirs.float().tolist() == numbers.tolist()
    assert float_from_bits(bits_from_dlpack(torch.utils.dlpack.to_dlpack(theirs))).tolist() == numbers.tolist()


def test_rows_of_a_larger_array_are_taken_as_they_are() -> None:
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert bits_from_dlpack(dlpack_from_bits(bits[1:, ::2])).tolist() == [[4, 6], [8, 10]]


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="type code 2 with 32 bits is no bfloat16"):
        bits_from_dlpack(np.ones(3, np.float32).__dlpack__())


def test_rounding_is_that_of_torch() -> None:
    numbers = np.concatenate(
        [
            np.random.default_rng(2).standard_normal(1000).astype(np.float32),
            np.array([np.nan, np.inf, -np.inf, 0, -0.0, 3.4e38, 1e-40, 1.00390625, 1.01171875], np.float32),
        ]
    )
    theirs = torch.from_numpy(numbers).bfloat16().float().numpy()
    np.testing.assert_array_equal(float_from_bits(bits_from_float(numbers)), theirs)
