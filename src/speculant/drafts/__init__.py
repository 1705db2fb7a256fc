"""Every draft strategy by name, and the one way to make one.

Builders import what they need when called, so that listing the drafts costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..target.base import Target
from .base import Draft

if TYPE_CHECKING:
    from ..heads.base import EagleHead
    from ..heads.medusa import MedusaHead


COPYING = "ngram+"
"""Before a draft's name: copy three tokens' continuation where there is one (`drafts.hybrid`)."""
CHAIN_DEPTH = 5
"""Tokens an EAGLE chain drafts where nothing else is said: what training unrolls."""


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
    force: bool = False,
) -> Draft:
    from .vanilla import for_target

    _check_depth("vanilla", num_draft_tokens, target)
    if model is None and layers is None:
        model = _bundled_vanilla(target)
    return for_target(target, model, num_draft_tokens, layers, force)


def _bundled_vanilla(target: Target) -> Path | None:
    """The trained layers that ship with the package, where they are this target's."""
    from ..heads.weights import load_head

    try:
        folder = bundled_head("vanilla")
        _check_head(load_head(folder), target, force=False)
    except ValueError:
        return None  # another target, which is pruned instead
    return folder


def _medusa(
    target: Target,
    head: MedusaHead | str | Path | None = None,
    tree: int = 32,
    force: bool = False,
) -> Draft:
    from .medusa import MedusaDraft

    if tree < 1:
        raise ValueError(f"draft 'medusa' drafts a tree: tree is {tree}: give at least 1 node")
    _check_tree("medusa", tree, target)
    return MedusaDraft(_fitting_head("medusa", "medusa", target, head, force), target.unembed, tree)


def _eagle1(
    target: Target,
    head: EagleHead | str | Path | None = None,
    num_draft_tokens: int | None = None,
    tree: int = 0,
    branch: int = 8,
    force: bool = False,
) -> Draft:
    name = "eagle2" if tree else "eagle1"
    return _eagle(name, "eagle1", target, head, num_draft_tokens, tree, branch, force)


