"""`serve --adaptive`: per request the depth that pays, chosen before anything is drawn."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import re
from collections import Counter
from typing import Any

import httpx2
import pytest

from fake import FakeTarget
from scripted import Scripted
from serving import MODEL, TALK, VOCAB, Running, ask, plain, serving, tiny_target, usual_drafts
from speculant import pace
from speculant.adaptive import Adaptive, ByLoad, Costs
from speculant.control import Fixed
from speculant.drafts import load_draft
from speculant.engine import Engine, generate
from speculant.pace import by_load, sizes
from speculant.sampling import SamplingParams
from speculant.track import Track


def costs(draft_ms: float, most: int = 3) -> Costs:
    """A forward of any rows takes 10 ms, a drafted token so many."""
    depths = range(most + 1)
    rows, drafts = tuple(d + 1 for d in depths), tuple(draft_ms * d for d in depths)
    return Costs(tuple(depths), rows, ((1, 10.0),), drafts)


def adapt(running: Running, name: str, *tables: Costs) -> None:
    """Give a lane costs that no machine decides, of 1 row and of 4."""
    lane = running.worker.engine.lanes[running.worker.lanes.index(name)]
    lane.control = ByLoad(dict(zip((1, 4), tables, strict=False)), samples=name == "vanilla")


def right_draft(target: FakeTarget, text: list[int]) -> Scripted:
    """Drafts what the target says greedily after TALK."""
    start = len(target.tokenizer.chat(TALK))
    return Scripted(lambda tokens, n: text[len(tokens) - start :][:n], 3, vocab=VOCAB)


def test_it_is_off_unless_asked_for_and_then_visible() -> None:
    """/speculation tells each depth's cost, the answer its rounds by depth, /metrics their sum."""
    with serving() as running:
        drafts = httpx2.get(f"{running.url}/speculation").json()["drafts"]
        assert all(d["round_ms"] is None for d in drafts)
    with serving(adaptive=True, num_draft_tokens=2, max_rows=3) as running:
        told = {d["name"]: d for d in httpx2.get(f"{running.url}/speculation").json()["drafts"]}
        assert told["none"]["round_ms"] is None
        for name, depths in (("ngram", "012"), ("vanilla", "0123")):
            tables = told[name]["round_ms"]
            assert list(tables) == ["1", "2", "3"][: len(tables)]
            assert tables
            assert all(list(table) == list(depths) for table in tables.values())
            assert all(ms > 0 for table in tables.values() for ms in table.values())
        figures = [
            ask(running, max_tokens=25, n=2, extra_body={"speculation": name})
            .metrics["speculative_decoding"]
            for name in ("ngram", "vanilla", "vanilla", "none")
        ]  # fmt: skip
        for one in figures:
            assert sum(one["depth_histogram"]) == one["target_forwards"]
        assert figures[-1]["depth_histogram"] == [50]
        text = running.service.metrics.render().decode()
        for name in told:
            pattern = rf'draft_depth_total{{depth="(\d+)",draft="{name}",.*}} (\S+)'
            counted = {int(d): float(n) for d, n in re.findall(pattern, text)}
            want: Counter[int] = Counter()
            for one in figures:
                if one["draft"] == name:
                    want.update(dict(enumerate(one["depth_histogram"])))
            assert counted == {d: n for d, n in want.items() if n}


@pytest.mark.parametrize("draft_ms", [0.1, 40.0])
def test_the_depth_that_pays(draft_ms: float) -> None:
    """A draft that is always right goes deep where it is cheap, and is left alone where a token of
    it costs four of the target's, but for trials; at most as deep as the request allows."""
    target = tiny_target()
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    want = generate(target, load_draft("none", target), TALK, params)
    drafts: dict[str, Any] = {"right": right_draft(target, want.token_ids), **plain(target)}
    with serving(target, drafts) as running:
        adapt(running, "right", costs(draft_ms))
        out = ask(running, max_tokens=60)
        assert out.choices[0].message.content == want.text
        rounds = out.metrics["speculative_decoding"]["depth_histogram"]
        if draft_ms < 1:
            assert rounds[3] >= 14
            assert sum(rounds) <= 17
        else:
            assert rounds[0] >= 45
            assert rounds[2:] == []
        shallow = ask(running, max_tokens=60, extra_body={"speculation": 1})
        assert shallow.choices[0].message.content == want.text
        assert len(shallow.metrics["speculative_decoding"]["depth_histogram"]) <= 2


def test_depth_follows_from_earlier_rounds_alone() -> None:
    """Law 3: replayed from what the rounds before have shown, each round's depth comes out the same."""
    target = tiny_target()
    table = costs(1.5)
    with serving(target) as running:
        adapt(running, "vanilla", table)
        stream = ask(
            running, max_tokens=120, temperature=0.8, seed=5, stream=True,
            extra_body={"speculation": "vanilla", "return_rounds": True},
        )  # fmt: skip
        chunks = [chunk.model_dump() for chunk in stream]
    rounds = [chunk["speculant"]["round"] for chunk in chunks if "speculant" in chunk]
    control, track, left, depths = Adaptive(table), Track(), 120, []
    for each in rounds:
        assert each["budget"] == control.budget(left, track)
        depths.append(each["budget"])
        track.observe(len(each["tokens"]), len(each["accepted"]))
        left -= min(left, len(each["accepted"]) + 1)
    assert left == 0
    assert len(set(depths)) > 1


