"""The head of each kind, where it starts from, and its objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..heads.eagle1 import Eagle1Config, Eagle1Head
from ..heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.vanilla import VanillaConfig, VanillaHead
from ..heads.weights import Head, HeadError, load_head
from ..target.base import Target
from ..train.copying import can_copy, copying_heads, with_copying
from ..train.data import Corpus, plan
from ..train.eagle1 import Eagle1Objective, start_from_layer
from ..train.eagle3 import Eagle3Objective
from ..train.features import Features
from ..train.init import (
    channel_scale,
    condition,
    init_eagle3,
    layer_sizes,
    pair_scale,
    with_vocabulary,
)
from ..train.loop import Objective
from ..train.medusa import MedusaObjective
from ..train.vanilla import VanillaObjective, start_from_layers
from .settings import STARTS, VOCABULARY, TrainSettings

SCALED_BATCHES = 8
"""Batches of about a thousand answer tokens that the size of tapped channels is taken from."""
SHALLOW = 7
"""Layers below which there are no default taps."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens a head learns over, and how much of the data's answers they are.

    ids: [Vd] int64, ascending; coverage: share of answer tokens; distinct: ids that occur at all
    """

    ids: Tensor
    coverage: float
    distinct: int


def vocabulary_for(settings: TrainSettings, corpus: Corpus, target: Target) -> Vocabulary:
    """The tokens to learn: those of the head that training starts from, else the most frequent.

    A head may be given another size than it had: then its tokens are chosen anew too.
    """
    wanted = vocabulary_size(settings, target)
    if settings.kind == "eagle3" and settings.init not in STARTS:
        head = load_head(Path(settings.init))
        if isinstance(head, Eagle3Head) and head.config.draft_vocab_size == wanted:
            return _vocabulary(head.target_ids, corpus.counts(target.info.vocab_size))
    return choose_vocabulary(corpus, target, wanted)


def choose_vocabulary(corpus: Corpus, target: Target, size: int) -> Vocabulary:
    """The `size` most frequent answer tokens, EOS always; filled up with ids that never occur.

    Ties go to the lower id. Unused ids fill up a vocabulary larger than the data's own tokens, never
    a token twice: an engine's map must be one to one.
    """
    info = target.info
    _check_vocabulary(size, target)
    counts = corpus.counts(info.vocab_size)
    ranked = counts.clone()
    for eos in target.tokenizer.eos_ids:
        if eos < info.vocab_size:
            ranked[eos] = counts.max() + 1
    ids = ranked.sort(descending=True, stable=True).indices[:size].sort().values
    return _vocabulary(ids, counts)


def vocabulary_size(settings: TrainSettings, target: Target) -> int:
    """Tokens that a head learns over: as asked, else as the head that training starts from."""
    if settings.draft_vocab_size is not None:
        return settings.draft_vocab_size
    if settings.kind == "eagle3" and settings.init not in STARTS:
        head = load_head(Path(settings.init))
        if isinstance(head, Eagle3Head):
            return head.config.draft_vocab_size
    return min(VOCABULARY, target.info.vocab_size)


def _vocabulary(ids: Tensor, counts: Tensor) -> Vocabulary:
    """Some ids, against how often each token of the target is an answer's, [V]."""
    coverage = float(counts[ids].sum()) / max(1, int(counts.sum()))
    return Vocabulary(ids, coverage, int((counts > 0).sum()))


def _check_vocabulary(size: int, target: Target) -> None:
    if size > target.info.vocab_size:
        raise ValueError(
            f"--draft-vocab-size is {size}: the target has {target.info.vocab_size} tokens: give "
            "fewer"
        )


def check_sizes(settings: TrainSettings, target: Target) -> None:
    """Refuse what the target is too small for, before any data is made."""
    _check_vocabulary(vocabulary_size(settings, target), target)
    taps_for(settings, target)
    if settings.kind == "vanilla":
        spread_layers(settings.layers, target.info.num_layers)


def noted_taps(settings: TrainSettings, target: Target) -> tuple[int, ...]:
    """The layers whose states are noted with data: EAGLE-3's, so that every kind can train on it."""
    if settings.taps is None and target.info.num_layers < SHALLOW:
        return ()
    return taps_for(replace(settings, kind="eagle3"), target)


def taps_for(settings: TrainSettings, target: Target) -> tuple[int, ...]:
    """The layers a head of this kind reads, beside the last state."""
    if settings.kind != "eagle3":
        return ()
    taps = settings.taps or default_taps(target.info.num_layers)
    if taps[-1] >= target.info.num_layers or taps[0] < 0:
        raise ValueError(
            f"--taps {','.join(map(str, taps))}: the target's layers are 0 to "
            f"{target.info.num_layers - 1}"
        )
    return taps


