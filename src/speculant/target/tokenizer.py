"""A folder's tokenizer and chat template, read without importing transformers.

`tokenizers` and jinja2 load in a tenth of a second; transformers and its AutoTokenizer take more
than loading the bundled model does. The rendering follows transformers' `apply_chat_template`,
and a test holds the two together token for token.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import LoadError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension
    from tokenizers import Tokenizer as Backend

SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files that hold a tokenizer which transformers can turn into a tokenizer.json."""


class FileTokenizer:
    """Implements `Tokenizer` on a tokenizer.json and the configs of a model folder."""

    def __init__(
        self,
        backend: Backend,
        eos_ids: frozenset[int] = frozenset(),
        template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """special: what a chat template may name, such as {"bos_token": "<s>"}."""
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.eos_ids, self.template = backend, eos_ids, template
        self.has_chat_template = template is not None
        self.special = dict(special or {})

    @staticmethod
    def from_folder(folder: Path, configs: Path | None = None) -> FileTokenizer:
        """Read tokenizer.json and tokenizer_config.json of `folder`.

        configs: where config.json and generation_config.json lie, when not beside them. EOS ids
        are the union of what the three name.
        """
        backend = _backend(folder / "tokenizer.json")
        config = read_json(folder / "tokenizer_config.json", missing_ok=True)
        special = _special_tokens(folder, config)
        _add_tokens(backend, config)
        ids = set(_eos_ids(configs or folder))
        end = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if end is not None:
            ids.add(end)
        return FileTokenizer(backend, frozenset(ids), _template(folder, config), special)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the tokenizer's own leading tokens (BOS), if any."""
        return self._ids(text, special=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation and the opening of the assistant's turn."""
        return self._ids(self.render(messages), special=False)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise ValueError("the text holds a lone surrogate: it is not UTF-8 text") from None
        return ids

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text that `chat` encodes."""
        from jinja2 import TemplateError

        if self.template is None:
            raise ValueError("this tokenizer has no chat template: give plain text instead")
        if not messages:
            raise ValueError("the conversation is empty: give at least one message")
        # a key set to None counts as absent, as in transformers: templates would print "None"
        plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return self._compiled.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None

    def fingerprint(self) -> str:
        """Hash of the vocabulary and of how text becomes tokens."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        whole = json.loads(self.backend.to_str())
        parts = [
            sorted(self.backend.get_vocab(with_added_tokens=True).items()),
            whole["normalizer"],
            whole["pre_tokenizer"],
            whole["model"]["type"],
            whole["model"].get("merges"),  # the same vocabulary with other merges splits otherwise
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
        )

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return env.from_string(self.template or "")


def _generation_tag() -> type[Extension]:
    """{% generation %} marks the assistant's text in some templates; here it prints its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML characters; transformers' does not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def load_tokenizer(folder: Path, cache: Path) -> FileTokenizer:
    """A model folder's tokenizer; one without tokenizer.json is converted once into `cache`."""
    if (folder / "tokenizer.json").is_file():
        return FileTokenizer.from_folder(folder)
    sources = [folder / name for name in SLOW_FILES if (folder / name).is_file()]
    if not sources:
        raise LoadError(f"{folder}: no tokenizer (tokenizer.json or tokenizer.model): add the file")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    converted = cache / "tokenizers" / f"{folder.name}-{digest}"
    if not (converted / "tokenizer.json").is_file():
        _convert(folder, converted)
    return FileTokenizer.from_folder(converted, configs=folder)


def _convert(folder: Path, converted: Path) -> None:
    """Let transformers write the tokenizer.json that `folder` lacks into `converted`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        converted.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=converted.parent) as temporary:
            # the last step is one rename, so that a folder half written is never taken for whole
            tokenizer.save_pretrained(f"{temporary}/whole")
            if not Path(f"{temporary}/whole/tokenizer.json").is_file():
                raise LoadError(f"{folder}: its tokenizer has no tokenizer.json form: unusable")
            os.replace(f"{temporary}/whole", converted)
    except LoadError:
        raise
    except Exception as error:  # what tokenizers raises is a plain Exception, nothing narrower
        raise LoadError(f"{folder}: its tokenizer does not convert ({line(error)})") from error


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception, nothing narrower
        raise LoadError(f"{path}: not a tokenizer ({line(error)}): copy it anew") from None


def _add_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json lists and tokenizer.json lacks, in order of id."""
    from tokenizers import AddedToken

    listed = sorted((int(i), entry) for i, entry in config.get("added_tokens_decoder", {}).items())
    for _, entry in listed:
        if backend.token_to_id(entry["content"]) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = AddedToken(entry["content"], **{k: entry[k] for k in flags if k in entry})
            backend.add_tokens([token])


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: of special_tokens_map.json, and tokenizer_config.json over it."""
    merged = {**read_json(folder / "special_tokens_map.json", missing_ok=True), **config}
    texts = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in merged.items()
        if key.endswith("_token") and not key.startswith("add_")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, or the (default) one in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template


def _eos_ids(folder: Path) -> set[int]:
    ids: set[int] = set()
    config = read_json(folder / "config.json", missing_ok=True)
    generation = read_json(folder / "generation_config.json", missing_ok=True)
    for source in (config, config.get("text_config") or {}, generation):
        named = source.get("eos_token_id")
        ids.update([] if named is None else named if isinstance(named, list) else [named])
    return ids


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} for a missing file where that is allowed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise LoadError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable as JSON ({line(error)}): copy it anew") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: a JSON {type(value).__name__}, not an object: copy it anew")
    return value


def line(error: BaseException) -> str:
    """The first line of an error, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
