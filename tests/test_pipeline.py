"""The whole of a training run on a tiny model: every kind, resuming, data, refusals.

Independent truth: plain greedy decoding for what a trained head drafts, an uninterrupted run for
one that was stopped, and counts written out.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fake import FakeTarget, FakeTokenizer
from speculant.drafts import load_draft
from speculant.drafts.none import NoDraft
from speculant.engine import generate_many
from speculant.heads.eagle3 import Eagle3Head
from speculant.heads.weights import load_head, save_head
from speculant.pipeline import run as pipeline
from speculant.pipeline.build import Vocabulary, choose_vocabulary, noted_taps, spread_layers
from speculant.pipeline.data import (
    DataProgress,
    forget_unfinished,
    make_data,
    missing_states,
    use_offline,
)
from speculant.pipeline.result import check_out
from speculant.pipeline.run import TrainResult, Watch, _seconds, gather, train
from speculant.pipeline.settings import TrainSettings, parse_seconds, parse_taps
from speculant.sampling import SamplingParams
from speculant.target.base import Target
from speculant.target.load import load_target
from speculant.train.losses import lm_head_rows
from speculant.train.responses import Answer, Recipe, Talk
from speculant.train.shards import Sample, read_shard, shard_path, states_path, write_shard
from talking import InRounds, in_rounds
from test_load import byte_tokenizer, tiny_llama
from test_loop import Scripted, trainer

KINDS = ("eagle3", "eagle1", "medusa", "vanilla")
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}<assistant>"
EOS = 258
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def tiny_model(folder: Path, template: str | None = TEMPLATE, layers: int = 7) -> Path:
    """A random Llama on disk, a token a byte."""
    tiny_llama(num_hidden_layers=layers, max_position_embeddings=72).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny7")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"Tell me of {i * i}\n" for i in range(12)))
    return path


class News:
    """A `Watch` that notes everything, and may do something at a step."""

    def __init__(self, at: Callable[[int], None] = lambda step: None) -> None:
        self.said: list[str] = []
        self.shards: list[DataProgress] = []
        self.steps: list[int] = []
        self.at = at
        self.watch = Watch(
            self.said.append, lambda news, wanted: self.shards.append(news), self.step
        )

    def step(self, record: dict[str, Any], total: int) -> None:
        self.steps.append(record["step"])
        self.at(record["step"])


def interrupt_at(step: int) -> Callable[[int], None]:
    return lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None


def wanted(kind: str, model: Path, out: Path, **more: Any) -> TrainSettings:
    sizes: dict[str, Any] = {
        "epochs": 1.0, "lr": 1.5e-3, "ema": 0.0, "draft_vocab_size": 200, "steps": 3, "heads": 2,
        "precision": "float32",
    }  # fmt: skip
    return TrainSettings(kind, str(model), out, **{**sizes, **more})


@pytest.fixture(scope="session")
def data(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with states, made once."""
    folder = tmp_path_factory.mktemp("data")
    settings = wanted("eagle3", model, folder, prompts=prompts, features="offline")
    gather(settings, load_target(model), folder, None, News().watch)
    return folder


