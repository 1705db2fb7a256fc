"""The benchmark's counting, order and figures, against uncached decoding and hand-made samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fake import FakeTarget, FakeTokenizer
from scripted import Scripted
from speculant.bench import host, roofline, visitors
from speculant.bench.asked import Asked, ask, groups
from speculant.bench.contenders import (
    PLAIN,
    Contender,
    Entry,
    Outcome,
    Spent,
    decode,
    ours,
    parse_contender,
    theirs,
)
from speculant.bench.grid import Plan, Sample, Tally, mixed, rotated, run_grid
from speculant.bench.measure import group_size
from speculant.bench.questions import BUNDLED, Question, read_questions, spread
from speculant.bench.roofline import Machine, Roofline, multiplied
from speculant.bench.speeds import (
    Agreement,
    Figure,
    adapted,
    best_ours,
    first_difference,
    same_weights,
    speeds,
)
from speculant.drafts import DRAFTS, load_draft
from speculant.sampling import SamplingParams
from speculant.target.hf import HFTarget
from speculant.target.llama import LlamaTarget

TASKS = ("writing", "roleplay", "reasoning", "maths", "coding", "extraction", "summarisation",
         "translation", "qa", "json")  # fmt: skip


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(seed=4)


def half_right(target: FakeTarget) -> Scripted:
    """A chain that is right every other time."""

    def guess(tokens: Sequence[int], budget: int) -> list[int]:
        right = target.greedy(tokens, budget)
        return right if len(tokens) % 2 else [(t + 1) % 11 for t in right]

    return Scripted(guess, 3)


def until_eos(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[: list(ids).index(0) + 1] if 0 in ids else ids)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


# The bundled questions


def test_the_bundled_questions() -> None:
    questions = read_questions(BUNDLED)
    assert Counter(q.category for q in questions) == dict.fromkeys(TASKS, 8)
    assert [q.question_id for q in questions] == list(range(1, 81))
    turns = [turn for q in questions for turn in q.turns]
    assert len(set(turns)) == len(turns)
    assert 10 <= sum(len(q.turns) == 2 for q in questions) <= 30
    assert max(len(q.turns) for q in questions) == 2
    # a token is less than a word: contexts beyond 500 tokens need no more than 400 words
    assert sum(len(q.turns[0].split()) > 300 for q in questions) >= 5
    assert [q.category for q in spread(questions, 10)] == list(TASKS)


def test_they_are_installed_with_the_package() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    data = next(line for line in text.splitlines() if line.startswith("speculant = ["))
    globs = json.loads(data.partition("=")[2])
    package = BUNDLED.parents[2]
    assert BUNDLED in {path for glob in globs for path in package.glob(glob)}


# What is asked


def test_a_second_turn_follows_the_greedy_answer(target: FakeTarget) -> None:
    questions = [Question(1, "a", ("hello", "and then")), Question(2, "b", ("more",))]
    asked, skipped = ask(target, questions, 7)
    encode, decode = target.tokenizer.encode, target.tokenizer.decode
    answer = until_eos(target.greedy(encode("hello"), 7))
    said = decode([i for i in answer if i])
    expected = [encode("hello"), encode(f"hello\n\n{said}\n\nand then"), encode("more")]
    assert [list(a.ids) for a in asked] == expected
    assert [a.key for a in asked] == [(1, 0), (1, 1), (2, 0)]
    assert skipped == []


def test_a_turn_without_room_is_skipped_with_those_behind_it() -> None:
    target = FakeTarget(seed=4, context_length=20)
    questions = [Question(1, "a", ("x" * 15, "next")), Question(2, "a", ("short",))]
    asked, skipped = ask(target, questions, 6)
    assert [a.key for a in asked] == [(2, 0)]
    assert [(s.question.question_id, s.turn, s.tokens) for s in skipped] == [(1, 0, 15), (1, 1, 15)]
    assert [a.key for a in ask(target, questions, 5)[0]] == [(1, 0), (2, 0)]


def test_a_batch_is_kept_full() -> None:
    assert [group_size(b) for b in (1, 2, 8, 16, 64, 100)] == [1, 8, 32, 64, 64, 100]


def test_groups_are_full() -> None:
    assert groups([1, 2, 3], [9], 1) == [[1], [2], [3]]
    assert groups([1, 2, 3], [8, 9], 2) == [[1, 2], [3, 8]]
    assert groups([1, 2], [8], 8) == [[1, 2, 8, 1, 2, 8, 1, 2]]


def test_seeds_are_of_question_and_turn() -> None:
    question = Question("q", "a", ("one", "two"))
    first, again = Asked(question, 0, (1,)), Asked(question, 0, (2, 3))
    assert first.params(5, 1.0) == again.params(5, 1.0)
    assert first.params(5, 1.0).seed != Asked(question, 1, (1,)).params(5, 1.0).seed
    assert first.params(5, 0.7).temperature == 0.7


# Counting


@pytest.mark.parametrize("prompts", [["hello there"], ["abc", "wxyzuvw", "kl"]], ids=["1", "3"])
@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("drafted", [False, True])
def test_every_appended_token_counts(
    target: FakeTarget, prompts: list[str], drafted: bool, batch: int | None
) -> None:
    """Against uncached greedy decoding; rounds are the forwards that the target saw, of at most as
    many rows as run at once."""
    ids = [target.tokenizer.encode(text) for text in prompts]
    wanted = tuple(until_eos(target.greedy(each, 9)) for each in ids)
    draft = half_right(target) if drafted else load_draft("none", target)
    seen = [0]
    forward = target.forward

    def counting(*args: Any, **options: Any) -> Any:
        if options.get("need_logits", True):  # a prefill needs none
            seen[0] += 1
            assert len(args[0]) <= (batch or len(prompts))
        return forward(*args, **options)

    target.forward = counting  # type: ignore[method-assign]
    out = decode(target, draft, ids, [greedy(max_tokens=9)] * len(ids), batch)
    assert out.tokens == wanted
    assert out.spent is not None
    assert out.counters is not None
    assert out.counters.num_emitted_tokens == sum(map(len, wanted))
    if batch == 2:  # the last answer may run alone, which does not count
        assert 0 < out.counted <= sum(map(len, wanted))
        assert 0 < out.spent.rounds <= seen[0]
    else:
        assert out.counted == sum(map(len, wanted))
        assert out.spent.rounds == seen[0]
    assert (out.counters.num_accepted_tokens > 0) == drafted
    if not drafted:
        lengths = list(map(len, wanted))
        assert (
            out.spent.rounds
            == {None: max(lengths), 1: sum(lengths), 2: out.counted / min(2, len(ids))}[batch]
        )
    parts = out.spent.per_round()
    assert parts["total"] * out.spent.rounds == pytest.approx(out.decode_ms)
    assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"])
    assert 0 < out.spent.loop_share < 1


def test_sampled_contenders_get_the_same_numbers(target: FakeTarget) -> None:
    """A draft of chosen nodes leaves plain decoding's text at any temperature."""
    asked, _ = ask(target, [Question(i, "a", (t,)) for i, t in enumerate(("abcabc", "zzyzzy"))], 12)
    texts = {}
    for spec in (PLAIN, "ngram", "ngram@3"):
        for contender in ours(target, "float32", spec, (0.0, 1.0), (1, 2), 12):
            entry = contender.entry
            whole = [asked] if entry.batch == 2 else [[a] for a in asked]
            tokens = [t for group in whole for t in contender.run(group).tokens]
            texts[entry.name, entry.temperature, entry.batch] = tokens
    for temperature in (0.0, 1.0):
        mine = [tokens for (_, t, _), tokens in texts.items() if t == temperature]
        assert len(mine) == 6
        assert all(tokens == mine[0] for tokens in mine)
    assert texts[PLAIN, 0.0, 1] != texts[PLAIN, 1.0, 1]


