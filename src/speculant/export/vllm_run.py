"""Run vLLM once over some prompts: a program for the Python that has vLLM, which needs no speculant.

    python vllm_run.py JOB.json RESULT.json

JOB: model, prompts (lists of token ids), max_tokens, dtype, max_model_len, speculative_config or null,
temperature, seed, ignore_eos, max_num_seqs. RESULT: version, token_ids of every prompt, seconds, and
the counters of speculation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "num_accepted_tokens_per_pos",
}


def main(job_path: str, result_path: str) -> None:
    """Run a job and write what came out of it."""
    job = json.loads(Path(job_path).read_text())
    import vllm

    options: dict[str, Any] = {
        "model": job["model"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job.get("max_num_seqs", 4),
        "disable_log_stats": False,
        "seed": 0,
    }
    if job.get("speculative_config"):
        options["speculative_config"] = job["speculative_config"]
    llm = vllm.LLM(**options)
    params = [
        vllm.SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=job.get("temperature", 0.0),
            seed=None if job.get("seed") is None else job["seed"] + i,
            ignore_eos=job.get("ignore_eos", False),
        )
        for i in range(len(job["prompts"]))
    ]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result: dict[str, Any] = {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": time.perf_counter() - began,
    }
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            value = list(metric.values) if hasattr(metric, "values") else metric.value
            result[COUNTERS[metric.name]] = value
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
