"""`speculant export`, `import` and `check-export` as a user meets them: output, errors, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from exporting import edit
from fake import HIDDEN, FakeTarget
from speculant.cli import app
from speculant.commands import run_engine
from speculant.commands.lend import lend
from speculant.commands.ranks import accuracies
from speculant.commands.taps import measure
from speculant.export import running
from speculant.export.keys import LAYOUTS
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.layers import causal
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.vanilla import VanillaConfig, VanillaHead
from speculant.heads.weights import load_head, save_head
from test_pipeline import tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "kv_heads": 1, "head_dim": 16,
    "vocab_size": 259, "context_length": 72,
}  # fmt: skip
KINDS = ("eagle3", "eagle1", "medusa", "vanilla")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def heads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of heads of all kinds for that model, their matrices as if trained."""
    folder = tmp_path_factory.mktemp("heads")
    owner = {"target": dict(lend(str(model), ends=False).fingerprint)}
    made: dict[str, Any] = {
        "eagle3": Eagle3Head(Eagle3Config(**SIZES, draft_vocab_size=50, taps=(1, 3, 5), **owner)),
        "eagle1": Eagle1Head(Eagle1Config(**SIZES, **owner)),
        "medusa": MedusaHead(MedusaConfig(32, 259, 2, accuracies=((0.5,), (0.2,)), **owner)),
        "vanilla": VanillaHead(VanillaConfig(**SIZES, num_layers=1, **owner)),
    }
    made["eagle3"].set_vocabulary(torch.arange(50) * 5)
    random = torch.Generator().manual_seed(0)
    for kind, head in made.items():
        with torch.no_grad():
            for p in head.parameters():
                p.copy_(torch.randn(p.shape, generator=random).pow(3) * 0.1 + (p.ndim == 1))
        save_head(head, folder / kind)
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def works(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def refused(*words: object, code: int = 2) -> str:
    """The one line that a mistake gives."""
    result = run(*words)
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"speculant: [^\n]+\n", result.stderr), result.stderr
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(engine: str, kind: str, model: Path, heads: Path, tmp_path: Path) -> None:
    words = ("export", engine, heads / kind, "--out", tmp_path / "out", "--target", model)
    if kind not in LAYOUTS[engine]:
        assert f"no {engine} export of a head of kind {kind}" in refused(*words)
        assert not any(tmp_path.iterdir())
        return
    out = works(*words)
    assert "checked" in out
    assert str(model) in out, "the command names the target"
    assert "loads whole, as exported" in works("check-export", tmp_path / "out", "--target", model)
    works("import", tmp_path / "out", "--out", tmp_path / "head", "--target", model)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (heads / kind / file).read_bytes()


def test_the_launch_command_is_valid(model: Path, heads: Path, tmp_path: Path) -> None:
    """What the shell makes of the printed line: vLLM's options, the settings one JSON object."""
    out = tmp_path / "with a space"
    text = works("export", "vllm", heads / "eagle3", "--out", out, "--target", model, "-n", 4)
    line = next(line.strip() for line in text.splitlines() if line.startswith("    "))
    shell = f'vllm() {{ for word in "$@"; do echo "$word"; done; }}; {line}'
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    serve, target, option, settings = words.stdout.splitlines()[:4]
    assert (serve, target, option) == ("serve", str(model), "--speculative-config")
    expected = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 4}
    assert json.loads(settings) == expected


