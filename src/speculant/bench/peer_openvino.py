"""OpenVINO GenAI in a peer's process (`peer_worker`).

job: model (a folder in OpenVINO's format, or a GGUF file), context, eos_ids, options (of the device),
draft (a folder, or null), is_lookup (prompt look-up), and generation: entries of its
GenerationConfig.
"""

from __future__ import annotations

import time
from typing import Any


def load(job: dict[str, Any]) -> tuple[str, Any]:
    """The version, and the function that runs."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    options = dict(job["options"])
    if job["draft"]:
        options["draft_model"] = genai.draft_model(job["draft"], "CPU", **job["options"])
    if job["is_lookup"]:
        options["prompt_lookup"] = True
    pipe = genai.LLMPipeline(job["model"], "CPU", **options)

    class Clock(genai.StreamerBase):  # type: ignore[misc]  # untyped here
        """Notes when tokens come."""

        def __init__(self) -> None:
            super().__init__()
            self.steps: list[tuple[float, int]] = []
            self.count = 0
            self.began = time.perf_counter()

        def write(self, token: int | list[int]) -> Any:
            """Called with the tokens of a round, one or all."""
            self.count += 1 if isinstance(token, int) else len(token)
            self.steps.append((1e3 * (time.perf_counter() - self.began), self.count))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Called behind the last token."""

    def run(ids: list[int], max_tokens: int) -> tuple[list[int], list[tuple[float, int]]]:
        config = genai.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            apply_chat_template=False,
            stop_token_ids=set(job["eos_ids"]),
            **job["generation"],
        )
        row = openvino.Tensor(np.array([ids], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        clock = Clock()
        output = pipe.generate(genai.TokenizedInputs(row, mask), config, clock)
        return [int(token) for token in output.tokens[0]], clock.steps

    return f"openvino-genai {genai.__version__}", run
