"""A GGUF file -> a folder in transformers' format, once, in the conversion cache.

transformers takes 20 to 50 s to dequantise a GGUF file and to rebuild its tokenizer; the folder
that this leaves loads in under a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import LoadError
from .quantised import write_quantised
from .tokenizer import line

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FORMAT = 2
"""Part of the cache key: raise it when a conversion starts to give other files."""
SAMPLE_BYTES, SAMPLES = 1 << 16, 32
SPARE_BYTES = 64 << 20
"""Disk for the tokenizer and the configs, beside the weights."""
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""`tokenizer.ggml.pre` values that split digits one by one before GPT-2's rule.

transformers 5.24 leaves them out of its table and splits by GPT-2's rule alone, which tokenises
a blank line before a digit ("\\n\\n1.") otherwise than the model was trained on.
"""


def cache_folder() -> Path:
    """Where conversions are kept: $SPECULANT_CACHE or ~/.cache/speculant."""
    return Path(os.environ.get("SPECULANT_CACHE") or "~/.cache/speculant").expanduser()


def convert_gguf(path: Path) -> Path:
    """The converted folder of a GGUF file, from the cache where it is there already."""
    _check_magic(path)
    converted = cache_folder() / "converted" / f"{path.stem}-{_key(path)}"
    if (converted / "model.safetensors").is_file():
        return converted
    reader = _read_whole(path)
    needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * 5 + SPARE_BYTES
    try:
        converted.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(converted.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")
        print(f"speculant: converting {path.name}, once, into {converted}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=converted.parent) as temporary:
            folder = Path(temporary) / "whole"
            folder.mkdir()
            _write(path, reader, folder)
            _publish(folder, converted)
    except OSError as error:
        if error.errno == errno.ENOSPC or "No space left" in str(error):
            raise LoadError(
                f"{converted.parent}: the disk is full; converting {path.name} takes "
                f"{needed} bytes ({needed / 1e6:.0f} MB): free some, or set SPECULANT_CACHE to a "
                "folder elsewhere"
            ) from error
        raise LoadError(
            f"{converted.parent}: cannot be written ({line(error)}): set SPECULANT_CACHE to a "
            "folder that can"
        ) from error
    return converted


def _publish(folder: Path, converted: Path) -> None:
    """One rename, so that a folder half written is never taken for whole."""
    try:
        os.replace(folder, converted)
    except OSError:
        if not (converted / "model.safetensors").is_file():  # else another process was first
            raise


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({line(error)})") from None
    if magic != b"GGUF":
        raise LoadError(f"{path}: not a GGUF file (it starts with {magic!r}): copy it anew")


def _key(path: Path) -> str:
    """Hash of the file's size and of samples spread over it; the whole file would take seconds."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {size} ".encode())
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _read_whole(path: Path) -> GGUFReader:
    """The file's metadata and tensor table; LoadError when it is not whole."""
    from gguf import GGUFReader

    size = path.stat().st_size
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, EOFError, OSError) as error:
        raise LoadError(
            f"{path}: a damaged or truncated GGUF file ({line(error)}): copy it anew"
        ) from None
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > size:
            raise LoadError(
                f"{path}: truncated ({tensor.name} ends at byte {end} of {size}): copy it anew"
            )
    return reader


def _write(path: Path, reader: GGUFReader, folder: Path) -> None:
    """Config, tokenizer and float32 weights of a GGUF file, in transformers' format."""
    with _quiet():
        model, tokenizer = _read(path)
        _restore_digits(reader, tokenizer)
        tokenizer.save_pretrained(str(folder))
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the weights written are plain float32
        config = model.config.to_dict()
        for key in ("_name_or_path", "_model_name_or_path"):  # a path of this machine, a free text
            config.pop(key, None)
        config.update(architectures=[type(model).__name__], dtype="float32")
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
        if model.generation_config is not None:
            generation = json.dumps(model.generation_config.to_diff_dict(), indent=2, default=str)
            (folder / "generation_config.json").write_text(generation)
    _save_weights(model, folder / "model.safetensors")
    write_quantised(reader, model.state_dict(), config, folder)


def _read(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **source)
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), dtype=torch.float32, **source
        )
    except Exception as error:  # what tokenizers raises is a plain Exception, nothing narrower
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise LoadError(f"{path}: transformers cannot read this GGUF ({line(error)})") from error
    return model, tokenizer


def _restore_digits(reader: GGUFReader, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the tokenizer the digit rule that its GGUF names (see DIGITS_APART)."""
    from tokenizers import pre_tokenizers as rules

    field = reader.get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in DIGITS_APART:
        digits = rules.Digits(individual_digits=True)
        split = rules.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = rules.Sequence([digits, split])


def _save_weights(model: PreTrainedModel, path: Path) -> None:
    """All parameters in one safetensors file, tied ones once."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tied: Sequence[str] = list(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:  # the writer wraps the operating system's error in its own
        full = "No space left" in str(error) or "code: 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, line(error)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Within it, transformers prints neither bars nor warnings; errors still raise."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.set_verbosity(before)
