"""The workload file: what is served, on what, how, and what is known about acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..cost.formulas import position_rates
from .hardware import DTYPE_BYTES
from .stacks import version_key
from .tasks import TASKS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Task = Literal[
    "chat", "code", "json_sql", "summarisation", "translation", "maths", "rag", "creative"
]
Kind = Literal["vanilla", "medusa", "eagle1", "eagle2", "eagle3", "lookahead", "ngram"]
StackName = Literal["vllm", "sglang", "tensorrt-llm", "speculant", "transformers"]


class Strict(BaseModel):
    """Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(Strict):
    """The model that is served: a known name, a local config, or sizes."""

    model: str | None = Field(default=None, description="Hub id or name.")
    config: str | None = Field(default=None, description="Folder or config.json of a local model.")
    params_b: Positive | None = Field(default=None, description="Parameters, in billions.")
    active_params_b: Positive | None = Field(
        default=None, description="Used by one token (experts)."
    )
    experts: Count | None = None
    experts_per_token: Count | None = None
    tokenizer: str | None = Field(
        default=None, description="Name or hash; compared with each head's."
    )
    revision: str | None = Field(
        default=None, description="Compared with each head's base revision."
    )
    dtype: str = Field("bfloat16", description=f"One of {', '.join(DTYPE_BYTES)}.")
    kv_rollback: bool = Field(True, description="false: its state cannot go back (recurrent).")

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value.lower() not in DTYPE_BYTES:
            raise ValueError(f"{value!r} is not one of {', '.join(DTYPE_BYTES)}")
        return value.lower()

    @model_validator(mode="after")
    def _sized(self) -> Target:
        if not (self.model or self.config or self.params_b):
            raise ValueError("give model, config or params_b")
        if self.active_params_b and self.params_b and self.active_params_b > self.params_b:
            raise ValueError("active_params_b is more than params_b")
        return self


class Hardware(Strict):
    """Accelerators of one kind; `name: measured` takes everything from the profile."""

    name: str
    count: Count = 1
    bandwidth_gb_s: Positive | None = Field(
        default=None, description="For hardware not in the table."
    )
    tflops: Positive | None = Field(default=None, description="Dense 16-bit; likewise.")
    memory_gb: Positive | None = None


class Stack(Strict):
    """What serves it."""

    name: StackName
    version: str | None = None

    @field_validator("version", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        """A version that YAML reads as a number (0.32) is meant as text."""
        value = str(value) if isinstance(value, (int, float)) else value
        if isinstance(value, str):
            version_key(value)
        return value


class Traffic(Strict):
    """Load and its targets. Times in milliseconds per output token of one request."""

    batch_sizes: Annotated[list[Count], Field(min_length=1)] = [1]
    concurrency: Count | None = Field(
        default=None, description="The usual one (default: the first)."
    )
    prompt_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 1000
    output_tokens: Count = 300
    p50_ms: Positive | None = None
    p99_ms: Positive | None = None

    @property
    def usual_batch(self) -> int:
        """The batch size that decides."""
        return self.concurrency or self.batch_sizes[0]

    @property
    def context(self) -> int:
        """Cached tokens behind a request, on average."""
        return self.prompt_tokens + self.output_tokens // 2


class Head(Strict):
    """A draft that exists."""

    family: Kind
    model: str
    tokenizer: str | None = None
    base: str | None = Field(default=None, description="The target it was trained for.")
    base_revision: str | None = None
    params_b: Positive | None = Field(default=None, description="Needed for vanilla.")


class Acceptance(Strict):
    """Measured acceptance of one draft, on one task or on the whole mix."""

    family: Kind
    task: Task | None = None
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    acceptance_per_position: Annotated[list[float], Field(min_length=1, max_length=64)]
    nodes: Count | None = Field(default=None, description="Of the tree it was measured with.")

    @field_validator("acceptance_per_position")
    @classmethod
    def _rates(cls, value: list[float]) -> list[float]:
        position_rates(value, len(value))
        return value


class Telemetry(Strict):
    """Where acceptance was measured. Paths are relative to the workload file.

    draft, num_draft_tokens, temperature: what ran while the counters of vLLM or SGLang were taken
    """

    profile: str | None = None
    vllm_metrics: str | None = None
    sglang_meta_info: str | None = None
    draft: Kind | None = None
    num_draft_tokens: Count | None = None
    nodes: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    acceptance: list[Acceptance] = []


class Workload(Strict):
    """The whole file."""

    target: Target
    hardware: Hardware
    stack: Stack
    traffic: Traffic = Field(default_factory=Traffic)
    temperatures: dict[float, Share] = {0.0: 1.0}
    tasks: dict[Task, Share] = {"chat": 1.0}
    telemetry: Telemetry = Field(default_factory=Telemetry)
    heads: list[Head] = []
    training_budget: Literal["none", "small", "full"] = "none"
    acceptance_rule: Literal["exact", "typical", "relaxed", "synthetic"] = "exact"
    folder: Annotated[str, Field(exclude=True)] = "."

    @field_validator("temperatures")
    @classmethod
    def _temperatures(cls, value: dict[float, float]) -> dict[float, float]:
        for temperature in value:
            if not 0 <= temperature <= 5:
                raise ValueError(f"temperature {temperature} lies outside 0..5")
        return _normalised(value)

    @field_validator("tasks")
    @classmethod
    def _tasks(cls, value: dict[Any, float]) -> dict[Any, float]:
        return _normalised(value)

    @property
    def measured(self) -> bool:
        """Whether any acceptance was measured."""
        t = self.telemetry
        return bool(t.profile or t.vllm_metrics or t.sglang_meta_info or t.acceptance)


def _normalised(shares: dict[Any, float]) -> dict[Any, float]:
    """Shares that add up to 1, in a fixed order."""
    total = sum(shares.values())
    if total <= 0:
        raise ValueError("the shares add up to 0")
    return {key: shares[key] / total for key in sorted(shares)}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without duplicate keys, which it would otherwise drop in silence."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, (str, int, float, bool)):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is no plain value", key_node.start_mark
            )
        if key in seen:
            problem = f"the key {key!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_text(path: Path) -> str:
    """Text of a user's file; ValueError in one line for a missing, odd or non-UTF-8 one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def read_workload(path: Path) -> Workload:
    """Read and check a workload file. Raises ValueError in one line."""
    text = read_text(path)
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark else "somewhere"
        raise ValueError(f"{path}: {where}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if raw is None:
        raise ValueError(f"{path} is empty: see speculant tune --example")
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is no mapping of keys: see speculant tune --example")
    if "folder" in raw:
        raise ValueError(f"{path}: folder: unknown key")
    return checked({**raw, "folder": str(path.parent)}, str(path))


def checked(raw: dict[Any, Any], name: str) -> Workload:
    """A workload from parsed values; ValueError in one line, naming key and cause."""
    try:
        return Workload.model_validate(raw)
    except ValidationError as error:
        found = []
        for item in error.errors()[:3]:
            key = ".".join(str(part) for part in item["loc"]) or "the file"
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = "unknown key"
            found.append(f"{key}: {message}")
        more = len(error.errors()) - len(found)
        rest = f" (and {more} more)" if more > 0 else ""
        raise ValueError(f"{name}: {'; '.join(found)}{rest}") from None


def schema() -> dict[str, Any]:
    """JSON schema of the workload file."""
    made = Workload.model_json_schema()
    made["properties"].pop("folder", None)
    return made


assert set(TASKS) == set(Task.__args__)  # type: ignore[attr-defined]
