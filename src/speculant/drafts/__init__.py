"""Every draft strategy by name, and the one way to make one.

Builders import what they need when called, so that listing the drafts costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..target.base import Target
from .base import Draft

if TYPE_CHECKING:
    from ..heads.eagle3 import Eagle3Head


def _none(target: Target) -> Draft:
    from .none import NoDraft

    return NoDraft()


def _ngram(
    target: Target, num_draft_tokens: int = 8, max_ngram: int = 4, min_ngram: int = 1
) -> Draft:
    from .ngram import NgramDraft

    _check_depth("ngram", num_draft_tokens, target)
    return NgramDraft(num_draft_tokens, max_ngram, min_ngram)


def _lookahead(target: Target, window: int = 5, ngram: int = 4, max_candidates: int = 5) -> Draft:
    from .lookahead import LookaheadDraft

    return LookaheadDraft(window, ngram, max_candidates, target.info.context_length)


def _vanilla(
    target: Target,
    model: Target | str | Path | None = None,
    num_draft_tokens: int = 4,
    layers: int | None = None,
) -> Draft:
    from .vanilla import for_target

    _check_depth("vanilla", num_draft_tokens, target)
    return for_target(target, model, num_draft_tokens, layers)


def _eagle3(
    target: Target,
    head: Eagle3Head | str | Path | None = None,
    num_draft_tokens: int = 5,
    force: bool = False,
) -> Draft:
    from ..heads.weights import check_target, load_head
    from ..target.load import target_fingerprint
    from .eagle import Eagle3Draft

    if head is None:
        raise ValueError("draft 'eagle3' needs a head: give the folder of one as the draft")
    _check_depth("eagle3", num_draft_tokens, target)
    loaded = load_head(Path(head), target.info.dtype) if isinstance(head, str | Path) else head
    folder = target.info.folder
    if loaded.config.target and folder is not None and not force:
        check_target(loaded, target_fingerprint(folder, target.tokenizer), target.info.name)
    c, info = loaded.config, target.info
    if (c.hidden_size, c.vocab_size) != (info.hidden_size, info.vocab_size):
        raise ValueError(
            f"the head is for hidden size {c.hidden_size} and vocabulary {c.vocab_size}; "
            f"{info.name} has {info.hidden_size} and {info.vocab_size}"
        )
    if c.taps[-1] >= info.num_layers:
        raise ValueError(f"the head taps layer {c.taps[-1]}; {info.name} has {info.num_layers}")
    loaded = loaded.to(info.device)
    return Eagle3Draft(loaded, target.embed, info.vocab_size, num_draft_tokens)


def _check_depth(name: str, count: int, target: Target) -> None:
    """The engine reserves cache for a whole proposal, which never needs to outgrow the context."""
    if not 1 <= count <= target.info.context_length:
        most = target.info.context_length
        raise ValueError(f"draft {name!r}: num_draft_tokens is {count}: must be from 1 to {most}")


DRAFTS: dict[str, tuple[str, Callable[..., Draft]]] = {
    "none": ("drafts nothing: plain decoding", _none),
    "ngram": ("copies what followed the last occurrence of the newest tokens", _ngram),
    "lookahead": ("verifies n-grams from a Jacobi window in the target's own forward", _lookahead),
    "eagle3": ("an EAGLE-3 head on the target's hidden states, drafting a chain", _eagle3),
    "vanilla": ("a smaller model with the same tokenizer, or the target's first layers", _vanilla),
}
"""Name -> what it does in a line, and its builder: the target, then the draft's options."""


def draft_options(name: str) -> dict[str, object]:
    """Options of a draft and their defaults."""
    parameters = list(inspect.signature(DRAFTS[name][1]).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters[1:]}


def load_draft(name: str, target: Target, **options: object) -> Draft:
    """Make a draft for a target; ValueError for a name or an option that is not known.

    The folder of a trained head is a name too.
    """
    if name not in DRAFTS and (Path(name) / "config.json").is_file():
        options, name = {"head": Path(name), **options}, "eagle3"
    if name not in DRAFTS:
        raise ValueError(f"unknown draft {name!r}: the drafts are {', '.join(DRAFTS)}")
    known = draft_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"its options are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"draft {name!r} has no option {', '.join(unknown)}: {takes}")
    return DRAFTS[name][1](target, **options)
