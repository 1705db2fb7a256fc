"""The text of a request against a byte-level decoder and against rescanning everything.

The decoder is a real one in miniature: ids stand for bytes, characters may be split over tokens,
and what is no whole character decodes to U+FFFD. The truth about stops looks at every token, every
stop string and every place in the text, from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant.sampling import SamplingParams
from speculant.text import TextStream

EURO, SMILE = "€".encode(), "😀".encode()
PIECES = [
    b"",  # 0: EOS, a special token that has no text
    b"a",
    b"b",
    b"ab",
    b"ba ",
    "é".encode(),
    EURO[:1],
    EURO[1:],
    EURO[:2],
    EURO[2:],
    SMILE[:3],
    SMILE[3:],
    b"b" + SMILE[:1],
    SMILE[1:] + b"a",
    b"\xff",  # never part of a character
    b"",  # another special token
]
EOS = 0
WHOLE = [1, 2, 3, 4, 5, 15]
"""Pieces that are whole characters."""


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


def ids_of(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def stream(limit: int = 100, stop_ids: Sequence[int] = (EOS,), **params: object) -> TextStream:
    return TextStream(decode, SamplingParams(**params), stop_ids, limit)  # type: ignore[arg-type]


def alphabet(*texts: str) -> Callable[[Sequence[int]], str]:
    """A decoder of one text an id."""
    return lambda ids: "".join(texts[i] for i in ids)


def run(text: TextStream, blocks: Sequence[Sequence[int]]) -> tuple[list[str], list[int]]:
    """Push blocks until the end: what was released after each, and the counts that stood."""
    shown, counts = [], []
    for block in blocks:
        counts.append(text.push(block))
        shown.append(text.release())
        if text.finish_reason:
            break
    return shown, counts


@st.composite
def cut_in_blocks(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    blocks, at = [], 0
    while at < len(ids):
        size = draw(st.integers(1, 5))
        blocks.append(ids[at : at + size])
        at += size
    return blocks


# ------------------------------------------------------------- characters


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ids=st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=20))
def test_pieces_add_up_to_the_decoded_whole(data: st.DataObject, ids: list[int]) -> None:
    text = stream(limit=len(ids))
    shown, counts = run(text, data.draw(cut_in_blocks(ids)))
    assert (text.finish_reason, sum(counts), text.ids) == ("length", len(ids), ids)
    assert "".join(shown) == text.text == decode(ids)


def test_a_split_character_waits_until_it_is_whole() -> None:
    text = stream()
    seen = []
    for token in ids_of(b"a", EURO[:1], EURO[1:], SMILE[:3], SMILE[3:], b"b"):
        text.push([token])
        seen.append(text.release())
    assert seen == ["a", "", "€", "", "😀", "b"]


def test_one_block_may_hold_the_whole_character() -> None:
    text = stream()
    assert text.push(ids_of(SMILE[:3], SMILE[3:], EURO[:2])) == 3
    assert text.release() == "😀"


@pytest.mark.parametrize("end", [[EOS], []])
def test_what_never_became_whole_is_shown_at_the_end(end: list[int]) -> None:
    ids = [*ids_of(b"a", EURO[:2]), *end]
    text = stream(limit=len(ids))
    text.push(ids)
    assert text.finish_reason == ("stop" if end else "length")
    assert text.release() == text.text == "a�"


# ------------------------------------------------------------------ stops


def rescanned(
    ids: Sequence[int], stops: Sequence[str], limit: int, min_tokens: int
) -> tuple[int, str, str | None]:
    """How many tokens stand, the text and the reason, by looking at everything anew.

    A stop string counts when the token that completes it is at least the min_tokens-th.
    """
    for n in range(1, len(ids) + 1):
        before, text = decode(ids[: n - 1]), decode(ids[:n])
        if ids[n - 1] == EOS:
            return n, before, "stop"
        found = [
            at
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if found and n >= min_tokens:
            return n, text[: min(found)], "stop"
        if n == limit:
            return n, text, "length"
    return len(ids), decode(ids), None


STOPS = st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    ids=st.lists(st.sampled_from([*WHOLE, EOS]), min_size=1, max_size=16),
    stops=STOPS,
    limit=st.integers(1, 16),
    min_tokens=st.integers(0, 8),
)
def test_ends_where_a_rescan_ends(
    data: st.DataObject, ids: list[int], stops: list[str], limit: int, min_tokens: int
) -> None:
    # EOS before min_tokens is the sampler's business: it never comes then
    ids = [i for n, i in enumerate(ids) if i != EOS or n >= min_tokens] or [1]
    text = stream(limit=limit, stop=stops, min_tokens=min_tokens)
    shown, counts = run(text, data.draw(cut_in_blocks(ids)))
    stood, expected, reason = rescanned(ids, stops, limit, min_tokens)
    assert (sum(counts), text.text, text.finish_reason) == (stood, expected, reason)
    assert text.ids == ids[:stood]
    assert text.remaining == limit - stood
    if reason:
        assert "".join(shown) == expected
    else:
        assert expected.startswith("".join(shown))


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=16),
    stops=STOPS,
    limit=st.integers(1, 16),
)
def test_blocks_do_not_change_the_result(
    data: st.DataObject, ids: list[int], stops: list[str], limit: int
) -> None:
    """Split characters and broken bytes included; nothing that was shown is ever withdrawn."""
    single, blocks = (stream(limit=limit, stop=stops) for _ in range(2))
    run(single, [[i] for i in ids])
    shown: list[str] = []
    for block in data.draw(cut_in_blocks(ids)):
        blocks.push(block)
        shown.append(blocks.release())
        assert blocks.text.startswith("".join(shown))
        if blocks.finish_reason:
            assert "".join(shown) == blocks.text
            break
    assert (blocks.ids, blocks.text, blocks.finish_reason) == (
        single.ids,
        single.text,
        single.finish_reason,
    )


CASES = {
    # texts of the ids 1.., tokens, stops -> how many stand, text
    "across tokens": (["x", "E", "N", "D"], [1, 2, 3, 4, 1], ["END"], 4, "x"),
    "inside one token": (["hello END more"], [1, 1], ["END"], 1, "hello "),
    "the earliest place wins": (["x b a"], [1], ["a", "b"], 1, "x "),
    "a stop that begins another": (["x", "<", "<end>"], [1, 2, 1], ["<end>", "<"], 2, "x"),
    "the longer one is never reached": (["a", "b", "c"], [1, 2, 3], ["ab", "abc"], 2, ""),
    "overlapping beginnings": (["a", "a", "b"], [1, 2, 1, 3], ["aab"], 4, "a"),
    "a false start": (["E", "N", "x", "END"], [1, 2, 3, 4], ["END"], 4, "ENx"),
    "early in a long block": (["a", "!", "b"], [1, 2, 3, 3, 3, 3], ["!"], 2, "a"),
    "a space and a letter": (["a ", "b"], [1, 2, 2], [" b"], 2, "a"),
}


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("case", CASES)
def test_stop_strings(case: str, size: int) -> None:
    texts, ids, stops, stood, expected = CASES[case]
    text = TextStream(alphabet("", *texts), SamplingParams(stop=stops), [0], 50)
    shown, counts = run(text, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert (sum(counts), text.text, text.finish_reason) == (stood, expected, "stop")
    assert "".join(shown) == expected


def test_the_beginning_of_a_stop_is_held_back_and_let_go() -> None:
    text = TextStream(alphabet("", "x<", "en", "d>", "!"), SamplingParams(stop=["<end>"]), [0], 50)
    seen = []
    for token in (1, 2, 4, 1, 2, 3):
        text.push([token])
        seen.append(text.release())
    assert seen == ["x", "", "<en!", "x", "", ""]
    assert text.finish_reason == "stop"
    assert text.text == "x<en!x"


def test_what_was_held_back_is_shown_when_no_stop_came() -> None:
    for ids, limit, reason in (([1, 2, 0], 50, "stop"), ([1, 2], 2, "length")):
        text = TextStream(alphabet("", "x<", "en"), SamplingParams(stop=["<end>"]), [0], limit)
        text.push(ids)
        assert (text.finish_reason, text.release()) == (reason, "x<en")


def test_stop_and_limit_in_one_block() -> None:
    texts = alphabet("", "a", "!", "b")
    for limit, stood, reason in ((1, 1, "length"), (2, 2, "stop"), (3, 2, "stop")):
        text = TextStream(texts, SamplingParams(stop=["!"]), [0], limit)
        assert text.push([1, 2, 3, 3]) == stood
        assert (text.finish_reason, text.text) == (reason, "a")
    text = TextStream(texts, SamplingParams(), [0], 2)
    assert (text.push([1, 0, 3]), text.finish_reason, text.text) == (2, "stop", "a")


def test_eos_in_the_middle_of_a_block() -> None:
    text = stream()
    assert text.push([*ids_of(b"a", b"b"), EOS, *ids_of(b"a", b"a")]) == 3
    assert (text.ids, text.text, text.finish_reason) == ([1, 2, EOS], "ab", "stop")
    assert (text.release(), text.release()) == ("ab", "")


def test_stop_token_ids_end_without_their_text() -> None:
    text = stream(stop_ids=[EOS, 5])
    assert text.push([1, 5, 1]) == 2
    assert (text.text, text.finish_reason) == ("a", "stop")


def test_min_tokens_with_a_stop_string() -> None:
    """Before min_tokens a stop string is text; a later one ends the request."""
    texts = alphabet("", "a", "!", "b")
    text = TextStream(texts, SamplingParams(stop=["!"], min_tokens=3), [0], 50)
    assert text.push([1, 2, 3, 3]) == 4
    assert text.release() == "a!bb"
    assert text.push([3, 2, 3]) == 2
    assert (text.text, text.release(), text.finish_reason) == ("a!bbb", "b", "stop")
    exactly = TextStream(texts, SamplingParams(stop=["!"], min_tokens=3), [0], 50)
    assert exactly.push([1, 3, 2, 3]) == 3
    assert exactly.text == "ab"


def test_nothing_comes_after_the_end() -> None:
    text = stream(limit=1)
    assert text.push([1]) == 1
    assert text.push([2]) == 0
    assert (text.ids, text.text) == ([1], "a")


def test_a_stop_before_an_incomplete_character_ends_at_once() -> None:
    """The token that completes the stop string may also begin a character."""
    text = stream(stop=["b"])
    assert text.push(ids_of(b"a", b"b" + SMILE[:1], b"a")) == 2
    assert (text.text, text.finish_reason) == ("a", "stop")
