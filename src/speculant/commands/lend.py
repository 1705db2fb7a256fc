"""What exports and imports need of a target: read from its files, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..export.given import Given
    from ..export.parts import FromTarget

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Lent:
    """A target's fingerprint, and what it lends."""

    fingerprint: Mapping[str, Any]
    parts: FromTarget

    def given(self, given: Given) -> Given:
        """What an import is told, with the target's side."""
        return replace(
            given,
            num_layers=self.fingerprint["num_layers"],
            hidden_size=self.fingerprint["hidden_size"],
            fingerprint=self.fingerprint,
            embedding=self.parts.embedding,
            lm_head=self.parts.unembedding,
        )


def lend(target: str, ends: bool) -> Lent:
    """The target of a name, folder, hub id or GGUF file. Raises LoadError when it cannot be read.

    ends: read its embedding and its LM head too
    """
    from ..export.parts import FromTarget
    from ..target.convert import cache_folder
    from ..target.load import HUB_ID, resolve, target_fingerprint
    from ..target.tokenizer import load_tokenizer, read_json

    folder, _ = resolve(target)
    fingerprint = target_fingerprint(folder, load_tokenizer(folder, cache_folder()))
    config = read_json(folder / "config.json")
    embedding, lm_head = read_ends(folder) if ends else (None, None)
    named = HUB_ID.fullmatch(target) and not Path(target).expanduser().exists()
    place = target if named else str(folder.resolve())
    files = {n: (folder / n).read_bytes() for n in TOKENIZER_FILES if (folder / n).is_file()}
    parts = FromTarget(
        name=place,
        architecture=str(fingerprint["architecture"]),
        embedding=embedding,
        lm_head=lm_head,
        config={**config, **(config.get("text_config") or {})},
        files=files,
    )
    return Lent(fingerprint, parts)


def read_ends(folder: Path) -> tuple[Tensor, Tensor | None]:
    """Input embeddings [V, H], and the LM head [V, H] where it is another tensor (else None)."""
    from safetensors import safe_open

    from ..target.base import LoadError
    from ..target.weights import read_header, weight_files

    files = {name: path for path in weight_files(folder) for name in read_header(path)}
    out: list[Tensor | None] = []
    for end in ("embed_tokens.weight", "lm_head.weight"):
        names = [name for name in files if name.endswith(end)]
        if len(names) > 1:
            raise LoadError(f"{folder}: {len(names)} tensors {end}: a model of several parts")
        if not names:
            out.append(None)
            continue
        with safe_open(files[names[0]], framework="pt") as file:
            out.append(file.get_tensor(names[0]))
    embedding, lm_head = out
    if embedding is None:
        raise LoadError(f"{folder}: no tensor embed_tokens.weight: not a model of Llama's kind")
    return embedding, lm_head
