"""vLLM in a peer's process (`peer_worker`).

job: model (a folder), dtype, context, eos_ids, and speculative_config, or null. The engine is stepped
here, so that the time of every step is seen. Threads are what OMP_NUM_THREADS says.
"""

from __future__ import annotations

import itertools
import time
from typing import Any


def load(job: dict[str, Any]) -> tuple[str, Any]:
    """The version, and the function that runs."""
    import vllm

    options: dict[str, Any] = {
        "model": job["model"],
        "dtype": job["dtype"],
        "max_model_len": job["context"],
        "max_num_seqs": 1,
        "seed": 0,
        # a prompt met again would be found cached, and drafts see less of such a prompt
        "enable_prefix_caching": False,
        # else the first token is told after the second's forward has run
        "async_scheduling": False,
    }
    if job["speculative_config"]:
        options["speculative_config"] = job["speculative_config"]
    engine = vllm.LLM(**options).llm_engine
    numbers = itertools.count()

    def run(ids: list[int], max_tokens: int) -> tuple[list[int], list[tuple[float, int]]]:
        params = vllm.SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=job["eos_ids"], detokenize=False
        )
        tokens: list[int] = []
        steps: list[tuple[float, int]] = []
        began = time.perf_counter()
        engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                steps.append((1e3 * (time.perf_counter() - began), len(tokens)))
        return tokens, steps

    return f"vllm {vllm.__version__}", run
