"""A head for drafting: its matrices packed for few rows, its decoder layer one call of the library.

A draft step is bound by reading the head's weights and by the calls around them, and what a draft
proposes need not be exact to the last bit: the target verifies it. So matrices are rounded to int8
with a scale for every 32 inputs, inputs too (`native.linear`, the format q8_0-a8), where 32 divides
their width; others stay in bfloat16, as heads are stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..native.attention import can_attend
from ..native.chain import Chain
from ..native.chain import Pairs as Pairs
from ..native.layers import Layers, LayerWeights
from ..native.layers import fits as fits_layers
from ..native.linear import PackedLinear, can_pack, quantise
from .eagle3 import Eagle3Head

INTEGERS = "q8_0"


class Packed(nn.Module):
    """Stands where an `nn.Linear` stood. It is run, not trained or saved.

    weight: empty; it tells the precision and the device of what goes in and comes out
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = packed(linear)
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.linear(x).to(self.weight.dtype)


def packed(*linears: nn.Linear) -> PackedLinear:
    """Matrices of one input, one below the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if can_pack(weight.shape[1], INTEGERS, weight.device):
        return PackedLinear(quantise(weight, INTEGERS), bias, round_inputs=True)
    return PackedLinear(weight.to(torch.bfloat16), bias)


def pack(head: nn.Module) -> nn.Module:
    """The head with its linear layers packed, in place, where the compiled library is here.

    Drafting keeps no graph: the packed layers take no gradient.
    """
    if isinstance(head, Eagle3Head):
        head.compiled = compiled_layer(head)
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and can_pack(
                child.in_features, "bfloat16", child.weight.device
            ):
                setattr(module, name, Packed(child))
    return head


def compiled_layer(head: Eagle3Head) -> Layers | None:
    """EAGLE-3's decoder layer as one call; None where the library is missing or does not fit.

    A layer that a published head's switches change runs one operator at a time.
    """
    c, layer = head.config, head.midlayer
    weight = layer.mlp.down_proj.weight
    sized = fits_layers(c.hidden_size, c.intermediate_size)
    there = weight.dtype is torch.float32 and can_attend(weight.dtype, weight.device, c.head_dim)
    if not sized or not there or c.norm_before_residual or c.norm_output or c.rope_scaling:
        return None
    attn, mlp = layer.self_attn, layer.mlp
    weights = LayerWeights(
        input_norm=layer.hidden_norm.weight.detach(),
        q_norm=None,
        k_norm=None,
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        qkv=packed(attn.q_proj, attn.k_proj, attn.v_proj),
        out=packed(attn.o_proj),
        gate_up=packed(mlp.gate_proj, mlp.up_proj),
        down=packed(mlp.down_proj),
        beside_norm=layer.input_layernorm.weight.detach(),
    )
    sizes = (c.num_heads, c.kv_heads, c.head_dim, c.intermediate_size)
    return Layers([weights], *sizes, c.norm_eps)


def greedy_chain(head: object, embed: Callable[[Tensor], Tensor], inv_freq: Tensor) -> Chain | None:
    """A chain of the head's likeliest tokens as one call; None for a head that is not packed whole.

    embed: token ids -> input embeddings; inv_freq: [D / 2], of the head's RoPE
    """
    if not isinstance(head, Eagle3Head) or head.compiled is None:
        return None
    if not isinstance(head.lm_head, Packed):
        return None
    embeddings = embed(head.target_ids).detach().float()
    norm, c = head.norm.weight.detach(), head.config
    plain = isinstance(head.fc, Packed) and not c.norm_before_fc and not c.fc_norm
    fc = head.fc.linear if plain else None
    return Chain(head.compiled, norm, head.lm_head.linear, embeddings, inv_freq, fc)
