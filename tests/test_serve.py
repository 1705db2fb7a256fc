"""The server with OpenAI's own client: what it answers equals what the library gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from fake import FakeTarget
from serving import EOS, MODEL, Running, serving, tiny_target, usual_drafts
from speculant.engine import generate
from speculant.sampling import SamplingParams

TALK: list[Any] = [{"role": "user", "content": "Tell me: one two one two one two"}]


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def running(target: FakeTarget) -> Iterator[Running]:
    with serving(target, max_rows=4, tasks=("maths",)) as server:
        yield server


def library(target: FakeTarget, prompt: Any, draft: str = "ngram", **params: Any) -> Any:
    """What `speculant.generate` gives."""
    return generate(target, usual_drafts(target)[draft], prompt, SamplingParams(**params))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft", ["ngram", "vanilla", "none"])
def test_chat_equals_the_library(
    running: Running, target: FakeTarget, draft: str, temperature: float
) -> None:
    out = running.client().chat.completions.create(
        model=MODEL, messages=TALK, max_completion_tokens=40, seed=5, temperature=temperature,
        extra_body={"speculation": draft},
    )  # fmt: skip
    want = library(target, TALK, draft, max_tokens=40, seed=5, temperature=temperature)
    assert out.choices[0].message.content == want.text
    assert out.choices[0].finish_reason == want.finish_reason
    assert out.usage is not None
    assert out.usage.prompt_tokens == want.prompt_tokens
    assert out.usage.completion_tokens == len(want.token_ids)
    figures = out.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert figures["draft"] == draft
    for ours, theirs in (
        ("num_spec_steps", "num_drafts"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_draft_tokens", "num_accepted_tokens"),
        ("acceptance_histogram", "accepted_length_histogram"),
    ):
        assert figures[ours] == getattr(want.metrics, theirs)
    assert figures["mean_acceptance_length"] == round(want.metrics.mean_acceptance_length, 4)


def test_streams_equal_whole_answers(running: Running, target: FakeTarget) -> None:
    """Text, finish reason, usage and metrics; every token once, with its origin."""
    want = library(target, TALK, max_tokens=60, seed=3, temperature=0.7)
    stream = running.client().chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=60, seed=3, temperature=0.7, stream=True,
        stream_options={"include_usage": True}, extra_body={"return_rounds": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == want.text
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        want.finish_reason
    ]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(want.token_ids)
    extras = [c.speculant for c in chunks[1:-1]]  # type: ignore[attr-defined]
    told = [t for extra in extras for t in extra["tokens"]]
    assert [t["id"] for t in told if "continues" not in t] == want.token_ids
    assert [t["origin"] for t in told if "continues" not in t] == want.origins
    assert "".join(t["text"] for t in told) == want.text
    rounds = [extra["round"] for extra in extras]
    assert sum(len(r["accepted"]) for r in rounds) == want.metrics.num_accepted_tokens
    assert sum(len(r["tokens"]) for r in rounds) == want.metrics.num_draft_tokens
    assert len(rounds) == want.metrics.target_forwards


def test_completions(running: Running, target: FakeTarget) -> None:
    client = running.client()
    ids = target.tokenizer.encode("abcabc")
    for prompt in ("abcabc", ids):
        out = client.completions.create(model=MODEL, prompt=prompt, seed=1)
        want = library(target, ids, max_tokens=16, seed=1, temperature=1.0)
        assert (out.choices[0].text, out.choices[0].finish_reason) == (
            want.text,
            want.finish_reason,
        )
    both = client.completions.create(model=MODEL, prompt=["abc", "xyz"], n=2, seed=1, temperature=1)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    for choice, (text, seed) in zip(
        both.choices, [("abc", 1), ("abc", 2), ("xyz", 1), ("xyz", 2)], strict=True
    ):
        prompt = target.tokenizer.encode(text)
        assert choice.text == library(target, prompt, max_tokens=16, seed=seed).text
    assert both.usage is not None
    assert both.usage.prompt_tokens == 6
    parts = client.completions.create(model=MODEL, prompt="abcabc", seed=1, stream=True)
    want = library(target, ids, max_tokens=16, seed=1)
    assert "".join(part.choices[0].text for part in parts) == want.text


def test_choices_of_a_stream(running: Running, target: FakeTarget) -> None:
    texts = {0: "", 1: "", 2: ""}
    last = None
    for chunk in running.client().chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=20, seed=4, n=3, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        last = chunk
    for i, text in texts.items():
        assert text == library(target, TALK, max_tokens=20, seed=4 + i).text
    assert last is not None
    assert last.metrics["speculative_decoding"]["num_draft_tokens"] > 0  # type: ignore[attr-defined]


def test_sampling_parameters_reach_the_engine(running: Running, target: FakeTarget) -> None:
    """Each of them changes what the library gives, and the server gives the same."""
    plain = library(target, TALK, max_tokens=24, seed=9).text
    for ours, extra in (
        ({"temperature": 0.3}, False),
        ({"top_p": 0.3}, False),
        ({"presence_penalty": 2.0}, False),
        ({"frequency_penalty": 2.0}, False),
        ({"logit_bias": {65: 100.0}}, False),
        ({"top_k": 3}, True),
        ({"min_p": 0.5}, True),
        ({"repetition_penalty": 5.0}, True),
        ({"ignore_eos": True, "logit_bias": {EOS: 5.0}}, True),
        ({"min_tokens": 20, "logit_bias": {EOS: 5.0}}, True),
    ):
        want = library(target, TALK, max_tokens=24, seed=9, **ours)
        assert want.text != plain, ours
        asked: dict[str, Any] = {"extra_body": ours} if extra else dict(ours)
        if "logit_bias" in asked:
            asked["logit_bias"] = {str(k): v for k, v in asked["logit_bias"].items()}
        out = running.client().chat.completions.create(
            model=MODEL, messages=TALK, max_tokens=24, seed=9, **asked
        )
        assert out.choices[0].message.content == want.text, ours


def test_stop_strings(running: Running, target: FakeTarget) -> None:
    whole = library(target, TALK, max_tokens=40, temperature=0.0).text
    stop = whole[7:9]
    for stream in (False, True):
        out: Any = running.client().chat.completions.create(
            model=MODEL, messages=TALK, max_tokens=40, temperature=0, stop=[stop], stream=stream
        )
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in out)
        else:
            text = out.choices[0].message.content
            assert out.choices[0].finish_reason == "stop"
        assert text == whole[: whole.index(stop)]


def test_logprobs(running: Running, target: FakeTarget) -> None:
    """The target's own, from uncached forwards; those of a stream are the same."""
    asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 12, "seed": 2}
    asked |= {"logprobs": True, "top_logprobs": 3, "temperature": 0.8}
    client = running.client()
    out = client.chat.completions.create(**asked)
    assert out.choices[0].logprobs is not None
    content = out.choices[0].logprobs.content or []
    want = library(target, TALK, max_tokens=12, seed=2, temperature=0.8)
    ids = [t for t in want.token_ids if t != EOS]
    assert len(content) == len(ids) > 5
    before = target.tokenizer.chat(TALK)
    for i, (entry, token) in enumerate(zip(content, ids, strict=True)):
        table = target.logits([*before, *ids[:i]])[-1].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(table[token]), abs=1e-3)
        assert entry.bytes == list(running.service.grammars.token_bytes(token))
        best = table.topk(3)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-3
        )
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode(errors="replace") == out.choices[0].message.content
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in content]
    old = client.completions.create(
        model=MODEL, prompt=before, max_tokens=12, seed=2, temperature=0.8, logprobs=2
    )
    assert old.choices[0].logprobs is not None
    assert old.choices[0].logprobs.token_logprobs == [e.logprob for e in content]
    assert old.choices[0].logprobs.tokens == [e.token for e in content]


