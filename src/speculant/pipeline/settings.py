"""What a training run is asked to do, checked before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from ..heads.weights import is_head
from ..train.losses import LOSSES

HEADS = ("eagle3", "medusa", "eagle1", "vanilla")
ANSWERS = ("target", "given")
STARTS = ("target", "random")
FEATURES = ("auto", "offline", "online")
UNITS = {"s": 1, "m": 60, "h": 3600}
DATA_SHARE = 0.5
"""Share of a time budget that goes into data: more tokens help a head more than more epochs."""


VOCABULARY = 8192
"""Tokens that a head drafts where nobody says how many, or all of a smaller target's."""


@dataclass(frozen=True)
class TrainSettings:
    """A run of `speculant train`.

    kind:          of head; out: its folder; the run's own files lie in `<out>.run`
    budget_s:      wall seconds for all of it, or None: then answer_tokens and epochs say how much
    answer_tokens: data to make, or to use of `data`; epochs: passes over it
    data:          folders of shards to train on instead, the first shard of all is held out
    prompts:       a file of the user's; answers: "target" answers it or the file's are "given"
    begun, documents, long, turns: shares of the recipe (`train.responses.Recipe`), None for its own
    features:      "offline" notes the states on disk, "online" computes them every step
    init:          "target": from its LM head or layers; "random"; or the folder of a head of the kind
    draft_vocab_size: tokens that are drafted, None for VOCABULARY or those of the head in `init`
    steps:         EAGLE-3's unrolled draft positions; single: share of the run with one step
    copying:       EAGLE-3 gets attention heads that copy, see `train.copying`
    """

    kind: str
    target: str
    out: Path
    budget_s: float | None = None
    answer_tokens: int = 1_500_000
    epochs: float = 2.0
    data: tuple[Path, ...] = ()
    prompts: Path | None = None
    answers: str = "target"
    features: str = "auto"
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    steps: int = 5
    single: float = 0.5
    copying: bool = True
    loss: str = "cross_entropy"
    heads: int = 4
    layers: int = 2
    lr: float = 1e-3
    ema: float = 0.998
    batch_answers: int = 256
    precision: str = "auto"
    device: str = "cpu"
    init: str = "target"
    begun: float | None = None
    documents: float | None = None
    long: float | None = None
    turns: float | None = None
    rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "kind": (self.kind, HEADS),
            "--answers": (self.answers, ANSWERS),
            "--features": (self.features, FEATURES),
            "--loss": (self.loss, LOSSES),
            "--device": (self.device.partition(":")[0], ("cpu", "cuda")),
            "--precision": (self.precision, ("auto", "float32", "bfloat16")),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")
        for name in ("answer_tokens", "epochs", "draft_vocab_size", "steps", "heads", "layers",
                     "lr", "batch_answers", "rows"):  # fmt: skip
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is {getattr(self, name)}: it must be above 0")
        if not 0 <= self.ema < 1:
            raise ValueError(f"--ema is {self.ema}: from 0 to below 1")
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"--taps {_list(self.taps)}: layer ids, ascending, each once")
        if not 0 <= self.single <= 1:
            raise ValueError(f"--single is {self.single}: a share from 0 to 1")
        if self.budget_s is not None and self.budget_s < 60:
            raise ValueError(f"--budget is {self.budget_s:.0f} s: give at least a minute")
        if self.answers == "given" and self.prompts is None:
            raise ValueError("--answers given needs --prompts: the file that has the answers")
        if self.answers == "given" and self.features == "offline":
            raise ValueError("--answers given: nothing is generated, so no states to note: leave "
                             "out --features offline")  # fmt: skip
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"--prompts: no file {self.prompts}")
        if self.init not in STARTS and not is_head(Path(self.init)):
            raise ValueError(f"--init {self.init!r}: give target, random or the folder of a head")
        missing = [str(folder) for folder in self.data if not folder.is_dir()]
        if missing:
            raise ValueError(f"--data: no folder {missing[0]}")

    @property
    def run(self) -> Path:
        """Where the run's own files lie: data, state, metrics, picture."""
        return self.out.with_name(self.out.name + ".run")


ONLY = {
    "steps": ("eagle3",),
    "single": ("eagle3",),
    "copying": ("eagle3",),
    "loss": ("eagle3", "medusa", "vanilla"),
    "heads": ("medusa",),
    "layers": ("vanilla",),
}
"""Options that mean something to some kinds of heads only."""


def check_options(settings: TrainSettings) -> None:
    """Raise ValueError for an option that the kind would silently ignore."""
    usual = {field.name: field.default for field in fields(TrainSettings)}
    for name, kinds in ONLY.items():
        given = getattr(settings, name)
        if settings.kind not in kinds and given != usual[name]:
            option = f"--no-{name}" if given is False else f"--{name}"
            raise ValueError(
                f"{option} means nothing to {settings.kind}: it is for {', '.join(kinds)}"
            )


def parse_seconds(text: str) -> float:
    """'20m', '3h', '90s' or seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found:
        raise ValueError(f"--budget {text!r}: give a time such as 20m, 3h or 900s")
    return float(found[1]) * UNITS[found[2] or "s"]


def _list(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


def parse_taps(text: str) -> tuple[int, ...]:
    """'2,15,27' as layer ids."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--taps {text!r}: give layer ids such as 2,15,27") from None
