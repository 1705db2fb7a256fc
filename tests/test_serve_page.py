"""The page in a real browser against a real server: what it shows is what OpenAI's client is told.

The target recites a text by position, and the draft knows which tokens it gets wrong.
"""

# ruff: noqa: F401, F811 (pytest finds imported fixtures by their names)

from __future__ import annotations

import json
import re

import pytest

from browsing import (
    DEPTH,
    ORIGINS,
    Locator,
    Reciting,
    Visitor,
    browser,
    drafts_of,
    ended,
    expect,
    running,
    send,
    settings,
    shown_tokens,
    target,
    told,
    visit,
)  # fmt: skip
from serving import MODEL, Running, serving

pytestmark = pytest.mark.browser


def test_tokens_are_coloured_by_origin(visit: Visitor, running: Running) -> None:
    """As the API tells them; each origin with a look of its own."""
    page = visit()
    settings(page, max_tokens=40)
    send(page)
    want = [
        (token["text"], token["origin"])
        for chunk in told(running)
        for token in (chunk.get("speculant") or {"tokens": []})["tokens"]
    ]
    answer = page.locator(".turn.assistant .run")
    assert shown_tokens(answer) == want
    assert {origin for _, origin in want} >= {"accepted", "recovered", "bonus"}
    assert page.locator(".turn.user .text").inner_text() == "hello"
    looks = {
        origin: page.locator(f"#legend .tok.{origin}").evaluate(
            "n => [getComputedStyle(n).backgroundColor, getComputedStyle(n).textDecorationLine]"
        )
        for origin in ORIGINS
    }
    assert len({colour for colour, _ in looks.values()}) == len(ORIGINS)
    for origin in ("accepted", "recovered", "bonus"):
        style = answer.locator(f".tok.{origin}").first.evaluate(
            "n => [getComputedStyle(n).backgroundColor, getComputedStyle(n).textDecorationLine]"
        )
        assert style == looks[origin]


def test_figures_and_charts_say_what_the_server_counted(visit: Visitor, running: Running) -> None:
    page = visit()
    settings(page, max_tokens=40)
    send(page)
    figures = told(running)[-1]["metrics"]["speculative_decoding"]
    assert page.locator("#fig-forward").inner_text() == f"{figures['tokens_per_forward']:.2f}"
    rate = round(100 * figures["draft_acceptance_rate"])
    assert page.locator("#fig-accepted").inner_text() == f"{rate} %"
    assert float(page.locator("#fig-speed").inner_text()) > 0
    # the bars are as high as the shares that they stand for: the axis runs from 0 to 100 %
    heights = page.locator("#positions rect").evaluate_all(
        "ns => ns.map(n => +n.getAttribute('height'))"
    )
    axis = page.locator("#positions line").evaluate_all("ns => ns.map(n => +n.getAttribute('y1'))")
    whole = max(axis) - min(axis)
    want = figures["acceptance_per_position"]
    assert [h / whole for h in heights] == pytest.approx(want, abs=1e-3)
    shares = ", ".join(f"position {i + 1}: {round(100 * s)} %" for i, s in enumerate(want))
    assert words(page.locator("#positions")) == f"Acceptance by position. {shares}"
    assert f"over {figures['target_forwards']} rounds" in str(words(page.locator("#rounds")))
    counts = {o: page.locator(f"#rounds rect.{o}").count() for o in ORIGINS}
    assert counts["accepted"] == sum(figures["acceptance_histogram"][1:])


def test_charts_move_while_an_answer_comes(visit: Visitor, target: Reciting) -> None:
    page = visit()
    settings(page, max_tokens=400)
    target.pace = 0.03
    try:
        send(page, wait=False)
        page.locator(".run .tok").nth(3).wait_for()
        for name in ("#rounds", "#positions", "#speed") * 2:
            chart = page.locator(name)
            expect(chart).not_to_have_attribute("aria-label", str(words(chart)))
        assert page.locator("#speed polyline").count() == 1
        assert page.locator("#tree .node.root").count() == 1
        page.locator("#stop").click()
        ended(page)
    finally:
        target.pace = 0.0


def words(chart: Locator) -> str | None:
    """What a chart says that it shows."""
    return chart.get_attribute("aria-label")


def test_the_tree_of_every_round(visit: Visitor, running: Running) -> None:
    """Nodes, edges and the accepted path are the round's; keys walk through the rounds."""
    page = visit()
    settings(page, max_tokens=24)
    send(page)
    rounds = [c["speculant"] for c in told(running, max_tokens=24) if c.get("speculant")]
    drafting = [i for i, r in enumerate(rounds) if r["round"]["tokens"]]
    at = drafting[-1]
    assert page.locator("#round-name").inner_text() == f"round {at + 1} of {len(rounds)}"
    earlier = page.locator("#earlier")
    earlier.focus()
    while True:
        tree, tokens = rounds[at]["round"], rounds[at]["tokens"]
        drawn = [t for t in tokens if t["origin"] != "accepted"]
        kinds = page.locator("#tree .node").evaluate_all("ns => ns.map(n => n.classList[1])")
        want = [
            "accepted" if i in tree["accepted"] else "rejected" for i in range(len(tree["tokens"]))
        ]
        assert kinds == ["root", *want, *(t["origin"] for t in drawn)]
        assert page.locator("#tree .edge").count() == len(kinds) - 1
        names = page.locator("#tree .node title").evaluate_all("ns => ns.map(n => n.textContent)")
        assert [json.loads(n.split(": ", 1)[1]) for n in names[1:]] == tree["texts"] + [
            t["text"] for t in drawn
        ]
        marked = page.locator(".run .tok.shown").count()
        assert marked == (len(tokens) if at != drafting[-1] else 0)
        if at == 0:
            break
        page.keyboard.press("Enter")
        at -= 1
    assert earlier.is_disabled()
    page.locator("#latest").click()
    assert page.locator("#round-name").inner_text().startswith(f"round {drafting[-1] + 1} ")
    page.locator(".run .tok").first.click()  # a token leads to its round
    assert page.locator("#round-name").inner_text() == f"round 1 of {len(rounds)}"


