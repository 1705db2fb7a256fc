"""The training loop: one objective, batches in a fixed order, selection by held-out acceptance.

Every step takes one batch a process. The loss is a sum over supervised tokens, divided by their
count over all processes, so that two processes have the gradient of one with both batches. Order,
noise and schedule follow from the settings alone: a run that was interrupted goes on with the
losses it would have had.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .data import Batch, Corpus, Item, plan
from .losses import Outcome
from .settings import LoopSettings, Score, average_decay, rate
from .state import Progress, RunFolder

if TYPE_CHECKING:
    from accelerate import Accelerator


class Objective(Protocol):
    """What is trained: a module, its loss on a batch, and how far its drafts would be accepted."""

    module: nn.Module

    def loss(self, batch: Batch) -> Outcome:
        """Sum over supervised tokens, their count, and each draft position's figures."""
        ...

    def begin(self, share: float, step: int) -> None:
        """Called before every step with its number and the share of the run that is done."""
        ...

    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Bases that greedy drafting reaches and that are accepted, [depth] each."""
        ...


class Trainer:
    """Trains an objective over a corpus.

    total_steps: of the run, where it starts anew; a run that goes on keeps its own
    settings:    extra: what else must stay the same, such as the data's shards
    report:      called after every step with a record, for progress
    """

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        held_out: Corpus,
        settings: LoopSettings,
        folder: RunFolder,
        accelerator: Accelerator,
        total_steps: int,
        extra: dict[str, Any] | None = None,
        report: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self.objective, self.corpus, self.held_out = objective, corpus, held_out
        self.settings, self.folder, self.accelerator = settings, folder, accelerator
        self.report, self.module = report, objective.module
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        kept = {**asdict(settings), **(extra or {})}
        found = folder.load(self.module, self.optimizer, kept)
        self.progress, self.best, self.ema = found or (Progress(total_steps, settings=kept), {}, {})
        if found is None and settings.ema:
            self.ema = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        if accelerator.is_main_process:
            folder.rewind(self.progress.step)
        self._stop = False

    def run(self, checkpoint_s: float = 180.0) -> bool:
        """Train to the end; False when a signal stopped it before, its state written."""
        began, saved = time.monotonic(), time.monotonic()
        spent = self.progress.seconds
        with self._signals():
            for items in self._batches():
                record = self._step(items)
                self.progress.seconds = spent + time.monotonic() - began
                last = self.progress.step == self.progress.total_steps
                if last or self.progress.step % self.settings.score_every == 0:
                    record |= self._select()
                if self.accelerator.is_main_process:
                    self.folder.log(record)
                self.report(record | {"seconds": self.progress.seconds})
                stopping = self._agree(self._stop)
                if self._agree(stopping or last or time.monotonic() - saved > checkpoint_s):
                    self._save()
                    saved = time.monotonic()
                if stopping:
                    return False
        return True

    def score(self) -> Score:
        """Held-out acceptance of the module as it is; with EMA, of the averaged weights."""
        depth, settings = self.settings.depth, self.settings
        counts = torch.zeros(2, depth, device=self.accelerator.device)
        batches = plan(self.held_out.items, 0, 0, settings.batch_answers, settings.batch_tokens)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.module.eval()
        with self._averaged(), self.accelerator.autocast():
            for items in batches[rank::world]:
                reached, accepted = self.objective.score(
                    self.held_out.batch(items).to(counts.device), depth
                )
                counts += torch.stack([reached, accepted]).to(counts)
        self.module.train()
        reached, accepted = self.accelerator.reduce(counts, "sum").tolist()
        return Score(tuple(reached), tuple(accepted))

    def backward(self, items: Sequence[Item]) -> Outcome:
        """Gradients of one batch a process, of the loss per supervised token over all of them."""
        self.module.train()
        with self.accelerator.autocast():
            outcome = self.objective.loss(self.corpus.batch(items).to(self.accelerator.device))
        (outcome.loss / self._sum(outcome.count)).backward()
        if self.accelerator.num_processes > 1:
            for p in self.parameters:
                p.grad = self.accelerator.reduce(
                    torch.zeros_like(p) if p.grad is None else p.grad, "sum"
                )
        return outcome

    def _step(self, items: Sequence[Item]) -> dict[str, Any]:
        """One optimiser step; its record."""
        lr = rate(self.settings, self.progress.step, self.progress.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.objective.begin(self.progress.step / self.progress.total_steps, self.progress.step)
        outcome = self.backward(items)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"step {self.progress.step + 1}: the gradient is {norm}: lower --lr, or train with "
                "--precision float32"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average()
        self.progress.step += 1
        self.progress.tokens += int(self._sum(outcome.count))
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": float(outcome.loss.detach()) / outcome.count,
            "lr": lr,
            "gradient_norm": norm,
            "top1": [s.top1 / s.count for s in outcome.steps],
            "alpha": [s.alpha / s.count for s in outcome.steps],
        }

    def _batches(self) -> Iterator[list[Item]]:
        """This process's batches from the current step on."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        settings, at, epoch = self.settings, 0, 0
        while True:
            answers, tokens = settings.batch_answers, settings.batch_tokens
            batches = plan(self.corpus.items, epoch, settings.seed, answers, tokens)
            steps = len(batches) // world
            if not steps:
                raise ValueError(f"{len(batches)} batches for {world} processes: make more data")
            for i in range(steps):
                if at >= self.progress.total_steps:
                    return
                if at >= self.progress.step:
                    yield batches[i * world + rank]
                at += 1
            epoch += 1

    def _select(self) -> dict[str, Any]:
        """Score, and keep the weights when they are the best so far."""
        score = self.score()
        length = score.mean_acceptance_length
        if length > self.progress.best_length:
            self.progress.best_length, self.progress.best_step = length, self.progress.step
            with self._averaged():
                self.best = {k: v.detach().clone() for k, v in self.module.state_dict().items()}
        return {"mean_acceptance_length": length, "conditional": score.conditional}

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            self.folder.save(self.progress, self.module, self.optimizer, self.best, self.ema)
        self.accelerator.wait_for_everyone()

    def _sum(self, count: int) -> float:
        total = torch.tensor(float(count), device=self.accelerator.device)
        return float(self.accelerator.reduce(total, "sum"))

    def _agree(self, flag: bool) -> bool:
        """True when any process says so: they stop, and save, at the same step."""
        return self._sum(int(flag)) > 0

    @torch.no_grad()
    def _average(self) -> None:
        if self.ema:
            decay = average_decay(self.settings, self.progress.step)
            for name, p in self.module.named_parameters():
                self.ema[name].lerp_(p, 1 - decay)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within it, the module holds the averaged weights, where there are some."""
        if not self.ema:
            yield
            return
        own = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        self._put(self.ema)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.module.named_parameters():
            p.copy_(weights[name])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Within it, Ctrl-C and SIGTERM end the run after the current step; twice, at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        old = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
