"""`unembed` of tap LAST equals the logits of the same forward, on both kinds of target."""

from __future__ import annotations

import pytest
import torch

from speculant.target.base import LAST, LoadError
from speculant.target.hf import HFTarget
from test_hf import FakeTokenizer, tiny


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_last_state_and_lm_head_give_the_logits(kind: str) -> None:
    target = HFTarget(tiny(kind), FakeTokenizer(), kind)
    rows = target.new_cache(2, 8).rows([0, 1], 5)
    tokens = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(0))
    logits, last = target.forward(tokens, torch.arange(5).expand(2, 5), None, rows, (LAST,))
    assert logits is not None and last is not None
    torch.testing.assert_close(target.unembed(last), logits)


def test_scaled_logits_are_refused() -> None:
    target = HFTarget(tiny("llama"), FakeTokenizer(), "llama")
    target.config.logit_scale = 0.5
    with pytest.raises(LoadError, match="logit_scale is 0.5"):
        target.unembed(torch.zeros(1, target.info.hidden_size))
