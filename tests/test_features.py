"""States for training: noted ones equal recomputed ones, and both the uncached target's.

Independent truth: `FakeTarget.logits`, one forward over the whole text without a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fake import HIDDEN, FakeTarget
from speculant.drafts.record import RecordDraft
from speculant.engine import Engine
from speculant.sampling import SamplingParams
from speculant.target.base import LAST
from speculant.train.data import Batch, Corpus
from speculant.train.features import (
    CHUNK,
    OfflineFeatures,
    OnlineFeatures,
    States,
    disk_bytes,
    has_states,
)
from speculant.train.shards import Sample, shard_path, states_path, write_shard
from test_record import uncached

NOTED = (0, 1, LAST)
LENGTHS = [(3, 8), (2, 1), (9, 4), (5, 15), (4, 2)]


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def shard(target: FakeTarget, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Answers of the engine, their states noted on the way, all requests at once."""
    engine = Engine(target, RecordDraft(NOTED, dtype), max_rows=len(LENGTHS), capacity=64)
    prompts = [[(5 * i + 3 * j) % 31 + 1 for j in range(p)] for i, (p, _) in enumerate(LENGTHS)]
    params = [
        SamplingParams(max_tokens=a, temperature=0.9, seed=i, ignore_eos=True)
        for i, (_, a) in enumerate(LENGTHS)
    ]
    done = engine.complete(prompts, params)  # every one has a row, so all states are still there
    assert isinstance(engine.draft, RecordDraft)
    samples = [
        Sample(prompt, out.token_ids, engine.draft.states_of([*prompt, *out.token_ids]))
        for prompt, out in zip(prompts, done, strict=True)
    ]
    path = shard_path(folder, 0)
    write_shard(path, samples)
    return path


def real(states: States, batch: Batch) -> list[Tensor]:
    """The numbers that mean something, row by row."""
    out = []
    for b, item in enumerate(batch.items):
        out += [states.taps[b, : item.length - 1], states.last[b, : item.length - 1]]
        out += [states.log_mass[b, : item.answer], states.best[b, : item.answer]]
    return out


