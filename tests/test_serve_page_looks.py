"""The page for everyone: phones, keyboards, both themes, hostile text, other models, no network."""

# ruff: noqa: F401, F811 (pytest finds imported fixtures by their names)

from __future__ import annotations

import re
from typing import Any

import pytest

from browsing import (
    TEXT,
    Browser,
    Page,
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
    visit,
)  # fmt: skip
from serving import VOCAB, Running, serving

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}


def fits(page: Page) -> bool:
    """Nothing is wider than the screen."""
    width: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return width <= 0


@pytest.mark.parametrize("width", [320, 390])
def test_a_narrow_screen(visit: Visitor, width: int) -> None:
    """No sideways scrolling in either view, whatever is on them; everything can be reached."""
    page = visit(**{**PHONE, "viewport": {"width": width, "height": 640}})
    assert fits(page)
    assert page.locator("#settings").get_attribute("open") is None
    page.locator("#settings summary").tap()
    settings(page, max_tokens=40, compare=True)
    assert fits(page)
    page.locator("#settings summary").tap()
    page.locator("#prompt").fill("w" * 300)
    page.locator("#send").tap()
    ended(page)
    assert fits(page)
    assert page.locator("#charts").is_hidden()
    page.locator("[data-show=charts]").tap()
    assert page.locator("#chat").is_hidden()
    assert page.locator("#tree .node").count() > 5
    assert fits(page)
    for name in ("positions", "rounds", "speed"):
        box = page.locator(f"#{name}").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    small = page.locator("button:visible").evaluate_all(
        "ns => ns.filter(n => n.getBoundingClientRect().height < 24).map(n => n.textContent)"
    )
    assert small == []  # WCAG 2.2, target size


def test_the_keyboard_alone(visit: Visitor) -> None:
    page = visit()
    settings(page, max_tokens=8)
    page.reload()  # the focus is at the beginning
    page.locator("body[data-busy=false]").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link over the header
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    ended(page)
    assert page.locator(".turn.user .text").inner_text() == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "prompt"
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(
            """() => { const n = document.activeElement;
            if (n === document.body) return "";
            if (getComputedStyle(n).outlineStyle === "none") return "no outline: " + n.id;
            return n.id || n.textContent; }"""
        )
        if name == "temperature":
            page.keyboard.press("ArrowRight")
        if name == "speculation":
            page.keyboard.press("Space")
        if not name:
            break
        seen.append(name)
    assert not [name for name in seen if name.startswith("no outline")]
    want = [
        "send",
        "Settings",
        "speculation",
        "temperature",
        "max-tokens",
        "seed",
        "charts",
        "earlier",
    ]
    assert [name.split(" ")[0] for name in seen if name.split(" ")[0] in want] == want
    assert page.locator("#temperature-value").inner_text() == "0.1"
    assert not page.locator("#speculation").is_checked()


def test_names_and_roles(visit: Visitor) -> None:
    """What a screen reader is told."""
    page = visit()
    settings(page, max_tokens=8)
    send(page)
    for role, name in (
        ("textbox", "Message"), ("button", "Send"), ("combobox", "Draft"), ("log", "Messages"),
        ("slider", "Temperature"), ("switch", "Speculation"), ("button", "Earlier round"),
        ("region", "Conversation"), ("main", None), ("banner", None), ("complementary", "Charts"),
    ):  # fmt: skip
        found = page.get_by_role(role, name=name) if name else page.get_by_role(role)  # type: ignore[arg-type]
        assert found.count() == 1, (role, name)
    assert page.get_by_role("img").count() == 4
    assert "ended: 8 tokens" in page.locator("#status").inner_text()
    unnamed = page.locator("button, input, select, textarea, svg[role=img]").evaluate_all(
        """ns => ns.filter(n => !(n.getAttribute("aria-label") || n.textContent.trim() ||
        (n.labels && n.labels.length))).map(n => n.outerHTML)"""
    )
    assert unnamed == []


