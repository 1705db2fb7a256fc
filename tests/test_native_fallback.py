"""Without a compiler the same target in plain torch: the same results within rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speculant.native import library as loading
from speculant.native.layers import rms_norm
from speculant.native.library import library
from speculant.target.linear import Linear
from speculant.target.llama import LlamaTarget
from test_llama import FakeTokenizer, saved

compiled = pytest.mark.skipif(library() is None, reason="the compiled library is not here")


def logits(target: LlamaTarget) -> torch.Tensor:
    """A prompt of 12 tokens, then five more of two rows."""
    cache = target.new_cache(2, 24)
    ids = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(2))
    for first, last in ((0, 12), (12, 17)):
        positions = torch.arange(first, last).expand(2, -1)
        rows = cache.rows([0, 1], last - first)
        out, _ = target.forward(ids[:, first:last], positions, None, rows)
        for slot in (0, 1):
            cache.advance(slot, last - first)
    assert out is not None
    return out


@compiled
@pytest.mark.parametrize("weights", ["", "bfloat16", "int8"])
def test_the_same_logits(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "llama wide heads")

    def load() -> LlamaTarget:
        parts = (torch.float32, "cpu", weights)
        return LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x", *parts)

    fast = load()
    assert fast.compiled is not None
    want = logits(fast)
    for module in ("attention", "linear"):
        monkeypatch.setattr(f"speculant.native.{module}.library", lambda: None)
    slow = load()
    assert slow.compiled is None
    assert all(layer.qkv.own is None for layer in slow.layers)
    torch.testing.assert_close(logits(slow), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["int4", "int8", "bfloat16"])
def test_a_rounded_layer_in_plain_torch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled layer and the dense one stand for the same rounded numbers."""
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    want = Linear(weight, weights=form)(x)
    monkeypatch.setattr("speculant.native.linear.library", lambda: None)
    slow = Linear(weight, weights=form)
    assert slow.own is None
    torch.testing.assert_close(slow(x), want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(slow(x), x @ weight.T, atol=1e-5)
    with pytest.raises(ValueError, match="groups of 32"):
        Linear(torch.randn(16, 48), weights="int4")


def test_it_can_be_left_out() -> None:
    code = (
        "from speculant.native.library import library\n"
        "import torch\nfrom speculant.target.linear import Linear\n"
        "assert library() is None\n"
        "x, w = torch.randn(3, 32), torch.randn(16, 32)\n"
        "torch.testing.assert_close(Linear(w)(x), x @ w.T)\n"
    )
    env = {"SPECULANT_NATIVE": "0", "PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_a_library_for_a_better_processor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stop at an instruction that this one does not have."""
    found = library()
    if found is None:
        pytest.skip("the compiled library is not here")
    level = found.speculant_level()
    loading.library.cache_clear()
    try:
        lower = {0: None, 1: "DEFAULT", 2: "AVX2"}[level]
        if lower is None:
            pytest.skip("compiled for any processor")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: lower)
        assert loading.library() is None
    finally:
        monkeypatch.undo()
        loading.library.cache_clear()
    assert library() is not None


@pytest.mark.parametrize("size", [16, 40, 576, 7])
def test_norms_are_torchs(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and not, in both precisions; and a gradient flows where one is asked for."""
    x, weight = 3 * torch.randn(2, 3, size), torch.randn(size)
    want = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5).float()
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), want)
        row = rms_norm(x[1, 2], weight, 1e-5)
        assert torch.equal(row, rms_norm(x, weight, 1e-5)[1, 2])
        assert torch.equal(rms_norm(x.transpose(0, 1), weight, 1e-5)[2, 1], row)
        half = rms_norm(x.bfloat16(), weight, 1e-5)
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)
    learned = weight.clone().requires_grad_()
    rms_norm(x, learned, 1e-5).sum().backward()
    assert learned.grad is not None
    monkeypatch.setattr("speculant.native.layers.library", lambda: None)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), want)
