"""What drafting needs of an EAGLE head: EAGLE-1's and EAGLE-3's go through one draft class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from ..native.layers import Layers
from .layers import Attend, Sizes


class EagleSizes(Sizes, Protocol):
    """What drafting reads of a head's config, beside its layer's sizes.

    taps:       target layers whose entering state is read, or (LAST,) for the one after the final norm
    state_size: width of the target's states
    target:     fingerprint of the target it was trained for; empty where it is not known
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def state_size(self) -> int: ...

    @property
    def target(self) -> Mapping[str, Any]: ...


class EagleHead(Protocol):
    """One decoder layer over pairs of a target's features at t and the embedding of token t + 1.

    H is the hidden size, Vd the size of the draft vocabulary.
    """

    @property
    def config(self) -> EagleSizes: ...

    @property
    def compiled(self) -> Layers | None:
        """The decoder layer in the compiled library, where drafting may run it there."""
        ...

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target id of every draft id, ascending."""
        ...

    @property
    def own_embedding(self) -> Callable[[Tensor], Tensor] | None:
        """Token ids [...] -> input embeddings [..., H] of its own; None where it uses the target's."""
        ...

    def parameters(self, recurse: bool = ...) -> Iterator[nn.Parameter]:
        """The weights; the first one tells dtype and device."""
        ...

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped states [..., len(taps) * state_size] -> features [..., H]."""
        ...

    def __call__(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """One pass over pairs: embeddings, and features or own outputs, [B, T, H] -> [B, T, H].

        positions: [B, T] int64, rotary positions
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] -> logits [..., Vd] in float32 over the draft vocabulary."""
        ...
