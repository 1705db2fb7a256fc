"""Make training shards with the bundled target: self-synthesised requests and its own answers.

Resumable: shards that exist are read, missing ones are made. Example:

    python scripts/make_data.py ~/.cache/speculant/data/smollm2 --answer-tokens 1500000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from speculant.drafts import load_draft
from speculant.drafts.base import Draft
from speculant.drafts.record import RecordDraft
from speculant.engine import Engine
from speculant.heads.eagle3 import default_taps
from speculant.sampling import SamplingParams
from speculant.target.base import LAST, Target
from speculant.target.load import load_target
from speculant.train.responses import Answer, Recipe, ShardMaker, make_shards


def batched(target: Target, rows: int, capacity: int, draft: Draft) -> Engine:
    """One engine for all shards: `rows` requests at once, without speculation.

    At 64 rows a forward is bound by arithmetic, so speculation would only add work.
    """
    return Engine(target, draft, max_rows=rows, capacity=capacity)


def main() -> None:
    """Make shards until their answers hold enough tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--answer-tokens", type=int, default=1_500_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=Recipe.conversations)
    parser.add_argument("--states", action="store_true", help="note the states, 4.6 kB a token")
    parser.add_argument("--documents", type=float, default=Recipe.documents)
    parser.add_argument("--turns", type=float, default=Recipe.turns)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    target = load_target(args.target, dtype=getattr(torch, args.dtype))
    recipe = Recipe(
        seed=args.seed,
        conversations=args.conversations,
        documents=args.documents,
        turns=args.turns,
    )
    taps = (*default_taps(target.info.num_layers), LAST)
    draft = RecordDraft(taps) if args.states else load_draft("none", target)
    engine = batched(target, args.rows, recipe.longest + 8, draft)

    def generate(
        prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        # rows of like length are read together: hand the prompts over by length
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        done = engine.complete([list(prompts[i]) for i in order], [params[i] for i in order])
        answers = dict(zip(order, done, strict=True))
        noted = engine.draft.take() if isinstance(engine.draft, RecordDraft) else {}
        outs = []
        for i, prompt in enumerate(prompts):
            out = answers[i]
            states = noted.get((*prompt, *out.token_ids))
            outs.append(Answer(out.token_ids, out.text, out.finish_reason, states))
        return outs

    args.folder.mkdir(parents=True, exist_ok=True)
    maker = ShardMaker(target.tokenizer, generate, recipe)
    began, before = time.time(), 0
    for index, samples, total in make_shards(maker, args.folder, args.answer_tokens):
        took, made = time.time() - began, total - before
        longest = max(len(s.prompt) + len(s.answer) for s in samples)
        print(
            f"shard {index}: {len(samples)} samples, longest {longest}, {made} answer tokens in "
            f"{took:.0f} s ({made / took:.0f} tokens/s), {total} in all",
            flush=True,
        )
        began, before = time.time(), total


if __name__ == "__main__":
    main()