def test_a_request_gets_its_depths_whatever_runs_beside_it() -> None:
    """Sampled chains, whose text depends on the depths: each as the library gives it alone."""
    target = tiny_target()
    tables = {"vanilla": costs(1.5), "ngram": costs(1.0)}
    asked = [
        {"seed": i, "temperature": 0.4 * (i % 3), "max_tokens": 20 + 3 * i,
         "extra_body": {"speculation": ("vanilla", "ngram")[i % 2]}}
        for i in range(6)
    ]  # fmt: skip
    with serving(target, max_rows=4) as running, concurrent.futures.ThreadPoolExecutor(6) as pool:
        for name, table in tables.items():
            adapt(running, name, table)
        answers = list(pool.map(lambda more: ask(running, **more), asked))
    for more, out in zip(asked, answers, strict=True):
        params = {k: v for k, v in more.items() if k != "extra_body"}
        name = more["extra_body"]["speculation"]  # type: ignore[index]
        want = generate(
            target, usual_drafts(target)[name], TALK,
            SamplingParams(**params, ignore_eos=True), control=Adaptive(tables[name]),  # type: ignore[arg-type]
        )  # fmt: skip
        assert out.choices[0].message.content == want.text


def test_what_pays_alone_need_not_pay_in_a_batch() -> None:
    """Four rows by the costs of four: nothing is drafted, but by a row whose text would change."""
    target = tiny_target()
    cheap, dear = costs(0.001), costs(40.0)
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=3 + i, ignore_eos=True)
              for i in range(4)]  # fmt: skip

    def deep(out: Any) -> float:
        rounds = out.metrics["speculative_decoding"]["depth_histogram"]
        return sum(rounds[1:]) / sum(rounds)  # type: ignore[no-any-return]

    with serving(target, max_rows=4) as running:
        for name in ("ngram", "vanilla"):
            adapt(running, name, cheap, dear)
            more: dict[str, Any] = {"max_tokens": 40, "extra_body": {"speculation": name}}
            assert deep(ask(running, **more)) > 0.1  # as far as this draft deserves
            assert deep(ask(running, n=4, **more)) == 0
        out = ask(running, n=4, temperature=0.8, seed=3, **more)
        assert deep(out) > 0.1
        alone = [
            generate(target, usual_drafts(target)["vanilla"], TALK, mine, control=Adaptive(cheap))
            for mine in params
        ]
        assert [c.message.content for c in out.choices] == [one.text for one in alone]


def test_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [list(sizes(n)) for n in (1, 2, 3, 8, 9)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9],
    ]  # fmt: skip
    target = FakeTarget(3)
    small = FakeTarget(4)
    chain = by_load(target, load_draft("vanilla", target, model=small), 2, 1)
    assert (list(chain.tables), chain.samples) == ([1], True)
    assert chain.tables[1].depths == (0, 1, 2)
    assert not by_load(target, load_draft("ngram", target), 2, 1).samples
    # from four rows on a drafted token costs as much as it can ever bring: no more is measured
    dear = {1: 0.1, 2: 1.0, 4: 20.0}
    monkeypatch.setattr(pace, "measure_costs", lambda t, d, n, size: costs(dear[size]))
    assert list(by_load(target, load_draft("ngram", target), None, 64).tables) == [1, 2, 4]
    with pytest.raises(ValueError, match="one row"):
        ByLoad({2: costs(1.0)}, samples=False)


def test_adapting_keeps_the_distribution() -> None:
    """Four sampled tokens where one acceptance decides whether more is drafted: the joint
    distribution by enumeration against 1000 draws."""
    target, small = FakeTarget(2, 3, sharpness=1.5), FakeTarget(3, 3, sharpness=1.5)
    prompt, runs, depths = [1, 2], 1000, Counter[int]()
    want = {
        path: math.prod(
            float(target.logits([*prompt, *path[:i]])[-1].softmax(0)[path[i]]) for i in range(4)
        )
        for path in itertools.product(range(3), repeat=4)
    }
    # a round of depth 1 gains 5 % from an acceptance of 0.51 on: one round tips the scales
    control = Adaptive(Costs((0, 1), (1, 2), ((1, 10.0),), (0.0, 4.4)), prior=0.53)
    seen: Counter[tuple[int, ...]] = Counter()
    draft = load_draft("vanilla", target, model=small, num_draft_tokens=1)
    engine = Engine(target, draft, max_rows=100, capacity=16, control=control)
    for first in range(0, runs, 100):
        params = [
            SamplingParams(max_tokens=4, temperature=1, seed=first + i, ignore_eos=True)
            for i in range(100)
        ]
        for out in engine.complete([prompt] * 100, params):
            seen[tuple(out.token_ids)] += 1
            depths[out.metrics.num_draft_tokens] += 1
    assert len(depths) > 1
    chi2 = sum((seen[path] - runs * p) ** 2 / (runs * p) for path, p in want.items())
    assert chi2 < 80 + 4 * math.sqrt(2 * 80)  # 81 cells; four standard deviations


def test_none_has_nothing_to_adapt() -> None:
    target = tiny_target()
    with serving(target, plain(target), adaptive=True) as running:
        assert isinstance(running.worker.engine.lanes[0].control, Fixed)
        assert ask(running, model=MODEL).usage.completion_tokens == 20