def test_speculation_off_and_a_length(visit: Visitor) -> None:
    page = visit()
    settings(page, max_tokens=16, speculation=False)
    assert page.locator("#draft").is_disabled()
    send(page)
    assert visit.bodies[-1]["speculation"] is False
    assert {origin for _, origin in shown_tokens(page.locator(".run"))} == {"plain"}
    assert page.locator("#fig-forward").inner_text() == "1.00"
    assert page.locator("#tree-text").inner_text() == "Nothing was drafted in this round"
    settings(page, speculation=True, draft="ngram", depth=2, temperature=0.5, seed=9)
    send(page, "again")
    assert visit.bodies[-1]["speculation"] == {"draft": "ngram", "num_draft_tokens": 2}
    assert (visit.bodies[-1]["temperature"], visit.bodies[-1]["seed"]) == (0.5, 9)
    assert [m["role"] for m in visit.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    # the first answer's figures can be looked at again
    page.get_by_role("button", name="Show in charts").first.click()
    assert "no speculation" in page.locator("#shown").inner_text()


def test_beside_plain(visit: Visitor) -> None:
    """The same prompt and seed once more without speculation, and whether the texts agree."""
    page = visit()
    settings(page, max_tokens=40, compare=True, temperature=0.7)
    send(page)
    drafted, plain = page.locator(".run").all()
    assert drafted.locator(".text").inner_text() == plain.locator(".text").inner_text()
    assert {origin for _, origin in shown_tokens(plain)} == {"plain"}
    assert page.locator(".note").inner_text().startswith("The same text")
    first, second = visit.bodies
    assert second.pop("speculation") is False
    assert first.pop("speculation") == {"draft": "tree", "num_draft_tokens": DEPTH}
    assert first == second
    assert page.locator("#speed polyline").count() == 2
    assert re.fullmatch(r"\d+\.\d\d\u00d7", page.locator("#fig-ratio").inner_text())
    boxes = [run.bounding_box() for run in (drafted, plain)]
    assert boxes[0]["y"] == boxes[1]["y"]  # type: ignore[index]
    assert boxes[0]["x"] < boxes[1]["x"]  # type: ignore[index]


def test_reload_and_a_new_chat(visit: Visitor) -> None:
    page = visit()
    settings(page, max_tokens=24, temperature=0.3, draft="ngram", depth=4)
    page.locator("#theme").click()
    send(page)
    looked = ("#log", "#fig-forward", "#fig-accepted", "#fig-speed", "#shown", "#settings-text")

    def seen() -> list[str | None]:
        return [page.locator(name).text_content() for name in looked]

    before = seen()
    page.reload()
    page.locator("#model").get_by_text(MODEL).wait_for()
    assert seen() == before
    assert page.locator("#draft").input_value() == "ngram"
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert "not kept over a reload" in page.locator("#tree-text").inner_text()
    page.locator("#new-chat").click()
    assert page.locator(".turn").count() == 0
    assert page.locator("#empty").is_visible()
    page.reload()
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(visit: Visitor, running: Running, target: Reciting, how: str) -> None:
    """The server's slot is free at once, what has come stays, and the next message works."""
    page = visit()
    settings(page, max_tokens=900)
    target.pace = 0.02
    try:
        send(page, wait=False)
        page.locator(".run .tok").nth(5).wait_for()
        if how == "button":
            page.locator("#stop").click()
        else:
            page.keyboard.press("Escape")
        ended(page)
        running.idle()
    finally:
        target.pace = 0.0
    assert "stopped" in page.locator(".figures").inner_text()
    assert page.locator("#error").is_hidden()
    settings(page, max_tokens=8)
    send(page, "more")
    assert len(shown_tokens(page.locator(".run").nth(1))) == 8


def test_refusals_are_shown(visit: Visitor) -> None:
    page = visit(refusals=True)
    settings(page, max_tokens=8)
    send(page, "x" * 2000)
    error = page.locator("#error")
    assert error.get_attribute("role") == "alert"
    assert "tokens" in error.inner_text()
    assert page.locator(".turn").count() == 0
    assert page.locator("#prompt").input_value() == "x" * 2000  # nothing typed is lost
    settings(page, max_tokens=0)
    send(page)
    assert "whole number" in error.inner_text()
    settings(page, max_tokens=8)
    send(page)
    assert error.is_hidden()
    assert len(shown_tokens(page.locator(".run"))) == 8


def test_key_and_a_server_that_went_away(visit: Visitor, target: Reciting) -> None:
    with serving(target, drafts_of(target), api_key="s3cret", max_rows=1) as server:
        page = visit(server.url, refusals=True, ready=False)
        page.locator("#error").wait_for()
        assert "API key" in page.locator("#error").inner_text()
        key = page.locator("#key")
        assert key.evaluate("node => node === document.activeElement")
        key.fill("s3cret")
        key.press("Enter")
        page.locator("#model").get_by_text(MODEL).wait_for()
        settings(page, max_tokens=8)
        send(page)
        assert len(shown_tokens(page.locator(".run"))) == 8
        page.reload()  # the tab knows the key still
        page.locator("#model").get_by_text(MODEL).wait_for()
    send(page, "gone")
    assert "cannot be reached" in page.locator("#error").inner_text()
    assert page.locator("#prompt").input_value() == "gone"
