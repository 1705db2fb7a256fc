"""Options of the command line, the checks of what was given, and loading the pair."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from .drafts.base import Draft
    from .target.base import Target

BUNDLED = "smollm2-135m-instruct"
MAX_THREADS = 1024
TREE_NODES = 32

TargetName = Annotated[
    str, typer.Option("--target", help=f"{BUNDLED}, a folder, a hub id, or a .gguf file.")
]
DraftName = Annotated[
    str,
    typer.Option(
        "--draft",
        help="ngram, lookahead, vanilla, medusa, eagle1, eagle1-tree, eagle2, eagle3, none; a head's "
        "folder, or NAME=FOLDER; ngram+ before one copies where the text repeats itself.",
    ),
]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", help="vanilla: the smaller model, as for --target.")
]
NumDraft = Annotated[
    int | None, typer.Option("--num-draft-tokens", "-n", help="Tokens to draft a round.")
]
Tree = Annotated[
    int | None,
    typer.Option(
        "--tree",
        help=f"Nodes of a head's tree, {TREE_NODES} without a number; 0 makes EAGLE draft a chain.",
        show_default=False,
    ),
]
Rule = Annotated[str, typer.Option("--rule", help="Rule for sampled chains: block or token.")]
IsAdaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Draft as deep as pays, nothing where nothing does: costs are measured at the start.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="Round the target's matrices: float32, bfloat16, int8, int4; "
        "file: the integers of its GGUF file; -a8 behind a name rounds activations to int8 too, as "
        "llama.cpp does. auto: the fastest that rounds nothing.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Backend = Annotated[str, typer.Option("--backend", help="auto, llama (ours) or hf (transformers).")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="CPU threads; default: torch's, fewer where others are at work."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        help="0 is greedy. Default: 0, but 1 when --top-k, --top-p, --min-p or --seed is given.",
        show_default=False,
    ),
]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest mass, in (0, 1].")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens of this share of the likeliest.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Over prompt and output.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Over the output, once.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="Per occurrence.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", help="No end before this many tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends; repeatable.")]
StopIds = Annotated[list[int] | None, typer.Option("--stop-token-id", help="Repeatable.")]
Bias = Annotated[list[str] | None, typer.Option("--logit-bias", help="ID=NUMBER; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after EOS.")]
Seed = Annotated[int | None, typer.Option("--seed", help="0 .. 2**63 - 1; default: a new one.")]
Logprobs = Annotated[int | None, typer.Option("--logprobs", help="Alternatives a token (--json).")]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template: continue the text.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
ShowDraft = Annotated[
    bool, typer.Option("--show-draft", help="Colour tokens: accepted, recovered, bonus.")
]


Force = Annotated[
    bool, typer.Option("--force", help="Load a head that was trained for another target.")
]


class Commands(TyperGroup):
    """The subcommands. Their `--tree` may come without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare `--tree` its number, then parse as usual."""
        words: list[str] = []
        for i, word in enumerate(args):
            words.append(word)
            if word == "--tree" and not (args[i + 1 :] and _is_number(args[i + 1])):
                words.append(str(TREE_NODES))
        return super().parse_args(ctx, words)


def _is_number(word: str) -> bool:
    return word.lstrip("-").isdigit()


def resolve_temperature(
    given: float | None, top_k: int, top_p: float, min_p: float, seed: int | None
) -> float:
    """Asking for sampling without a temperature means temperature 1, never silently greedy."""
    if given is not None:
        return given
    return 1.0 if top_k or top_p != 1 or min_p or seed is not None else 0.0


def parse_biases(pairs: Sequence[str]) -> dict[int, float]:
    """`--logit-bias` pairs ID=NUMBER as a mapping."""
    out = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            out[int(token)] = float(value)
        except ValueError:
            raise ValueError(
                f"--logit-bias {pair!r}: give it as ID=NUMBER, such as 42=-1.5"
            ) from None
    return out


def load_pair(
    target: str,
    draft: str,
    draft_model: str | None,
    num_draft_tokens: int | None,
    dtype: str,
    device: str,
    backend: str,
    threads: int | None,
    tree: int | None = None,
    force: bool = False,
    weights: str = "auto",
) -> tuple[Target, Draft]:
    """Load the pair; everything that can be refused cheaply is refused before the target loads."""
    from .drafts import NEEDS, bundled_head, draft_options, find_draft, load_draft

    name, given = find_draft(draft)
    if name in NEEDS and not given:
        bundled_head(NEEDS[name], name)
    if tree is not None and "tree" not in draft_options(name):
        raise ValueError(f"--tree goes with medusa and the EAGLE drafts, not with {draft}")
    if force and "force" not in draft_options(name):
        raise ValueError(f"--force loads a head of another target: {draft} has none")
    if draft_model is not None and draft != "vanilla":
        raise ValueError(f"--draft-model goes with --draft vanilla, not with {draft}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {dtype!r}: choose float32 or bfloat16")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose cpu or cuda")
    if num_draft_tokens is not None and num_draft_tokens < 0:
        raise ValueError(f"--num-draft-tokens is {num_draft_tokens}: it must be at least 0")
    set_threads(threads)
    import torch

    from .target.load import load_target

    parts: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device, "backend": backend}
    loaded = load_target(target, **parts, weights=weights)  # a draft model keeps its dtype
    if threads is None:
        fewer_threads(loaded)
    options: dict[str, Any] = {} if tree is None else {"tree": tree}
    if force:
        options["force"] = True
    if draft_model is not None:
        options["model"] = load_target(draft_model, **parts)
    count, most = num_draft_tokens or 0, loaded.info.context_length
    if count and "num_draft_tokens" in draft_options(name):
        options["num_draft_tokens"] = min(count, most)
    with warnings.catch_warnings(record=True) as told:
        made = load_draft(draft, loaded, **options)
    for warning in told:
        typer.echo(f"speculant: {warning.message}", err=True)
    most = min(most, made.info.depth or most)  # the draft none takes any number
    if count > most:
        raise ValueError(f"--num-draft-tokens is {count}: {draft} drafts at most {most} here")
    return loaded, made


def adaptive_control(target: Target, draft: Draft, num_draft_tokens: int | None) -> dict[str, Any]:
    """The engine's option `control` for --adaptive."""
    from .pace import adapt

    return {"control": adapt(target, draft, num_draft_tokens)}


