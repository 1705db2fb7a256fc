"""Sampling parameters, and the one way from logits to probabilities to tokens.

The order is Hugging Face's: bias, penalties, min_tokens, temperature, top-k, top-p, min-p.
The target's logits always pass through it, in plain decoding and at every drafted position
alike, so that no parameter can hold in one and not in the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

GREEDY_BELOW = 1e-4
"""Temperatures below this are argmax: dividing by them would overflow float32."""
MAX_SEED = 2**63 - 1
LARGEST = 1e4
"""Largest bias and penalty: far beyond any logit, far below what overflows at a low temperature."""
DRAW_BLOCK = 256
"""Tokens whose probabilities are added up before one of them is drawn."""
TOP_P_SHORTLIST = 512


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops.

    max_tokens:          most tokens to generate, at least 1
    temperature:         0 is greedy; so is anything below 1e-4
    top_k:               keep the k likeliest tokens; 0 keeps all
    top_p:               keep the smallest set of likeliest tokens of at least this mass, in (0, 1]
    min_p:               keep tokens of at least min_p times the likeliest one's probability
    repetition_penalty:  of Hugging Face: divides positive, multiplies negative logits of every
                         token seen in prompt or output (> 0; 1 is off)
    presence_penalty,    of OpenAI: subtracted from the logits of tokens in the output, once
    frequency_penalty:   or per occurrence
    logit_bias:          token id -> number added to its logit
    min_tokens:          no EOS, stop id or stop string before this many output tokens
    stop:                strings that end the output; they are not part of it
    stop_token_ids:      ids that end the output, beside the model's EOS ids
    ignore_eos:          go on after EOS (for measurements)
    seed:                0 .. 2**63 - 1; None takes one from the operating system
    logprobs:            None, or how many alternatives to report a token (0: the token only);
                         log-probabilities of the target before any processing
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, wrong, rule in self._rules():
            if wrong:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {rule}")

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        """(field, is it wrong, what it must be); NaN fails every comparison, hence the `not`s."""
        yield (
            "max_tokens",
            not _whole(self.max_tokens) or self.max_tokens < 1,
            "a whole number >= 1",
        )
        yield (
            "temperature",
            not (_number(self.temperature) and self.temperature >= 0),
            "a number >= 0 (0 is greedy)",
        )
        yield "top_k", not _whole(self.top_k) or self.top_k < 0, "a whole number >= 0 (0 is off)"
        yield "top_p", not (_number(self.top_p) and 0 < self.top_p <= 1), "in (0, 1] (1 is off)"
        yield "min_p", not (_number(self.min_p) and 0 <= self.min_p <= 1), "in [0, 1] (0 is off)"
        yield (
            "repetition_penalty",
            not (_number(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3),
            "between 0.001 and 1000 (1 is off)",
        )
        yield (
            "presence_penalty",
            not _small(self.presence_penalty),
            f"between -{LARGEST:g} and {LARGEST:g}",
        )
        yield (
            "frequency_penalty",
            not _small(self.frequency_penalty),
            f"between -{LARGEST:g} and {LARGEST:g}",
        )
        yield (
            "logit_bias",
            any(not (_small(v) or v == -math.inf) for v in self.logit_bias.values())
            or any(not _whole(k) or k < 0 for k in self.logit_bias),
            f"token ids with numbers from -{LARGEST:g} to {LARGEST:g} (-inf forbids a token)",
        )
        yield (
            "min_tokens",
            not _whole(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens,
            f"between 0 and max_tokens ({self.max_tokens})",
        )
        yield (
            "stop",
            any(not (isinstance(s, str) and s) for s in self.stop),
            "strings that are not empty",
        )
        yield "stop_token_ids", any(not _whole(i) or i < 0 for i in self.stop_token_ids), "ids >= 0"
        yield (
            "seed",
            self.seed is not None and (not _whole(self.seed) or not 0 <= self.seed <= MAX_SEED),
            "between 0 and 2**63 - 1",
        )
        yield (
            "logprobs",
            self.logprobs is not None and not (_whole(self.logprobs) and 0 <= self.logprobs <= 100),
            "None or between 0 and 100",
        )

    @property
    def greedy(self) -> bool:
        """True when the temperature counts as 0."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """True when a token's logits depend on the tokens before it beyond the model itself."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
        )

    @property
    def shape(self) -> tuple[float, int, float, float]:
        """What `to_probs` depends on; rows of equal shape are transformed together."""
        return (0.0 if self.greedy else self.temperature, self.top_k, self.top_p, self.min_p)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _small(value: object) -> bool:
    return _number(value) and abs(value) <= LARGEST  # type: ignore[arg-type]


