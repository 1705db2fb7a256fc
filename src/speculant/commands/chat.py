"""`speculant chat`: a conversation in the terminal."""

from __future__ import annotations

from ..options import (
    BUNDLED,
    Backend,
    Device,
    DraftModel,
    DraftName,
    Dtype,
    Force,
    MaxTokens,
    NumDraft,
    Seed,
    ShowDraft,
    System,
    TargetName,
    Temperature,
    Threads,
    TopK,
    TopP,
    Tree,
    Weights,
    check_text,
    load_pair,
    resolve_temperature,
    user_errors,
)


def chat(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    show_draft: ShowDraft = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Talk to the target. /reset forgets, /stats counts, /exit leaves."""
    with user_errors():
        from ..sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=resolve_temperature(temperature, top_k, top_p, 0.0, seed),
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        check_text("--system", system or "")
        loaded = load_pair(
            target,
            draft,
            draft_model,
            num_draft_tokens,
            dtype,
            device,
            backend,
            threads,
            tree,
            force,
            weights,
        )
        from ..chat import converse

        converse(*loaded, params, system, num_draft_tokens, show_draft)