def test_json(model: Path, heads: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("export", "vllm", heads / "eagle3", "--out", out, "--target", model, "--json")
    assert json.loads(works(*words, "--format", "speculators")) == {
        "out": str(out), "format": "speculators", "kind": "eagle3", "notes": [],
    }  # fmt: skip
    told = json.loads(works("check-export", out, "--json"))
    assert (told["passed"], told["findings"], told["kind"]) == (True, [], "eagle3")
    edit(out, None, lambda data: data.pop("lm_head.weight"))
    result = run("check-export", out, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["passed"] is False
    assert told["findings"][0]["subject"] == "lm_head.weight"
    told = json.loads(
        works("import", heads_export(model, heads, tmp_path), "--out", tmp_path / "h", "--json")
    )
    assert told["kind"] == "eagle3"
    assert told["measured"] is None


def heads_export(model: Path, heads: Path, tmp_path: Path) -> Path:
    """An export as of another program: without our note."""
    works("export", "vllm", heads / "eagle3", "--out", tmp_path / "x", "--target", model)
    (tmp_path / "x" / "speculant_export.json").unlink()
    return tmp_path / "x"


def test_findings_for_people(model: Path, heads: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    works("export", "vllm", heads / "eagle3", "--out", out, "--target", model)
    edit(out, lambda data: data.update(norm_output=True), lambda data: data.pop("d2t"))
    result = run("check-export", out)
    assert result.exit_code == 1
    assert "FAIL  d2t: missing: vLLM takes draft id i for target id i" in result.stdout
    assert "FAIL  norm_output: is True; the head is False" in result.stdout
    assert "verdict: 2 problems: do not serve this" in result.stdout


def test_another_target(model: Path, heads: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", layers=8)
    words = ("export", "vllm", heads / "eagle3", "--out", tmp_path / "out", "--target")
    assert "trained for another target" in refused(*words, other)
    works(*words, other, "--force")
    result = run("check-export", tmp_path / "out", "--target", other)
    assert result.exit_code == 1
    assert "FAIL  target: trained for another target, whose num_layers is 7, not 8" in result.stdout


def test_an_untrained_head_is_not_exported(model: Path, tmp_path: Path) -> None:
    save_head(Eagle1Head(Eagle1Config(**SIZES)), tmp_path / "fresh")
    words = ("export", "vllm", tmp_path / "fresh", "--out", tmp_path / "out", "--target", model)
    assert "random numbers" in refused(*words)
    assert not (tmp_path / "out").exists()
    works(*words, "--force")


def test_the_imports_taps_are_measured(model: Path, heads: Path, tmp_path: Path) -> None:
    """Both readings of the ids are tried on the target, and the numbers are told."""
    folder = heads_export(model, heads, tmp_path)
    text = works("import", folder, "--out", tmp_path / "a", "--target", model)
    numbers = re.search(r"next token in ([\d.]+)% with taps 1,3,5, ([\d.]+)% with taps 2,4,6", text)
    assert numbers, text
    assert load_head(tmp_path / "a").config.taps in ((1, 3, 5), (2, 4, 6))  # type: ignore[union-attr]
    text = works("import", folder, "--out", tmp_path / "b", "--tap-convention", "output")
    assert "taps 2, 4, 6" in text
    text = works("import", folder, "--out", tmp_path / "c", "--taps", "0,2,3")
    assert load_head(tmp_path / "c").config.taps == (0, 2, 3)  # type: ignore[union-attr]
    assert "no fingerprint of its target" in text


def test_measured_agreement_is_the_heads_own() -> None:
    """Against one uncached pass for every position: the pair of features at t and token t + 1 is
    asked for the token that the target finds likeliest at t + 2."""
    torch.manual_seed(0)
    target = FakeTarget(seed=4)
    sizes = SIZES | {"hidden_size": HIDDEN, "vocab_size": 32, "head_dim": 8}
    head = Eagle3Head(Eagle3Config(**sizes, draft_vocab_size=24, taps=(0,)))
    head.set_vocabulary(torch.arange(32)[torch.arange(32) % 4 > 0])
    text = target.greedy([3, 9, 1, 30], 12)
    likely, agree = measure(target, head, [(0,), (1,)], [text])
    for tap, mine, share in zip((0, 1), likely, agree, strict=True):
        scores, hits = [], []
        for t in range(len(text) - 2):
            states = states_of(target, text[: t + 1], tap)
            embedded = target.embedding[torch.tensor(text[1 : t + 2])]
            with torch.no_grad():
                hidden = head.fuse(states)[None]
                out = head(embedded[None], hidden, torch.arange(t + 1)[None], causal)
                logits = head.logits(out)[0, -1].log_softmax(-1)
            best = int(target.logits(text[: t + 2])[-1].argmax())
            if best in head.target_ids.tolist():
                at = head.target_ids.tolist().index(best)
                scores.append(float(logits[at]))
                hits.append(int(logits.argmax()) == at)
        assert scores
        assert mine == pytest.approx(sum(scores) / len(scores), abs=1e-5)
        assert share == pytest.approx(sum(hits) / len(hits))


def states_of(target: FakeTarget, tokens: list[int], tap: int) -> torch.Tensor:
    """States entering a layer [T, H], from one uncached forward."""
    cache = target.new_cache(1, len(tokens))
    rows = cache.rows([0], len(tokens))
    positions = torch.arange(len(tokens))[None]
    _, hidden = target.forward(torch.tensor([tokens]), positions, None, rows, (tap,))
    assert hidden is not None
    return hidden[0]


def test_an_imported_medusas_accuracies_are_measured(
    model: Path, heads: Path, tmp_path: Path
) -> None:
    """Without a target it says what is not known and how to know it; then a usual tree is drafted."""
    words = ("export", "vllm", heads / "medusa", "--out", tmp_path / "x", "--target", model)
    works(*words)
    (tmp_path / "x" / "speculant_export.json").unlink()
    edit(tmp_path / "x", lambda data: data.update(original_lm_head=False), medusas_own)
    text = works("import", tmp_path / "x", "--out", tmp_path / "a")
    assert "2 LM heads kept as the heads' own" in text
    assert "accuracies of its heads are not known" in text
    assert load_head(tmp_path / "a").config.accuracies == ()  # type: ignore[union-attr]
    told = run("generate", "hello", "--draft", tmp_path / "a", "--target", model, "--max-tokens", 4)
    assert told.exit_code == 0, told.stderr
    assert told.stderr.startswith(
        "speculant: the accuracies of these Medusa heads were never measured"
    )
    asked = tmp_path / "questions.jsonl"
    asked.write_text('{"question_id": 1, "category": "a", "turns": ["hello there"]}\n')
    words = ("import", tmp_path / "x", "--out", tmp_path / "b", "--target", model)
    text = works(*words, "--questions", asked)
    assert re.search(r"first choices right in [\d.]+%, [\d.]+% \(measured at \d+ positions", text)
    config: Any = load_head(tmp_path / "b").config
    assert [len(ranks) for ranks in config.accuracies] == [10, 10]
    told = run("generate", "hello", "--draft", tmp_path / "b", "--target", model, "--max-tokens", 4)
    assert (told.exit_code, told.stderr) == (0, "")


def medusas_own(data: dict[str, torch.Tensor]) -> None:
    """LM heads of their own in place of the target's."""
    lent = data.pop("lm_head.weight")
    for h in range(2):
        data[f"lm_heads.{h}.weight"] = lent + (h + 1) * 0.01


def test_measured_accuracies_are_the_heads_own() -> None:
    """Against one uncached forward for every label: the state 2 + h before it, and the rank it gets."""
    target = FakeTarget(seed=4)
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(HIDDEN, 32, 3))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    texts = [(target.greedy([3, 9, 1], 9), 3), (target.greedy([30], 6), 1)]
    texts = [([3, 9, 1, *texts[0][0]], 3), ([30, *texts[1][0]], 1)]
    shares, positions = accuracies(target, head, texts)
    hits, tried = torch.zeros(3, 10), [0, 0, 0]
    for ids, prompt in texts:
        for at in range(prompt, len(ids)):
            for h in range(3):
                if at - 2 - h < 0:
                    continue
                state = states_of(target, ids[: at - 1 - h], -1)[-1]
                with torch.no_grad():
                    ranked = head.logits(state)[h].argsort(descending=True).tolist()
                tried[h] += 1
                if ranked.index(ids[at]) < 10:
                    hits[h, ranked.index(ids[at])] += 1
    assert positions == tried[0] == 9 + 5
    assert torch.allclose(torch.tensor(shares), hits / torch.tensor(tried)[:, None], atol=1e-6)
    assert float(hits.sum()) > 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("export", "llama.cpp", "HEAD", "--out", "o"),
            "unknown engine 'llama.cpp': choose from vllm",
        ),
        (("export", "sglang", "HEAD", "--out", "o", "--format", "speculators"), "is vLLM's"),
        (("export", "vllm", "HEAD", "--out", "o", "--format", "onnx"), "unknown format 'onnx'"),
        (("export", "vllm", "HEAD", "--out", "o", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("export", "vllm", "HEAD", "--out", "o", "-n", "0", "--target", "MODEL"), "at least 1"),
        (("export", "vllm", "no/such", "--out", "o"), "no/such: no folder of a head"),
        (("export", "vllm", "MODEL", "--out", "o"), "no head's config"),
        (("export", "vllm", "HEAD", "--out", "HEAD"), "no earlier export"),
        (
            ("export", "vllm", "HEAD", "--out", "o", "--target", "no_such"),
            "unknown model 'no_such'",
        ),
        (("import", "no/such", "--out", "o"), "no such folder"),
        (("import", "HEAD", "--out", "o"), "is a head of ours already"),
        (("import", "HEAD", "--out", "MODEL"), "is there and is no head"),
        (("import", "HEAD", "--out", "o", "--taps", "3,1"), "--taps '3,1': give layers, ascending"),
        (("import", "HEAD", "--out", "o", "--taps", "a"), "--taps 'a'"),
        (("import", "HEAD", "--out", "o", "--tap-convention", "both"), "choose from auto, enter"),
        (("import", "MODEL", "--out", "o"), "is a whole model"),
        (("import", "HEAD", "--out", "o", "--questions", "q"), "--questions goes with --target"),
        (("check-export", "no/such"), "no such folder"),
        (("check-export", "HEAD", "--engine", "tgi"), "unknown engine 'tgi'"),
        (("check-export", "HEAD", "--python", "x"), "--python goes with --run"),
    ],
)
def test_mistakes(
    words: tuple[str, ...], told: str, model: Path, heads: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    places = {"HEAD": heads / "eagle3", "MODEL": model}
    assert told in refused(*(places.get(word, word) for word in words))
    assert not any(tmp_path.iterdir()), "nothing is left behind"


def test_a_pickle_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for words in (("import", tmp_path, "--out", tmp_path / "o"), ("check-export", tmp_path)):
        assert "weights_only=True" in refused(*words)


def test_run_needs_vllm(model: Path, heads: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    works("export", "vllm", heads / "eagle3", "--out", out, "--target", model)
    if not running.has_vllm(Path(sys.executable)):
        assert "has no vLLM" in refused("check-export", out, "--run")
    assert "has no vLLM" in refused("check-export", out, "--run", "--python", tmp_path / "none")
    works("export", "sglang", heads / "eagle3", "--out", out, "--target", model)
    assert "--run is vLLM's" in refused("check-export", out, "--run")


STAND_IN = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)
job = json.load(open(sys.argv[2]))
if "gone" in job["model"]:
    sys.exit("RuntimeError: Engine core initialization failed")
result = {{"version": "0", "token_ids": [[1, 2]] * len(job["prompts"]), "seconds": 1}}
if job.get("speculative_config"):
    assert job["speculative_config"]["method"] == "eagle3"
    accepted = {accepted}
    result.update(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=sum(accepted),
                  num_accepted_tokens_per_pos=accepted)
    result["token_ids"][0] = {first}
json.dump(result, open(sys.argv[3], "w"))
"""


@pytest.mark.parametrize(
    ("accepted", "first", "code", "told"),
    [
        ([6, 3, 1], [1, 2], 0, "mean acceptance length 2.00, by position: 60%, 30%, 10%"),
        ([0, 0, 0], [1, 2], 1, "FAIL: next to nothing is accepted"),
        ([6, 3, 1], [1, 3], 1, "FAIL: speculation changed the text"),
    ],
)
def test_run_judges_what_vllm_counted(
    accepted: list[int], first: list[int], code: int, told: str,
    model: Path, heads: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """A stand-in for the Python with vLLM; the real one runs in `make vllm-e2e`."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, accepted=accepted, first=first))
    python.chmod(0o755)
    works("export", "vllm", heads / "eagle3", "--out", tmp_path / "out", "--target", model)
    result = run("check-export", tmp_path / "out", "--run", "--python", python)
    assert result.exit_code == code, result.output + result.stderr
    assert told in result.stdout


def test_an_engine_that_stops_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, accepted=[], first=[]))
    python.chmod(0o755)
    with pytest.raises(running.EngineError, match="vLLM stopped: RuntimeError: Engine core"):
        running.run_vllm(python, {"model": "gone"})
    assert running.reason("a\nKeyError: 'x'\nshutting down") == "KeyError: 'x'"


def test_depth_is_at_most_the_number_of_medusa_heads(
    model: Path, heads: Path, tmp_path: Path
) -> None:
    from speculant.export.folder import read_checkpoint

    words = ("export", "vllm", heads / "medusa", "--out", tmp_path, "--target", model, "-n", 5)
    works(*words)
    assert run_engine.depth(read_checkpoint(tmp_path)) == 2


def test_ends_of_a_tied_target(tmp_path: Path, model: Path) -> None:
    """An LM head where the file has one; None where it is the embedding."""
    assert lend(str(model), ends=True).parts.lm_head is not None
    tied = tiny_model(tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    lent = lend(str(tied), ends=True).parts
    assert lent.lm_head is None
    assert torch.equal(lent.unembedding, tensors["model.embed_tokens.weight"])
