"""Schemathesis over the OpenAPI schema: whatever it sends, no 5xx; and what it is told is right."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2
import hypothesis
import pytest

from serving import MODEL, serving, tiny_target
from speculant.drafts import load_draft

QUIET = partial(
    hypothesis.settings, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
)  # fmt: skip
schemathesis = pytest.importorskip("schemathesis")


def test_no_5xx() -> None:
    """Every operation with data that fits its schema, and with data that does not."""
    target = tiny_target(context_length=64)
    drafts = {"ngram": load_draft("ngram", target), "none": load_draft("none", target)}
    with serving(target, drafts, max_rows=4) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        modes = schemathesis.GenerationMode
        seen: dict[tuple[Any, int], int] = {}
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (modes.POSITIVE, modes.NEGATIVE) if operation.body else (modes.POSITIVE,):
                call = _caller(mode, seen)
                strategy = operation.as_strategy(generation_mode=mode)
                count = 12 if operation.body else 2
                QUIET(max_examples=count)(hypothesis.given(case=strategy)(call))()
        assert seen[modes.POSITIVE, 200] > 5
        assert seen[modes.NEGATIVE, 422] + seen[modes.NEGATIVE, 400] > 5
        running.idle()
        assert running.client().completions.create(model=MODEL, prompt="a").choices


def _caller(mode: Any, seen: dict[tuple[Any, int], int]) -> Any:
    """Sends a case and looks at the answer; notes its status under the mode."""

    def call(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # else all that is tested is the name
            case.body.pop("task", None)  # of which there is none here
        answer = case.call(timeout=30)
        status = answer.status_code
        seen[mode, status] = seen.get((mode, status), 0) + 1
        assert status < 500, answer.text
        if status >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    return call


def test_the_schema_tells_what_there_is() -> None:
    with serving() as running:
        told = httpx2.get(f"{running.url}/openapi.json").json()
    assert set(told["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health",
        "/metrics", "/speculation",
    }  # fmt: skip
    post = told["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "401", "404", "413", "422", "429", "503"} <= set(post["responses"])
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    fields = told["components"]["schemas"][body]
    assert fields["additionalProperties"] is False
    assert {"speculation", "response_format", "logit_bias", "seed"} <= set(fields["properties"])
