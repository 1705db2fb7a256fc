"""JSON output by grammar, with llguidance: a mask for every drafted position.

The matcher holds the committed tokens only. A drafted path is consumed, looked at and rolled back,
so that a rejected token leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from ..target.base import Target
from .errors import ApiError, bad_request

MOST_SYMBOLS, MOST_STATES = 100_000, 50_000
"""Size of a grammar and of its lexer: tighter than llguidance's own, a schema comes from a client."""
SPACES = r"[ \n\t]{1,16}"
"""White space between tokens of JSON: bounded, or a weak model goes on with it until it is cut."""
MOST_DEPTH = 64
"""Nesting of a schema; deeper ones are refused before anything recurses into them."""


class Grammars:
    """Compiles grammars for one model, and knows the bytes of its tokens."""

    def __init__(self, target: Target) -> None:
        """Raises ValueError for a model whose tokenizer is not of the `tokenizers` library."""
        backend = getattr(target.tokenizer, "backend", None)
        if backend is None:
            raise ValueError(f"{target.info.name}: its tokenizer has no tokenizer.json form")
        self.eos_ids = frozenset(target.tokenizer.eos_ids)
        self.vocab_size = target.info.vocab_size
        eos = sorted(self.eos_ids) or [0]
        self.table = LLTokenizer(backend.to_str(), n_vocab=self.vocab_size, eos_token=eos)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; they need not be whole characters."""
        return bytes(self.table.decode_bytes([token]))

    def compile(self, schema: dict[str, Any] | None) -> JsonConstraint:
        """A constraint to JSON of a schema; None: any object. Takes milliseconds to a second.

        Raises ApiError (400) for a schema that is wrong, too large, or uses what is not enforced:
        a keyword that would be ignored is refused.
        """
        if not self.eos_ids:
            raise bad_request("response_format: this model has no end-of-text token to finish with")
        if schema is not None and _deeper(schema, MOST_DEPTH):
            raise bad_request("response_format: the schema is nested too deeply", "response_format")
        options: Any = {"whitespace_pattern": SPACES, "lenient": False}
        try:
            text = json.dumps({"type": "object"} if schema is None else schema, allow_nan=False)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)
            limits = LLParserLimits(
                max_grammar_size=MOST_SYMBOLS, max_lexer_states=MOST_STATES, verbose_errors=False
            )
            matcher = LLMatcher(self.table, grammar, log_level=0, limits=limits)
        except ValueError:
            raise _refused() from None
        form = JsonConstraint(matcher, self.eos_ids, self.vocab_size)
        if matcher.is_error() or form.allowed([]) is None:
            raise _refused()
        return form


class JsonConstraint:
    """Implements `Constraint` on a matcher of committed tokens."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.error: str | None = None
        self._matcher, self._eos_ids, self._vocab_size = matcher, eos_ids, vocab_size

    def copy(self) -> JsonConstraint:
        """One for another answer to the same request."""
        return JsonConstraint(self._matcher.deep_copy(), self._eos_ids, self._vocab_size)

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """See `Constraint.allowed`."""
        matcher, tokens = self._matcher, list(path)
        if self.error or not self._eos_ids.isdisjoint(tokens):
            return None  # behind EOS nothing is committed
        if tokens and matcher.validate_tokens(tokens) < len(tokens):
            return None
        if tokens:
            matcher.consume_tokens(tokens)
        weights = bytearray(matcher.compute_logit_bias())  # a byte a token, 0: not allowed
        if tokens:
            matcher.rollback(len(tokens))
        self._note()
        mask = torch.frombuffer(weights, dtype=torch.uint8)[: self._vocab_size] > 0
        if not bool(mask.any()):
            self.error = "the grammar allows no token here"
        return None if self.error else mask

    def commit(self, tokens: Sequence[int]) -> None:
        """See `Constraint.commit`."""
        text = [token for token in tokens if token not in self._eos_ids]
        if text and not self.error:
            self._matcher.consume_tokens(text)
            self._note()

    def _note(self) -> None:
        if self._matcher.is_error():
            self.error = "the grammar became too complex to follow"


def _refused() -> ApiError:
    message = "response_format: the schema is not valid, or uses keywords that cannot be enforced"
    return bad_request(message, "response_format", "invalid_json_schema")


def _deeper(value: Any, most: int) -> bool:
    """True when a JSON value is nested deeper than `most`. No recursion: it may be very deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (
                outer.values()
                if isinstance(outer, dict)
                else outer
                if isinstance(outer, list)
                else ()
            )
        ]
        if not level:
            return False
    return True
