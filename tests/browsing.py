"""The page in a real browser (Debian's chromium): a target that recites, and what tests do there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from torch import Tensor

from fake import FakeTarget
from scripted import Scripted
from serving import MODEL, VOCAB, Running, byte_tokenizer, serving
from speculant.drafts import load_draft
from speculant.drafts.base import DraftInfo

__all__ = [
    "Browser",
    "Locator",
    "Page",
    "expect",
]  # for the tests, which must not import playwright

CHROMIUM = Path("/usr/bin/chromium")
try:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
except ImportError:
    pytest.skip("playwright is missing: make test-page", allow_module_level=True)
if not CHROMIUM.exists():
    pytest.skip("chromium is missing: apt-get install chromium", allow_module_level=True)

TEXT = "<img src=x onerror=document.title='broken'> & some plain words; "
ORIGINS = ("accepted", "recovered", "bonus", "plain")
DEPTH, SIBLINGS, WRONG = 3, 2, 7


class Reciting(FakeTarget):
    """Token p of the sequence is character p of `TEXT`, over and over, at any sane temperature."""

    pace = 0.0

    def __init__(self, template: bool = True) -> None:
        tokenizer: Any = byte_tokenizer() if template else byte_tokenizer(None)
        super().__init__(1, VOCAB, context_length=1024, name=MODEL, tokenizer=tokenizer)
        self.ids = tokenizer.encode(TEXT)

    def at(self, position: int) -> int:
        return self.ids[position % len(self.ids)]

    def forward(self, tokens: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.pace)
        logits, hidden = super().forward(tokens, positions, *args, **kwargs)
        if logits is not None:
            for b, row in enumerate(positions.tolist()):
                for t, position in enumerate(row):
                    logits[b, t, self.at(position + 1)] += 60.0
        return logits, hidden


class Knowing(Scripted):
    """Drafts a tree that holds the target's next tokens, but for every seventh of the sequence."""

    def __init__(self, target: Reciting) -> None:
        def guess(tokens: Sequence[int], budget: int) -> list[int]:
            places = range(len(tokens), len(tokens) + budget)
            return [(target.at(p) + (90 if p % WRONG == 0 else 0)) % 256 for p in places]

        super().__init__(guess, DEPTH, SIBLINGS, VOCAB)
        nodes = DEPTH * (1 + SIBLINGS)
        self.info = DraftInfo("scripted", max_nodes=nodes, max_depth=DEPTH)


def drafts_of(target: Reciting) -> dict[str, Any]:
    return {
        "tree": Knowing(target),
        "ngram": load_draft("ngram", target),  # type: ignore[arg-type]
        "none": load_draft("none", target),  # type: ignore[arg-type]
    }


@contextmanager
def chromium() -> Iterator[Browser]:
    # root, as in a container, cannot use the browser's sandbox
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=args)
        yield browser
        browser.close()


class Visitor:
    """Opens the page, and keeps what it requests and complains of.

    asked: every request; complaints: errors of its scripts and in its console
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser, self.url = browser, url
        self.contexts: list[BrowserContext] = []
        self.asked: list[Any] = []
        self.complaints: list[str] = []
        self.hosts = {urlsplit(url).netloc}

    def __call__(
        self, url: str | None = None, refusals: bool = False, ready: bool = True, **more: Any
    ) -> Page:
        """A page of its own. refusals: answers of 400 and more are expected, which the console
        tells of too; ready: wait until the server has told what it offers."""
        self.hosts.add(urlsplit(url or self.url).netloc)
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **more})
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        context.on("request", lambda request: self.asked.append(request))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        if not refusals:
            page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        page.goto(url or self.url)
        if ready:
            page.locator("#model").get_by_text(MODEL).wait_for()
        return page

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What was posted."""
        return [json.loads(request.post_data) for request in self.asked if request.post_data]

    def check(self) -> None:
        """No request went elsewhere, and nothing was complained of."""
        assert self.complaints == []
        assert {urlsplit(request.url).netloc for request in self.asked} <= self.hosts
        assert {urlsplit(request.url).scheme for request in self.asked} == {"http"}


@contextmanager
def visiting(browser: Browser, running: Running) -> Iterator[Visitor]:
    """A visitor that is checked at the end."""
    visitor = Visitor(browser, running.url)
    yield visitor
    for context in visitor.contexts:
        context.close()
    visitor.check()


@pytest.fixture(scope="module")
def target() -> Reciting:
    """What `running` serves."""
    return Reciting()


@pytest.fixture(scope="module")
def running(target: Reciting) -> Iterator[Running]:
    """A server with a drafted tree, for the tests of one file."""
    with serving(target, drafts_of(target), max_rows=2, capacity=1000) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of one file."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, running: Running) -> Iterator[Visitor]:
    """A visitor of `running`, checked at the end."""
    with visiting(browser, running) as visitor:
        yield visitor


def settings(page: Page, **values: Any) -> None:
    """Fill in settings by their ids."""
    for name, value in values.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(str(value))


def send(page: Page, text: str = "hello", wait: bool = True) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    if wait:
        ended(page)


def ended(page: Page) -> None:
    # no wait_for_function: the page's policy forbids what it evaluates
    page.locator("body[data-busy=false]").wait_for()


def shown_tokens(answer: Locator) -> list[tuple[str, str]]:
    """(text, origin) of every token of an answer, from the document."""
    found = answer.locator(".tok").evaluate_all(
        "nodes => nodes.map(n => [n.textContent, n.classList[1]])"
    )
    return [(text, origin) for text, origin in found]


def told(running: Running, content: str = "hello", **more: Any) -> list[dict[str, Any]]:
    """The chunks that OpenAI's client is told for the same request."""
    stream = running.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], stream=True, temperature=0,
        max_tokens=more.pop("max_tokens", 40), extra_body={"return_rounds": True, **more},
    )  # fmt: skip
    return [chunk.model_dump() for chunk in stream]
