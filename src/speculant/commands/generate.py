"""`speculant generate`: text for one prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..options import (
    BUNDLED,
    AsJson,
    Backend,
    Bias,
    Device,
    DraftModel,
    DraftName,
    Dtype,
    Force,
    Frequency,
    IgnoreEos,
    IsAdaptive,
    Logprobs,
    MaxTokens,
    MinP,
    MinTokens,
    NumDraft,
    Presence,
    Raw,
    Repetition,
    Rule,
    Seed,
    ShowDraft,
    Stop,
    StopIds,
    System,
    TargetName,
    Temperature,
    Threads,
    TopK,
    TopP,
    Tree,
    Weights,
    adaptive_control,
    check_prompt,
    check_rule,
    load_pair,
    message_for,
    parse_biases,
    resolve_temperature,
    user_errors,
)


def generate(
    prompt: Annotated[str, typer.Argument(help="A user message; - reads it from standard input.")],
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    adaptive: IsAdaptive = False,
    rule: Rule = "block",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_id: StopIds = None,
    logit_bias: Bias = None,
    ignore_eos: IgnoreEos = False,
    seed: Seed = None,
    logprobs: Logprobs = None,
    system: System = None,
    raw: Raw = False,
    as_json: AsJson = False,
    show_draft: ShowDraft = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Generate text for one prompt."""
    with user_errors():
        from ..sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=resolve_temperature(temperature, top_k, top_p, min_p, seed),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            logit_bias=parse_biases(logit_bias or []),
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
        )
        options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "rule": check_rule(rule)}
        text = sys.stdin.read() if prompt == "-" else prompt
        check_prompt(text, system, raw)
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
        if adaptive:
            options |= adaptive_control(*loaded, num_draft_tokens)
        message = message_for(loaded[0], text, system, raw)
        if as_json:
            from ..engine import generate as run

            out = run(*loaded, message, params, **options)
            path = "greedy" if params.greedy else "sampled"
            names = {"target": loaded[0].info.name, "draft": draft, "decoding": path, "rule": rule}
            typer.echo(json.dumps(out.as_dict() | names))
        else:
            from ..chat import print_pieces
            from ..engine import stream

            pieces = stream(*loaded, message, params, **options)
            print_pieces(loaded[0], params, pieces, show_draft)
            typer.echo()
