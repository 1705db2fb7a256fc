"""The command, as a user and a script meet it: output, errors, exit codes, chat, signals, pipes.

Most tests run the commands on the fake target, whose plain uncached `greedy` and `logits` say what
must come out. Those marked `real` start processes on the bundled model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fake import Broken, FakeTarget, FakeTokenizer
from speculant import __version__
from speculant.cache import KVCache
from speculant.check import Check, Report
from speculant.cli import app
from speculant.target.base import LoadError

COMMANDS = ("generate", "chat", "check", "demo", "bench", "eval", "train", "data")
PROMPT = "abcabcab"
COUNTERS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "num_drafted_per_pos",
    "num_emitted_tokens",
    "target_forwards",
    "accepted_length_histogram",
    "prefill_ms",
    "decode_ms",
    "draft_ms",
    "verify_ms",
    "forward_ms",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_per_position",
    "conditional_acceptance_per_position",
    "tokens_per_forward",
    "tokens_per_s",
    "loop_share",
}


class ChatTokenizer(FakeTokenizer):
    """With a chat template, and a record of the conversations that went through it."""

    has_chat_template = True

    def __init__(self, name: str = "fake") -> None:
        super().__init__(name)
        self.conversations: list[list[tuple[str, str]]] = []

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.conversations.append([(m["role"], m["content"]) for m in messages])
        return self.encode(template(self.conversations[-1]))


def template(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{role}:{content}." for role, content in messages) + "assistant:"


class Models:
    """Stands in for `load_target`: fake models by name, and a record of what was asked for."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {
            "smollm2-135m-instruct": FakeTarget(seed=4, tokenizer=ChatTokenizer()),
            "other": FakeTarget(seed=2, tokenizer=ChatTokenizer()),
            "stranger": FakeTarget(seed=2, tokenizer=ChatTokenizer("stranger")),
            "bare": FakeTarget(seed=4),
        }
        self.loads: list[tuple[str, dict[str, Any]]] = []

    @property
    def target(self) -> Any:
        return self.known["smollm2-135m-instruct"]

    @target.setter
    def target(self, target: FakeTarget) -> None:
        self.known["smollm2-135m-instruct"] = target

    @property
    def conversations(self) -> list[list[tuple[str, str]]]:
        return self.target.tokenizer.conversations  # type: ignore[no-any-return]

    def load(self, source: str, **options: Any) -> FakeTarget:
        self.loads.append((source, options))
        return self.known[source]  # type: ignore[no-any-return]

    def answer(self, text: str, count: int, raw: bool = False) -> list[int]:
        """Greedy tokens after a user's message (or plain text) up to EOS, without speculation."""
        prompt = text if raw else template([("user", text)])
        return until_eos(self.target.greedy(self.target.tokenizer.encode(prompt), count))


def until_eos(ids: list[int]) -> list[int]:
    return ids[: ids.index(0) + 1] if 0 in ids else ids


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(96 + i) for i in ids if i)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    made = Models()
    monkeypatch.setattr("speculant.target.load.load_target", made.load)
    return made


def run(*args: str, stdin: str | bytes | None = None, **env: str) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin, env=env, prog_name="speculant")


def ok(*args: str, stdin: str | bytes | None = None, **env: str) -> str:
    result = run(*args, stdin=stdin, **env)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*args: str, stdin: str | bytes | None = None) -> dict[str, Any]:
    """Output of `generate --json`: one line on stdout, and nothing else anywhere."""
    result = run("generate", "--json", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.endswith("}\n")
    assert result.stdout.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)  # type: ignore[no-any-return]