class Neighbour:
    """A peer that answers with uncached greedy decoding, a millisecond a token after the first."""

    name, weights = "neighbour", "float32"

    def __init__(self, target: FakeTarget, wrong_at: int | None = None, fails: int = 0) -> None:
        self.target, self.wrong_at, self.fails, self.inside = target, wrong_at, fails, False

    def __enter__(self) -> Neighbour:
        self.inside = True
        return self

    def __exit__(self, *error: object) -> None:
        self.inside = False

    def run(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        assert self.inside
        self.fails -= 1
        if self.fails == 0:
            raise RuntimeError("out of\nideas")
        out = list(until_eos(self.target.greedy(prompt_ids, max_tokens)))
        if self.wrong_at is not None:
            out[self.wrong_at] = 31 - out[self.wrong_at]
        return out, float(len(out) - 1)


def test_the_token_out_of_a_peers_prefill_does_not_count(target: FakeTarget) -> None:
    asked, _ = ask(target, [Question(1, "a", ("hello",))], 6)
    with Neighbour(target) as peer:
        out = theirs(peer, 6).run(asked)
    assert out.tokens == (until_eos(target.greedy(list(asked[0].ids), 6)),)
    assert out.counted == len(out.tokens[0]) - 1 == out.decode_ms


# Order


def watched(names: Sequence[str], batches: Sequence[int], log: list[Any]) -> list[Contender]:
    """Contenders that only write down what they are given."""

    def make(name: str, batch: int) -> Contender:
        def run(group: Sequence[Asked]) -> Outcome:
            log.append((batch, name, tuple(a.key for a in group)))
            return Outcome(tuple((1, 2) for _ in group), 2 * len(group), 4.0)

        return Contender(Entry(name, "float32", 0.0, batch), run)

    return [make(name, batch) for batch in batches for name in names]


def some(count: int) -> list[Asked]:
    return [Asked(Question(i, "ab"[i % 2], ("?",)), 0, (1, 2)) for i in range(count)]


def test_contenders_alternate_in_a_turning_order() -> None:
    log: list[Any] = []
    names = [PLAIN, "a", "b"]
    mine = {1: groups(some(4), [], 1), 2: groups(some(4), [], 2)}
    done: list[tuple[int, int]] = []
    run_grid(watched(names, (1, 2), log), mine, 3, lambda *x: done.append(x))
    warm, log = log[: 2 * len(names)], log[2 * len(names) :]
    assert {(batch, keys) for batch, _, keys in warm} == {(1, ((0, 0),)), (2, ((0, 0), (1, 0)))}
    assert done == [(i, 18) for i in range(1, 19)]
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert len(rounds) == 3 * (4 + 2)
    for three in rounds:  # one group, all of them
        assert len({(batch, keys) for batch, _, keys in three}) == 1
        assert {name for _, name, _ in three} == set(names)
    for batch, count in ((1, 4), (2, 2)):
        first = [three[0][1] for three in rounds if three[0][0] == batch]
        assert set(first) == set(names)
        for keys in {three[0][2] for three in rounds if three[0][0] == batch}:
            openers = [t[0][1] for t in rounds if t[0][0] == batch and t[0][2] == keys]
            assert sorted(openers) == sorted(names), "a group met one contender first in two runs"
        assert len(first) == 3 * count


def test_batch_sizes_are_mixed_evenly() -> None:
    mine = {1: groups(some(4), [], 1), 2: groups(some(4), [], 2), 4: groups(some(4), [], 4)}
    order = [batch for batch, _, _ in mixed(mine)]
    assert order == [1, 2, 1, 4, 1, 2, 1]
    assert rotated([1, 2, 3], 4) == [2, 3, 1]
    assert rotated([], 4) == []


def test_a_peer_that_fails_is_given_up_and_an_error_of_ours_is_not(target: FakeTarget) -> None:
    asked, _ = ask(target, [Question(i, "a", ("hi",)) for i in range(3)], 4)
    log: list[Any] = []
    peer = Neighbour(target, fails=3)  # the warm-up counts as a run
    with peer:
        entered = [*watched([PLAIN], (1,), log), theirs(peer, 4)]
        plain, theirs_tally = run_grid(entered, {1: groups(asked, [], 1)}, 2)
    assert theirs_tally.failed == "out of ideas"
    assert len(theirs_tally.samples) == 1
    assert len(plain.samples) == 6
    assert [s.name for s in speeds([plain, theirs_tally])] == [PLAIN]

    def broken(group: Sequence[Asked]) -> Outcome:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        run_grid([Contender(Entry(PLAIN, "", 0.0, 1), broken)], {1: [asked[:1]]}, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"drafts": ()}, "--drafts names nothing"),
        ({"drafts": ("ngram", "ngram")}, "twice"),
        ({"drafts": ("ngram@0",)}, "a depth from 1"),
        ({"drafts": ("plain",)}, "always compared"),
        ({"batches": (1, 0)}, "--batches"),
        ({"temperatures": (-1.0,)}, "--temperature"),
        ({"temperatures": (float("nan"),)}, "--temperature"),
        ({"runs": 0}, "--runs is 0"),
        ({"max_tokens": 1}, "--max-tokens is 1"),
        ({"limit": 0}, "--limit is 0"),
        ({"weights": ()}, "--weights names nothing"),
    ],
)
def test_a_plan_is_checked(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan(**({"drafts": ("ngram",)} | wrong))


def test_contenders_are_read() -> None:
    assert parse_contender("eagle3") == ("eagle3", 0, "")
    assert parse_contender("eagle3:8@auto") == ("eagle3", 8, "auto")
    assert parse_contender("heads/mine@3") == ("heads/mine", 0, "3")
    for wrong in ("eagle3:", "eagle3:0", "eagle3:x", "eagle3@", "eagle3@0", "eagle3@deep"):
        if wrong == "eagle3:":
            assert parse_contender(wrong) == ("eagle3", 0, "")  # nothing after the colon is nothing
        else:
            with pytest.raises(ValueError):
                parse_contender(wrong)


# Figures


def tally(
    name: str,
    samples: Sequence[tuple[int, str, int, float]],
    texts: dict[Any, tuple[int, ...]] | None = None,
    **entry: Any,
) -> Tally:
    place = {"weights": "float32", "temperature": 0.0, "batch": 1} | entry
    return Tally(Entry(name, **place), [Sample(*s) for s in samples], texts=texts or {})


PLAIN_RUNS = [(1, "a", 10, 100.0), (1, "b", 30, 100.0), (2, "a", 10, 50.0), (2, "b", 30, 150.0)]
"""200 tokens a second in both runs; a: 100, 200; b: 300, 200."""


def test_medians_spread_and_ratios_run_for_run() -> None:
    runs = [(1, "a", 10, 50.0), (1, "b", 30, 50.0), (2, "a", 10, 40.0), (2, "b", 30, 40.0)]
    plain, mine = speeds([tally(PLAIN, PLAIN_RUNS), tally("ngram", runs)])
    assert plain.tokens_per_s == Figure(200.0, 0.0, (200.0, 200.0))
    assert mine.tokens_per_s == Figure(450.0, 100 / 450, (400.0, 500.0))
    assert mine.ratio == Figure(2.25, 0.5 / 2.25, (2.0, 2.5))
    assert mine.per_task["a"] == Figure(225.0, 50 / 225, (200.0, 250.0))
    assert mine.ratio_per_task["a"].runs == (200 / 100, 250 / 200)
    assert mine.ratio_per_task["b"].runs == (600 / 300, 750 / 200)
    assert mine.tokens == 40
    assert plain.ratio.runs == (1.0, 1.0)


def test_one_run_has_no_spread() -> None:
    (plain,) = speeds([tally(PLAIN, PLAIN_RUNS[:2])])
    assert plain.tokens_per_s == Figure(200.0, None, (200.0,))


def test_contenders_compare_with_plain_of_their_own_place() -> None:
    other = {"weights": "file", "batch": 2}
    found = speeds([
        tally(PLAIN, PLAIN_RUNS), tally(PLAIN, [(1, "", 10, 10.0)], **other),
        tally("ngram", [(1, "", 10, 20.0)], **other),
    ])  # fmt: skip
    assert (found[2].ratio.median, found[2].against, found[2].per_task) == (0.5, "file", {})


def test_agreement_names_where_texts_part() -> None:
    wanted = {(1, 0): (5, 6, 7), (1, 1): (5, 6), (2, 0): (9,)}
    texts = {(1, 0): (5, 6, 8), (1, 1): (5, 6, 7), (2, 0): (9,)}
    found = speeds([tally(PLAIN, PLAIN_RUNS, wanted), tally("x", PLAIN_RUNS, texts, peer=True)])
    assert found[0].agreement == Agreement(3, 3, {})
    assert found[1].agreement == Agreement(3, 1, {"1/1": 2, "1/2": 2})
    warm = speeds([tally(PLAIN, PLAIN_RUNS, wanted, temperature=1.0)])
    assert warm[0].agreement is None


@pytest.mark.parametrize("a", [(), (1,), (1, 2), (1, 2, 3), (2, 2, 3)])
@pytest.mark.parametrize("b", [(), (1,), (1, 2, 4)])
def test_first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    expected = next((i for i in range(4) if a[i : i + 1] != b[i : i + 1]), None)
    assert first_difference(a, b) == expected


def test_a_peer_compares_with_the_same_weights() -> None:
    assert same_weights("float32", ["file", "float32"]) == "float32"
    assert same_weights("Q4_1 GGUF", ["float32", "file"]) == "file"
    assert same_weights("Q4_1 GGUF", ["float32", "int8"]) == "float32"
    assert same_weights("Q4_1 GGUF", ["float32", "file", "file-a8"]) == "file-a8"
    assert same_weights("bfloat16", ["float32"]) == "float32"
    found = speeds([
        tally(PLAIN, [(1, "a", 10, 100.0)]), tally(PLAIN, [(1, "a", 10, 40.0)], weights="file"),
        tally("llama.cpp", [(1, "a", 10, 80.0)], weights="Q4_1 GGUF", peer=True),
    ])  # fmt: skip
    assert found[2].against == "file"
    assert found[2].ratio.median == 0.5
    assert best_ours(found) is found[1]
    assert best_ours(found, lambda s: s.weights == "float32") is found[0]


def test_what_adapting_is_worth() -> None:
    """Worst task against plain; the mean over tasks against the best fixed depth of the draft."""

    def runs(a: float, b: float) -> list[tuple[int, str, int, float]]:
        return [(1, "a", 100, 1e5 / a), (1, "b", 100, 1e5 / b)]

    found = speeds([
        tally(PLAIN, runs(100, 100)), tally("eagle3@2", runs(150, 80)),
        tally("eagle3@4", runs(160, 90)), tally("eagle3@auto", runs(152, 99)),
        tally("ngram", runs(900, 900)), tally("eagle3:8@auto", runs(50, 120)),
        tally("eagle3", runs(10, 10), peer=True),
    ])  # fmt: skip
    one, tree = adapted(found)
    assert (one.name, one.worst_task, one.fixed) == ("eagle3@auto", "b", "eagle3@4")
    assert one.worst == pytest.approx(0.99)
    assert one.mean == pytest.approx((152 / 160 + 99 / 90) / 2)
    assert one.line.count("met") == 2
    assert "not met" not in one.line
    assert (tree.worst_task, tree.fixed) == ("a", PLAIN)  # no fixed tree of 8 nodes was there
    assert tree.mean == pytest.approx((0.5 + 1.2) / 2)
    assert tree.line.count("not met") == 2


def test_spent_adds_up() -> None:
    spent = Spent(2, 10.0, 20.0, 4.0, 40.0)
    spent.add(Spent(2, 2.0, 4.0, 2.0, 8.0))
    parts = {"draft": 3.0, "verify": 6.0, "sampling": 1.5, "other": 1.5, "total": 12.0}
    assert spent.per_round() == parts
    assert spent.loop_share == pytest.approx(1 - 36 / 48)
    assert Spent().loop_share == 0.0


# The machine


def test_the_roofline_is_bytes_and_operations() -> None:
    roof = Roofline(read_gb_per_s=20.0, gflop_per_s=100.0)
    assert roof.bandwidth_ms(500_000_000) == pytest.approx(25.0)
    assert roof.arithmetic_ms(135_000_000, 8) == pytest.approx(2 * 8 * 135e6 / 100e9 * 1e3)


def test_the_machine_keeps_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a test winds: reading takes 4 and 2 ms, the product 5, then all 100."""
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(roofline, "SQUARE", 8)
    times = iter([0.0, 0.004, 1.0, 1.002, 2.0, 2.005, 3.0, 3.1, 4.0, 4.1, 5.0, 5.1])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(times))
    machine = Machine()
    machine.run()
    machine.run()
    assert machine.read == pytest.approx((1 << 22) / 2)
    assert machine.arithmetic == pytest.approx(2 * 8**3 / 5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_only_looked_up_is_not_multiplied(tmp_path: Path, tied: bool) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert multiplied(LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x")) == linears + norms
    assert multiplied(HFTarget(model, FakeTokenizer(), "x")) == linears + norms


def test_forwards_are_timed_beside_the_questions(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 14)
    monkeypatch.setattr(roofline, "SQUARE", 4)
    monkeypatch.setattr(roofline, "parameters", lambda t: 1000)
    monkeypatch.setattr(roofline, "weight_bytes", lambda t, p: 4 * p)
    forwards = roofline.Forwards({"float32": target})
    before = target.num_forwards
    for done in range(1, 5):
        forwards.keep_up(done, 4)
    assert target.num_forwards - before == roofline.PASSES * len(roofline.ROWS)
    found = forwards.figures()["float32"]
    assert list(found.ms) == list(roofline.ROWS)
    assert (found.weight_bytes, found.params, found.context) == (4000, 1000, 256)
    assert all(ms > 0 and wide >= 0 for ms, wide in found.ms.values())


def test_what_fits_into_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F16", "shape": [500, 2], "data_offsets": [0, 2000]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(2000)
    (tmp_path / "model.safetensors").write_bytes(data)
    need = host.ROOM * 1000 * (4 + 1)  # a float32 and an int8 for each of 1000 parameters
    monkeypatch.setattr(host, "_memory_bytes", lambda name: int(need) + 1)
    assert host.fit_together(tmp_path, ["float32", "int8"])
    assert host.fit_together(tmp_path, ["float32", "int8-a8"])
    monkeypatch.setattr(host, "_memory_bytes", lambda name: int(need) - 1)
    assert not host.fit_together(tmp_path, ["float32", "int8"])
    assert host.fit_together(tmp_path, ["float32"])  # there is no other way
    monkeypatch.setattr(host, "_memory_bytes", lambda name: None)
    assert host.fit_together(tmp_path, ["float32", "int8"])


def test_every_format_of_weights_has_a_size() -> None:
    from speculant.target.load import WEIGHTS

    assert {name.partition("-a")[0] for name in WEIGHTS} <= set(host.BYTES)


def test_the_machine_is_described() -> None:
    found = host.describe()
    assert found["processor"]
    assert found["cores"] >= 1
    assert {"python", "torch", "speculant"} <= set(host.versions())
    json.dumps(found, allow_nan=False)


def test_a_process_that_fails_tells_why(target: FakeTarget) -> None:
    with pytest.raises(OSError, match=r"failed: .*no-such-model"):
        host.peak_memory("no-such-model", target, 4)


def test_heads_for_peers(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the package's fits a strange target; a folder that is named is handed on."""
    monkeypatch.setattr(
        visitors, "find_draft", lambda name: ("eagle3", {"head": Path(name)} if "/" in name else {})
    )
    assert visitors.draft_folders(["eagle3@2", "eagle3:8"], target) == {}
    assert visitors.draft_folders(["eagle3@2", "heads/e@auto"], target) == {"eagle3": "heads/e"}


def test_adaptive_depth_is_a_contender(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured once for all temperatures and batches, and the text stays plain's."""
    measured: list[Any] = []
    from speculant import pace
    from speculant.bench import contenders

    def costs(*args: Any) -> Any:
        measured.append(args)
        return pace.adapt(*args)

    monkeypatch.setattr(contenders, "adapt", costs)
    monkeypatch.setitem(DRAFTS, "eagle3", ("for tests", lambda target: half_right(target)))
    asked, _ = ask(target, [Question(1, "a", ("hello",)), Question(2, "a", ("world",))], 9)
    mine = ours(target, "float32", "eagle3@auto", (0.0, 1.0), (1, 2), 9)
    assert len(measured) == 1
    assert [(c.entry.temperature, c.entry.batch) for c in mine] == [
        (0.0, 1), (1.0, 1), (0.0, 2), (1.0, 2)
    ]  # fmt: skip
    wanted = tuple(until_eos(target.greedy(list(a.ids), 9)) for a in asked)
    assert mine[2].run(asked).tokens == wanted