class Random:
    """One request's random numbers, from a `torch.Generator` of its own.

    `peek` shows the next uniforms without using them up, `take` uses up: a round that walks
    chosen nodes uses exactly one number per committed token, as plain decoding does, so the
    same seed gives the same text with and without such a draft.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little") & MAX_SEED
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self._ahead: list[float] = []

    def peek(self, count: int) -> list[float]:
        """The next `count` uniforms of [0, 1), in float64."""
        missing = count - len(self._ahead)
        if missing > 0:
            fresh = torch.rand(missing, dtype=torch.float64, generator=self.generator)
            self._ahead += fresh.tolist()
        return self._ahead[:count]

    def take(self, count: int) -> list[float]:
        """The next `count` uniforms, used up."""
        taken = self.peek(count)
        del self._ahead[:count]
        return taken


def to_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [..., V] of logits [..., V]: temperature, top-k, top-p, min-p, softmax.

    Greedy parameters give the point mass on the argmax, ties to the lowest id.
    """
    if params.greedy:
        ids = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, ids, 1.0)
    scaled = logits / params.temperature if params.temperature != 1 else logits
    if 0 < params.top_k < scaled.shape[-1]:
        kth = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    probs = scaled.softmax(dim=-1)
    if params.top_p < 1:
        probs = _nucleus(probs, params.top_p)
    if params.min_p > 0:
        least = params.min_p * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def to_probs_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`to_probs` of logits [B, ..., V] with one set of parameters a row; equal ones together."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for b, mine in enumerate(params):
        groups.setdefault(mine.shape, []).append(b)
    if len(groups) == 1:
        return to_probs(logits, params[0])
    out = torch.empty_like(logits)
    for members in groups.values():
        out[members] = to_probs(logits[members], params[members[0]])
    return out


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p, renormalised.

    Sorting the vocabulary costs more than the rest of sampling together, so a shortlist of the
    likeliest tokens is tried first; only where its mass falls short is everything sorted.
    """
    rows = probs.reshape(-1, probs.shape[-1])  # shape: [R, V]
    count = min(TOP_P_SHORTLIST, rows.shape[-1])
    values, ids = rows.topk(count, dim=-1)  # shape: [R, count], descending
    out = torch.zeros_like(rows).scatter_(-1, ids, _head(values, top_p))
    short = (values.sum(dim=-1) < top_p).nonzero().squeeze(1)
    if count < rows.shape[-1] and len(short):  # those rows alone: no row may sway another's ties
        values, ids = rows[short].sort(dim=-1, descending=True, stable=True)
        out[short] = torch.zeros_like(values).scatter_(-1, ids, _head(values, top_p))
    return (out / out.sum(dim=-1, keepdim=True)).reshape(probs.shape)


def _head(values: Tensor, top_p: float) -> Tensor:
    """Descending values [R, k] with those zeroed that come after a mass of top_p."""
    before = values.cumsum(dim=-1, dtype=torch.float64) - values  # mass of the likelier tokens
    return values.masked_fill(before >= top_p, 0.0)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [...] drawn from probs [..., V] by inverting the cumulative sum at uniforms [...].

    First among blocks of DRAW_BLOCK tokens, then inside one: adding up blocks is thirty times
    cheaper than a running sum over a vocabulary of 49,152. Sums are float64 and scaled by their own
    total, so a token of probability 0 is never drawn: the first index whose sum exceeds the
    threshold has added to it.
    """
    vocab = probs.shape[-1]
    size = min(DRAW_BLOCK, vocab)
    parts = F.pad(probs, (0, -vocab % size)).unflatten(-1, (-1, size))  # shape: [..., N, size]
    sums = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = sums[..., -1:]
    if not bool((total > 0).all()):
        raise FloatingPointError("nothing to draw from: every token is forbidden or NaN")
    threshold = _below(uniforms.to(sums)[..., None] * total, total)
    block = torch.searchsorted(sums, threshold, right=True)  # shape: [..., 1]
    before = F.pad(sums, (1, 0)).gather(-1, block)
    index = block[..., None].expand(*block.shape, size)
    inside = parts.gather(-2, index).squeeze(-2).cumsum(dim=-1, dtype=torch.float64)
    threshold = _below(threshold - before, inside[..., -1:])
    return (block * size + torch.searchsorted(inside, threshold, right=True)).squeeze(-1)


def _below(threshold: Tensor, total: Tensor) -> Tensor:
    """Thresholds kept under their total, so that rounding never asks for more than there is."""
    return torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))


def broken_rows(fine: Tensor, positions: Tensor, real: Tensor) -> dict[int, str]:
    """Batch rows of a target's logits that mean nothing somewhere: what is wrong, with its place.

    fine:      [B, 1 + n], see `native.layers.likeliest`
    positions: [B, 1 + n]
    real:      [B, n], which nodes are not padding
    """
    if real.shape[1]:
        fine = fine.clone()
        fine[:, 1:] |= ~real.to(fine.device)
    if bool(fine.all()):
        return {}
    out: dict[int, str] = {}
    for row, column in (~fine).nonzero().tolist():
        place = int(positions[row, column])
        broken = (
            f"the target's logits at position {place} are not finite: weights or inputs are broken"
        )
        out.setdefault(row, broken)
    return out
