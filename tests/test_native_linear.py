"""Packed linear layers against float64, and rows against themselves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculant.native.library import library
from speculant.native.linear import FORMATS, PackedLinear, Quantised, can_pack, quantise

CPU = torch.device("cpu")
INTEGERS = ("int8", "q8_0", "q4_1")
compiled = pytest.mark.skipif(library() is None, reason="the compiled library is not here")


def weights(form: str, outputs: int, inputs: int, seed: int) -> tuple[Tensor | Quantised, Tensor]:
    """A matrix in a format, and the float32 numbers it stands for."""
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    if form in INTEGERS:
        quantised = quantise(matrix, form)
        return quantised, quantised.dequantised()
    rounded = matrix.to(getattr(torch, form))
    return rounded, rounded.float()


@compiled
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 21), outputs=st.integers(1, 170), groups=st.integers(1, 5),
       seed=st.integers(0, 99), biased=st.booleans())  # fmt: skip
def test_against_float64(
    form: str, rows: int, outputs: int, groups: int, seed: int, biased: bool
) -> None:
    """Any number of rows, outputs and groups; and each row is what it is alone, to the last bit."""
    weight, dense = weights(form, outputs, 32 * groups, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, 32 * groups, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    packed = PackedLinear(weight, bias)
    out = packed(x)
    want = x.double() @ dense.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), want, atol=2e-4, rtol=1e-5)
    for i in range(rows):
        assert torch.equal(packed(x[i]), out[i])
        assert torch.equal(packed(x[i : i + 1]), out[i : i + 1])


@compiled
def test_shapes_strides_and_other_precisions() -> None:
    weight = torch.randn(32, 40)
    packed = PackedLinear(weight)
    x = torch.randn(40, 3, 2).permute(1, 2, 0)  # shape: [3, 2, 40], not contiguous
    torch.testing.assert_close(packed(x), x @ weight.T)
    torch.testing.assert_close(packed(x.bfloat16()), x.bfloat16().float() @ weight.T)
    assert packed(torch.empty(0, 40)).shape == (0, 32)


@pytest.mark.parametrize("form", INTEGERS)
def test_rounding_is_to_the_nearest(form: str) -> None:
    """No weight is off by more than half a step, zeros stay, and a constant group is exact."""
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    matrix[3], matrix[4] = 0.0, 0.25
    quantised = quantise(matrix, form)
    steps = (
        quantised.scales[:, None] if form == "int8" else quantised.scales.repeat_interleave(32, 1)
    )
    assert bool(((quantised.dequantised() - matrix).abs() <= 0.5001 * steps + 1e-7).all())
    assert bool((quantised.dequantised()[3] == 0).all())
    torch.testing.assert_close(quantised.dequantised()[4], matrix[4])
    with pytest.raises(ValueError, match="no integer format"):
        quantise(matrix, "float32")


def test_what_is_not_packed() -> None:
    assert not can_pack(40, "q4_1", CPU)
    assert not can_pack(64, "float32", torch.device("meta"))
    assert can_pack(40, "float32", CPU) == (library() is not None)


@compiled
@pytest.mark.parametrize("form", FORMATS)
def test_two_threads_give_what_one_gives(form: str) -> None:
    """Every panel is computed, by whichever thread: to the last bit."""
    packed = PackedLinear(weights(form, 500, 96, 3)[0])
    x = torch.randn(11, 96, generator=torch.Generator().manual_seed(4))
    one = packed(x)
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(packed(x), one) for _ in range(5))
    finally:
        torch.set_num_threads(1)