def test_speculation_can_be_chosen(running: Running, target: FakeTarget) -> None:
    def figures(speculation: Any) -> dict[str, Any]:
        out = running.client().chat.completions.create(
            model=MODEL, messages=TALK, max_tokens=40, temperature=0,
            extra_body={"speculation": speculation},
        )  # fmt: skip
        assert out.choices[0].message.content == plain
        return out.metrics["speculative_decoding"]  # type: ignore[attr-defined, no-any-return]

    plain = library(target, TALK, "none", max_tokens=40, temperature=0.0).text
    assert figures(True)["draft"] == "ngram"
    assert figures(False) == figures("none") == figures(0)
    assert figures(False)["num_draft_tokens"] == 0
    assert figures("vanilla")["draft"] == "vanilla"
    assert len(figures({"draft": "vanilla", "num_draft_tokens": 1})["acceptance_histogram"]) <= 2
    assert max(map(len, [figures(2)["acceptance_per_position"]])) <= 2


def test_models_and_health(running: Running) -> None:
    import urllib.request

    client = running.client()
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "speculant"
    with urllib.request.urlopen(f"{running.url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{running.url}/speculation") as answer:
        told = json.load(answer)
    assert told["default"] == "ngram"
    assert [d["name"] for d in told["drafts"]] == ["ngram", "vanilla", "none"]
    assert all(d["enabled"] for d in told["drafts"])


