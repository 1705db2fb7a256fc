"""Packed linear layers against float64, and rows against themselves alone."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculant.native.library import library
from speculant.native.linear import FORMATS, PackedLinear, Quantised, can_pack, quantise, rounded
from speculant.native.memory import move_to_huge_pages
from speculant.target.linear import Linear

CPU = torch.device("cpu")
INTEGERS = ("int8", "q8_0", "q4_1")
compiled = pytest.mark.skipif(library() is None, reason="the compiled library is not here")


def weights(form: str, outputs: int, inputs: int, seed: int) -> tuple[Tensor | Quantised, Tensor]:
    """A matrix in a format, and the float32 numbers it stands for."""
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    form = form.partition("-a")[0]
    if form in INTEGERS:
        quantised = quantise(matrix, form)
        return quantised, quantised.dequantised()
    rounded = matrix.to(getattr(torch, form))
    return rounded, rounded.float()


def literally_rounded(x: Tensor, form: str = "-a8") -> Tensor:
    """x as a format sees it, where it rounds to int8 a group at a time; in float64."""
    if form.endswith("-a16"):
        return x.to(torch.bfloat16).double()
    if not form.endswith("-a8"):
        return x.double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(len(x)):
        for k in range(0, x.shape[1], 32):
            group = x[i, k : k + 32]
            most = group.abs().max()
            if most > 0:
                codes = torch.round(group * (127 / most))
                assert codes.abs().max() == 127
                out[i, k : k + 32] = codes.double() * (most / 127).double()
    return out


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
    packed = PackedLinear(weight, bias, round_inputs="-a" in form)
    assert packed.form == form
    out = packed(x)
    seen = literally_rounded(x, form)
    want = seen @ dense.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), want, atol=2e-4, rtol=1e-5)
    for i in range(rows):
        assert torch.equal(packed(x[i]), out[i])
        assert torch.equal(packed(x[i : i + 1]), out[i : i + 1])


def test_rounded_inputs() -> None:
    """No number is off by more than half a step of its group, zeros stay, other groups do not count."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    x[1, 32:64], x[2, 5] = 0.0, 1000.0
    out = rounded(x)
    torch.testing.assert_close(out.double(), literally_rounded(x))
    steps = x.unflatten(1, (-1, 32)).abs().amax(dim=2).repeat_interleave(32, 1) / 127
    assert bool(((out - x).abs() <= 0.5001 * steps).all())
    assert bool((out[1, 32:64] == 0).all())
    assert torch.equal(out[2, 32:], rounded(x[2, 32:]))
    with pytest.raises(ValueError, match="groups of 32"):
        rounded(x[:, :40])


@pytest.mark.parametrize("kind", ["int8-a8", "int4-a8", "bfloat16-a16"])
def test_rounded_inputs_without_the_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch fallback computes the same model, up to the order of sums."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(48, 64, generator=generator), torch.randn(7, 64, generator=generator)
    ours = Linear(weight, None, kind)(x)
    monkeypatch.setattr("speculant.native.linear.library", lambda: None)
    fallback = Linear(weight, None, kind)
    assert fallback.own is None
    torch.testing.assert_close(fallback(x), ours, atol=1e-4, rtol=1e-4)
    exact = Linear(weight, None, kind.partition("-a")[0] if "8-" not in kind else "float32")
    assert not torch.allclose(exact(x), fallback(x), atol=1e-4)


@compiled
def test_odd_inputs_are_not_paired() -> None:
    """bfloat16 inputs go two at a time; rows of an odd number of them stay as they are."""
    weight, dense = weights("bfloat16", 20, 33, 4)
    packed = PackedLinear(weight, None, round_inputs=True)
    assert packed.form == "bfloat16"
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(packed(x), x @ dense.T, atol=1e-4, rtol=1e-4)


@compiled
def test_values_that_bfloat16_cannot_hold() -> None:
    """Ties go to even, and what is not finite stays so: a broken row must be seen as one."""
    packed = PackedLinear(torch.ones(16, 2, dtype=torch.bfloat16), None, round_inputs=True)
    x = torch.tensor([[1 + 2**-8, 0.0], [1 + 3 * 2**-8, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    out = packed(x)[:, 0]
    assert out[:2].tolist() == [1.0, 1 + 2**-6]
    assert out[2].isnan()
    assert not out[3].isfinite()


@compiled
def test_matrices_move_as_they_are() -> None:
    """Into one mapping, each on a line of its own, to the last bit."""
    made = [PackedLinear(weights(form, 640, 640, 5)[0], None, "-a" in form) for form in FORMATS]
    x = torch.randn(3, 640)
    before = [matrix(x) for matrix in made]
    homes = [matrix.weight.data_ptr() for matrix in made]
    move_to_huge_pages(made)
    for matrix, out, home in zip(made, before, homes, strict=True):
        assert torch.equal(matrix(x), out)
        assert matrix.weight.data_ptr() % 64 == 0
        assert (matrix.weight.data_ptr() != home) == hasattr(mmap, "MADV_HUGEPAGE")
    few = PackedLinear(torch.randn(16, 32))
    home = few.weight.data_ptr()
    move_to_huge_pages([few])  # less than a page: not worth a mapping
    assert few.weight.data_ptr() == home


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
