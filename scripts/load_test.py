"""Load and faults: many streams at once, clients that leave, bad bodies, slow readers, SIGTERM.

Starts `speculant serve` in a process of its own and reports what it saw: errors, slots that stay
taken, memory, times to the first token and between tokens; and compares every answer that was
completed with what the library gives for the same seed. Exit code 1 when something is not as it
should be.

    python scripts/load_test.py --tiny --streams 64 --seconds 180
    python scripts/load_test.py --draft eagle3 --streams 8 --seconds 60 --max-tokens 48
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import openai
from load_clients import Seen, bad_loop, client_loop, slow_loop, stream_one
from load_server import Server, compare, tiny_model


async def load(server: Server, options: argparse.Namespace, seen: Seen) -> list[float]:
    """The load; the server's memory every two seconds."""
    until = time.perf_counter() + options.seconds
    tasks = [
        asyncio.create_task(client_loop(i, server, options, seen, until))
        for i in range(options.streams)
    ]
    tasks.append(asyncio.create_task(bad_loop(server, seen, until)))
    tasks += [asyncio.create_task(slow_loop(server, options, seen, until)) for _ in range(2)]
    memory = []
    while time.perf_counter() < until:
        await asyncio.sleep(2)
        memory.append(server.rss_mb())
    await asyncio.gather(*tasks)
    return memory


async def terminate(server: Server, options: argparse.Namespace, seen: Seen) -> int:
    """SIGTERM while every stream runs: those that run end whole, the waiting ones get 503."""
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300
    )
    extra = {"ignore_eos": True}
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": 40,
    }

    async def one() -> None:
        try:
            await stream_one(client, {**asked, "extra_body": extra}, seen, None)
            seen.finished += 1
        except openai.APIError as error:
            if getattr(error, "code", None) == "shutting_down" or isinstance(
                error, openai.APIConnectionError
            ):
                seen.cut += 1
            else:
                seen.errors.append(f"at SIGTERM: {error}")

    tasks = [asyncio.create_task(one()) for _ in range(options.streams)]
    before = len(seen.first_ms)
    while len(seen.first_ms) < before + 2:  # some run, and the others wait
        await asyncio.sleep(0.01)
    server.child.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    return await asyncio.to_thread(server.child.wait, 60)


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile."""
    ordered = sorted(values) or [0.0]
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
          for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}  # fmt: skip
    return {name: round(value, 1) for name, value in at.items()}


def main() -> int:
    """Run it all; 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--tiny", action="store_true", help="a random model instead")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kill", type=float, default=0.1, help="share of clients that leave")
    parser.add_argument("--compare", type=int, default=1000, help="most answers to compare")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_model(Path(folder) / "tiny") if options.tiny else options.target
        server = Server(options, target)
        try:
            memory = asyncio.run(load(server, options, seen))
            time.sleep(1)
            stuck = server.gauge("num_requests_running") + server.gauge("num_requests_waiting")
            done = len(seen.done)
            speed = seen.tokens / options.seconds
            code = asyncio.run(terminate(server, options, seen))
        finally:
            server.child.kill()
        compared, differ = compare(options, target, seen.done, options.compare)
    half = memory[len(memory) // 2]
    report = {
        "streams": options.streams, "rows": options.rows, "seconds": options.seconds,
        "answers": done, "tokens": seen.tokens, "tokens_per_s": round(speed, 1),
        "prompt_tokens_from_the_cache": seen.cached,
        "time_to_first_token_ms": percentiles(seen.first_ms),
        "between_chunks_ms": percentiles(seen.between_ms), "killed_clients": seen.killed,
        "malformed_bodies": seen.bad, "slow_readers_served": seen.slow, "refused_429": seen.refused,
        "stuck_answers": stuck, "errors": seen.errors[:10], "compared": compared, "differ": differ,
        "memory_mb": {"start": round(memory[0]), "half": round(half), "end": round(memory[-1])},
        "at_sigterm": {"exit_code": code, "finished": seen.finished, "refused": seen.cut},
        "log": server.errors()[-2000:],
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    wrong = bool(seen.errors or stuck or differ or code) or memory[-1] > 1.05 * half + 5
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
