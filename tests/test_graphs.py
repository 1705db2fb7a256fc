"""What a CUDA graph would hold, called on the CPU: against the forward that reads lengths anew.

Independent truth: `LlamaTarget.forward` as torch operators. The "graph" is recorded once a shape and
replayed by calling the same function, which must find all that changed in its input buffers.
Recording on a GPU is not tested: none was at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.drafts import load_draft
from speculant.engine import generate_many
from speculant.sampling import SamplingParams
from speculant.target.base import LAST
from speculant.target.graphs import COLUMNS, Graphs, Outputs
from speculant.target.llama import LlamaTarget
from speculant.tree import ancestor_mask, depths
from test_llama import load, saved

TAPS = (0, 2, LAST)


class Calls:
    """Records by calling; counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        self.recorded += 1
        outputs = run()

        def replay() -> None:
            self.replayed += 1
            for old, new in zip(outputs, run(), strict=True):
                if old is not None:
                    assert new is not None
                    old.copy_(new)

        return replay, outputs


def pair(folder: Path, variant: str) -> tuple[LlamaTarget, LlamaTarget, Calls]:
    """The same target twice: as it is, and with graphs."""
    saved(folder, variant)
    plain, other, calls = load(folder), load(folder), Calls()
    plain.compiled = other.compiled = None
    other.graphs = Graphs(other, calls)
    return plain, other, calls


def same(found: Outputs, want: Outputs) -> None:
    for mine, theirs in zip(found, want, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("variant", ["llama", "llama wide heads", "qwen2", "qwen3"])
def test_replayed_forwards_are_forwards(variant: str, tmp_path: Path) -> None:
    """Prompts in chunks, trees, single tokens: rows at other lengths and slots each time."""
    plain, other, calls = pair(tmp_path, variant)
    generator = torch.Generator().manual_seed(2)
    caches = [target.new_cache(4, 120) for target in (plain, other)]

    def both(slots: list[int], new: int, parents: Tensor | None, keep: int) -> None:
        tokens = torch.randint(0, 97, (len(slots), new), generator=generator)
        lengths = torch.tensor([caches[0].lengths[slot] for slot in slots])[:, None]
        mask = None if parents is None else ancestor_mask(parents)
        offsets = torch.arange(new) if parents is None else depths(parents)
        found = []
        for target, cache in zip((plain, other), caches, strict=True):
            parts = (tokens, lengths + offsets, mask, cache.rows(slots, new), TAPS)
            found.append(target.forward(*parts))
            for slot in slots:
                cache.advance(slot, keep)
        same(found[1], found[0])

    tree = torch.tensor([[-1, -1, 0, 0, 1]])
    both([0], 7, None, 7)
    both([2], 30, None, 30)
    both([0, 2], 1, None, 1)
    both([0, 2], 6, tree.expand(2, -1), 1)
    both([2, 0], 6, tree.expand(2, -1), 1)
    both([3, 1], 5, None, 5)
    both([0, 1, 2, 3], 1, None, 1)
    recorded = calls.recorded
    for _ in range(5):
        both([0, 2], 1, None, 1)
        both([1, 3], 6, tree.expand(2, -1), 1)
    assert calls.recorded == recorded  # lengths, slots and masks are no reason for another graph
    assert calls.replayed == 7 + 10


@torch.inference_mode()
def test_results_are_not_written_over(tmp_path: Path) -> None:
    _, other, _ = pair(tmp_path, "llama")
    cache = other.new_cache(1, 40)
    kept = []
    for token in (5, 9):
        rows = cache.rows([0], 1)
        logits, _ = other.forward(torch.tensor([[token]]), torch.tensor([[0]]), None, rows)
        assert logits is not None
        kept.append((logits, logits.clone()))
    assert all(torch.equal(a, b) for a, b in kept)
    assert not torch.equal(kept[0][0], kept[1][0])


def test_what_has_no_graph(tmp_path: Path) -> None:
    """Long prompts, no room for padding, entries left behind, a sliding window: run as ever."""
    plain, other, calls = pair(tmp_path, "llama")
    assert other.graphs is not None
    cache = other.new_cache(1, 100)
    assert not other.graphs.fits(cache.rows([0], 65))
    assert other.graphs.fits(cache.rows([0], 64))
    assert not other.graphs.fits(cache.rows([0], 2, behind=1))
    cache.advance(0, 97)
    assert other.graphs.fits(cache.rows([0], 2))
    assert not other.graphs.fits(cache.rows([0], 3))  # padded to four it would not fit
    saved(tmp_path / "window", "mistral window")
    window = load(tmp_path / "window")
    graphs = Graphs(window, calls)
    assert not graphs.fits(window.new_cache(1, 50).rows([0], 1))
    assert COLUMNS > 0
    assert plain.graphs is None


@pytest.mark.parametrize("draft", ["none", "ngram", "lookahead"])
def test_decoding_with_graphs_is_decoding(draft: str, tmp_path: Path) -> None:
    plain, other, calls = pair(tmp_path, "llama wide heads")
    prompts: Any = [[5, 9, 3, 5, 9], [7, 1], [1, 2, 3, 1, 2, 3, 1, 2]]
    params = [
        SamplingParams(max_tokens=30, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.8, 0)
    ]
    want = generate_many(plain, load_draft(draft, plain), prompts, params, max_rows=2)
    found = generate_many(other, load_draft(draft, other), prompts, params, max_rows=2)
    assert [out.token_ids for out in found] == [out.token_ids for out in want]
    assert calls.replayed > 20