def _eagle1_tree(
    target: Target,
    head: EagleHead | str | Path | None = None,
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> Draft:
    return _eagle("eagle1-tree", "eagle1", target, head, num_draft_tokens, 0, 8, force, fixed=True)


def _eagle2(
    target: Target,
    head: EagleHead | str | Path | None = None,
    num_draft_tokens: int | None = None,
    tree: int = 32,
    branch: int = 8,
    force: bool = False,
) -> Draft:
    if tree < 1:
        raise ValueError(f"draft 'eagle2' drafts a tree: tree is {tree}; the chain is eagle1")
    return _eagle("eagle2", "eagle1", target, head, num_draft_tokens, tree, branch, force)


def _eagle3(
    target: Target,
    head: EagleHead | str | Path | None = None,
    num_draft_tokens: int | None = None,
    tree: int = 0,
    branch: int = 8,
    force: bool = False,
) -> Draft:
    return _eagle("eagle3", "eagle3", target, head, num_draft_tokens, tree, branch, force)


def _eagle(
    name: str,
    kind: str,
    target: Target,
    head: EagleHead | str | Path | None,
    num_draft_tokens: int | None,
    tree: int,
    branch: int,
    force: bool,
    fixed: bool = False,
) -> Draft:
    """An EAGLE draft; a tree goes a level deeper than a chain, since its branches cost no pass."""
    from ..heads.eagle1 import Eagle1Head
    from .eagle import EagleDraft

    depth = (CHAIN_DEPTH + (tree > 0)) if num_draft_tokens is None else num_draft_tokens
    _check_depth(name, depth, target)
    _check_tree(name, tree, target)
    loaded = _fitting_head(name, kind, target, head, force)
    if isinstance(loaded, Eagle1Head):
        loaded.bind(target.unembed)
    parts = (loaded, target.embed, target.info.vocab_size, depth, tree, branch)
    return EagleDraft(*parts, name=name, fixed=fixed)


def bundled_head(kind: str, name: str | None = None) -> Path:
    """Folder of the head of a kind that ships with the package, for the bundled model.

    Raises ValueError with what to do when there is none; name: the draft that asks for it.
    """
    folder = Path(__file__).parents[1] / "bundled" / kind
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft {name or kind!r} needs a head: {_advice(kind)}")
    return folder


def _advice(kind: str) -> str:
    return f"give the folder of one as the draft, or train one: speculant train {kind}"


def _fitting_head(name: str, kind: str, target: Target, head: Any, force: bool) -> Any:
    """The head of a draft, loaded if it is a folder, checked against the target, on its device.

    head:  a module, a folder, or None for the bundled one
    force: skip the fingerprint; sizes must fit all the same
    """
    from ..heads.packed import pack
    from ..heads.weights import KINDS, load_head

    source = bundled_head(kind, name) if head is None else head
    loaded: Any = source
    if isinstance(source, str | Path):
        loaded = load_head(Path(source), target.info.dtype)
        if not isinstance(loaded, KINDS[kind][1]):
            found = next(k for k, (_, module) in KINDS.items() if isinstance(loaded, module))
            raise ValueError(f"{source} holds a head of kind {found}: draft {name!r} needs {kind}")
    try:
        _check_head(loaded, target, force)
    except ValueError as error:
        if head is not None:
            raise
        bundled = f"the bundled {kind} head is not for {target.info.name}"
        raise ValueError(f"{bundled}: {_advice(kind)} ({error})") from None
    loaded = loaded.to(target.info.device)
    return pack(loaded) if isinstance(source, str | Path) else loaded  # a module given is not ours


def _check_head(head: Any, target: Target, force: bool) -> None:
    """Raise ValueError when a head's fingerprint, sizes or taps are not the target's."""
    from ..heads.weights import check_target
    from ..target.load import target_fingerprint

    c, info = head.config, target.info
    if c.target and info.folder is not None and not force:
        check_target(head, target_fingerprint(info.folder, target.tokenizer), info.name)
    size = getattr(
        c, "state_size", c.hidden_size
    )  # of the target's states; an EAGLE head may differ
    if (size, c.vocab_size) != (info.hidden_size, info.vocab_size):
        raise ValueError(
            f"the head is for hidden size {size} and vocabulary {c.vocab_size}; "
            f"{info.name} has {info.hidden_size} and {info.vocab_size}"
        )
    taps = getattr(c, "taps", ())  # a vanilla draft reads none
    if taps and taps[-1] >= info.num_layers:
        raise ValueError(f"the head taps layer {taps[-1]}; {info.name} has {info.num_layers}")


def _check_depth(name: str, count: int, target: Target) -> None:
    """The engine reserves cache for a whole proposal, which never needs to outgrow the context."""
    if not 1 <= count <= target.info.context_length:
        most = target.info.context_length
        raise ValueError(f"draft {name!r}: num_draft_tokens is {count}: must be from 1 to {most}")


def _check_tree(name: str, nodes: int, target: Target) -> None:
    if not 0 <= nodes <= target.info.context_length:
        most = target.info.context_length
        raise ValueError(f"draft {name!r}: tree is {nodes}: must be from 0 to {most} nodes")


DRAFTS: dict[str, tuple[str, Callable[..., Draft]]] = {
    "none": ("drafts nothing: plain decoding", _none),
    "ngram": ("copies what followed the last occurrence of the newest tokens", _ngram),
    "lookahead": ("verifies n-grams from a Jacobi window in the target's own forward", _lookahead),
    "vanilla": ("a smaller model with the same tokenizer, or the target's first layers", _vanilla),
    "medusa": ("extra heads on the target's last hidden state, drafting a fixed tree", _medusa),
    "eagle1": ("an EAGLE-1 head on the target's last hidden state, drafting a chain", _eagle1),
    "eagle1-tree": ("an EAGLE-1 head drafting the fixed tree of its paper, 25 nodes", _eagle1_tree),
    "eagle2": ("an EAGLE-1 head drafting a tree that follows its confidence", _eagle2),
    "eagle3": ("an EAGLE-3 head on three hidden states, drafting a chain or a tree", _eagle3),
}
"""Name -> what it does in a line, and its builder: the target, then the draft's options."""

KINDS = {
    "eagle3": ("eagle3", "head"),
    "eagle1": ("eagle1", "head"),
    "medusa": ("medusa", "head"),
    "vanilla": ("vanilla", "model"),
}
"""Kind of a head's folder -> the draft that uses it, and which of its options takes the folder."""

NEEDS = {
    "medusa": "medusa", "eagle1": "eagle1", "eagle1-tree": "eagle1", "eagle2": "eagle1",
    "eagle3": "eagle3",
}  # fmt: skip
"""Draft -> the kind of head that it takes from the package when none is given (`bundled_head`)."""


def draft_options(name: str) -> dict[str, object]:
    """Options of a draft and their defaults."""
    builder = DRAFTS[name.removeprefix(COPYING)][1]
    parameters = list(inspect.signature(builder).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters[1:]}


def find_draft(name: str) -> tuple[str, dict[str, object]]:
    """The entry of DRAFTS for its name or for a head's folder, and the option with that folder.

    ngram+NAME copies where the text repeats itself, and is NAME elsewhere. NAME=FOLDER is a draft
    with a head that others use as well: `eagle2=heads/eagle1`. Raises ValueError for what is none of
    these.
    """
    if name in DRAFTS:
        return name, {}
    if name.startswith(COPYING):
        entry, given = find_draft(name.removeprefix(COPYING))
        if entry in ("none", "ngram", "lookahead"):
            raise ValueError(
                f"draft {name!r}: {COPYING} goes with vanilla, Medusa and EAGLE drafts"
            )
        return COPYING + entry, given
    entry, _, place = name.partition("=")
    if place and entry in NEEDS:
        return entry, {"head": Path(place)}
    folder = Path(name)
    if not (folder / "config.json").is_file():
        names = ", ".join(DRAFTS)
        raise ValueError(f"unknown draft {name!r}: the drafts are {names}, or a head's folder")
    from ..heads.weights import head_kind

    entry, option = KINDS[head_kind(folder)]
    return entry, {option: folder}


def load_draft(name: str, target: Target, **options: object) -> Draft:
    """Make a draft for a target; ValueError for a name or an option that is not known.

    The folder of a trained head is a name too.
    """
    name, given = find_draft(name)
    options = {**given, **options}
    known = draft_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"its options are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"draft {name!r} has no option {', '.join(unknown)}: {takes}")
    made = DRAFTS[name.removeprefix(COPYING)][1](target, **options)
    if not name.startswith(COPYING):
        return made
    from .hybrid import HybridDraft

    return HybridDraft(_ngram(target, min_ngram=3, max_ngram=5), made, target.info.vocab_size)
