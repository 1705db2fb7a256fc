"""The bundled model with its EAGLE-3 head behind a real server, asked by OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving import serving
from speculant.drafts import load_draft
from speculant.engine import generate
from speculant.sampling import SamplingParams
from speculant.target.load import load_target

MODEL = "smollm2-135m-instruct"
TALK: list[Any] = [{"role": "user", "content": "Tell me in a few words why the sky is blue."}]


@pytest.mark.real
def test_the_bundled_model(bundled: Path) -> None:
    """Text as the library gives it, whole and streamed; JSON that fits; a warm second turn."""
    target = load_target(MODEL)
    drafts = {name: load_draft(name, target) for name in ("eagle3", "ngram", "none")}
    asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 32}
    with serving(target, drafts, model_name=MODEL, max_rows=2, capacity=512) as running:  # type: ignore[arg-type]
        client = running.client(timeout=300)
        for params in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
            draft = load_draft("eagle3", target)
            want = generate(target, draft, TALK, SamplingParams(max_tokens=32, **params))  # type: ignore[arg-type]
            out: Any = client.chat.completions.create(**asked, **params)
            assert out.choices[0].message.content == want.text
            figures = out.metrics["speculative_decoding"]
            assert figures["draft"] == "eagle3"
            assert figures["num_accepted_draft_tokens"] == want.metrics.num_accepted_tokens
            assert want.metrics.num_accepted_tokens > 0
        stream = client.chat.completions.create(**asked, temperature=0, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        plain = generate(
            target, load_draft("none", target), TALK, SamplingParams(max_tokens=32, temperature=0)
        )
        assert "".join(parts) == plain.text
        assert len([part for part in parts if part]) < len(plain.token_ids)
        schema = {"type": "object", "properties": {"animal": {"enum": ["fox", "dog"]}},
                  "required": ["animal"], "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        out = client.chat.completions.create(**asked, temperature=0, response_format=form)  # type: ignore[arg-type]
        assert json.loads(out.choices[0].message.content)["animal"] in ("fox", "dog")
        talk = [*TALK, {"role": "assistant", "content": plain.text}, *TALK]
        out = client.chat.completions.create(
            model=MODEL, messages=talk, max_tokens=4, temperature=0
        )
        assert out.usage.prompt_tokens_details.cached_tokens > 30
