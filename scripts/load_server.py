"""What `load_test.py` loads: a server in a process, and the library that it is compared with."""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil


class Server:
    """`speculant serve` in a process."""

    def __init__(self, options: argparse.Namespace, target: str) -> None:
        command = [sys.executable, "-m", "speculant.cli", "serve", "--target", target]
        command += ["--port", "0", "--draft", options.draft, "--max-rows", str(options.rows)]
        command += ["--max-queue", str(4 * options.streams), "--context", str(options.context)]
        if options.threads:
            command += ["--threads", str(options.threads)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.child.stdout is not None
        found = re.search(r"(\S+) at http://([\d.]+):(\d+)", self.child.stdout.readline())
        if not found:
            raise SystemExit(f"the server did not start: {self.errors()}")
        self.model, self.host, self.port = found[1], found[2], int(found[3])
        self.url = f"http://{self.host}:{self.port}"
        self.process = psutil.Process(self.child.pid)

    def rss_mb(self) -> float:
        return self.process.memory_info().rss / 1e6  # type: ignore[no-any-return]

    def gauge(self, name: str) -> float:
        """A gauge of /metrics, summed over its labels."""
        text = get(self, "/metrics")
        found = re.findall(rf"^speculant:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()


def get(server: Server, path: str) -> str:
    """The body of a GET."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()


def tiny_model(folder: Path) -> str:
    """A random Llama of two layers with a token a byte, in a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        bos_token_id=256, eos_token_id=257, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    settings = {"chat_template": template, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def compare(
    options: argparse.Namespace, target: str, answers: Sequence[dict[str, Any]], most: int
) -> tuple[int, int]:
    """(answers compared, answers that differ) against the library's, each with its own draft."""
    import torch

    from speculant.drafts import load_draft
    from speculant.drafts.base import Draft
    from speculant.engine import Engine
    from speculant.sampling import SamplingParams
    from speculant.serve.grammar import Grammars
    from speculant.target.load import load_target

    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_target(target, weights="auto")  # as the server
    form = Grammars(loaded).compile(None)
    differ, drafts = 0, dict[str, Draft]()
    some = answers if len(answers) <= most else random.Random(0).sample(answers, most)
    for asked in some:
        wanted = asked["extra_body"]["speculation"]
        name = wanted if isinstance(wanted, str) else options.draft if wanted else "none"
        depth = wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else None
        params = SamplingParams(
            max_tokens=asked["max_tokens"], temperature=asked["temperature"], seed=asked["seed"]
        )
        if name not in drafts:
            drafts[name] = load_draft(name, loaded)
        engine = Engine(loaded, drafts[name], capacity=options.context)
        constraint = form.copy() if "response_format" in asked else None
        engine.submit(
            loaded.tokenizer.chat(asked["messages"]), params, num_draft_tokens=depth,
            constraint=constraint,
        )  # fmt: skip
        text = ""
        while engine.busy:
            text += "".join(piece.text for piece in engine.step())
        if text != asked["text"]:
            differ += 1
            print(f"differs: seed {asked['seed']}, draft {name}", file=sys.stderr)
    return len(some), differ