CONTRAST = """([selector, property]) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {  // as painted: each colour over those before it
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(selector)].map((node) => {
    const behind = [];
    for (let n = property === "color" ? node : node.parentElement; n; n = n.parentElement) {
      behind.unshift(getComputedStyle(n).backgroundColor);
    }
    const front = light(over([...behind, getComputedStyle(node)[property]]));
    const back = light(over(behind));
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(visit: Visitor, scheme: Any) -> None:
    """Text 4.5 to 1 and more, what charts are drawn with 3 to 1 (WCAG 2.1, 1.4.3 and 1.4.11)."""
    page = visit(color_scheme=scheme, refusals=True)
    settings(page, max_tokens=40, compare=True)
    send(page)
    settings(page, max_tokens=0)
    send(page)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) == (scheme == "light")
    for selector in (
        ".tok",
        ".muted",
        "h1, h2, h3",
        "#error",
        "button:enabled",
        "#legend li",
        "dt, dd",
    ):
        found = page.evaluate(CONTRAST, [selector, "color"])
        assert found, selector
        assert min(found) >= 4.5, selector
    page.get_by_role("img").first.wait_for()
    for selector, style in (
        ("svg text", "fill"), (".fill", "fill"), (".trace", "stroke"), (".edge", "stroke"),
        (".mean", "stroke"),
    ):  # fmt: skip
        found = page.evaluate(CONTRAST, [selector, style])
        assert found, selector
        assert min(found) >= (4.5 if selector == "svg text" else 3), selector


def test_markup_stays_text(visit: Visitor) -> None:
    """From the user and from the model, in the chat, the tree and after a reload."""
    page = visit()
    settings(page, max_tokens=2 * len(TEXT))
    title = page.title()
    attack = "<script>document.title='broken'</script><svg onload=document.title='broken'>"
    send(page, attack)
    page.reload()
    page.locator("#model").wait_for()
    assert page.locator(".turn.user .text").inner_text() == attack
    assert TEXT in page.locator(".run .text").inner_text()
    assert page.locator("img, #log script, #log svg").count() == 0
    assert page.title() == title


def test_a_model_without_a_chat_template(visit: Visitor, browser: Browser) -> None:
    """Its text goes on."""
    target = Reciting(template=False)
    with serving(target, drafts_of(target), capacity=500) as server:
        page = visit(server.url)
        settings(page, max_tokens=20)
        send(page, TEXT[:10])
        assert page.locator(".run .text").inner_text() == TEXT[10:30]
        assert visit.bodies[-1]["prompt"] == TEXT[:10]
        page.context.close()


def test_a_draft_that_the_server_switched_off(visit: Visitor) -> None:
    """The answer comes without it, and the page says so."""
    target = Reciting()
    drafts = drafts_of(target)
    drafts["tree"].guess = lambda tokens, budget: [VOCAB] * budget  # no such token
    with serving(target, drafts) as server:
        page = visit(server.url)
        settings(page, max_tokens=12)
        send(page)
        assert len(shown_tokens(page.locator(".run"))) == 12
        assert {origin for _, origin in shown_tokens(page.locator(".run"))} == {"plain"}
        assert page.locator("#error").is_hidden()
        option = page.locator("#draft option").first
        expect(option).to_have_text("tree (tree of 9) \u2013 switched off: it failed")
        page.context.close()


def test_a_full_queue(visit: Visitor) -> None:
    """The second user is told when to come back; the first one's answer goes on."""
    target = Reciting()
    target.pace = 0.02
    with serving(target, drafts_of(target), max_rows=1, max_queue=0) as server:
        first, second = visit(server.url), visit(server.url, refusals=True)
        settings(first, max_tokens=600)
        send(first, wait=False)
        first.locator(".run .tok").nth(3).wait_for()
        send(second)
        error = second.locator("#error").inner_text()
        assert re.fullmatch(r"Too many requests .* \(wait \d+ s\)", error)
        assert second.locator("#prompt").input_value() == "hello"
        first.locator("#stop").click()
        ended(first)
        first.context.close()
        second.context.close()


def test_files_and_policy(running: Running) -> None:
    """The page is plain files under a policy that lets it load nothing else."""
    import httpx2

    with httpx2.Client(base_url=running.url) as client:
        for path, kind in (
            ("/", "text/html"), ("/app.js", "javascript"), ("/style.css", "text/css"),
            ("/icon.svg", "image/svg+xml"),
        ):  # fmt: skip
            answer = client.get(path)
            assert answer.status_code == 200
            assert kind in answer.headers["content-type"]
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
