"""The table of drafts: every entry builds, every wrong request is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake import FakeTarget, FakeTokenizer, Prunable, make_row
from speculant.drafts import DRAFTS, NEEDS, find_draft, load_draft


def test_load_draft_builds_each() -> None:
    target = Prunable()
    for name in DRAFTS:
        if name in NEEDS:  # a bundled head is another target's, and none is this one's
            with pytest.raises(ValueError, match="train one: speculant train"):
                load_draft(name, target)
        else:
            assert load_draft(name, target).info.name == name
    none, row = load_draft("none", target), make_row([1, 2])
    none.start(1, 8)
    none.open(row)
    assert none.propose([row, row]).num_nodes.tolist() == [0, 0]
    vanilla = load_draft("vanilla", target, layers=3, num_draft_tokens=2)
    assert vanilla.info.options == {"model": "pruned to 3", "num_draft_tokens": 2}
    assert load_draft("vanilla", target, model=FakeTarget(name="small")).info.max_nodes == 4


def test_load_draft_refuses() -> None:
    target = FakeTarget(name="big")
    with pytest.raises(ValueError, match=r"unknown draft 'x': the drafts are none, ngram, look"):
        load_draft("x", target)
    with pytest.raises(ValueError, match=r"no option nmax: its options are num_draft_tokens, max"):
        load_draft("ngram", target, nmax=3)
    with pytest.raises(ValueError, match=r"no option a: it has none"):
        load_draft("none", target, a=1)
    with pytest.raises(ValueError, match="cannot be pruned"):
        load_draft("vanilla", target)
    with pytest.raises(ValueError, match="not both"):
        load_draft("vanilla", target, model=target, layers=2)
    other = FakeTarget(name="small", tokenizer=FakeTokenizer("other"))
    with pytest.raises(ValueError, match="draft small has another tokenizer than target big"):
        load_draft("vanilla", target, model=other)
    bigger = FakeTarget(name="padded", vocab_size=40)
    assert load_draft("vanilla", target, model=bigger).info.name == "vanilla"
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        load_draft("vanilla", target, model=bigger, num_draft_tokens=0)


def test_a_draft_with_another_ones_head() -> None:
    """NAME=FOLDER; a name alone keeps its meaning, and drafts without a head have no folder."""
    assert find_draft("eagle2=heads/mine") == ("eagle2", {"head": Path("heads/mine")})
    assert find_draft("eagle1-tree=a=b") == ("eagle1-tree", {"head": Path("a=b")})
    assert find_draft("eagle2") == ("eagle2", {})
    for name in ("ngram=heads/mine", "eagle2=", "=x", "nope=x"):
        with pytest.raises(ValueError, match="unknown draft"):
            find_draft(name)
