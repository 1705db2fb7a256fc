"""The target's hidden states for training: noted beforehand (offline) or computed a batch (online).

Offline costs disk, 8 bytes x taps x hidden size a token in bfloat16 (4.6 kB for SmolLM2's three taps
and its last state), and is read through a memory map. Online costs a forward of the target a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..target.base import LAST, Target
from .data import Batch, Item
from .losses import whole_vocabulary
from .shards import read_shard, states_path, write_tensors

CHUNK = 256  # answer positions whose logits over the whole vocabulary are held at once


@dataclass(frozen=True)
class States:
    """What a batch's loss needs of the target.

    taps:     [B, T - 1, n * H] states entering the tapped layers (n may be 0)
    last:     [B, T - 1, H] states after the final norm
    log_mass: [B, A] logsumexp of the logits that predict answer token a
    best:     [B, A] int64, the likeliest token there
    """

    taps: Tensor
    last: Tensor
    log_mass: Tensor
    best: Tensor


class Features(Protocol):
    """Where states come from."""

    def states(self, batch: Batch) -> States:
        """The states of a batch, zeros behind a row's end."""
        ...


class OnlineFeatures:
    """Runs the target over every batch."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)

    @torch.no_grad()
    def states(self, batch: Batch) -> States:
        """One forward of the target, without its LM head but for the answers."""
        rows, width = batch.tokens.shape
        cache = self.target.new_cache(rows, width)
        positions = torch.arange(width - 1).expand(rows, -1)
        where = cache.rows(range(rows), width - 1)
        _, hidden = self.target.forward(
            batch.tokens[:, :-1], positions, None, where, (*self.taps, LAST), need_logits=False
        )
        assert hidden is not None
        size = self.target.info.hidden_size
        log_mass, best = _answers(self.target, batch, hidden[..., -size:])
        # the target runs in inference mode, whose tensors take no gradient; heads are float32
        hidden = hidden.to(torch.float32, copy=True)
        return States(hidden[..., :-size], hidden[..., -size:], log_mass, best)


class OfflineFeatures:
    """Reads states noted while answering (`drafts.record`), and their logits' sums beside them."""

    def __init__(self, target: Target, taps: Sequence[int], noted: Sequence[int]) -> None:
        """noted: taps in the order of the files' columns, LAST among them."""
        missing = [tap for tap in (*taps, LAST) if tap not in noted]
        if missing:
            raise ValueError(
                f"tap {missing[0]} was not noted with the data, which holds {list(noted)}: "
                "train with --features online"
            )
        size = target.info.hidden_size
        self.target, self.size = target, size
        self.columns = [slice(size * i, size * (i + 1)) for i in map(list(noted).index, taps)]
        self.last = slice(size * list(noted).index(LAST), size * (list(noted).index(LAST) + 1))
        self._open: dict[Path, tuple[Tensor, Tensor, Tensor]] = {}

    def prepare(self, shards: Sequence[Path]) -> None:
        """Compute what is missing beside the states now, not in the middle of a run."""
        for path in shards:
            self._shard(path)

    def states(self, batch: Batch) -> States:
        """Copy the rows of a batch out of the files."""
        rows, width, most = len(batch.items), batch.tokens.shape[1], int(batch.answers.max())
        size, device = self.size, self.target.info.device
        taps = torch.zeros(rows, width - 1, size * len(self.columns))
        last, log_mass = torch.zeros(rows, width - 1, size), torch.zeros(rows, most)
        best = torch.zeros(rows, most, dtype=torch.int64)
        for b, item in enumerate(batch.items):
            states, masses, tops = self._shard(item.path)
            mine = states[item.row : item.row + item.length - 1]
            for i, column in enumerate(self.columns):
                taps[b, : len(mine), size * i : size * (i + 1)] = mine[:, column]
            last[b, : len(mine)] = mine[:, self.last]
            first = item.row + item.prompt - 1
            log_mass[b, : item.answer] = masses[first : first + item.answer]
            best[b, : item.answer] = tops[first : first + item.answer]
        return States(*(x.to(device) for x in (taps, last, log_mass, best)))

    def _shard(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """Memory-mapped states [N, n * H], log masses [N] and best tokens [N] of a shard."""
        if path not in self._open:
            from safetensors.torch import load_file

            states = load_file(states_path(path))["states"]
            sums = path.with_name(path.name.replace("shard-", "sums-"))
            if not sums.exists():
                self._sum(path, states, sums)
            data = load_file(sums)
            if len(data["best"]) != len(states):  # the shard was made anew since
                self._sum(path, states, sums)
                data = load_file(sums)
            self._open[path] = (states, data["log_mass"], data["best"])
        return self._open[path]

    def _sum(self, path: Path, states: Tensor, sums: Path) -> None:
        """Compute once what a loss needs of the whole vocabulary at a shard's answers."""
        count = len(states)
        log_mass, best = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
        row = 0
        for sample in read_shard(path):
            first, end = (
                row + len(sample.prompt) - 1,
                row + len(sample.prompt) + len(sample.answer) - 1,
            )
            for a in range(first, end, CHUNK):
                b = min(a + CHUNK, end)
                logits = self.target.unembed(states[a:b, self.last])
                log_mass[a:b], best[a:b] = whole_vocabulary(logits)
            row = end
        if row != count:
            raise ValueError(f"{path}: {count} states for {row} positions: delete the shard")
        write_tensors(sums, {"log_mass": log_mass, "best": best})


def _answers(target: Target, batch: Batch, last: Tensor) -> tuple[Tensor, Tensor]:
    """log_mass and best [B, A] of a batch, from its last states [B, T - 1, H]."""
    most = int(batch.answers.max())
    log_mass = torch.zeros(len(batch.items), most, device=last.device)
    best = torch.zeros(len(batch.items), most, dtype=torch.int64, device=last.device)
    for b, item in enumerate(batch.items):
        for a in range(0, item.answer, CHUNK):
            z = min(a + CHUNK, item.answer)
            first = item.prompt - 1
            logits = target.unembed(last[b, first + a : first + z])
            log_mass[b, a:z], best[b, a:z] = whole_vocabulary(logits)
    return log_mass, best


def disk_bytes(tokens: int, hidden_size: int, taps: int) -> int:
    """Bytes of noted states for `tokens` positions: bfloat16, the taps and the last state."""
    return tokens * hidden_size * (taps + 1) * 2


def has_states(items: Sequence[Item]) -> bool:
    """True when every sample's shard has its states beside it."""
    return all(states_path(path).exists() for path in {item.path for item in items})
