"""llama.cpp, through llama-cpp-python, in a peer's process (`peer_worker`).

job: model (a GGUF file), context, threads, eos_ids, and draft_tokens: how many its prompt look-up
drafts, 0 for none.
"""

from __future__ import annotations

import time
from typing import Any


def load(job: dict[str, Any]) -> tuple[str, Any]:
    """The version, and the function that runs."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    count = job["draft_tokens"]
    llm = llama_cpp.Llama(
        model_path=job["model"],
        n_ctx=job["context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=count) if count else None,
        verbose=False,
    )

    def run(ids: list[int], max_tokens: int) -> tuple[list[int], list[tuple[float, int]]]:
        llm.reset()
        tokens: list[int] = []
        steps: list[tuple[float, int]] = []
        began = time.perf_counter()
        for token in llm.generate(ids, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            steps.append((1e3 * (time.perf_counter() - began), len(tokens)))
            if token in job["eos_ids"] or len(tokens) == max_tokens:
                break
        return tokens, steps

    return f"llama-cpp-python {llama_cpp.__version__}", run