def set_threads(threads: int | None) -> None:
    """Set torch's CPU threads, where a number was given."""
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads is {threads}: it must be between 1 and {MAX_THREADS}")
    import torch

    torch.set_num_threads(threads)


def fewer_threads(target: Target) -> None:
    """On a busy machine, compute with as many threads as are fastest there, and say so."""
    from .pace import pick_threads

    found = pick_threads(target)
    most = torch_threads()
    if found is None or found[0] == most:
        return
    count, times = found
    set_threads(count)
    if sys.stderr.isatty():
        typer.echo(
            f"speculant: the machine is busy: {count} of {most} threads ({times[count]:.0f} ms a "
            f"token, {times[most]:.0f} with all); --threads decides otherwise",
            err=True,
        )


def torch_threads() -> int:
    """Threads that torch computes with."""
    import torch

    return torch.get_num_threads()


def check_rule(name: str) -> str:
    """The name of an acceptance rule, checked."""
    if name not in ("block", "token"):
        raise ValueError(f"unknown rule {name!r}: choose block or token")
    return name


def check_text(name: str, text: str) -> None:
    """Bytes that are not UTF-8 reach Python as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None


def check_prompt(text: str, system: str | None, raw: bool) -> None:
    """Refuse a prompt that no model could take, before one is loaded."""
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one character")
    if raw and system is not None:
        raise ValueError("--system needs the chat template: leave out --raw")
    check_text("the prompt", text)
    check_text("--system", system or "")


def message_for(target: Target, text: str, system: str | None, raw: bool) -> Any:
    """What the engine takes: a user's message, messages with a system's, or raw token ids."""
    if raw:
        return target.tokenizer.encode(text)
    if system is not None:
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return text


@contextmanager
def user_errors() -> Iterator[None]:
    """A user's mistake is one line and exit code 2, a failure one line and 1, Ctrl-C 130."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None
    except typer.Exit:
        raise
    except _expected() as error:
        line = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"speculant: {line}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _expected() -> tuple[type[BaseException], ...]:
    """Errors whose message is for the user; anything else is a bug and keeps its traceback."""
    if "torch" not in sys.modules:  # nothing was loaded, and an error needs no torch to be told
        return (ValueError, OSError, FloatingPointError, MemoryError)
    import torch

    from .target.base import LoadError

    memory = (MemoryError, torch.OutOfMemoryError)
    return (LoadError, ValueError, OSError, FloatingPointError, *memory)
