"""The heads that ship with the package, on the model they were trained for."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculant.drafts import NEEDS, bundled_head, load_draft
from speculant.engine import generate
from speculant.heads.weights import load_head
from speculant.sampling import SamplingParams
from speculant.target.base import Target

KINDS = ("eagle3", "eagle1", "medusa", "vanilla")
LARGEST_MB = 60
PROMPT = "Explain in a few sentences why the sky is blue."
PARAMS = SamplingParams(max_tokens=160, temperature=0.0)


@pytest.fixture(scope="module")
def target(bundled: Path) -> Target:
    from speculant.target.load import load_target

    return load_target("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[int]:
    """The answer that every draft must leave as it is."""
    return generate(target, load_draft("none", target), PROMPT, PARAMS).token_ids


def test_they_are_small_and_whole() -> None:
    """Every shipped folder loads strictly; together they stay below what the package may carry."""
    folders = [bundled_head(kind) for kind in KINDS]
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    assert size < LARGEST_MB * 1e6
    for kind, folder in zip(KINDS, folders, strict=True):
        head = load_head(folder)
        training = head.config.training
        assert head.config.target["weights_sha256"], kind
        assert training["command"].startswith("speculant train " + kind)
        assert training["answer_tokens"] > 0
        assert training["held_out"]["mean_acceptance_length"] > 1


@pytest.mark.real
@pytest.mark.parametrize("name", [*NEEDS, "vanilla"])
def test_text_is_the_targets_and_drafts_are_accepted(
    target: Target, plain: list[int], name: str
) -> None:
    ours = generate(target, load_draft(name, target), PROMPT, PARAMS)
    assert ours.token_ids == plain
    # a head with d2t misread or its taps swapped accepts nothing; the weakest here reaches 1.12
    assert ours.metrics.mean_acceptance_length > 1.05