def fails(result: Result, code: int, *words: str) -> None:
    """One line for the user, and the exit code."""
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert re.fullmatch(r"speculant: [^\n]+\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
    assert result.stdout == ""


# generate


def test_json_has_the_documented_keys(models: Models) -> None:
    out = as_json(PROMPT, "--max-tokens", "20")
    assert set(out) == {
        *("text", "token_ids", "finish_reason", "usage", "metrics"),
        *("seed", "draft", "target", "decoding", "rule"),
    }
    assert set(out["usage"]) == {"prompt_tokens", "completion_tokens"}
    assert set(out["metrics"]) == COUNTERS
    assert (out["draft"], out["target"]) == ("ngram", "fake")


@pytest.mark.parametrize("draft", ["none", "ngram", "lookahead", "vanilla"])
def test_json_tells_what_the_target_says(models: Models, draft: str) -> None:
    more = ("--draft-model", "other") if draft == "vanilla" else ()
    expected = models.answer(PROMPT, 40)
    out = as_json(PROMPT, "--max-tokens", "40", "--draft", draft, *more)
    assert out["token_ids"] == expected
    assert out["text"] == text_of(expected)
    assert out["finish_reason"] == ("stop" if expected[-1] == 0 else "length")
    prompt = len(template([("user", PROMPT)]))
    assert out["usage"] == {"prompt_tokens": prompt, "completion_tokens": len(expected)}
    m = out["metrics"]
    histogram = m["accepted_length_histogram"]
    assert m["num_emitted_tokens"] == len(expected)
    assert m["target_forwards"] == len(expected) - m["num_accepted_tokens"]
    assert sum(histogram) == m["num_drafts"] <= m["target_forwards"]
    assert sum(i * n for i, n in enumerate(histogram)) == m["num_accepted_tokens"]
    assert sum(m["num_accepted_tokens_per_pos"]) == m["num_accepted_tokens"]
    if m["num_drafts"]:
        length = 1 + m["num_accepted_tokens"] / m["num_drafts"]
        assert m["mean_acceptance_length"] == pytest.approx(length)
        rate = m["num_accepted_tokens"] / m["num_draft_tokens"]
        assert m["draft_acceptance_rate"] == pytest.approx(rate)
    assert (m["num_drafts"] > 0) == (draft != "none")
    assert m["tokens_per_s"] == pytest.approx(1e3 * len(expected) / m["decode_ms"], rel=1e-2)


def test_text_is_the_json_text(models: Models) -> None:
    expected = text_of(models.answer(PROMPT, 30))
    result = run("generate", PROMPT, "--max-tokens", "30")
    assert (result.exit_code, result.stdout, result.stderr) == (0, expected + "\n", "")


def test_the_same_seed_gives_the_same_output(models: Models) -> None:
    def sampled(*args: str) -> tuple[list[int], int]:
        out = as_json(PROMPT, "--max-tokens", "30", "--ignore-eos", *args)
        return out["token_ids"], out["seed"]

    assert sampled("--seed", "7") == sampled("--seed", "7")
    assert sampled("--seed", "7")[0] != sampled("--seed", "8")[0]
    ids, seed = sampled("--temperature", "1")  # a seed that was not given is reported
    assert sampled("--seed", str(seed))[0] == ids


def test_without_sampling_options_it_is_greedy(models: Models) -> None:
    expected = models.answer(PROMPT, 20)
    for args in ((), ("--temperature", "0", "--seed", "3"), ("-t", "1e-6", "--top-p", "0.9")):
        assert as_json(PROMPT, "--max-tokens", "20", *args)["token_ids"] == expected
    for args in (("--top-k", "31"), ("--top-p", "0.99"), ("--min-p", "1e-4"), ("--seed", "1")):
        out = as_json(PROMPT, "--max-tokens", "60", "--ignore-eos", *args)
        assert out["decoding"] == "sampled", args
    seeded = ("--max-tokens", "60", "--ignore-eos", "--seed", "1")
    assert as_json(PROMPT, *seeded)["token_ids"][:20] != expected


def test_stop_ends_the_text_before_the_string(models: Models) -> None:
    text = text_of(models.answer(PROMPT, 40))
    stop = text[9:12]
    out = as_json(PROMPT, "--max-tokens", "40", "--stop", stop, "--stop", "never{}")
    assert out["text"] == text[: text.index(stop)]
    assert out["finish_reason"] == "stop"
    assert text_of(out["token_ids"]) == text[: text.index(stop) + 3]
    plain = ok("generate", PROMPT, "--max-tokens", "40", "--stop", stop)
    assert plain == out["text"] + "\n"


def test_stop_token_ids_bias_and_penalties_reach_the_request(models: Models) -> None:
    expected = models.answer(PROMPT, 20)
    out = as_json(PROMPT, "--stop-token-id", str(expected[5]))
    assert out["token_ids"] == expected[: expected.index(expected[5]) + 1]
    assert out["finish_reason"] == "stop"
    biased = as_json(PROMPT, "--max-tokens", "5", "--logit-bias", "9=1000")
    assert biased["token_ids"] == [9] * 5
    args = ("--logit-bias", "9=1000", "--logit-bias", "3=900", "--presence-penalty", "700")
    assert as_json(PROMPT, "--max-tokens", "2", *args)["token_ids"] == [9, 3]
    args = ("--logit-bias", "0=1000", "--min-tokens", "4", "--max-tokens", "9")
    out = as_json(PROMPT, *args)
    assert len(out["token_ids"]) == 5
    assert out["token_ids"][4] == 0


def test_logprobs_are_the_targets(models: Models) -> None:
    out = as_json(PROMPT, "--max-tokens", "6", "--logprobs", "3", "--temperature", "0.5")
    assert [entry["token_id"] for entry in out["logprobs"]] == out["token_ids"]
    prompt = models.target.tokenizer.encode(template([("user", PROMPT)]))
    for i, entry in enumerate(out["logprobs"]):
        logps = models.target.logits(prompt + out["token_ids"][:i])[-1].log_softmax(-1)
        assert entry["logprob"] == pytest.approx(float(logps[entry["token_id"]]), abs=1e-4)
        best = logps.topk(3)
        assert [token for token, _ in entry["top"]] == best.indices.tolist()
        assert [p for _, p in entry["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    none = as_json(PROMPT, "--max-tokens", "2", "--logprobs", "0")["logprobs"]
    assert [entry["top"] for entry in none] == [[], []]


def test_raw_system_and_standard_input(models: Models) -> None:
    raw = as_json(PROMPT, "--raw", "--max-tokens", "10")
    assert raw["usage"]["prompt_tokens"] == len(PROMPT)
    assert raw["token_ids"] == models.answer(PROMPT, 10, raw=True)
    assert models.conversations == []
    as_json(PROMPT, "--system", "be brief", "--max-tokens", "2")
    assert models.conversations[-1] == [("system", "be brief"), ("user", PROMPT)]
    text = "two\nlines, é"
    as_json("-", "--max-tokens", "2", stdin=text)
    assert models.conversations[-1] == [("user", text)]


def test_depth_of_drafting(models: Models) -> None:
    def per_position(*args: str) -> int:
        more = ("--max-tokens", "60", "--ignore-eos", "--logit-bias", "5=1000")
        return len(as_json("eee", "--raw", *more, *args)["metrics"]["num_drafted_per_pos"])

    for draft in ("ngram", "lookahead", "vanilla"):
        model = ("--draft-model", "other") if draft == "vanilla" else ()
        assert per_position("-n", "0", "--draft", draft, *model) == 0
        assert per_position("-n", "2", "--draft", draft, *model) == 2
    assert per_position("-n", "12") == 12
    for draft, number in (("ngram", "1000000"), ("lookahead", "513")):
        result = run("generate", PROMPT, "--draft", draft, "-n", number)
        fails(result, 2, f"--num-draft-tokens is {number}", draft, "at most")


def test_rule_dtype_device_backend_and_threads_are_passed_on(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculant import decode

    used: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        rule = decode.RULES[name]

        def spied(*args: Any) -> Any:
            used.append(name)
            return rule(*args)

        return spied

    for name in ("token", "block"):
        monkeypatch.setitem(decode.RULES, name, spy(name))
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    vanilla = ("--draft", "vanilla", "--draft-model", "other", "--seed", "1", "--max-tokens", "9")
    for rule in ("token", "block"):
        used.clear()
        as_json(PROMPT, *vanilla, "--rule", rule, "--threads", "3")
        assert set(used) == {rule}
    assert set_to == [3, 3]
    models.loads.clear()
    options = ("--dtype", "bfloat16", "--device", "cpu:0", "--backend", "hf")
    as_json(PROMPT, *vanilla, *options)
    given = {"dtype": torch.bfloat16, "device": "cpu:0", "backend": "hf"}
    target = ("smollm2-135m-instruct", given | {"weights": "auto"})
    assert models.loads == [target, ("other", given)]


def test_generation_ends_where_the_context_does(models: Models) -> None:
    models.target = FakeTarget(seed=4, context_length=64, tokenizer=ChatTokenizer())
    out = as_json("a" * 50, "--raw", "--max-tokens", "9000", "--ignore-eos")
    assert out["finish_reason"] == "length"
    assert len(out["token_ids"]) == 14


# --show-draft


def coloured(output: str) -> list[tuple[str, str]]:
    """(colour number, text) runs; texts without a colour have number ''."""
    parts = re.split(r"\x1b\[(\d*)m", output)
    colours = ["", *("" if c == "0" else c for c in parts[1::2])]
    return [(c, t) for c, t in zip(colours, parts[::2], strict=True) if t]


def test_show_draft_colours_every_token_by_its_origin(models: Models) -> None:
    args = (PROMPT, "--max-tokens", "40", "--ignore-eos", "--draft", "lookahead")
    args += ("--logit-bias", "0=4")
    out = as_json(*args)
    assert 0 in out["token_ids"][:20]  # colours go on behind an EOS that is ignored
    shown = ok("generate", *args, "--show-draft", FORCE_COLOR="1", TERM="xterm")
    text, legend = shown.rstrip("\n").rsplit("\n", 1)
    runs = coloured(text)
    assert "".join(t for _, t in runs) == out["text"]
    counts = {c: sum(len(t) for d, t in runs if d == c) for c, _ in runs}
    m = out["metrics"]
    assert counts["32"] == m["num_accepted_tokens"] > 0
    assert counts["31"] + counts["36"] == m["num_drafts"]  # one recovered or bonus token a draft
    names = [("32", "accepted "), ("31", "recovered "), ("36", "bonus "), ("39", "plain ")]
    assert coloured(legend) == names


def test_show_draft_prints_the_same_text(models: Models) -> None:
    """Past EOS, with tabs, and with the start of a stop string that never came to its end."""

    class Tabs(ChatTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return "".join("\t" if i % 4 == 1 else "\n" if i == 6 else chr(96 + i) for i in ids)

    models.target = FakeTarget(seed=4, sharpness=1, tokenizer=Tabs())
    args = ["generate", PROMPT, "--seed", "1", "--max-tokens", "60", "--ignore-eos"]
    args += ["--logit-bias", "0=2"]
    plain = ok(*args)
    assert "\t" in plain
    assert "`" in plain  # the fake EOS, and text behind it
    assert ok(*args, "--show-draft").startswith(plain)
    assert ok(*args, "--show-draft", "--stop", plain[-3:-1] + "more").startswith(plain)


def test_show_draft_without_a_terminal_writes_no_escapes(models: Models) -> None:
    out = ok("generate", PROMPT, "--max-tokens", "9", "--show-draft", NO_COLOR="1", TERM="dumb")
    assert "\x1b" not in out
    assert out.endswith("\naccepted recovered bonus plain \n")


# Bad input


def label(value: Any) -> str:
    """A test's name: its arguments."""
    return " ".join(value)[:40] if isinstance(value, list) else ""


EARLY = [
    (
        ["--draft", "eagle9"],
        "eagle9",
        "none, ngram, lookahead, vanilla, medusa, eagle1, eagle1-tree, eagle2, eagle3",
    ),
    (["--draft-model", "other"], "--draft-model", "vanilla"),
    (["--max-tokens", "0"], "max_tokens", ">= 1"),
    (["--max-tokens", "-5"], "max_tokens", ">= 1"),
    (["--temperature", "-0.1"], "temperature", ">= 0"),
    (["--temperature", "nan"], "temperature", "nan"),
    (["--temperature", "inf"], "temperature", "inf"),
    (["--top-p", "0"], "top_p", "(0, 1]"),
    (["--top-p", "1.5"], "top_p", "(0, 1]"),
    (["--top-k", "-1"], "top_k", ">= 0"),
    (["--min-p", "2"], "min_p", "[0, 1]"),
    (["--seed", "-1"], "seed", "2**63 - 1"),
    (["--seed", str(2**63)], "seed", "2**63 - 1"),
    (["--repetition-penalty", "0"], "repetition_penalty", "1 is off"),
    (["--presence-penalty", "nan"], "presence_penalty", "nan"),
    (["--frequency-penalty", "inf"], "frequency_penalty", "inf"),
    (["--min-tokens", "300"], "min_tokens", "256"),
    (["--stop", ""], "stop", "not empty"),
    (["--stop-token-id", "-1"], "stop_token_ids", ">= 0"),
    (["--logit-bias", "5"], "--logit-bias '5'", "ID=NUMBER"),
    (["--logit-bias", "a=1"], "--logit-bias 'a=1'", "ID=NUMBER"),
    (["--logit-bias", "5=nan"], "logit_bias", "nan"),
    (["--logprobs", "-1"], "logprobs", "0 and 100"),
    (["--num-draft-tokens", "-1"], "--num-draft-tokens is -1", "at least 0"),
    (["--rule", "typical"], "typical", "block or token"),
    (["--dtype", "int8"], "int8", "float32 or bfloat16"),
    (["--device", "meta"], "meta", "cpu or cuda"),
    (["--device", "tpu9"], "tpu9", "cpu or cuda"),
    (["--threads", "0"], "--threads is 0", "between 1 and"),
    (["--threads", "99999999999999999999"], "--threads is 9", "between 1 and"),
    (["--raw", "--system", "x"], "--system", "--raw"),
    (["--system", "a\udcff"], "--system", "UTF-8"),
]


@pytest.mark.parametrize(("args", "first", "second"), EARLY, ids=label)
def test_mistakes_are_told_before_the_model_loads(
    models: Models, args: list[str], first: str, second: str
) -> None:
    fails(run("generate", "hi", *args), 2, first, second)
    assert models.loads == []


@pytest.mark.parametrize("prompt", ["", "  \n\t", "bad \udcff byte"], ids=repr)
def test_prompts_that_are_none(models: Models, prompt: str) -> None:
    fails(run("generate", prompt), 2, "UTF-8" if prompt.strip() else "empty")
    assert models.loads == []


def test_standard_input_that_is_no_prompt(models: Models) -> None:
    fails(run("generate", "-", stdin=""), 2, "empty")
    fails(run("generate", "-", stdin=b"\xff\xfe"), 2, "utf-8")


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_mistakes_that_only_the_model_can_tell(models: Models, json_too: list[str]) -> None:
    def bad(*args: str) -> Result:
        return run("generate", *args, *json_too)

    fails(bad("a" * 600), 2, "tokens", "the context holds 512", "shorten the prompt")
    fails(bad("hi", "--logit-bias", "32=1"), 2, "logit_bias", "32", "0..31")
    args = ("--draft", "vanilla", "--draft-model")
    fails(bad("hi", *args, "stranger"), 2, "another tokenizer")
    fails(bad("hi", "--target", "bare", "--system", "x"), 2, "no chat template", "text")


def test_a_broken_target_is_a_failure(models: Models) -> None:
    models.target = Broken(seed=4, tokenizer=ChatTokenizer())
    models.target.position = 0
    fails(run("generate", "hi", "--json"), 1, "position")


def test_a_bug_keeps_its_traceback(models: Models) -> None:
    del models.known["smollm2-135m-instruct"]
    result = run("generate", "hi")
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    "args",
    ["generate", "generate hi --max-tokens many", "generate hi --nope", "nope", "bench --runs 1.5"],
)
def test_what_does_not_parse_is_a_usage_error(args: str) -> None:
    result = run(*args.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(r"^Error: .+\n\Z", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda folder: "smollm3", 2, ["smollm3", "smollm2-135m-instruct"]),
        (lambda folder: str(folder / "missing"), 2, ["missing", "no such file or folder"]),
        (lambda folder: str(folder / "missing.gguf"), 2, ["missing.gguf", "no such file"]),
        (lambda folder: _file(folder / "a.txt", b"x"), 2, ["a.txt", "not a folder"]),
        (lambda folder: _file(folder / "a.gguf", b""), 1, ["a.gguf", "not a GGUF file"]),
        (lambda folder: _file(folder / "a.gguf", b"GGUF\3\0\0\0ab"), 1, ["truncated GGUF"]),
        (lambda folder: str(folder), 1, ["config.json"]),
        (lambda folder: _model_folder(folder, cut=9), 1, ["model.safetensors", "copy it anew"]),
        (lambda folder: _model_folder(folder), 1, ["no tokenizer"]),
    ],
    ids=["name", "path", "gguf", "text", "empty", "truncated", "folder", "cut", "no tokenizer"],
)
@pytest.mark.parametrize("command", ["generate", "chat", "check", "demo", "bench"])
def test_targets_that_cannot_be_loaded(
    command: str, make: Callable[[Path], str], code: int, words: list[str], tmp_path: Path
) -> None:
    prompt = ["hi"] if command == "generate" else []
    result = run(command, *prompt, "--target", make(tmp_path), SPECULANT_CACHE=str(tmp_path / "c"))
    if command == "bench":  # its progress line is on stderr as well
        assert result.exit_code == code
        assert result.stderr.splitlines()[-1].startswith("speculant: ")
        assert "Traceback" not in result.stderr
    else:
        fails(result, code, *words)


def _file(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _model_folder(folder: Path, cut: int = 0) -> str:
    """A folder with a config and (whole or cut) weights, without a tokenizer."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut])
    return str(folder)


@pytest.mark.real
def test_no_room_for_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=10**12, used=10**12, free=10**6)
    monkeypatch.setattr("speculant.target.convert.shutil.disk_usage", lambda path: full)
    result = run("generate", "hi", SPECULANT_CACHE=str(tmp_path))
    fails(result, 1, "disk is full", "SPECULANT_CACHE")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_errors_of_the_system_are_one_line(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: BaseException) -> Callable[..., Any]:
        def load(*_: Any, **__: Any) -> Any:
            raise error

        return load

    for error, code in (
        (OSError(errno.ENOSPC, "No space left\non device"), 1),
        (LoadError("broken file"), 1),
        (MemoryError(), 1),
    ):
        monkeypatch.setattr("speculant.target.load.load_target", failing(error))
        fails(run("generate", "hi"), code)
    monkeypatch.setattr("speculant.target.load.load_target", failing(KeyboardInterrupt()))
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


# help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    out = ok(command, "--help")
    assert f"Usage: speculant {command}" in out
    assert "--target" in out


def test_help_lists_the_commands_and_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from speculant.cli import app\n"
        "for args in (['--help'], ['--version'], *([c, '--help'] for c in sys.argv[1:])):\n"
        "    try:\n"
        "        app(args)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'scipy', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    for command in COMMANDS:
        assert f"  {command} " in out.stdout
    assert f"speculant {__version__}\n" in out.stdout


def test_no_command_shows_help_and_fails() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.output


# chat


def chat(*lines: str, args: Sequence[str] = (), **env: str) -> list[str]:
    """What `chat` says to each line, and last to the end of input."""
    out = ok("chat", "--max-tokens", "12", *args, stdin="".join(f"{x}\n" for x in lines), **env)
    greeting, *replies = out.split("> ")
    assert "/reset forgets, /stats counts, /exit leaves" in greeting
    return replies


def test_chat_remembers(models: Models) -> None:
    first, second, end = chat("hello", "and then?")
    expected = text_of(models.answer("hello", 12))
    assert first == expected + "\n"
    assert end == "\n"
    history = [("user", "hello"), ("assistant", expected), ("user", "and then?")]
    assert models.conversations == [[("user", "hello")], history]
    ids = models.target.tokenizer.encode(template(history))
    assert second == text_of(until_eos(models.target.greedy(ids, 12))) + "\n"


def test_chat_resets_but_keeps_the_system_message(models: Models) -> None:
    replies = chat("hello", "/reset", "again", args=["--system", "be brief"])
    assert replies[1] == "forgotten\n"
    system = ("system", "be brief")
    assert models.conversations == [[system, ("user", "hello")], [system, ("user", "again")]]


def test_chat_counts(models: Models) -> None:
    before, first, second, after, _ = chat("/stats", "hello", "more", "/stats")
    assert before.startswith("0 tokens in 0 target forwards")
    expected = models.answer("hello", 12)
    history = [("user", "hello"), ("assistant", text_of(expected)), ("user", "more")]
    ids = models.target.tokenizer.encode(template(history))
    total = len(expected) + len(until_eos(models.target.greedy(ids, 12)))
    numbers = re.match(r"(\d+) tokens in (\d+) target forwards \(([\d.]+) a forward\)", after)
    assert numbers is not None
    assert int(numbers[1]) == total
    assert float(numbers[3]) == pytest.approx(total / int(numbers[2]), abs=0.006)
    drafted = re.search(r"(\d+) of (\d+) drafted tokens accepted \((\d+)%\)\n$", after)
    assert drafted is not None
    assert total == int(numbers[2]) + int(drafted[1])
    assert first
    assert second


def test_chat_commands(models: Models) -> None:
    unknown, blank, left = chat("/help me", "   ", "/exit", "never read")
    assert unknown == "unknown command /help me: /reset, /stats or /exit\n"
    assert (blank, left) == ("", "")
    assert models.conversations == []
    assert ok("chat", stdin="").endswith("> \n")


def test_chat_says_when_the_conversation_no_longer_fits(models: Models) -> None:
    models.target = FakeTarget(seed=4, context_length=96, tokenizer=ChatTokenizer())
    first, full, stats, reset, again, _ = chat("hello", "a" * 80, "/stats", "/reset", "hello")
    assert re.fullmatch(
        r"the prompt has \d+ tokens and the context holds 96: shorten the prompt, or /reset\n", full
    )
    assert stats.startswith(f"{len(models.answer('hello', 12))} tokens")
    assert (reset, again) == ("forgotten\n", first)


def test_a_turn_that_did_not_fit_is_not_remembered(models: Models) -> None:
    models.target = FakeTarget(seed=4, context_length=96, tokenizer=ChatTokenizer())
    chat("hello", "a" * 80, "so?")
    assert [role for role, _ in models.conversations[-1]] == ["user", "assistant", "user"]
    assert models.conversations[-1][-1] == ("user", "so?")


def test_chat_survives_a_stray_byte(models: Models) -> None:
    out = ok("chat", "--max-tokens", "4", stdin=b"a\xffb\n/stats\n")
    assert models.conversations == [[("user", "a\ufffdb")]]
    assert "target forwards" in out


def test_chat_shows_drafts(models: Models) -> None:
    first, _ = chat("hello", args=["--show-draft"], NO_COLOR="1")
    text = text_of(models.answer("hello", 12))
    assert first == f"{text}\naccepted recovered bonus plain \n"


def test_chat_samples_with_a_seed(models: Models) -> None:
    def said(seed: str) -> str:
        return chat("hello", args=["--seed", seed])[0]

    assert said("1") == said("1")
    assert len({said(str(seed)) for seed in range(5)}) > 1


def test_chat_refuses_bad_input(models: Models) -> None:
    fails(run("chat", "--top-p", "0"), 2, "top_p")
    fails(run("chat", "--system", "\udcff"), 2, "UTF-8")
    assert models.loads == []
    fails(run("chat", "--target", "bare"), 2, "no chat template", "--raw")


# check, demo, bench


def test_check_passes_a_lossless_pair(models: Models) -> None:
    args = ("--samples", "2000", "--draft", "lookahead")
    report = json.loads(ok("check", "--json", *args))
    assert report["passed"] is True
    assert all(check["passed"] for check in report["checks"])
    text = ok("check", *args)
    assert "verdict: lossless" in text
    assert text.count("pass ") == len(report["checks"])


def test_check_fails_a_broken_one(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache.keep

    def careless(self: KVCache, slot: int, offsets: Sequence[int]) -> None:
        real(self, slot, range(len(offsets)))

    monkeypatch.setattr(KVCache, "keep", careless)
    result = run("check", "--samples", "1000", "--draft", "lookahead", "--json")
    assert result.exit_code == 1
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert "roll-back" in {check["name"] for check in report["checks"] if not check["passed"]}


def test_exit_code_and_options_of_check(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stub(*_: Any, **options: Any) -> Report:
        given.update(options)
        return Report("t", "d", [Check("one", given["seed"] == 0, "detail", {})], False)

    monkeypatch.setattr("speculant.check.run_checks", stub)
    assert run("check").exit_code == 0
    assert callable(given.pop("progress"))
    assert given == {"samples": 50_000, "seed": 0, "rule": "block", "depth": None}
    result = run("check", "--seed", "3", "--rule", "token", "-n", "2", "--samples", "4000")
    assert result.exit_code == 1
    assert "NOT lossless" in result.stdout
    assert callable(given.pop("progress"))
    assert given == {"samples": 4000, "seed": 3, "rule": "token", "depth": 2}


def test_check_refuses_bad_input(models: Models) -> None:
    fails(run("check", "--rule", "typical"), 2, "typical", "block or token")
    assert models.loads == []
    fails(run("check", "--samples", "10"), 2, "samples")


@pytest.fixture
def wide(models: Models) -> Models:
    """A target whose context holds the demo's prompts."""
    models.target = FakeTarget(seed=4, context_length=4096, tokenizer=ChatTokenizer())
    return models


def test_demo_shows_both_texts_and_the_numbers(wide: Models) -> None:
    from speculant.demo import PROMPTS

    out = ok("demo", "--max-tokens", "30", "--draft", "lookahead", COLUMNS="200")
    assert "The texts are identical, token for token." in out
    for task, prompt in PROMPTS:
        expected = text_of(wide.answer(prompt, 30))
        assert out.count(expected) >= 2, task
        assert f"{task}, temperature 0" in out
    for word in ("plain tokens/s", "ratio", "acceptance", "length"):
        assert word in out
    assert len(re.findall(r"\d+\.\d\dx", out)) == len(PROMPTS)


def test_demo_fails_when_the_texts_differ(wide: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculant import demo

    real = demo.compare

    def compare(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        out[0].ours.token_ids[-1] += 1
        return out

    monkeypatch.setattr(demo, "compare", compare)
    result = run("demo", "--max-tokens", "8")
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout
    fails(run("demo", "--max-tokens", "0"), 2, "max_tokens")


BENCH = [
    (["--runs", "0"], "--runs"),
    (["--max-tokens", "1"], "--max-tokens"),
    (["--drafts", "ngram,medusa9"], "medusa9"),
    (["--drafts", "none"], "drafts nothing"),
    (["--drafts", ""], "--drafts"),
    (["--threads", "0"], "--threads is 0"),
]


@pytest.mark.parametrize(("args", "word"), BENCH, ids=label)
def test_bench_refuses_bad_input(models: Models, args: list[str], word: str) -> None:
    fails(run("bench", *args), 2, word)
    assert models.loads == []


# Real processes on the bundled model


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process that takes Ctrl-C, even where the tests run in the background."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "speculant.cli", *args],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SPECULANT_CACHE": _cache()},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _cache() -> str:
    from speculant.target.convert import cache_folder

    return str(cache_folder())


def read(process: subprocess.Popen[bytes], count: int) -> bytes:
    """`count` bytes of standard output as they come."""
    out = b""
    assert process.stdout is not None
    while len(out) < count:
        more = os.read(process.stdout.fileno(), count - len(out))
        assert more, process.communicate()
        out += more
    return out


STORY = "Write a long story about a lighthouse keeper."


@pytest.mark.real
@pytest.mark.parametrize("more", [[], ["--show-draft"]], ids=["text", "show-draft"])
def test_ctrl_c_in_a_stream(bundled: Path, more: list[str]) -> None:
    with started("generate", STORY, "--max-tokens", "2000", "--ignore-eos", *more) as process:
        assert len(read(process, 30)) == 30
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert errors == b"\ninterrupted\n"


@pytest.mark.real
def test_ctrl_c_in_a_chat(bundled: Path) -> None:
    with started("chat", "--max-tokens", "2000") as process:
        assert process.stdin is not None
        process.stdin.write(STORY.encode() + b"\n")
        process.stdin.flush()
        read(process, 120)  # the greeting, and the first words of the answer
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"\ninterrupted\n"


@pytest.mark.real
@pytest.mark.parametrize("more", [[], ["--show-draft"]], ids=["text", "show-draft"])
def test_a_reader_that_leaves(bundled: Path, more: list[str]) -> None:
    """As in `speculant generate ... | head -c 10`."""
    with started("generate", STORY, "--max-tokens", "2000", "--ignore-eos", *more) as process:
        read(process, 10)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=20) == 1
        assert process.stderr.read() == b""


@pytest.mark.real
def test_the_bundled_model_answers(bundled: Path) -> None:
    """Plain and speculative decoding in processes of their own: one line of JSON, one text."""
    answers = []
    for draft in ("none", "ngram"):
        args = ("generate", "-", "--json", "--max-tokens", "24", "--draft", draft)
        with started(*args) as process:
            out, errors = process.communicate("Repeat: a b c a b c 🐳".encode(), timeout=60)
            assert (process.returncode, errors) == (0, b"")
            assert out.count(b"\n") == 1
            answers.append(json.loads(out))
    plain, ours = answers
    assert plain["token_ids"] == ours["token_ids"]
    assert plain["text"] == ours["text"] != ""
    assert plain["metrics"]["num_drafts"] == 0
    assert ours["metrics"]["num_drafts"] > 0


@pytest.mark.real
def test_closed_streams(bundled: Path) -> None:
    """`<&-` and `>&-` behave as /dev/null."""
    command = f"{sys.executable} -m speculant.cli generate"
    out = subprocess.run(f"{command} - <&-", shell=True, capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "speculant: the prompt is empty: give at least one character\n"
    out = subprocess.run(
        f"{command} hi --max-tokens 3 >&-", shell=True, capture_output=True, text=True
    )
    assert (out.returncode, out.stderr) == (0, "")
