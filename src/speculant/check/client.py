"""A server with OpenAI's completions API, asked with the standard library."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ..target.base import Tokenizer

DRAFTED = re.compile(r"^vllm:spec_decode_num_drafts_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class EndpointError(OSError):
    """A server that does not answer, or not usefully; one line for the user."""


class Endpoint:
    """Completions of token ids by a server.

    url:       with or without /v1
    tokenizer: of the target, for a server that names tokens by their text
    model:     as the server calls it; default: the first it lists
    """

    def __init__(
        self, url: str, tokenizer: Tokenizer, model: str | None = None, timeout_s: float = 600
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        self.model = model or self._first_model()

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float,
        n: int = 1,
        seed: int | None = None,
    ) -> list[list[int]]:
        """Token ids of n completions of a prompt, EOS included where one ended with it."""
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "n": n,
            "return_token_ids": True,
        }
        if seed is not None:
            asked["seed"] = seed
        reply = self._post("/v1/completions", asked)
        choices = reply.get("choices") or []
        if choices and choices[0].get("token_ids") is None:  # a server that knows no such option
            reply = self._post("/v1/completions", {**asked, "logprobs": 1})
            choices = reply.get("choices") or []
        if len(choices) != n:
            raise EndpointError(f"{self.url}: {len(choices)} completions where {n} were asked for")
        return [self._tokens(choice, max_tokens) for choice in choices]

    def num_drafts(self) -> int | None:
        """Rounds that drafted so far, by vLLM's counter; None where the server has none."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
                found = DRAFTED.findall(reply.read().decode())
        except (OSError, ValueError):
            return None
        return int(sum(map(float, found))) if found else None

    def _tokens(self, choice: dict[str, Any], max_tokens: int) -> list[int]:
        ids = choice.get("token_ids")
        if ids is None:
            ids = [self._id(text) for text in (choice.get("logprobs") or {}).get("tokens") or []]
        ids = [int(i) for i in ids]
        ended = choice.get("finish_reason") == "stop" and len(ids) < max_tokens
        if ended and not (ids and ids[-1] in self.tokenizer.eos_ids):
            ids.append(min(self.tokenizer.eos_ids))  # some servers leave it out
        if not ids:
            raise EndpointError(f"{self.url}: its completions name no tokens (token_ids, logprobs)")
        return ids

    def _id(self, text: str) -> int:
        """The token of this text; `token_id:7` names it outright."""
        if text.startswith("token_id:"):
            return int(text.removeprefix("token_id:"))
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise EndpointError(f"{self.url}: which token {text!r} is cannot be known")
        return ids[0]

    def _first_model(self) -> str:
        listed = self._open(f"{self.url}/v1/models").get("data") or []
        if not listed or "id" not in listed[0]:
            raise EndpointError(f"{self.url}/v1/models lists no model: name it (--endpoint-model)")
        return str(listed[0]["id"])

    def _post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        return self._open(request)

    def _open(self, request: str | urllib.request.Request) -> dict[str, Any]:
        where = request if isinstance(request, str) else request.full_url
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                data = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            told = " ".join(error.read(500).decode(errors="replace").split())
            raise EndpointError(f"{where}: HTTP {error.code}: {told}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise EndpointError(f"{where}: no answer ({getattr(error, 'reason', error)})") from None
        except ValueError:
            raise EndpointError(f"{where}: the answer is no JSON") from None
        if not isinstance(data, dict):
            raise EndpointError(f"{where}: the answer is no object")
        return data
