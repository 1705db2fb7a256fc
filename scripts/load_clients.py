"""The clients of `load_test.py`: streams that may be left, bad bodies, and slow readers."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import openai
from load_server import Server

WORDS = ("the", "tide", "comes", "in", "goes", "out", "gulls", "above", "it", "one", "two", "three")
BAD_BODIES = (b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"model": 1}', b'{"messages": "x"}')
COMMON = "Host: localhost\r\nContent-Type: application/json\r\n\r\n"
JSON = {"type": "json_object"}


@dataclass
class Seen:
    """What the clients saw."""

    done: list[dict[str, Any]] = field(default_factory=list)  # request and text of whole answers
    errors: list[str] = field(default_factory=list)
    finished: int = 0  # answers that ran at SIGTERM and came to their end
    cut: int = 0  # answers that SIGTERM's end refused
    killed: int = 0
    refused: int = 0
    bad: int = 0
    slow: int = 0
    first_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0


async def stream_one(
    client: openai.AsyncOpenAI, asked: dict[str, Any], seen: Seen, kill_after: int | None
) -> str | None:
    """One streamed chat; its text when it came to its end."""
    began = last = time.perf_counter()
    text, chunks = "", 0
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        now = time.perf_counter()
        if chunk.usage:
            seen.tokens += chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            seen.cached += (details.cached_tokens or 0) if details else 0
        if not chunk.choices or chunk.choices[0].delta.role:
            continue
        text += chunk.choices[0].delta.content or ""
        if chunks:
            seen.between_ms.append(1e3 * (now - last))
        else:
            seen.first_ms.append(1e3 * (now - began))
        last, chunks = now, chunks + 1
        if kill_after is not None and chunks >= kill_after:
            seen.killed += 1
            await stream.close()
            return None
    return text


async def client_loop(
    number: int, server: Server, options: argparse.Namespace, seen: Seen, until: float
) -> None:
    """One client: asks, sometimes goes on with the conversation, sometimes leaves in the middle."""
    dice = random.Random(number)
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300
    )
    talk: list[dict[str, str]] = []
    while time.perf_counter() < until:
        if len(talk) > 4 or dice.random() < 0.5:
            talk = []
        said = " ".join(dice.choices(WORDS, k=dice.randint(3, 12)))
        talk = [*talk, {"role": "user", "content": said}]
        extra: dict[str, Any] = {"speculation": dice.choice([True, True, False, 2, "ngram"])}
        asked: dict[str, Any] = {
            "model": server.model, "messages": talk, "seed": dice.randrange(2**31),
            "max_tokens": dice.randint(4, options.max_tokens),
            "temperature": dice.choice([0.0, 0.7, 1.0]), "extra_body": extra,
        }  # fmt: skip
        if dice.random() < 0.15:
            asked["response_format"] = JSON
        kill = dice.randint(1, 8) if dice.random() < options.kill else None
        try:
            text = await stream_one(client, asked, seen, kill)
        except openai.RateLimitError:
            seen.refused += 1
            await asyncio.sleep(0.2)
            continue
        except openai.OpenAIError as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
            continue
        if text is not None:
            seen.done.append({**asked, "text": text})
            talk = [*talk, {"role": "assistant", "content": text}]
        else:
            talk = []


async def bad_loop(server: Server, seen: Seen, until: float) -> None:
    """Malformed bodies: each must be answered with a 4xx, and nothing else must notice."""
    while time.perf_counter() < until:
        for body in BAD_BODIES:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}"
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"{head}\r\n{COMMON}".encode() + body)
            line = await reader.readline()
            if not line.startswith(b"HTTP/1.1 4"):
                seen.errors.append(f"body {body[:10]!r}: {line!r}")
            seen.bad += 1
            writer.close()
        await asyncio.sleep(0.5)


async def slow_loop(server: Server, options: argparse.Namespace, seen: Seen, until: float) -> None:
    """A reader that takes its time for every few bytes, and reads to the end."""
    while time.perf_counter() < until:
        asked = {"model": server.model, "prompt": "the tide", "stream": True}
        body = json.dumps({**asked, "max_tokens": options.max_tokens}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}"
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
        writer.write(f"{head}\r\n{COMMON}".encode() + body)
        last = b""
        while b"[DONE]" not in last and (part := await reader.read(512)):
            last = last[-16:] + part
            await asyncio.sleep(0.02)
        seen.slow += b"[DONE]" in last
        writer.close()
