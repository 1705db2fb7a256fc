"""What published heads have and heads trained here do not: every switch is off unless a file names it.

The switches are fields of the heads' configs. One that is off is not written, so that a head without
any is the file that it was before there were switches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .rope import check_scaling

SWITCH = {"switch": True}
"""Metadata of a field that is written only where it is not its default."""


def as_dict(config: Any) -> dict[str, Any]:
    """A config's fields as they are written, without the switches that are off."""
    out = dataclasses.asdict(config)
    for each in dataclasses.fields(config):
        default: Any = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if "switch" in each.metadata and out[each.name] == default:
            del out[each.name]
    return out


@dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """Switches of an EAGLE head's Llama layer, and of what goes into it.

    qkv_bias:       the query, key and value projections add a bias (Qwen2's)
    o_bias:         the output projection does
    mlp_bias:       the three projections of the MLP do
    fc_bias:        fc does (EAGLE-1's own trainer)
    own_embeddings: an input embedding of its own in place of the target's
    rope_scaling:   one of `rope.SCALINGS`: its rope_type and numbers; {} is plain RoPE
    """

    qkv_bias: bool = field(default=False, metadata=SWITCH)
    o_bias: bool = field(default=False, metadata=SWITCH)
    mlp_bias: bool = field(default=False, metadata=SWITCH)
    fc_bias: bool = field(default=False, metadata=SWITCH)
    own_embeddings: bool = field(default=False, metadata=SWITCH)
    rope_scaling: dict[str, Any] = field(default_factory=dict, metadata=SWITCH)

    @property
    def attention_bias(self) -> bool:
        """True when a projection of the attention has a bias: engines know one flag for all four."""
        return self.qkv_bias or self.o_bias

    def check_variant(self) -> None:
        """Raise ValueError for a scaling of RoPE that is not known."""
        check_scaling(self.rope_scaling)
