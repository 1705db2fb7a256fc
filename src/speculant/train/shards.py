"""Samples on disk: shards of token ids, the states that go with them, written whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One supervised turn."""

    prompt: list[int]
    answer: list[int]
    states: Tensor | None = None  # [T - 1, n * H], where they were noted while answering


def states_path(path: Path) -> Path:
    """Where the states of a shard lie."""
    return path.with_name(path.name.replace("shard-", "states-"))


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples, and their states where noted: a shard is whole or not there."""
    if not samples:
        raise ValueError(f"{path}: no sample to write")
    tokens = torch.tensor([t for s in samples for t in (*s.prompt, *s.answer)], dtype=torch.int32)
    prompts = torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32)
    answers = torch.tensor([len(s.answer) for s in samples], dtype=torch.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = [s.states for s in samples if s.states is not None]
    if len(states) == len(samples):
        # first, so that a shard never lacks the states it was made with
        write_tensors(states_path(path), {"states": torch.cat(states)})
    write_tensors(path, {"tokens": tokens, "prompt_lengths": prompts, "answer_lengths": answers})


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file to a temporary name, then rename. Raises OSError: a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(dict(tensors), part)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error}); free some space and go on") from None
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file to a temporary name, then rename: it is whole or the old one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_shard(path: Path) -> list[Sample]:
    """The samples of a shard. Raises ValueError for a file that is no shard or was cut short."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data: dict[str, Tensor] = load_file(path)
        tokens, prompts = data["tokens"].tolist(), data["prompt_lengths"].tolist()
        answers = data["answer_lengths"].tolist()
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not a shard ({error}): delete it") from None
    samples, at = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        samples.append(Sample(tokens[at : at + prompt], tokens[at + prompt : at + prompt + answer]))
        at += prompt + answer
    if at != len(tokens):
        raise ValueError(
            f"{path}: lengths add up to {at} of {len(tokens)} tokens: delete the shard"
        )
    return samples
