"""JSON by grammar under speculation: masks per drafted position, against a brute-force parser.

Independent truths: Python's own `json`, a small regular grammar enumerated by hand, and plain
decoding with the same masks applied one token at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import create_model

from fake import FakeTarget
from scripted import Scripted
from serving import EOS, MODEL, VOCAB, byte_id, serving, tiny_target, usual_drafts
from speculant.constraint import ConstrainedHistory
from speculant.drafts import load_draft
from speculant.drafts.base import Draft
from speculant.engine import Engine
from speculant.request import Completion
from speculant.sampling import SamplingParams
from speculant.serve.errors import ApiError
from speculant.serve.grammar import Grammars, JsonConstraint

WORDS = ("red", "green", "blue")
ENUM: dict[str, Any] = {
    "type": "object",
    "properties": {"c": {"enum": list(WORDS)}, "ok": {"type": "boolean"}},
    "required": ["c", "ok"],
    "additionalProperties": False,
}
Colour = create_model("Colour", c=(Literal["red", "green", "blue"], ...), ok=(bool, ...))
TIGHT = dict.fromkeys((byte_id(c) for c in " \n\t"), -9.0)
"""A logit bias against white space, which a random model likes as much as anything."""
TALK: list[Any] = [{"role": "user", "content": "colour?"}]


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return tiny_target(3)


@pytest.fixture(scope="module")
def grammars(target: FakeTarget) -> Grammars:
    return Grammars(target)


def run(
    target: FakeTarget, draft: Draft, constraint: JsonConstraint, params: SamplingParams
) -> Completion:
    engine = Engine(target, draft, capacity=400)
    out = Completion()
    engine.submit(target.tokenizer.chat(TALK), params, out.metrics, constraint=constraint)
    while engine.busy:
        for piece in engine.step():
            assert not piece.error
            out.add(piece)
    return out


def fits(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"c", "ok"} and value["c"] in WORDS and isinstance(value["ok"], bool)


def test_token_bytes(grammars: Grammars, target: FakeTarget) -> None:
    for text in ("abc", "äöü €", "\n"):
        ids = target.tokenizer.encode(text)
        assert b"".join(grammars.token_bytes(i) for i in ids) == text.encode()


def test_masks_are_what_a_parser_allows(grammars: Grammars) -> None:
    """Every byte after every prefix of one object: allowed iff some completion exists."""
    constraint = grammars.compile({"enum": [{"a": 1}, {"a": 12}, {"b": "x"}]})
    whole = ['{"a":1}', '{"a":12}', '{"b":"x"}']
    ids = {c: grammars.table.tokenize_str(c)[0] for c in '{}":,abx12 '}
    for text in whole:
        for cut in range(len(text)):
            path = [ids[c] for c in text[:cut]]
            mask = constraint.allowed(path)
            assert mask is not None
            spaceless = {c for c, i in ids.items() if bool(mask[i]) and c != " "}
            assert spaceless == {w[cut] for w in whole if w.startswith(text[:cut]) and len(w) > cut}
        done = constraint.allowed([ids[c] for c in text])
        assert done is not None
        assert done.nonzero().flatten().tolist() == [EOS]
    assert constraint.allowed([ids["a"]]) is None  # the path breaks the form
    assert constraint.allowed([*[ids[c] for c in whole[0]], EOS]) is None
    first = constraint.allowed([])
    assert first is not None  # looking at paths has left no trace
    assert bool(first[ids["{"]])


def greedy_by_hand(
    target: FakeTarget, constraint: JsonConstraint, params: SamplingParams
) -> list[int]:
    """One uncached forward a token, the mask of the committed text, argmax."""
    prompt = target.tokenizer.chat(TALK)
    history = ConstrainedHistory(constraint, params, VOCAB, prompt)
    out: list[int] = []
    while len(out) < params.max_tokens and (not out or out[-1] != EOS):
        logits = target.logits([*prompt, *out])[-1:].float()
        out.append(int(history.adjust(logits, [[]])[0].argmax()))
        history.commit(out[-1:])
    return out


def some_drafts(target: FakeTarget, answer: Sequence[int]) -> dict[str, Draft]:
    """Right, wrong in the middle (out of the form), running on behind the end; chains and trees."""
    prompt = len(target.tokenizer.chat(TALK))

    def guess(tokens: Sequence[int], budget: int) -> list[int]:
        rest = [*answer[len(tokens) - prompt :], EOS, 5, 6, 7]
        return list(rest[:budget])

    def wrong(tokens: Sequence[int], budget: int) -> list[int]:
        chain = guess(tokens, budget)
        return [*chain[:2], *[(t + 1) % VOCAB for t in chain[2:]]]

    return {
        **usual_drafts(target),
        "right": Scripted(guess, 6, vocab=VOCAB),
        "wrong": Scripted(wrong, 6, vocab=VOCAB),
        "tree": Scripted(wrong, 4, siblings=2, vocab=VOCAB),
    }


def test_greedy_equals_masking_one_token_at_a_time(target: FakeTarget, grammars: Grammars) -> None:
    for schema in (ENUM, None, {"type": "array", "items": {"type": "integer"}, "maxItems": 3}):
        params = SamplingParams(max_tokens=40, temperature=0, logit_bias=TIGHT)
        form = grammars.compile(schema)
        want = greedy_by_hand(target, form.copy(), params)
        for name, draft in some_drafts(target, want).items():
            out = run(target, draft, form.copy(), params)
            assert out.token_ids == want, name
            if name == "right":
                assert out.metrics.num_accepted_tokens >= len(want) * 0.6


@pytest.mark.parametrize("name", ["none", "ngram", "vanilla", "tree"])
def test_sampled_output_always_fits(target: FakeTarget, grammars: Grammars, name: str) -> None:
    form = grammars.compile(ENUM)
    drafts = some_drafts(target, list(b'{"c":"green","ok":true}'))
    seen = set()
    for seed in range(10):
        params = SamplingParams(max_tokens=200, seed=seed, temperature=1.5, logit_bias=TIGHT)
        out = run(target, drafts[name], form.copy(), params)
        assert out.finish_reason == "stop"
        assert fits(out.text), out.text
        seen.add(out.text)
    assert len(seen) > 1


def test_the_same_seed_gives_the_same_text_with_a_chosen_draft(
    target: FakeTarget, grammars: Grammars
) -> None:
    form = grammars.compile(ENUM)
    for seed in range(5):
        params = SamplingParams(max_tokens=200, seed=seed, logit_bias=TIGHT)
        plain = run(target, load_draft("none", target), form.copy(), params)
        for name in ("ngram", "right", "wrong", "tree"):
            draft = some_drafts(target, plain.token_ids)[name]
            assert run(target, draft, form.copy(), params).token_ids == plain.token_ids


def test_the_distribution_is_the_masked_target(grammars: Grammars) -> None:
    """A choice of three words, 400 seeds, with a draft that samples: against enumeration."""
    from scipy import stats

    target = tiny_target(3, sharpness=1.0)
    form = grammars.compile({"enum": ["ab", "ba", "bb"]})
    params = SamplingParams(max_tokens=20, temperature=1.0)
    prompt = target.tokenizer.chat(TALK)
    texts = [f'"{w}"' for w in ("ab", "ba", "bb")]
    want = []
    for text in texts:  # chance of each byte among those that some word allows here
        chance, path = 1.0, list(target.tokenizer.encode(text))
        for i in range(len(path)):
            constraint = form.copy()
            mask = constraint.allowed(path[:i])
            assert mask is not None
            logits = target.logits([*prompt, *path[:i]])[-1].float()
            probs = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            chance *= float(probs[path[i]])
        want.append(chance)
    assert sum(want) == pytest.approx(1, abs=1e-3)
    small = tiny_target(8, sharpness=1.0)
    draft = load_draft("vanilla", target, model=small, num_draft_tokens=3)
    engine = Engine(target, draft, max_rows=100, capacity=64)
    outs: dict[int, str] = {}
    for seed in range(400):
        mine = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        outs[engine.submit(prompt, mine, constraint=form.copy())] = ""
    while engine.busy:
        for piece in engine.step():
            outs[piece.request] += piece.text
    counts = [sum(text == t for text in outs.values()) for t in texts]
    assert sum(counts) == 400
    scale = 400 / sum(want)
    p = stats.chisquare(counts, [w * scale for w in want]).pvalue
    assert params.temperature == 1.0
    assert p > 1e-4, (counts, want)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "object", "properties": 5},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "("},
        {"type": "array", "uniqueItems": True},
        {"anyOf": []},
        {"type": "string", "x": "\ud800"},
        {"allOf": [{"$ref": "#"}]},
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        grammars.compile(schema)
    assert caught.value.status == 400


def test_bombs(grammars: Grammars) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(20_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ApiError, match="deep"):
        grammars.compile(deep)
    for schema in (
        {"type": "string", "pattern": "(((((a{1,99}){1,99}){1,99}){1,99}){1,99})"},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "minItems": 10**6, "items": {"type": "string"}},
    ):
        form = grammars.compile(schema)
        for _ in range(20):
            mask = form.allowed([])
            assert mask is not None
            form.commit(mask.nonzero().flatten().tolist()[-1:])


def test_the_client_gets_json(target: FakeTarget) -> None:
    """response_format through OpenAI's client: whole, streamed, cut by max_tokens."""
    asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 150, "seed": 1}
    asked["logit_bias"] = {str(token): bias for token, bias in TIGHT.items()}
    schema = {"name": "colour", "schema": ENUM, "strict": True}
    with serving(target) as running:
        client = running.client()
        for name in ("ngram", "vanilla", "none"):
            out = client.chat.completions.create(
                **asked, n=2, response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[call-overload]
                extra_body={"speculation": name},
            )  # fmt: skip
            assert all(fits(choice.message.content) for choice in out.choices)
        stream = client.chat.completions.create(
            **asked, stream=True, response_format={"type": "json_schema", "json_schema": schema}
        )
        assert fits("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        out = client.chat.completions.create(
            **{**asked, "max_tokens": 1}, response_format={"type": "json_object"}
        )
        assert out.choices[0].finish_reason == "length"
        assert out.choices[0].message.content[0] in "{ \n\t"
        parsed = client.chat.completions.parse(**asked, response_format=Colour)
        assert isinstance(parsed.choices[0].message.parsed, Colour)
        bad = {"name": "x", "schema": {"not": {}}}
        with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
            client.chat.completions.create(
                **asked, response_format={"type": "json_schema", "json_schema": bad}
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_that_breaks_down_fails_its_row_alone(
    target: FakeTarget, grammars: Grammars, temperature: float
) -> None:
    form, good = grammars.compile(None), grammars.compile(ENUM)
    engine = Engine(target, load_draft("ngram", target), max_rows=2, capacity=300)
    prompt = target.tokenizer.chat(TALK)
    params = SamplingParams(max_tokens=100, seed=1, temperature=temperature, logit_bias=TIGHT)
    bad = engine.submit(prompt, params, constraint=form)
    other = engine.submit(prompt, params, constraint=good)
    pieces, text = 0, ""
    while engine.busy:
        form.error = form.error or ("too complex" if pieces > 4 else None)
        for piece in engine.step():
            if piece.request == bad and piece.error:
                assert piece.error == "too complex"
                assert piece.token_ids == []
            pieces += 1
            text += piece.text if piece.request == other else ""
    assert fits(text)
