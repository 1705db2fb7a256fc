"""transformers' `generate` as a peer: plain, with prompt look-up, and assisted by our vanilla draft.

It runs in this process, on the target's folder, in its dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from .peer_process import decode_ms


class Shared:
    """The target as transformers loads it, once for all of its peers.

    dtype: its name in torch; device: such as "cpu"
    """

    def __init__(self, folder: Path, dtype: str, device: str, eos_ids: list[int]) -> None:
        self.folder, self.dtype, self.device, self.eos_ids = folder, dtype, device, eos_ids

    @cached_property
    def model(self) -> Any:
        """The model, loaded when it is first asked for."""
        return self.load(self.folder)

    def load(self, folder: Path) -> Any:
        """A model of a folder."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, self.dtype), use_safetensors=True
        )
        return model.to(self.device).eval()


class Clock:
    """A streamer of transformers that notes when tokens come."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.count: int | None = None  # until the prompt was told
        self.began = time.perf_counter()

    def put(self, value: Any) -> None:
        """Called with the prompt, then with the tokens of every step."""
        if self.count is None:
            self.count = 0
            return
        self.count += value.numel()
        self.steps.append((1e3 * (time.perf_counter() - self.began), self.count))

    def end(self) -> None:
        """Called behind the last token."""


class TransformersPeer:
    """`generate` with some of its options.

    name, weights: see `Peer`
    options:       of `generate`
    assistant:     makes the folder of a draft model, or None
    """

    def __init__(
        self,
        name: str,
        shared: Shared,
        threads: int,
        options: Mapping[str, Any],
        assistant: Callable[[], Path] | None = None,
    ) -> None:
        self.name, self.weights = name, shared.dtype
        self.version = ""
        self._shared, self._threads, self._assistant = shared, threads, assistant
        self._options: dict[str, Any] = dict(options)

    def __enter__(self) -> TransformersPeer:
        import transformers

        self.version = f"transformers {transformers.__version__}"
        assert self._shared.model is not None
        if self._assistant is not None:
            self._options["assistant_model"] = self._shared.load(self._assistant())
        return self

    def __exit__(self, *error: object) -> None:
        self._options.pop("assistant_model", None)

    def run(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """See `Peer`."""
        import torch

        ids = torch.tensor([prompt_ids], device=self._shared.device)
        eos = self._shared.eos_ids
        with _threads(self._threads), _quiet():
            clock = Clock()
            out = self._shared.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else None,
                streamer=clock,
                **self._options,
            )
        tokens = out[0, len(prompt_ids) :].tolist()
        return tokens, decode_ms(clock.steps)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Within it, torch uses so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it, transformers does not warn of how its own assisted decoding calls it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
