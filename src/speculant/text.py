"""The text of one request as it grows: incremental decoding, stop rules, what may be shown.

Tokens are judged one at a time, however many a round commits, so that EOS, a stop string or the
token limit in the middle of an accepted block cuts exactly there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .sampling import SamplingParams

INCOMPLETE = "\ufffd"
"""What a tokenizer's decoder gives for the first bytes of a character that is not whole yet."""


class TextStream:
    """Output tokens of one request and the text they stand for.

    decode:   token ids -> text (special tokens left out)
    stop_ids: EOS and stop token ids, already without EOS under `ignore_eos`
    limit:    most tokens the request may have, max_tokens or what the context leaves
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        stop_ids: Iterable[int],
        limit: int,
    ) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.limit = limit
        self._decode, self._stop_ids = decode, frozenset(stop_ids)
        self._stops, self._min_tokens = tuple(params.stop), params.min_tokens
        self._from, self._read = 0, 0  # ids[_from:_read] were decoded last and give context
        self._shown = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.ids)

    def push(self, tokens: Sequence[int]) -> int:
        """Take committed tokens until the request ends; how many of them stand."""
        if self.finish_reason:
            return 0
        for count, token in enumerate(tokens, 1):
            self.ids.append(token)
            if token in self._stop_ids:
                self._finish("stop", self.ids[:-1])
            elif self._grow(self.ids, final=False):
                self.finish_reason = "stop"
            elif len(self.ids) >= self.limit:
                self._finish("length", self.ids)
            if self.finish_reason:
                return count
        return len(tokens)

    def release(self) -> str:
        """Text that can be shown now and has not been: never the possible start of a stop string."""
        end = len(self.text)
        if not self.finish_reason:
            end -= max((self._overlap(stop) for stop in self._stops), default=0)
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _finish(self, reason: str, ids: Sequence[int]) -> None:
        """End the request; what was held back as incomplete joins the text as it is."""
        stopped = self._grow(ids, final=True)
        self.finish_reason = "stop" if stopped else reason

    def _grow(self, ids: Sequence[int], final: bool) -> bool:
        """Append the text of new ids, unless it ends in an incomplete character; True at a stop."""
        if self._read >= len(ids):
            return False
        before = self._decode(ids[self._from : self._read])
        after = self._decode(ids[self._from :])
        new = after[len(before) :]
        whole = new if final else new.rstrip(INCOMPLETE)  # a stop may come before a half character
        if len(self.ids) >= self._min_tokens and self._cut(self.text + whole):
            return True
        if whole and len(whole) == len(new):
            self._from, self._read = self._read, len(ids)
            self.text += new
        return False

    def _cut(self, text: str) -> bool:
        """Cut text at the earliest stop string that ends behind `self.text`; True if there is."""
        old = len(self.text)
        places = (text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops)
        found = [at for at in places if at >= 0]
        if found:
            self.text = text[: min(found)]
        return bool(found)

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins `stop` without completing it."""
        longest = min(len(stop) - 1, len(self.text))
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)
