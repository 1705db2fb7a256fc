"""From a checked request to what the engine is asked: ids, sampling, draft, form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..request import RequestError, check_request
from ..sampling import MAX_SEED, SamplingParams
from ..target.base import Target
from .errors import ApiError, bad_request
from .grammar import Grammars, JsonConstraint
from .schema import ChatRequest, CompletionRequest, Sampling, SchemaFormat, Speculation, TextFormat
from .settings import MAX_CHOICES
from .ticket import Choice

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given: OpenAI's default. A chat goes on to the end of
the context."""


@dataclass(frozen=True)
class Reader:
    """Reads requests for one model.

    capacity: most tokens of prompt and output
    drafts:   lane -> the deepest it drafts; the first one is the default
    plain:    the lane that drafts nothing
    """

    target: Target
    grammars: Grammars
    capacity: int
    drafts: Mapping[str, int]
    plain: str

    def choices(self, request: ChatRequest | CompletionRequest) -> list[Choice]:
        """The answers asked for, prompts first. Raises ApiError for what cannot be served."""
        prompts = self._prompts(request)
        count = request.n or 1
        if count * len(prompts) > MAX_CHOICES:
            raise bad_request(f"n times the prompts is more than {MAX_CHOICES}", "n")
        draft, depth = self._draft(request.speculation)
        form = self._form(request)
        out: list[Choice] = []
        for ids in prompts:
            params = self._params(request, ids)
            for i in range(count):
                mine = (
                    params if params.seed is None else replace(params, seed=_seed(params.seed, i))
                )
                constraint = form.copy() if form else None
                out.append(Choice(len(out), ids, mine, draft, depth, constraint))
        return out

    def _prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Token ids of every prompt."""
        tokenizer = self.target.tokenizer
        if isinstance(request, ChatRequest):
            if not tokenizer.has_chat_template:
                message = "this model has no chat template: use /v1/completions"
                raise bad_request(message, "messages")
            try:
                return [tokenizer.chat([message.plain() for message in request.messages])]
            except ValueError:
                message = "the model's chat template refuses this conversation"
                raise bad_request(message, "messages") from None
        given = request.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        try:
            return [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        except ValueError:
            raise bad_request("the prompt is no text", "prompt") from None

    def _params(
        self, request: ChatRequest | CompletionRequest, ids: Sequence[int]
    ) -> SamplingParams:
        room = self.capacity - len(ids)
        if room < 1:
            raise _too_long(len(ids), 1, self.capacity)
        wanted = _max_tokens(request)
        most = room if wanted is None else wanted
        if most > room:
            raise _too_long(len(ids), most, self.capacity)
        stop = request.stop or ()
        given: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
            "seed": request.seed,
            "logprobs": _logprobs(request),
        }
        biases = {int(token): value for token, value in (request.logit_bias or {}).items()}
        try:
            params = SamplingParams(
                max_tokens=most,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                logit_bias=biases,
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:
            raise bad_request(str(error)) from None
        eos = frozenset() if params.ignore_eos else self.target.tokenizer.eos_ids
        try:
            check_request(ids, params, eos, self.target.info.vocab_size, self.capacity)
        except RequestError as error:
            raise bad_request(str(error)) from None
        return params

    def _draft(self, asked: bool | int | str | Speculation | None) -> tuple[str, int | None]:
        """(lane, most tokens to draft) of the field `speculation`."""
        usual = next(iter(self.drafts))
        if asked is None or asked is True:
            return usual, None
        if asked is False:
            return self.plain, None
        if isinstance(asked, int):
            asked = Speculation(draft=None, num_draft_tokens=asked)
        elif isinstance(asked, str):
            asked = Speculation(draft=asked, num_draft_tokens=None)
        name, depth = asked.draft or usual, asked.num_draft_tokens
        if name not in self.drafts:
            names = ", ".join(self.drafts)
            raise bad_request(f"speculation: no such draft here; there are {names}", "speculation")
        if depth is not None and depth > self.drafts[name]:
            most = self.drafts[name]
            raise bad_request(f"speculation: draft {name} drafts at most {most}", "speculation")
        return (self.plain, None) if depth == 0 else (name, depth)

    def _form(self, request: Sampling) -> JsonConstraint | None:
        """The grammar of `response_format`."""
        asked = request.response_format
        if asked is None or isinstance(asked, TextFormat):
            return None
        if request.min_tokens or request.ignore_eos:
            raise bad_request("response_format ends the output: no min_tokens, no ignore_eos")
        schema = asked.json_schema.schema_ if isinstance(asked, SchemaFormat) else None
        return self.grammars.compile(schema)


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    both = (request.max_completion_tokens, request.max_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens and max_completion_tokens differ: give one", "max_tokens")
    return both[1] if both[0] is None else both[0]


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives a token, or None."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _seed(seed: int, index: int) -> int:
    """Choice i of a seeded request has the seed i further on."""
    return (seed + index) & MAX_SEED


def _too_long(prompt: int, output: int, capacity: int) -> ApiError:
    message = (
        f"the context holds {capacity} tokens; the prompt has {prompt} and {output} are asked for"
    )
    return ApiError(400, message, "context_length_exceeded")
