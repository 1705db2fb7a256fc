"""The integer blocks of a GGUF file, kept beside the weights that they stand for.

Q4_1: 32 weights as integers of 0..15, a float16 scale and a float16 minimum. Q8_0: 32 weights as
int8 and a float16 scale. (llama.cpp, ggml-common.h: block_q4_1, block_q8_0.) The folder that a GGUF
file is converted into holds them in `gguf_blocks.st`, so that the decoder can run on them as
they are, without rounding a second time. (A safetensors file by another name: loaders of the folder
take every *.safetensors for weights.) A matrix is written only if its blocks give the converted
weights bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..native.linear import GROUP, Quantised
from .base import LoadError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

FILE = "gguf_blocks.st"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's matrices in GGUF's names and in Hugging Face's."""
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def hugging_face_name(name: str) -> str | None:
    """A GGUF matrix's name in a Llama-like model of transformers; None for anything else."""
    if name in TOP:
        return TOP[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in NAMES or parts[3] != "weight":
        return None
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"


def unpack_blocks(kind: str, data: np.ndarray[Any, Any]) -> Quantised | None:
    """The blocks of a GGUF matrix, data [N, bytes] uint8; None for a kind other than Q4_1 and Q8_0."""
    rows = torch.from_numpy(data.copy())
    if kind == "Q4_1":
        blocks = rows.unflatten(1, (-1, 20))  # shape: [N, K / 32, 20]
        scales, minima = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
        codes = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1)
        return Quantised("q4_1", codes.flatten(1), scales, minima)
    if kind == "Q8_0":
        blocks = rows.unflatten(1, (-1, 34))
        codes = blocks[..., 2:].contiguous().view(torch.int8)
        return Quantised("q8_0", codes.flatten(1), _halves(blocks[..., :2]))
    return None


def _halves(pairs: Tensor) -> Tensor:
    """[..., 2] uint8 -> [...] float32 of the float16 they are."""
    return pairs.contiguous().view(torch.float16).squeeze(-1).float()


def unpermuted(matrix: Quantised, heads: int) -> Quantised:
    """Rows of a query or key projection, from GGUF's interleaved rotary order to Hugging Face's."""
    count = len(matrix.codes)
    order = torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)
    minima = None if matrix.minima is None else matrix.minima[order]
    return Quantised(matrix.form, matrix.codes[order], matrix.scales[order], minima)


def write_quantised(
    reader: GGUFReader, weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path
) -> int:
    """Write every matrix whose blocks give the converted weights bit for bit; how many there are."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    for entry in reader.tensors:
        name = hugging_face_name(entry.name)
        if name is None or name not in weights:
            continue
        matrix = unpack_blocks(entry.tensor_type.name, entry.data)
        if matrix is None:
            continue
        tries = [matrix]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tries.append(unpermuted(matrix, heads if "q_proj" in name else kv_heads))
        same = [m for m in tries if torch.equal(m.dequantised(), weights[name].float())]
        if same:
            tensors |= _stored(name, same[0])
    if tensors:
        save_file(tensors, str(folder / FILE), metadata={"format": "pt"})
    return sum(name.endswith(".codes") for name in tensors)


def _stored(name: str, matrix: Quantised) -> dict[str, Tensor]:
    codes = matrix.codes
    if matrix.form == "q4_1":  # two in a byte, as in the blocks
        pairs = codes.unflatten(1, (-1, 2, GROUP // 2))
        codes = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    out = {f"{name}.codes": codes, f"{name}.scales": matrix.scales.half()}
    if matrix.minima is not None:
        out[f"{name}.minima"] = matrix.minima.half()
    return {key: value.contiguous() for key, value in out.items()}


class QuantisedFile:
    """Reads what `write_quantised` wrote."""

    def __init__(self, folder: Path) -> None:
        """Raises LoadError where the folder has no such file."""
        self.path = folder / FILE
        if not self.path.is_file():
            raise LoadError(
                f"{folder}: --weights file needs the blocks of a GGUF file of type Q4_1 or Q8_0, "
                "and these weights come from none: choose int8 or int4"
            )

    def take(self, names: Sequence[str]) -> Quantised | None:
        """Matrices one below the other, as one; None unless all are there, in one form."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            there = set(file.keys())
            if not all(f"{name}.codes" in there for name in names):
                return None
            parts = [_read(file, name, f"{name}.minima" in there) for name in names]
        if len({part.form for part in parts}) != 1:
            return None
        minima = [part.minima for part in parts if part.minima is not None]
        return Quantised(
            parts[0].form,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(minima) if minima else None,
        )


def _read(file: Any, name: str, four: bool) -> Quantised:
    codes, scales = file.get_tensor(f"{name}.codes"), file.get_tensor(f"{name}.scales").float()
    if not four:
        return Quantised("q8_0", codes, scales)
    pairs = codes.unflatten(1, (-1, 1, GROUP // 2))
    codes = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)
    return Quantised("q4_1", codes, scales, file.get_tensor(f"{name}.minima").float())
