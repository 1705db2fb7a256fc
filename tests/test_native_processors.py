"""The compiled library as other processors get it: every width of vectors compiles and computes alike.

A machine runs one of the ways in which `vectors.h` holds sixteen numbers. What it does not run would
break unseen, so the narrower ways are compiled and run here, and the wider ones at least compiled.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import speculant
from speculant.native.linear import FORMATS, PackedLinear, Quantised
from speculant.target.llama import LlamaTarget
from test_llama import FakeTokenizer, saved
from test_native_fallback import logits
from test_native_linear import literally_rounded, weights

COMPILER = shutil.which("c++") or ""
SOURCES = Path(speculant.__file__).parent / "native"
FLAGS = ["-std=c++17", "-ffp-contract=fast", "-fno-math-errno"]
NAMES = ("attention", "chain", "layers", "library", "linear", "tree")
WIDER = {
    "AVX-512": ["-mavx512f"],
    "AVX-512 BW": ["-march=skylake-avx512"],
    "VNNI": ["-march=icelake-server"],
    "bfloat16": ["-march=icelake-server", "-mavx512bf16"],
}
NARROWER = {"16 bytes": ["-march=x86-64"], "AVX2": ["-march=x86-64-v3"]}
pytestmark = pytest.mark.skipif(
    not COMPILER or platform.machine() not in ("x86_64", "AMD64"),
    reason="there is no C++ compiler, or the processor is no x86-64",
)


@pytest.mark.parametrize("kind", WIDER)
def test_wider_vectors_compile(kind: str, tmp_path: Path) -> None:
    """All instructions that are named exist for the processor that the flags describe."""
    both = tmp_path / "both.cpp"
    both.write_text(
        "".join(f'#include "{SOURCES / name}.cpp"\n' for name in ("linear", "attention"))
    )
    ran = subprocess.run(
        [COMPILER, "-fsyntax-only", *FLAGS, *WIDER[kind], str(both)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module", params=NARROWER)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library, compiled for a processor with no wider vectors than these."""
    if request.param == "AVX2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    out = tmp_path_factory.mktemp("library") / "other.so"
    files = [str(SOURCES / f"{name}.cpp") for name in NAMES]
    flags = ["-O1", "-fPIC", "-shared", *FLAGS, *NARROWER[request.param]]
    ran = subprocess.run([COMPILER, *flags, *files, "-o", str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    library = ctypes.CDLL(str(out))
    assert library.speculant_level() == (1 if request.param == "AVX2" else 0)
    return library


@pytest.fixture(autouse=True)
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "other" in request.fixturenames:
        library = request.getfixturevalue("other")
        for module in ("linear", "attention", "layers"):
            monkeypatch.setattr(f"speculant.native.{module}.library", lambda: library)


@pytest.mark.parametrize("form", FORMATS)
def test_products(form: str, other: ctypes.CDLL) -> None:
    """Against float64; a row among others is what it is alone, to the last bit."""
    weight, dense = weights(form, 150, 96, 6)
    packed = PackedLinear(weight, None, round_inputs="-a" in form)
    x = torch.randn(17, 96, generator=torch.Generator().manual_seed(7))
    out = packed(x)
    want = literally_rounded(x, form) @ dense.double().T
    torch.testing.assert_close(out.double(), want, atol=2e-4, rtol=1e-5)
    for rows in range(1, len(x)):
        assert torch.equal(packed(x[:rows]), out[:rows])


@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_products(form: str, sign: float, other: ctypes.CDLL) -> None:
    """Sums of bytes at their limits: sixteen bits would overflow where they are added too often."""
    code = 15 if form == "q4_1" else -127
    kind = torch.uint8 if form == "q4_1" else torch.int8
    codes, ones = torch.full((32, 96), code, dtype=kind), torch.ones(32, 3)
    minima = torch.zeros(32, 3) if form == "q4_1" else None
    x = torch.full((8, 96), sign * 127)
    out = PackedLinear(Quantised(form, codes, ones, minima), None, round_inputs=True)(x)
    assert torch.equal(out, torch.full((8, 32), sign * 127 * code * 96))


def test_a_whole_forward(
    other: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, attention over a cache and LM head against plain torch."""
    saved(tmp_path, "llama wide heads")

    def load() -> LlamaTarget:
        return LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x", torch.float32, "cpu", "")

    fast = load()
    assert fast.compiled is not None
    got: Tensor = logits(fast)
    for module in ("attention", "linear"):
        monkeypatch.setattr(f"speculant.native.{module}.library", lambda: None)
    torch.testing.assert_close(got, logits(load()), atol=1e-4, rtol=1e-4)