def test_a_conversation_is_not_run_again(running: Running, target: FakeTarget) -> None:
    """The second turn reuses the first one's cache, and says what a cold one says."""
    for draft in ("none", "ngram", "vanilla"):
        talk = [{"role": "user", "content": f"A long enough beginning for {draft}."}]
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
        asked["extra_body"] = {"speculation": draft, "ignore_eos": True}
        client = running.client()
        first: Any = client.chat.completions.create(messages=talk, **asked)  # type: ignore[arg-type]
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        answer = first.choices[0].message
        talk = [*talk, answer, {"role": "user", "content": "go on"}]
        second: Any = client.chat.completions.create(messages=talk, **asked)  # type: ignore[arg-type]
        assert second.usage.prompt_tokens_details.cached_tokens > 30
        plain = [{"role": m["role"], "content": m["content"]} for m in (talk[0], talk[2])]
        plain.insert(1, {"role": "assistant", "content": answer.content})
        cold = library(target, plain, draft, max_tokens=12, temperature=0.0, ignore_eos=True)
        assert second.choices[0].message.content == cold.text
        accepted = second.metrics["speculative_decoding"]["num_accepted_draft_tokens"]
        assert accepted == cold.metrics.num_accepted_tokens


def test_numbers_in_the_metrics(target: FakeTarget) -> None:
    """Counters equal the sum of what the answers say of themselves."""
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    with serving(target, tasks=("maths",)) as running:
        total = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
        tokens, per_position = 0, [0.0] * 8
        for i in range(4):
            out = running.client().chat.completions.create(
                model=MODEL, messages=TALK, max_tokens=30, temperature=0.4, seed=i,
                extra_body={"task": "maths"},
            )  # fmt: skip
            figures = out.metrics["speculative_decoding"]  # type: ignore[attr-defined]
            for name in total:
                total[name] += figures[name]
            for position, rate in enumerate(figures["acceptance_per_position"]):
                per_position[position] += rate * figures["num_spec_steps"]
            assert out.usage is not None
            tokens += out.usage.completion_tokens
        text = urlopen(f"{running.url}/metrics").read().decode()
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)

    def value(name: str, **labels: str) -> float:
        found = [s for s in samples[f"speculant:{name}"] if labels.items() <= s.labels.items()]
        return math.fsum(s.value for s in found)

    names = {"draft": "ngram", "task": "maths", "model_name": MODEL}
    assert value("spec_decode_num_drafts_total", **names) == total["num_spec_steps"]
    assert value("spec_decode_num_draft_tokens_total", **names) == total["num_draft_tokens"]
    accepted = total["num_accepted_draft_tokens"]
    assert value("spec_decode_num_accepted_tokens_total", **names) == accepted
    for position, count in enumerate(per_position):
        place = {"position": str(position)}
        if count:
            got = value("spec_decode_num_accepted_tokens_per_pos_total", **names, **place)
            assert got == pytest.approx(count, abs=0.01)
    assert value("generation_tokens_total") == tokens
    assert value("time_to_first_token_seconds_count") == 4
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("request_success_total") == 4
    assert value("num_requests_running") == value("num_requests_waiting") == 0