def build(
    settings: TrainSettings,
    target: Target,
    vocabulary: Vocabulary,
    features: Features,
    corpus: Corpus,
) -> tuple[Head, Objective]:
    """A head, started, and its objective."""
    torch.manual_seed(settings.seed)
    ids, device = vocabulary.ids.to(target.info.device), target.info.device
    head = _fresh(settings, target, ids)
    if settings.init not in STARTS:
        head = start_from_head(head, Path(settings.init), target)
    head.to(device)
    if isinstance(head, Eagle3Head | Eagle1Head):
        some = plan(corpus.items, 0, settings.seed, 1024, 8192)[:SCALED_BATCHES]
        batches = [corpus.batch(items).to(device) for items in some]
        if isinstance(head, Eagle3Head):
            if settings.copying and can_copy(head) and not copying_heads(head, target):
                head = with_copying(head, target, features, batches[: SCALED_BATCHES // 2])
            condition(head, channel_scale(features, batches), fresh=settings.init in STARTS)
        else:  # its fc starts as the state passed through, in the state's own size
            condition(head, pair_scale(target, features, batches), fresh=False)
    return head, _objective(settings, head, target, ids, features)


def start_from_head(head: Head, folder: Path, target: Target) -> Head:
    """A head like this one with the weights of a trained one of the same kind, whatever its target.

    A head of a model is a good start for the head of its fine-tune. EAGLE-3's may draft other tokens
    than it did, see `train.init.with_vocabulary`, and may have more attention heads, see
    `train.copying`. HeadError where it does not fit.
    """
    old = load_head(folder)
    if type(old) is not type(head):
        raise HeadError(f"--init {folder}: a head of another kind: start from one of this kind")
    if (
        isinstance(head, Eagle3Head)
        and isinstance(old, Eagle3Head)
        and old.config.vocab_size == head.config.vocab_size
    ):
        ids = head.target_ids
        old = with_vocabulary(old, ids, target)
        if copying_heads(old, target):
            heads, kv_heads = old.config.num_heads, old.config.kv_heads
            head = Eagle3Head(replace(head.config, num_heads=heads, kv_heads=kv_heads))
            head.set_vocabulary(ids)
    mine, theirs = head.state_dict(), old.state_dict()
    wrong = [n for n, t in mine.items() if n not in theirs or theirs[n].shape != t.shape]
    if wrong or len(mine) != len(theirs):
        raise HeadError(f"--init {folder}: its sizes are not those asked for ({wrong[:1]} differs)")
    head.load_state_dict(theirs)
    return head


def _fresh(settings: TrainSettings, target: Target, ids: Tensor) -> Head:
    """A head of the kind asked for, as it begins where it does not begin as a trained one."""
    info, sizes, own = target.info, layer_sizes(target), settings.init == "target"
    if settings.kind == "eagle3":
        config = Eagle3Config(draft_vocab_size=len(ids), taps=taps_for(settings, target), **sizes)
        eagle3 = Eagle3Head(config)
        eagle3.set_vocabulary(ids)
        if own:
            init_eagle3(eagle3, target)
        return eagle3
    if settings.kind == "eagle1":
        eagle1 = Eagle1Head(Eagle1Config(**sizes))
        if own:
            start_from_layer(eagle1, target, info.num_layers - 1)
        return eagle1
    if settings.kind == "medusa":
        return MedusaHead(MedusaConfig(info.hidden_size, info.vocab_size, settings.heads))
    vanilla = VanillaHead(VanillaConfig(num_layers=settings.layers, **sizes))
    if own:
        start_from_layers(vanilla, target, spread_layers(settings.layers, info.num_layers))
    return vanilla


def _objective(
    settings: TrainSettings, head: Head, target: Target, ids: Tensor, features: Features
) -> Objective:
    if isinstance(head, Eagle3Head):
        copying = copying_heads(head, target) if settings.copying else 0
        return Eagle3Objective(
            head, target, features, settings.steps, kind=settings.loss, single=settings.single,
            copying=copying,
        )  # fmt: skip
    if isinstance(head, Eagle1Head):
        return Eagle1Objective(head, target, features, ids, seed=settings.seed)
    if isinstance(head, MedusaHead):
        return MedusaObjective(head, target, features, ids, settings.loss)
    return VanillaObjective(head, target, features, ids, settings.loss)


def spread_layers(count: int, of: int) -> Sequence[int]:
    """`count` of `of` layers from the first to the last, evenly: 2 of 30 are 0 and 29."""
    if not 1 <= count <= of:
        raise ValueError(f"--layers is {count}: the target has {of}")
    return [0] if count == 1 else [round(i * (of - 1) / (count - 1)) for i in range(count)]
