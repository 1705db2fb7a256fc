"""`speculant tune` as a user runs it: pages, JSON, files, and every wrong input in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculant.cli import app


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def example(tmp_path: Path) -> Path:
    code, text, _ = run("--example")
    assert code == 0
    path = tmp_path / "workload.yaml"
    path.write_text(text)
    return path


def changed(example: Path, old: str, new: str) -> Path:
    text = example.read_text()
    assert old in text
    example.write_text(text.replace(old, new))
    return example


def test_the_example_gives_a_page_of_nine_sections(example: Path) -> None:
    code, page, err = run(str(example))
    assert (code, err) == (0, "")
    assert page.startswith("# Speculative decoding for meta-llama/Llama-3.1-8B-Instruct")
    assert page.count("\n## ") == 9
    assert run(str(example))[1] == page


def test_json_and_page_agree(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    code, text, _ = run(str(example), "--out", str(out), "--json")
    assert code == 0
    page = json.loads(text)
    assert out.read_text().count("\n## ") == 9
    assert f"**Use {page['family']}" in out.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.md", "workload.yaml"]


def test_the_schema_is_json_schema(example: Path) -> None:
    code, text, _ = run("--schema")
    assert code == 0
    assert json.loads(text)["properties"]["target"]["$ref"] == "#/$defs/Target"


def test_another_machine_on_the_command_line(example: Path) -> None:
    assert "1x B200" in run(str(example), "--hardware", "B200")[1]
    code, _, err = run(str(example), "--hardware", "measured")
    assert code == 2
    assert "telemetry.profile" in err


def test_predictions_as_table_and_json(tmp_path: Path) -> None:
    records = [
        {"id": "a", "method": "EAGLE-3 (SGLang, chain)", "target_model": "Llama-3.1-8B-Instruct",
         "batch_size": 1, "tau": 2.5, "num_draft_tokens": 3, "speedup": 1.8},
        {"id": "b"},
    ]  # fmt: skip
    path = tmp_path / "records.json"
    path.write_text(json.dumps(records))
    code, text, _ = run("--predict", str(path))
    assert code == 0
    assert "1 rows: median absolute error" in text
    assert "no method: b" in text
    out = tmp_path / "table.txt"
    code, text, _ = run("--predict", str(path), "--json", "--out", str(out))
    data = json.loads(text)
    assert data["summary"]["rows"] == 1
    assert data["records"][0]["id"] == "a"
    assert "predicted" in out.read_text()


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("count: 1", "count: -1", "hardware.count"),
        ("count: 1", "count: 1\n  cuont: 2", "hardware.cuont: unknown key"),
        ("prompt_tokens: 1000", "prompt_tokens: .nan", "finite"),
        ("prompt_tokens: 1000", "prompt_tokens: -5", "prompt_tokens"),
        ("p50_ms: 8", "p50_ms: .inf", "p50_ms"),
        ("dtype: bfloat16", "dtype: bf17", "bf17"),
        ("name: H100", "name: abacus", "not in the table"),
        ('version: "0.32.0"', "version: latest", "latest"),
        ("{chat: 0.6", "{chit: 0.6", "chit"),
        ("{chat: 0.6, code: 0.3, rag: 0.1}", "{chat: 0}", "add up to 0"),
        ("0.7: 0.3}", "0.7: 1.3}", "temperatures"),
        ("telemetry: {}", "telemetry: {profile: gone.json}", "gone.json"),
        ("telemetry: {}", "telemetry: {profile: workload.yaml}", "not JSON"),
        ("telemetry: {}", "telemetry: {vllm_metrics: workload.yaml, draft: eagle3}", "counters"),
        ("telemetry: {}", "telemetry: {sglang_meta_info: workload.yaml}", "not JSON"),
        ("target:", "target: [", "line"),
        ("stack:", "target:\n  model: x\nstack:", "twice"),
        ("  model: meta-llama/Llama-3.1-8B-Instruct ", "  model: some/unknown ", "params_b"),
    ],
)  # fmt: skip
def test_wrong_workloads_are_one_line(example: Path, old: str, new: str, word: str) -> None:
    code, out, err = run(str(changed(example, old, new)))
    assert code == 2
    assert out == ""
    assert word in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"- 1\n", b"a: b: c", b"{}", b"\x00"])
def test_wrong_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    for option in ((), ("--predict",)):
        path = tmp_path / "f.yaml"
        path.write_bytes(content)
        code, _, err = run(*option, str(path))
        assert code == 2, (option, content)
        assert err.startswith("speculant: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [(), ("gone.yaml",), ("--predict", "gone.json"), ("--example", "--schema"), (".",)],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_line(example: Path, tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "no" / "page.md"):
        code, _, err = run(str(example), "--out", str(out))
        assert code == 2
        assert err.count("\n") == 1


def test_it_runs_without_torch(example: Path) -> None:
    code = (
        "import sys\nfrom speculant.cli import main\n"
        f"sys.argv = ['speculant', 'tune', {str(example)!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