def greedy(target: Target) -> list[list[int]]:
    """Plain decoding of two prompts."""
    return [out.token_ids for out in generate_many(target, NoDraft(), ["Hello", "7 + 7"], GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_a_head_that_drafts(
    kind: str, model: Path, data: Path, tmp_path: Path
) -> None:
    news, out = News(), tmp_path / "head"
    settings = wanted(kind, model, out, data=(data,), ema=0.5 * (kind == "medusa"))
    result = train(settings, "speculant train", news.watch)
    assert result.finished
    assert result.steps == len(news.steps) == news.steps[-1] > 1
    assert 1 <= result.mean_acceptance_length <= 6
    assert "features: noted states, read from disk" in news.said
    assert (settings.run / "curves.png").read_bytes().startswith(b"\x89PNG")
    target = load_target(model)
    draft = load_draft(str(out), target)
    done = generate_many(target, draft, ["Hello", "7 + 7"], GREEDY)
    assert [o.token_ids for o in done] == greedy(target)
    assert all(o.metrics.num_draft_tokens > 0 for o in done)
    record = load_head(out).config.training
    assert record["command"] == "speculant train"
    assert record["steps"] == result.steps
    held_out = record["held_out"]
    assert held_out["mean_acceptance_length"] == pytest.approx(
        result.mean_acceptance_length, abs=1e-4
    )
    assert len(held_out["conditional_acceptance_per_position"]) == 5
    scores = [json.loads(line) for line in (settings.run / "metrics.jsonl").open()]
    best = max(r["mean_acceptance_length"] for r in scores if "conditional" in r)
    assert result.mean_acceptance_length == best
    if not kind.startswith("eagle"):  # whose fc is trained in another form
        kept = load_file(next(settings.run.glob("state-*.safetensors")))
        for name, t in load_file(out / "model.safetensors").items():
            assert torch.equal(t, kept[f"best.{name}"].bfloat16()), name
    with pytest.raises(ValueError, match="trained for another target"):
        load_draft(str(out), load_target(tiny_model(tmp_path / "other", layers=8)))
    again = News()  # a finished run finishes at once
    assert train(settings, "speculant train", again.watch) == replace(
        result, tokens_per_s=pytest.approx(result.tokens_per_s)
    )
    assert again.steps == []


def test_an_interrupted_run_goes_on_to_the_same_head(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Its own data, interrupted while it trains: the same weights as in one go."""
    heads, more = {}, {"prompts": prompts, "ema": 0.9, "batch_answers": 64}
    for name, at in (("whole", 0), ("parts", 2)):
        settings = wanted("eagle3", model, tmp_path / name, **more)
        first = News(interrupt_at(at))
        result = train(settings, "x", first.watch)
        assert result.finished == (name == "whole")
        assert len(first.shards) == 6
        if not result.finished:
            assert not settings.out.exists()
            second = News()
            assert train(settings, "x", second.watch).finished
            assert second.steps[0] == 3
            assert second.shards == []
        heads[name] = load_file(settings.out / "model.safetensors")
    assert set(heads["whole"]) == set(heads["parts"])
    assert all(torch.equal(t, heads["parts"][name]) for name, t in heads["whole"].items())


def test_a_run_with_a_budget_goes_on_with_its_data(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in training, it makes no more data, for which there would be time again."""
    monkeypatch.setattr(pipeline, "_total_steps", lambda *_: 4)
    settings = wanted("medusa", model, tmp_path / "m", prompts=prompts, budget_s=60.0)
    monkeypatch.setattr(pipeline, "DATA_SHARE", 0.0)
    first = News(interrupt_at(1))
    assert not train(settings, "x", first.watch).finished
    assert len(first.shards) == 2  # no time, but one is held out
    monkeypatch.setattr(pipeline, "DATA_SHARE", 0.9)
    second = News()
    assert train(settings, "x", second.watch).finished
    assert second.shards == []
    assert second.steps == [2, 3, 4]


def test_given_answers_need_no_generation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talks.jsonl"
    talks = [
        {"messages": [{"role": "user", "content": f"Say {i}"},
                      {"role": "assistant", "content": f"It is {i}, {i} and {i}"}]}
        for i in range(9)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, talks)))
    settings = wanted("vanilla", model, tmp_path / "v", prompts=path, answers="given")
    news = News()
    result = train(settings, "x", news.watch)
    assert result.finished
    assert "features: the target runs every step" in news.said
    answers = sum(len(f"It is {i}, {i} and {i}") + 1 for i in range(9))  # and EOS
    assert news.shards[-1].answer_tokens == answers
    first = sum(len(f"It is {i}, {i} and {i}") + 1 for i in range(2))  # held out
    assert result.answer_tokens == answers - first


def test_a_base_model_trains_on_texts(prompts: Path, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", template=None, layers=2)
    out = tmp_path / "head"
    with pytest.raises(ValueError, match=r"no chat template.*pass --prompts FILE"):
        train(wanted("medusa", base, out), "x", News().watch)
    settings = wanted("medusa", base, out, prompts=prompts)  # two layers: no default taps
    assert train(settings, "x", News().watch).finished
    with pytest.raises(ValueError, match="2 layers is too shallow for default taps"):
        train(replace(settings, kind="eagle3", out=tmp_path / "e"), "x", News().watch)


def test_the_target_writes_its_own_requests(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a random model are rubbish, so that here all of them count as usable."""
    for name in ("usable", "Unique"):
        monkeypatch.setattr(f"speculant.train.responses.{name}", lambda *_: lambda text: True)
    recipe = Recipe(conversations=40, documents=0.0, turns=0.0, longest=72)
    monkeypatch.setattr(pipeline, "recipe_for", lambda *_: recipe)
    settings, news = wanted("medusa", model, tmp_path / "m", answer_tokens=200), News()
    made = gather(settings, load_target(model), tmp_path / "data", None, news.watch)
    assert news.shards[-1].answer_tokens >= 200
    opened = load_target(model).tokenizer.encode("<user>")
    for sample in read_shard(made[0]):
        assert sample.prompt[: len(opened)] == opened
        assert sample.prompt.count(EOS) == 1
        assert len(sample.prompt) + len(sample.answer) <= 72


def test_nothing_usable_is_an_error(model: Path, tmp_path: Path) -> None:
    """Not an endless loop over shards without a sample."""

    class Nothing:
        def make(self, index: int) -> Talk[list[Sample]]:
            yield []
            return []

    with pytest.raises(ValueError, match=r"shard-00000.*usable: pass --prompts"):
        make_data(Nothing(), InRounds(nobody), tmp_path, 100, None, lambda news: None)


class Counting:
    """Makes shards of ten answer tokens each, and notes which."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def make(self, index: int) -> Talk[list[Sample]]:
        self.made.append(index)
        yield []
        return [Sample([1, 2], [3] * 10)]


def nobody(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
    """Answers nothing, since nothing is asked."""
    return [] if not prompts else pytest.fail("asked")


class Ahead(InRounds):
    """Opens the talks that it may before any returns, up to three."""

    def __init__(self) -> None:
        super().__init__(nobody)

    def stream(self, more: Callable[[], Talk[Any] | None]) -> Any:
        while talks := [talk for _ in range(3) if (talk := more()) is not None]:
            for talk in talks:
                yield in_rounds(talk, nobody)


def test_data_until_there_is_enough(tmp_path: Path) -> None:
    maker, news, talks = Counting(), [], InRounds(nobody)
    paths = make_data(maker, talks, tmp_path, 35, None, news.append)
    assert maker.made == [0, 1, 2, 3]
    assert [n.answer_tokens for n in news] == [10, 20, 30, 40]
    assert (news[-1].shards, news[-1].samples, news[-1].longest) == (4, 4, 12)
    paths[2].unlink()
    assert make_data(maker, talks, tmp_path, 35, None, news.append) == paths
    assert maker.made == [0, 1, 2, 3, 2]  # only the missing one again
    late = tmp_path / "late"
    assert len(make_data(Counting(), talks, late, 10**9, 0.0, news.append)) == 2


@pytest.mark.parametrize(("wanted", "shards"), [(35, 4), (40, 4), (41, 5), (5, 1), (10, 1)])
def test_shards_that_overlap_are_no_more_than_needed(
    wanted: int, shards: int, tmp_path: Path
) -> None:
    """The first alone, since nobody knows yet what a shard holds; one that exists counts."""
    maker, news = Counting(), []
    paths = make_data(maker, Ahead(), tmp_path, wanted, None, news.append)
    assert (len(paths), maker.made) == (shards, list(range(shards)))
    if shards > 3:
        paths[2].unlink()
        assert make_data(maker, Ahead(), tmp_path, wanted, None, news.append) == paths
        assert maker.made == [*range(shards), 2]
    assert news[-1].answer_tokens == 10 * shards


def test_what_was_never_finished_is_made_again(tmp_path: Path) -> None:
    states = torch.zeros(11, 4)
    write_shard(shard_path(tmp_path, 0), [Sample([1, 2], [3] * 10, states)])
    write_shard(shard_path(tmp_path, 1), [Sample([1, 2], [3] * 10)])
    for name in ("states-00002.safetensors", "sums-00002.safetensors",
                 "shard-00002.77.part", "states-00003.12.part"):  # fmt: skip
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "sums-00000.safetensors").write_bytes(b"whole")
    forget_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "shard-00000.safetensors", "shard-00001.safetensors", "states-00000.safetensors",
        "sums-00000.safetensors",
    ]  # fmt: skip
    assert missing_states([shard_path(tmp_path, i) for i in range(2)]) == [shard_path(tmp_path, 1)]


def test_an_interrupted_shard_is_made_anew(model: Path, prompts: Path, tmp_path: Path) -> None:
    """As left by a kill between states and shard: the next run clears it and goes on."""
    settings = wanted("eagle3", model, tmp_path / "h", prompts=prompts, features="offline")
    folder, target = tmp_path / "data", load_target(model)
    paths = gather(settings, target, folder, None, News().watch)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    paths[3].unlink()
    states_path(paths[3]).write_bytes(b"half")
    (folder / "shard-00003.9.part").write_bytes(b"half")
    news = News()
    assert gather(settings, target, folder, None, news.watch) == paths
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    tuned = tiny_model(tmp_path / "tuned", layers=8)
    with pytest.raises(ValueError, match="another target's than tuned"):
        gather(settings, load_target(tuned), folder, None, news.watch)
    with pytest.raises(ValueError, match="begun with seed = 0, not 1"):
        gather(replace(settings, seed=1), target, folder, None, news.watch)


def test_a_run_of_another_head_is_refused_before_any_data(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    settings = wanted("medusa", model, out, data=(data,))
    train(settings, "x", News().watch)
    monkeypatch.setattr(pipeline, "_shards", None)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"kind": "vanilla"}, "begun with kind = medusa, not vanilla"),
        ({"loss": "mixed"}, "begun with loss = cross_entropy, not mixed"),
        ({"lr": 0.5}, "begun with lr = 0.0015, not 0.5"),
        ({"draft_vocab_size": 100}, "begun with draft_vocab_size = 200, not 100"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            train(replace(settings, **change), "x", News().watch)


def test_other_data_under_a_run_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    settings = wanted("medusa", model, tmp_path / "head", data=(data,))
    train(settings, "x", News().watch)
    for name, count in (("fewer", 3), ("other", 6)):
        folder = tmp_path / name
        for i in range(count):
            write_shard(shard_path(folder, i), [Sample([1, 2], [3] * 10)])
        with pytest.raises(ValueError, match=r"begun with (shards|answer_tokens) ="):
            train(replace(settings, data=(folder,)), "x", News().watch)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("medusa", {"draft_vocab_size": 260}, "--draft-vocab-size is 260: the target has 259"),
        ("eagle3", {"taps": (1, 2, 7)}, "--taps 1,2,7: the target's layers are 0 to 6"),
        ("vanilla", {"layers": 8}, "--layers is 8: the target has 7"),
    ],
)
def test_sizes_are_refused_before_any_data(
    kind: str, change: dict[str, Any], message: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    settings = wanted(kind, model, tmp_path / "head", **{"prompts": prompts, **change})
    with pytest.raises(ValueError, match=message):
        train(settings, "x", News().watch)
    assert list(tmp_path.iterdir()) == []


def test_too_few_prompts_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Hello there")
    settings = wanted("medusa", model, tmp_path / "head", prompts=tmp_path / "one.txt")
    with pytest.raises(ValueError, match="1 shards of data: the first is held out"):
        train(settings, "x", News().watch)


def test_states_that_are_not_there_are_not_used(model: Path, data: Path, tmp_path: Path) -> None:
    """Another tap than noted: recomputed, or refused where offline was asked for."""
    settings = wanted("eagle3", model, tmp_path / "h", data=(data,), taps=(1, 3))
    news = News()
    assert train(settings, "x", news.watch).finished
    assert "features: the target runs every step" in news.said
    other = replace(settings, out=tmp_path / "o", features="offline")
    with pytest.raises(ValueError, match=r"--features offline: .*use --features online"):
        train(other, "x", news.watch)


@pytest.mark.parametrize(
    ("kind", "precision"), [("eagle3", "float32"), *((kind, "bfloat16") for kind in KINDS)]
)
def test_offline_and_online_train_alike(
    kind: str, precision: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """bfloat16 states cost precision, nothing else."""
    losses = []
    for features in ("offline", "online"):
        more: dict[str, Any] = {"features": features, "precision": precision}
        settings = wanted(kind, model, tmp_path / features, data=(data,), **more)
        train(settings, "x", News().watch)
        lines = (settings.run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_an_out_that_is_no_head_is_not_replaced(model: Path, tmp_path: Path) -> None:
    check_out(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty")
    (tmp_path / "heads" / "eagle3").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "heads", tmp_path / "file", Path("."), Path(".."), Path("/")):
        with pytest.raises(ValueError, match=r"--out .* is no head: give a folder of its own"):
            train(wanted("medusa", model, out), "x", News().watch)
    assert (tmp_path / "heads" / "eagle3").is_dir()


class Counts:
    """A corpus of given counts."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.values = torch.tensor(counts)

    def counts(self, vocab_size: int) -> Tensor:
        assert vocab_size == len(self.values)
        return self.values


def chosen(counts: Sequence[int], size: int, eos: frozenset[int] = frozenset({5})) -> Vocabulary:
    target = FakeTarget(vocab_size=len(counts), tokenizer=FakeTokenizer(eos_ids=eos))
    corpus: Any = Counts(counts)
    return choose_vocabulary(corpus, target, size)


def test_vocabularies_written_out() -> None:
    #         0  1  2  3  4  5  6  7
    counts = [9, 4, 4, 4, 1, 0, 0, 2]
    some = chosen(counts, 3)
    assert some.ids.tolist() == [0, 1, 5]  # EOS always; of three alike, the lowest
    assert (some.coverage, some.distinct) == (13 / 24, 6)
    assert chosen(counts, 1).ids.tolist() == [5]
    assert chosen(counts, 5).ids.tolist() == [0, 1, 2, 3, 5]
    more = chosen(counts, 8)  # more than the data holds: unused ids, each once
    assert more.ids.tolist() == list(range(8))
    assert more.coverage == 1.0
    assert chosen(counts, 7).ids.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert chosen([0] * 6, 3).ids.tolist() == [0, 1, 5]
    assert chosen(counts, 3, frozenset({5, 6, 99})).ids.tolist() == [0, 5, 6]
    with pytest.raises(ValueError, match="--draft-vocab-size is 9: the target has 8 tokens"):
        chosen(counts, 9)


def test_noted_taps() -> None:
    settings = TrainSettings("medusa", "x", Path("h"))
    deep, flat = (SimpleNamespace(info=SimpleNamespace(num_layers=n)) for n in (30, 6))
    assert noted_taps(settings, deep) == (2, 15, 27)  # type: ignore[arg-type]
    assert noted_taps(settings, flat) == ()  # type: ignore[arg-type]
    assert noted_taps(replace(settings, taps=(0, 1)), flat) == (0, 1)  # type: ignore[arg-type]


def test_layers_are_spread_evenly() -> None:
    assert spread_layers(2, 30) == [0, 29]
    assert spread_layers(3, 5) == [0, 2, 4]
    assert spread_layers(1, 5) == [0]
    assert spread_layers(4, 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="--layers is 5: the target has 4"):
        spread_layers(5, 4)


def test_states_are_noted_where_they_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 answer tokens at 1.8 positions: 1800 x 16 x 4 x 2 bytes; a tenth of the disk stays free."""
    target, need = FakeTarget(), 1800 * 16 * 4 * 2
    settings = wanted("eagle3", model, tmp_path / "h")
    for free, fits in ((need, False), (need / 0.9 + 1, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        assert use_offline(settings, target, 1000, tmp_path / "not" / "there") is fits
        assert not use_offline(replace(settings, features="online"), target, 1000, tmp_path)
        forced = replace(settings, features="offline")
        if fits:
            assert use_offline(forced, target, 1000, tmp_path)
        else:
            with pytest.raises(OSError, match=r"about 0.0 GB and .*use --features online"):
                use_offline(forced, target, 1000, tmp_path)


def test_the_steps_of_a_budget(tmp_path: Path) -> None:
    """One batch alone too; measuring changes nothing."""
    for i in range(2):
        write_shard(shard_path(tmp_path, i), [Sample([1, 2], [3] * 10)])
    mine = Scripted()
    some = trainer(tmp_path, tmp_path / "run", mine)
    before = [p.detach().clone() for p in mine.module.parameters()]
    settings = TrainSettings("medusa", "x", Path("h"), budget_s=60.0)
    steps = pipeline._total_steps(settings, some, pipeline.time.monotonic())
    assert steps > 1000  # a step of three numbers takes less than 50 ms
    assert pipeline._total_steps(settings, some, pipeline.time.monotonic() - 100) == 50
    assert pipeline._total_steps(replace(settings, budget_s=None, epochs=7), some, 0.0) == 7
    after = list(mine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
    assert some.progress.step == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "eagle4"}, "kind: 'eagle4' is not one of eagle3, medusa, eagle1, vanilla"),
        ({"init": "zero"}, "--init 'zero': give target, random or the folder of a head"),
        ({"answers": "none"}, "--answers: 'none'"),
        ({"features": "disk"}, "--features: 'disk'"),
        ({"loss": "mse"}, "--loss: 'mse'"),
        ({"precision": "half"}, "--precision: 'half'"),
        ({"answer_tokens": 0}, "--answer-tokens is 0: it must be above 0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"ema": 1.0}, "--ema is 1.0"),
        ({"single": 1.5}, "--single is 1.5"),
        ({"budget_s": 59.0}, "--budget is 59 s: give at least a minute"),
        ({"answers": "given"}, "--answers given needs --prompts"),
        ({"prompts": Path("not there")}, "--prompts: no file not there"),
        ({"data": (Path("not there"),)}, "--data: no folder not there"),
        ({"taps": (5, 2)}, "--taps 5,2: layer ids, ascending, each once"),
        ({"taps": (2, 2)}, "--taps 2,2: layer ids, ascending, each once"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainSettings(**{"kind": "eagle3", "target": "x", "out": Path("h"), **change})
    assert message in str(error.value)


def test_given_answers_and_noted_states_exclude_each_other(prompts: Path) -> None:
    more: dict[str, Any] = {"prompts": prompts, "answers": "given", "features": "offline"}
    with pytest.raises(ValueError, match="--answers given: nothing is generated"):
        TrainSettings("eagle3", "x", Path("h"), **more)


def test_a_budget_counts_steps_of_the_whole_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step i takes i seconds: the first few say little of a hundred, alone or few as they may be."""
    clock = [0.0]

    class Steps:
        class objective:  # noqa: N801
            begin = staticmethod(lambda share, step: None)

        class optimizer:  # noqa: N801
            zero_grad = staticmethod(lambda set_to_none: None)

        @staticmethod
        def backward(items: list[int]) -> None:
            clock[0] += items[0]

    monkeypatch.setattr("speculant.pipeline.run.time.perf_counter", lambda: clock[0])
    measured: Any = Steps()
    assert 40 < _seconds(measured, [[i] for i in range(100)], 1.0) < 60  # type: ignore[list-item]
    assert _seconds(measured, [[3]], 1.0) == 3  # type: ignore[list-item]
    assert _seconds(measured, [[2], [4]], 1.0) == 3  # type: ignore[list-item]


def test_times_and_taps() -> None:
    assert [parse_seconds(t) for t in ("20m", " 3h", "90s", "90", "1.5m")] == [
        1200,
        10800,
        90,
        90,
        90,
    ]
    for wrong in ("", "soon", "-5m", "5d", "m"):
        with pytest.raises(ValueError, match="--budget"):
            parse_seconds(wrong)
    assert parse_taps("2,15,27") == (2, 15, 27)
    with pytest.raises(ValueError, match="--taps 'a,b'"):
        parse_taps("a,b")


def test_results_name_the_best_step(tmp_path: Path) -> None:
    from speculant.pipeline.result import result_of

    for i in range(2):
        write_shard(shard_path(tmp_path, i), [Sample([1, 2], [3] * 10)])
    some = trainer(tmp_path, tmp_path / "run", Scripted([1.1, 1.6, 1.3]), change={"score_every": 4})
    some.run()
    result = result_of(some, some.corpus, True)
    assert result == TrainResult(
        True, pytest.approx(1.6), (pytest.approx(0.6), 0.0), 10, 10, result.tokens_per_s
    )
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert result_of(some, some.corpus, True).conditional == ()


@pytest.mark.parametrize("kind", ["eagle3", "vanilla"])
def test_a_run_may_start_from_a_head(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Of its kind and sizes: with steps of nothing, it stays that head."""
    first = wanted(kind, model, tmp_path / "first", data=(data,), lr=1e-2, epochs=2.0)
    train(first, "x", News().watch)
    second = replace(first, out=tmp_path / "second", init=str(first.out), lr=1e-12, epochs=1.0)
    train(second, "x", News().watch)
    fresh = replace(second, out=tmp_path / "fresh", init="random")
    train(fresh, "x", News().watch)
    one, two, none = (load_file(s.out / "model.safetensors") for s in (first, second, fresh))
    for name, t in one.items():
        torch.testing.assert_close(two[name].float(), t.float(), atol=1e-3, rtol=1e-2)
    assert any(float((none[n].float() - t.float()).abs().max()) > 0.01 for n, t in one.items())
    other = wanted("medusa", model, tmp_path / "other", data=(data,), init=str(first.out))
    with pytest.raises(ValueError, match="a head of another kind"):
        train(other, "x", News().watch)


def test_a_head_without_copying_heads_gets_them_once(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """A trained head that goes on has them then, keeps them, and is otherwise what it was."""
    first = wanted("eagle3", model, tmp_path / "plain", data=(data,), copying=False)
    train(first, "x", News().watch)
    second = replace(first, out=tmp_path / "b", init=str(first.out), copying=True, lr=1e-12)
    train(second, "x", News().watch)
    third = replace(second, out=tmp_path / "c", init=str(second.out))
    train(third, "x", News().watch)
    fourth = replace(third, out=tmp_path / "d", init=str(third.out), copying=False)
    train(fourth, "x", News().watch)
    sizes = []
    for settings in (first, second, third, fourth):
        head = load_head(settings.out)
        assert isinstance(head, Eagle3Head)
        sizes.append((head.config.num_heads, head.config.kv_heads))
    assert sizes == [(2, 1), (4, 2), (4, 2), (4, 2)]
    old, new = (load_file(s.out / "model.safetensors") for s in (first, fourth))
    for name, t in old.items():
        mine = new[name][: t.shape[0], : t.shape[1]] if t.ndim == 2 else new[name]
        torch.testing.assert_close(mine.float(), t.float(), atol=1e-3, rtol=2e-2)
    target = load_target(model)
    done = generate_many(target, load_draft(str(fourth.out), target), ["Hello", "7 + 7"], GREEDY)
    assert [o.token_ids for o in done] == greedy(target)


def test_a_head_goes_on_with_another_draft_vocabulary(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """Rows of tokens that it had are kept, those of new ones follow the map that the others show."""
    target = load_target(model)
    old = tmp_path / "old"
    train(wanted("eagle3", model, old, data=(data,), draft_vocab_size=120), "", News().watch)
    head = load_head(old)
    assert isinstance(head, Eagle3Head)
    whole = lm_head_rows(target, torch.arange(target.info.vocab_size))
    turn = torch.linalg.qr(torch.randn(whole.shape[1], whole.shape[1])).Q * 1.3
    with torch.no_grad():
        head.lm_head.weight.copy_(whole[head.target_ids] @ turn)
    save_head(head, old)
    more = wanted(
        "eagle3", model, tmp_path / "new", data=(data,), init=str(old), lr=1e-12, epochs=0.1,
        draft_vocab_size=200,
    )  # fmt: skip
    train(more, "", News().watch)
    new = load_head(more.out)
    assert isinstance(new, Eagle3Head)
    assert (len(head.target_ids), len(new.target_ids)) == (120, 200)
    # in the file weights are bfloat16, as the old head's were when it was read
    close = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(new.lm_head.weight, whole[new.target_ids] @ turn, **close)
    torch.testing.assert_close(new.fc.weight, head.fc.weight, **close)
    torch.testing.assert_close(
        new.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight, **close
    )
    same = replace(more, out=tmp_path / "same", draft_vocab_size=None)
    train(same, "", News().watch)
    kept = load_head(same.out)
    assert isinstance(kept, Eagle3Head)
    assert torch.equal(kept.target_ids, head.target_ids)  # where nobody asks, its own
