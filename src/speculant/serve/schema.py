"""What a request may hold. Anything else is refused, never ignored.

Names and ranges are OpenAI's (API reference, chat and completions); `speculation`, `return_rounds`,
`task`, `top_k`, `min_p`, `repetition_penalty`, `min_tokens` and `ignore_eos` are ours (the sampling
ones as vLLM names them).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """No unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a conversation.

    The fields that are null or empty are what OpenAI's client sends back with an answer.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """What a chat template takes."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Strict):
    """include_usage: a last chunk with the counts of tokens."""

    include_usage: bool | None = None


class JsonSchema(Strict):
    """A named JSON schema. It is always enforced, `strict` or not."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Speculation(Strict):
    """Which draft serves the request, and how deep it drafts at most."""

    draft: Name | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None


class Sampling(Strict):
    """What chat and completions share."""

    model: Name
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    user: Name | None = None
    speculation: bool | Annotated[int, Field(ge=0, le=4096)] | Name | Speculation | None = Field(
        None,
        description="false: no draft; a draft's name; a length in tokens; or an object with both",
    )
    return_rounds: bool | None = Field(
        None, description="streams: tell with every round its drafted tree and the accepted path"
    )
    task: Name | None = Field(None, description="label for the metrics; the server lists them")


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions. `echo` and `best_of` may be sent with the values that change nothing."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=16)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=16)
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


FIELDS = frozenset(
    field.alias or name
    for model in (
        ChatRequest, CompletionRequest, Message, TextPart, StreamOptions, JsonSchema, SchemaFormat,
        Speculation,
    )
    for name, field in model.model_fields.items()
)  # fmt: skip
"""Every name that a request may hold: what an error may repeat of it."""
