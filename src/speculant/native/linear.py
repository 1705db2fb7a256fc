"""Linear layers for few rows, in the compiled library: weights packed once, in several formats.

| format   | a weight is                                             | bytes |
|----------|---------------------------------------------------------|-------|
| float32  | itself                                                  | 4     |
| bfloat16 | rounded to bfloat16                                     | 2     |
| int8     | an integer of -127..127 times its output's scale        | 1     |
| q8_0     | the same, with a scale for every 32 inputs              | 1.125 |
| q4_1     | an integer of 0..15 times a scale, plus a minimum, both for every 32 inputs | 0.75 |

(scales and minima held in float32). Inputs and sums are float32 in these formats. In `q8_0-a8` and
`q4_1-a8` the inputs are rounded as well, each row by itself, to int8 with a scale for every 32 of
them (`rounded`), as llama.cpp rounds them: products of integers, several times as many a second. In
`bfloat16-a16` they are rounded to bfloat16, as where a model runs in bfloat16: two products at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import library

LANES, GROUP = 16, 32
FORMATS = (
    "float32", "bfloat16", "int8", "q8_0", "q4_1", "q8_0-a8", "q4_1-a8", "bfloat16-a16",
)  # fmt: skip
"""In the order of the enumeration in linear.cpp."""


class Call(ctypes.Structure):
    """The arguments of `speculant_linear`; linear.cpp has the same struct."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scales", "minima", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs", "outputs")),
    )


@dataclass(frozen=True)
class Quantised:
    """A weight matrix [N, K] as integers, scales and minima.

    form:   one of FORMATS but float32 and bfloat16
    codes:  [N, K] int8, or uint8 for q4_1
    scales: [N] for int8, else [N, K / 32], float32
    minima: [N, K / 32] float32 for q4_1, else None
    """

    form: str
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def dequantised(self) -> Tensor:
        """The weights [N, K] it stands for, in float32."""
        if self.form == "int8":
            whole: Tensor = self.codes * self.scales[:, None]
            return whole
        grouped = self.codes.unflatten(1, (-1, GROUP)) * self.scales[..., None]
        if self.minima is not None:
            grouped = grouped + self.minima[..., None]
        flat: Tensor = grouped.flatten(1)
        return flat


def quantise(weight: Tensor, form: str) -> Quantised:
    """Round a weight matrix [N, K] to the nearest of int8, q8_0 or q4_1.

    Raises ValueError for another form, and for q8_0 and q4_1 unless 32 divides K.
    """
    weight = weight.float()
    if form == "int8":
        scales = weight.abs().amax(dim=1) / 127
        return Quantised(form, _codes(weight, scales[:, None]).to(torch.int8), scales)
    if weight.shape[1] % GROUP:
        raise ValueError(f"{form} takes weights in groups of 32, not {weight.shape[1]}: take int8")
    groups = weight.unflatten(1, (-1, GROUP))  # shape: [N, K / 32, 32]
    if form == "q8_0":
        scales = groups.abs().amax(dim=2) / 127
        codes = _codes(groups, scales[..., None]).to(torch.int8)
        return Quantised(form, codes.flatten(1), scales)
    if form != "q4_1":
        raise ValueError(f"no integer format {form!r}: choose int8, q8_0 or q4_1")
    minima = groups.amin(dim=2)
    scales = (groups.amax(dim=2) - minima) / 15
    codes = _codes(groups - minima[..., None], scales[..., None]).clamp(0, 15).to(torch.uint8)
    return Quantised(form, codes.flatten(1), scales, minima)


def _codes(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()


def rounded(x: Tensor) -> Tensor:
    """x [..., K] as the `-a8` formats see it: int8 times a scale for every 32 numbers, in float32.

    Raises ValueError unless 32 divides K.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"rounded inputs come in groups of 32, not {x.shape[-1]}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(dim=-1, keepdim=True)
    codes = (groups * torch.where(most > 0, 127 / most, 0)).round()
    whole: Tensor = (codes * (most / 127)).flatten(-2)
    return whole


def can_pack(inputs: int, form: str, device: torch.device) -> bool:
    """True when the compiled library is here and holds a matrix of so many inputs."""
    whole = not form.startswith(("q8_0", "q4_1")) or inputs % GROUP == 0
    return device.type == "cpu" and whole and library() is not None


class PackedLinear:
    """y = x W^T + b with packed weights. Rows of x are independent to the last bit."""

    def __init__(
        self, weight: Tensor | Quantised, bias: Tensor | None = None, round_inputs: bool = False
    ) -> None:
        """weight: [N, K] in float32 or bfloat16, or quantised; `can_pack` must hold.

        round_inputs: to int8 for q8_0 and q4_1; to bfloat16 for that, where K is even
        """
        self.bias = None if bias is None else padded(bias.float()).contiguous()
        self.scales: Tensor | None = None
        self.minima: Tensor | None = None
        if isinstance(weight, Tensor):
            self.form, self.shape = str(weight.dtype).removeprefix("torch."), weight.shape
            self.weight = panels(weight)
            if round_inputs and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0:
                self.form += "-a16"
                self.weight = self.weight.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
            return
        self.form, self.shape = weight.form, weight.codes.shape
        if weight.form == "int8":
            self.weight = panels(weight.codes)
            self.scales = padded(weight.scales).contiguous()
            return
        self.scales = panels(weight.scales)
        self.minima = None if weight.minima is None else panels(weight.minima)
        codes = weight.codes
        if weight.form == "q4_1":  # inputs k and k + 16 of a group share a byte
            pairs = codes.unflatten(1, (-1, 2, GROUP // 2))
            codes = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
        self.weight = panels(codes)
        if round_inputs:
            self.form += "-a8"
            self.weight = _words(self.weight, weight.form == "q8_0")

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weights reads."""
        parts = (self.weight, self.scales, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] float32."""
        outputs, inputs = self.shape
        rows = x.reshape(-1, inputs).float().contiguous()
        width = (outputs + LANES - 1) // LANES * LANES
        out = torch.empty(*x.shape[:-1], width)
        call = Call(
            rows.data_ptr(),
            self.weight.data_ptr(),
            *(None if t is None else t.data_ptr() for t in (self.scales, self.minima, self.bias)),
            out.data_ptr(),
            len(rows),
            inputs,
            width,
        )
        loaded = library()
        assert loaded is not None
        form = FORMATS.index(self.form)
        loaded.speculant_linear(ctypes.byref(call), form, torch.get_num_threads())
        return out if width == outputs else out[..., :outputs]


def panels(matrix: Tensor) -> Tensor:
    """[N, C] -> [N / 16, C, 16], N rounded up: sixteen outputs side by side, input by input."""
    packed: Tensor = padded(matrix).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
    return packed


def _words(packed: Tensor, signed: bool) -> Tensor:
    """Panels [N / 16, C, 16] of bytes -> [N / 16, C / 4, 16, 4]: four of an output in one word.

    Signed bytes become unsigned, 128 their zero: what the processor multiplies is unsigned by signed.
    """
    whole = packed.view(torch.uint8) ^ 128 if signed else packed
    words: Tensor = whole.unflatten(1, (-1, 4)).transpose(2, 3).contiguous()
    return words


def padded(matrix: Tensor) -> Tensor:
    """[N, ...] with zero rows up to the next multiple of 16."""
    missing = -len(matrix) % LANES
    return torch.cat([matrix, matrix.new_zeros(missing, *matrix.shape[1:])]) if missing else matrix