@pytest.mark.parametrize("taps", [(0, 1), (1,), ()])
def test_offline_equals_online(
    target: FakeTarget, tmp_path: Path, taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches in any order, over chunks of answers, whichever columns a head reads."""
    monkeypatch.setattr("speculant.train.features.CHUNK", 4)
    corpus = Corpus([shard(target, tmp_path)])
    assert has_states(corpus.items)
    offline, online = OfflineFeatures(target, taps, NOTED), OnlineFeatures(target, taps)
    for order in ([0, 1, 2, 3, 4], [3, 0], [4]):
        batch = corpus.batch([corpus.items[i] for i in order])
        one, two = offline.states(batch), online.states(batch)
        width, most = batch.tokens.shape[1], batch.valid.shape[1]
        for states in (one, two):
            assert states.taps.shape == (len(order), width - 1, HIDDEN * len(taps))
            assert states.last.shape == (len(order), width - 1, HIDDEN)
            assert states.log_mass.shape == states.best.shape == (len(order), most)
            assert {states.taps.dtype, states.last.dtype} == {torch.float32}
        for a, b in zip(real(one, batch), real(two, batch), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_states_are_the_uncached_targets(target: FakeTarget, tmp_path: Path) -> None:
    corpus = Corpus([shard(target, tmp_path)])
    batch = corpus.batch(corpus.items)
    assert max(a for _, a in LENGTHS) < CHUNK
    for features in (OfflineFeatures(target, (1, 0), NOTED), OnlineFeatures(target, (1, 0))):
        states = features.states(batch)
        for b, item in enumerate(corpus.items):
            text = batch.tokens[b, : item.length].tolist()
            want = uncached(target, text[:-1], (1, 0, LAST))
            got = torch.cat([states.taps, states.last], dim=-1)[b, : item.length - 1]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            for a in range(item.answer):  # answer token a comes after text[: prompt + a]
                logits = target.logits(text[: item.prompt + a])[-1]
                mass = float(logits.logsumexp(-1))
                assert float(states.log_mass[b, a]) == pytest.approx(mass, abs=1e-4)
                assert int(states.best[b, a]) == int(logits.argmax())


def test_sums_are_written_once(
    target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus([shard(target, tmp_path)])
    batch, asked = corpus.batch(corpus.items), []
    unembed = target.unembed
    monkeypatch.setattr(target, "unembed", lambda x: (asked.append(len(x)), unembed(x))[1])
    first = OfflineFeatures(target, (0,), NOTED)
    one = first.states(batch)
    assert sum(asked) == sum(a for _, a in LENGTHS)  # answers' positions only
    asked.clear()
    sums = tmp_path / "sums-00000.safetensors"
    before = sums.stat().st_mtime_ns
    again = first.states(batch), OfflineFeatures(target, (0,), NOTED).states(batch)
    assert asked == []
    assert sums.stat().st_mtime_ns == before
    assert all(torch.equal(other.log_mass, one.log_mass) for other in again)


def test_sums_of_an_older_shard_are_made_anew(target: FakeTarget, tmp_path: Path) -> None:
    """A shard that was deleted and made again may hold other samples."""
    corpus = Corpus([shard(target, tmp_path)])
    batch = corpus.batch(corpus.items)
    want = OfflineFeatures(target, (0,), NOTED).states(batch)
    sums = tmp_path / "sums-00000.safetensors"
    save_file({name: t[:-3].clone() for name, t in load_file(sums).items()}, sums)
    got = OfflineFeatures(target, (0,), NOTED).states(batch)
    assert torch.equal(got.log_mass, want.log_mass)
    assert torch.equal(got.best, want.best)


@pytest.mark.parametrize("change", [-1, 1])
def test_states_that_do_not_fit_the_shard_are_refused(
    target: FakeTarget, tmp_path: Path, change: int
) -> None:
    path = shard(target, tmp_path)
    states = load_file(states_path(path))["states"]
    wrong = states[:change] if change < 0 else torch.cat([states, states[:change]])
    save_file({"states": wrong.clone()}, states_path(path))
    corpus = Corpus([path])
    features = OfflineFeatures(target, (0,), NOTED)
    count = sum(p + a - 1 for p, a in LENGTHS)
    with pytest.raises(ValueError, match=rf"shard-00000.*{count + change} states for {count}"):
        features.states(corpus.batch(corpus.items[:1]))
    assert not (tmp_path / "sums-00000.safetensors").exists()


def test_taps_that_were_not_noted_are_refused(target: FakeTarget) -> None:
    with pytest.raises(ValueError, match=r"tap 1 was not noted.*\[0, -1\].*--features online"):
        OfflineFeatures(target, (0, 1), (0, LAST))
    with pytest.raises(ValueError, match="tap -1 was not noted"):
        OfflineFeatures(target, (0,), (0, 1))


def test_half_precision_reaches_heads_as_float32(target: FakeTarget, tmp_path: Path) -> None:
    """Of a bfloat16 target, online and offline: a head's weights are float32."""
    half = FakeTarget(seed=1, dtype=torch.bfloat16)
    corpus = Corpus([shard(half, tmp_path, torch.bfloat16)])
    batch = corpus.batch(corpus.items)
    for features in (OnlineFeatures(half, (0, 1)), OfflineFeatures(half, (0, 1), NOTED)):
        states = features.states(batch)
        assert {states.taps.dtype, states.last.dtype, states.log_mass.dtype} == {torch.float32}
        exact = OnlineFeatures(target, (0, 1)).states(batch)
        torch.testing.assert_close(states.taps[3], exact.taps[3], atol=0.2, rtol=0.1)


def test_room_on_disk_written_out() -> None:
    assert disk_bytes(1000, 576, 3) == 1000 * 576 * 4 * 2 == 4_608_000
    assert disk_bytes(10, 16, 0) == 320


def test_shards_without_states_are_told_apart(target: FakeTarget, tmp_path: Path) -> None:
    path = shard(target, tmp_path)
    write_shard(shard_path(tmp_path, 1), [Sample([1, 2], [3])])
    assert has_states(Corpus([path]).items)
    assert not has_states(Corpus([path, shard_path(tmp_path, 1)]).items)
