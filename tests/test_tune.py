"""The tuner: its nine answers, its refusals, its readers; against closed forms and real formats."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from speculant.cost import Roofline, draft_shape, plan, write_profile
from speculant.cost.profile import (
    Accepted,
    DraftProfile,
    ForwardTime,
    Profile,
    ProfiledMachine,
    ProfiledTarget,
    ProposeTime,
)
from speculant.tune.facts import data, engine_for
from speculant.tune.hardware import find_machines, find_model, shape_from_config
from speculant.tune.recommend import recommend
from speculant.tune.report import render
from speculant.tune.stacks import has_family, stack_names, version_key
from speculant.tune.telemetry import read_meta_info, read_prometheus
from speculant.tune.workload import checked, read_workload, schema

RATES = [0.8, 0.62, 0.47, 0.36, 0.27]
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 750.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 450.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 300.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def workload(tmp_path: Path = Path("."), **changes: Any) -> Any:
    """A workload with a matching EAGLE-3 head and measured acceptance."""
    raw: dict[str, Any] = {
        "target": {"model": "meta-llama/Llama-3.1-8B-Instruct", "tokenizer": "llama-3.1"},
        "hardware": {"name": "H100"},
        "stack": {"name": "vllm", "version": "0.32.0"},
        "traffic": {"batch_sizes": [1, 8, 32], "concurrency": 8},
        "telemetry": {"acceptance": [{"family": "eagle3", "acceptance_per_position": RATES}]},
        "heads": [{"family": "eagle3", "model": "org/head", "tokenizer": "llama-3.1"}],
        "folder": str(tmp_path),
    }
    for key, value in changes.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and key in raw else value
    return checked(raw, "test")


def codes(page: dict[str, Any]) -> dict[str, str]:
    return {f["code"]: f["level"] for f in page["findings"]}


def test_the_length_is_the_fastest_of_a_search() -> None:
    page = recommend(workload())
    target, _ = find_model("Llama-3.1-8B")
    assert target is not None
    machine = find_machines("H100")[0]
    context = 1000 + 300 // 2
    draft = draft_shape("eagle3", target)
    times = Roofline(target, machine, engine_for("vllm"), draft, context)
    ratio = RATES[-1] / RATES[-2]  # past the measured end
    rates = [*RATES, *(RATES[-1] * ratio**i for i in range(1, 12))]
    per_token = {
        n: times.round_ms(8, plan("eagle3", n)) / (1 + sum(rates[:n])) for n in range(1, 17)
    }
    best = min(per_token, key=lambda n: per_token[n])
    assert page["decision"] == "on"
    assert page["family"] == "eagle3"
    assert page["num_draft_tokens"] == best
    row = next(a for a in page["arithmetic"] if a["num_draft_tokens"] == best)
    assert row["token_ms"] == pytest.approx(per_token[best], abs=1e-4)
    assert row["speedup"] == pytest.approx(times.plain_ms(8) / per_token[best], abs=1e-3)
    shown = [a["num_draft_tokens"] for a in page["arithmetic"]]
    assert {0, best - 1, best, best + 1} <= set(shown)


def test_a_page_has_the_nine_answers_and_is_repeatable() -> None:
    first, second = recommend(workload()), recommend(workload())
    assert first == second
    text = render(first)
    assert text == render(second)
    assert re.findall(r"^## (\d)", text, re.MULTILINE) == [str(i) for i in range(1, 10)]
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    low, point, high = (first["expected_speedup"][k] for k in ("low", "point", "high"))
    assert low < point < high
    assert first["runner_up"]["family"] == "ngram"


def test_the_vllm_configuration_is_one_that_vllm_takes() -> None:
    page = recommend(workload(traffic={"batch_sizes": [1, 256], "concurrency": 1}))
    command = page["configuration"]["vllm"]
    config = json.loads(re.search(r"--speculative-config '(.*)'", command)[1])  # type: ignore[index]
    # fields of SpeculativeConfig in vLLM 0.32.0
    known = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    assert set(config) <= known
    assert config["method"] == "eagle3"
    assert config["model"] == "org/head"
    table = config["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1
    for (_, end, _), (start, _, _) in itertools.pairwise(table):
        assert start == end + 1
    assert max(k for _, _, k in table) == config["num_speculative_tokens"]
    assert table[-1][2] < table[0][2]  # longer at small batches
    lengths = [c["lengths"] for c in page["rechecks"]]
    assert len(lengths) == 2 * (len(table) - 1)


def test_an_older_vllm_gets_one_length() -> None:
    page = recommend(workload(stack={"name": "vllm", "version": "0.11.0"}))
    assert "per_batch_size" not in page["configuration"]["vllm"]
    assert page["dynamic_length"] is False


def test_sglang_counts_the_root() -> None:
    page = recommend(workload(stack={"name": "sglang", "version": "0.5.6"}))
    flags = page["configuration"]["sglang"]
    steps = int(re.search(r"--speculative-num-steps (\d+)", flags)[1])  # type: ignore[index]
    drafted = int(re.search(r"--speculative-num-draft-tokens (\d+)", flags)[1])  # type: ignore[index]
    assert "--speculative-algorithm EAGLE3" in flags
    if "--speculative-eagle-topk 1 " in flags:
        assert drafted == steps + 1
    else:
        assert drafted > steps + 1
    assert next(iter(page["configuration"])) == "sglang"


def test_tensorrt_gets_eagle3_and_medusa() -> None:
    page = recommend(workload(stack={"name": "tensorrt-llm", "version": "1.2"}))
    text = page["configuration"]["tensorrt-llm"]
    assert "decoding_type: Eagle3" in text
    assert "speculative_model: org/head" in text
    page = recommend(checked({
        "target": {"model": "Llama-3.1-70B"}, "hardware": {"name": "H100", "count": 4},
        "stack": {"name": "tensorrt-llm", "version": "1.0"}, "tasks": {"code": 1},
        "traffic": {"batch_sizes": [1]}, "heads": [{"family": "medusa", "model": "org/medusa"}],
    }, "t"))  # fmt: skip
    assert page["family"] == "medusa"
    assert "MedusaDecodingConfig" in page["configuration"]["tensorrt-llm"]


def test_a_version_without_the_family_is_downgraded() -> None:
    page = recommend(workload(stack={"name": "vllm", "version": "0.8.0"}))
    assert codes(page)["no_eagle3"] == "downgrade"
    assert page["family"] in ("ngram", "off")
    assert [c["family"] for c in page["candidates"]] == ["ngram"]


@pytest.mark.parametrize(
    ("head", "code"),
    [
        ({"tokenizer": "qwen"}, "head_tokenizer"),
        ({"base": "other/model"}, "head_base"),
        ({"base_revision": "abc"}, "head_base_revision"),
    ],
)
def test_a_head_of_another_target_is_refused(head: dict[str, str], code: str) -> None:
    target = {"revision": "def"}
    heads = [{"family": "eagle3", "model": "org/head"} | head]
    page = recommend(workload(target=target, heads=heads, telemetry={"acceptance": []}))
    assert codes(page)[code] == "refuse"
    assert page["family"] != "eagle3"


def test_anything_lossy_is_refused() -> None:
    page = recommend(workload(acceptance_rule="typical"))
    assert codes(page)["lossy"] == "refuse"
    assert "Refuse: acceptance_rule typical" in render(page)
    for text in page["configuration"].values():
        assert "typical" not in (text or "")
        assert "threshold" not in (text or "")


def test_no_rollback_is_off() -> None:
    page = recommend(workload(target={"kv_rollback": False}))
    assert page["decision"] == "off"
    assert codes(page)["no_rollback"] == "refuse"
    assert "speculative" not in page["configuration"]["vllm"]


@pytest.mark.parametrize(
    ("billions", "decision", "code"),
    [(1.2, "off", "small_target"), (4.0, "on", "medium_target"), (8.0, "on", None)],
)
def test_small_targets_are_off_and_medium_ones_warned(
    billions: float, decision: str, code: str | None
) -> None:
    page = recommend(workload(target={"model": None, "params_b": billions}))
    assert page["decision"] == decision
    found = {c for c in codes(page) if c.endswith("_target")}
    assert found == ({code} if code else set())


def test_hot_creative_work_without_telemetry_asks_for_a_calibration() -> None:
    changes = {"tasks": {"creative": 1.0}, "temperatures": {1.0: 1.0}}
    page = recommend(checked({
        "target": {"model": "Llama-3.1-8B"}, "hardware": {"name": "H100"},
        "stack": {"name": "vllm"}, "heads": [{"family": "eagle3", "model": "h"}], **changes,
    }, "t"))  # fmt: skip
    assert page["decision"] == "calibrate"
    assert page["family"] == "off"
    assert any("speculant profile" in c for c in page["calibration"]["commands"])
    assert recommend(workload(**changes))["decision"] == "on"  # measured: nothing to ask for


def test_a_draft_that_costs_more_than_it_saves_is_off() -> None:
    poor = {"acceptance": [{"family": "eagle3", "acceptance_per_position": [0.1, 0.01]},
                           {"family": "ngram", "acceptance_per_position": [0.02]}]}  # fmt: skip
    page = recommend(workload(telemetry=poor, traffic={"batch_sizes": [1], "concurrency": 1}))
    assert page["decision"] == "off"
    assert "drafting costs what it saves" in page["reason"]
    assert "speculative" not in page["configuration"]["vllm"]


def test_ragged_batches_that_a_stack_cannot_are_refused() -> None:
    page = recommend(workload(stack={"name": "transformers", "version": "5.0"}))
    assert codes(page)["ragged"] == "refuse"
    assert page["rollback"]["ragged_at_this_batch"] is False
    assert page["decision"] == "off"


def test_the_temperature_gate_follows_what_was_measured() -> None:
    rows = [
        {"family": "eagle3", "temperature": 0.0, "acceptance_per_position": RATES},
        {"family": "eagle3", "temperature": 1.0, "acceptance_per_position": [0.05, 0.001]},
        {"family": "ngram", "temperature": 0.0, "acceptance_per_position": [0.01]},
    ]
    page = recommend(workload(telemetry={"acceptance": rows}))
    gate = page["temperature_gate"]
    assert gate["threshold"] is not None
    assert 0.3 < gate["threshold"] <= 1.0
    assert gate["above"] == "off"
    speeds = [r["speedup"] for r in gate["table"]]
    assert speeds == sorted(speeds, reverse=True)


def test_tasks_and_temperatures_are_mixed_by_their_shares() -> None:
    rows = [
        {"family": "eagle3", "task": "code", "acceptance_per_position": [0.9, 0.8]},
        {"family": "eagle3", "task": "chat", "acceptance_per_position": [0.5, 0.2]},
    ]
    shares = {"code": 0.75, "chat": 0.25}
    page = recommend(workload(telemetry={"acceptance": rows}, tasks=shares))
    assert page["acceptance_per_position"][:2] == pytest.approx([0.8, 0.65])


def test_a_tree_is_used_only_where_it_pays() -> None:
    page = recommend(workload(
        stack={"name": "sglang", "version": "0.5.6"}, hardware={"name": "H100", "count": 4},
        target={"model": "meta-llama/Llama-3.3-70B-Instruct"},
        traffic={"batch_sizes": [1, 64], "concurrency": 1},
        telemetry={"acceptance": [
            {"family": "eagle3", "acceptance_per_position": [0.74**i for i in range(1, 9)]}]},
    ))  # fmt: skip
    small, large = page["trees"]
    assert small["use"] == "tree"
    assert small["tree_speedup"] > small["chain_speedup"]
    assert large["use"] in ("chain", "off")
    assert "--speculative-eagle-topk 10 " in page["configuration"]["sglang"]


def test_a_tree_stays_within_memory() -> None:
    page = recommend(workload(
        stack={"name": "sglang", "version": "0.5.6"},
        hardware={"name": "tiny", "bandwidth_gb_s": 3350, "tflops": 989, "memory_gb": 17.9},
        traffic={"batch_sizes": [1], "concurrency": 1, "prompt_tokens": 10, "output_tokens": 10},
    ))  # fmt: skip
    row = page["trees"][0]
    # 16.11 GB are left of 0.9 x 17.9, less 16.06 GB of weights: some 40 nodes of 1.16 MB
    assert row["nodes"] <= 44


def test_vllm_counters_are_read() -> None:
    (count,) = read_prometheus(METRICS, "m")
    assert count.mean_acceptance_length == 2.5
    assert count.per_position == [0.75, 0.45, 0.3]


def test_our_counters_are_read_by_draft_and_task() -> None:
    text = METRICS.replace("vllm:", "speculant:").replace(
        'engine="0"', 'draft="eagle3",task="code"'
    ) + METRICS.replace("vllm:", "speculant:").replace('engine="0"', 'draft="ngram",task="chat"')
    counts = read_prometheus(text, "m")
    assert [(c.draft, c.task) for c in counts] == [("eagle3", "code"), ("ngram", "chat")]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no spec_decode counters"),
        ("vllm:spec_decode_num_drafts_total 0\n", "num_drafts is 0"),
        ("vllm:spec_decode_num_drafts_total NaN\n", "line 1"),
        ("vllm:spec_decode_num_drafts_total -3\n", "0 or more"),
        ('vllm:spec_decode_num_drafts_total 1\nspec_decode_num_accepted_tokens_per_pos_total'
         '{position="x"} 1\n', "position is 'x'"),
    ],
)  # fmt: skip
def test_wrong_counters_are_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=re.escape(word)):
        read_prometheus(text, "m")


def test_meta_info_of_sglang_is_read() -> None:
    with_histogram = [
        {"meta_info": {"completion_tokens": 9, "spec_verify_ct": 4,
                       "spec_accept_histogram": [1, 2, 1]}},
        {"completion_tokens": 3, "spec_verify_ct": 2, "spec_accept_histogram": [2]},
    ]  # fmt: skip
    count = read_meta_info(json.dumps(with_histogram), "m")
    assert count.per_position == pytest.approx([3 / 6, 1 / 6])
    plain = read_meta_info('{"completion_tokens": 26, "spec_verify_ct": 10}', "m")
    assert plain.mean_acceptance_length == pytest.approx(2.5)  # 25 tokens of 10 rounds
    for text in ("[]", "{}", '{"spec_verify_ct": 0}', "nonsense", '[{"spec_verify_ct": "x"}]'):
        with pytest.raises(ValueError, match="m"):
            read_meta_info(text, "m")


def test_the_servers_counters_replace_published_acceptance(tmp_path: Path) -> None:
    (tmp_path / "metrics.txt").write_text(METRICS)
    telemetry = {"acceptance": [], "vllm_metrics": "metrics.txt", "draft": "eagle3"}
    page = recommend(workload(tmp_path, telemetry=telemetry))
    assert page["acceptance_per_position"][:3] == [0.75, 0.45, 0.3]
    assert "metrics.txt" in page["reason"]
    with pytest.raises(ValueError, match=r"telemetry\.draft"):
        recommend(workload(tmp_path, telemetry=telemetry | {"draft": None}))


def profile(path: Path) -> None:
    """A machine whose EAGLE-3 halves the time per token, and whose n-gram rarely drafts."""
    forwards = tuple(ForwardTime(1, r, 10 + 0.5 * (r - 1)) for r in (1, 2, 4, 8))
    eagle = DraftProfile(
        "eagle3", "eagle3", (ProposeTime(1, 1, 1, 0.5), ProposeTime(1, 4, 4, 2.0)),
        (Accepted("all", 0.0, 4, 4, (0.8, 0.6, 0.5, 0.4), 3.3, mean_draft_tokens=4.0, rounds=500),),
        overhead_ms=0.5,
    )  # fmt: skip
    ngram = DraftProfile(
        "ngram", "ngram", (ProposeTime(1, 6, 6, 0.1),),
        (Accepted("all", 0.0, 6, 6, (0.5, 0.4, 0.3, 0.2, 0.1, 0.1), 2.6, 0.25, 4.0, 500),),
    )  # fmt: skip
    target = ProfiledTarget("smollm2", "float32", 134_515_008, 538_060_032)
    made = Profile(target, ProfiledMachine("two cores", threads=2), 256, forwards, (eagle, ngram))
    write_profile(made, path)


def test_a_profile_overrules_the_rule_and_the_roofline(tmp_path: Path) -> None:
    profile(tmp_path / "p.json")
    page = recommend(checked({
        "target": {"model": "smollm2-135m-instruct", "dtype": "float32"},
        "hardware": {"name": "measured"}, "stack": {"name": "speculant"},
        "telemetry": {"profile": "p.json"}, "folder": str(tmp_path),
    }, "t"))  # fmt: skip
    assert page["decision"] == "on"
    assert codes(page)["small_target_measured"] == "note"
    assert page["times_from"] == "profile"
    speeds = {(s["family"], s["nodes"]): s for s in page["strategies"]}
    # eagle3: 10 + 0.5 * 4 forward, 2 drafting, 0.5 overhead, 3.3 tokens
    eagle = speeds["eagle3", 4]["predicted_tokens_per_s"]
    assert eagle == pytest.approx(1e3 * 3.3 / 14.5, abs=0.01)
    # n-gram: a quarter of the rounds drafts 4 tokens, the others look and find nothing
    drafted, plain = 10 + 0.5 * 4 + 0.1, 10.0 + 0.1
    tokens = 0.25 * 2.6 + 0.75
    expected = 1e3 * tokens / (0.25 * drafted + 0.75 * plain)
    assert speeds["ngram", 6]["predicted_tokens_per_s"] == pytest.approx(expected, abs=0.01)
    assert page["family"] == "eagle3"


def test_measured_hardware_needs_a_profile() -> None:
    with pytest.raises(ValueError, match=r"telemetry\.profile"):
        recommend(workload(hardware={"name": "measured"}))


def test_unknown_hardware_needs_its_figures() -> None:
    with pytest.raises(ValueError, match="not in the table"):
        recommend(workload(hardware={"name": "abacus"}))
    ok = {"name": "abacus", "bandwidth_gb_s": 100, "tflops": 10, "memory_gb": 64}
    assert recommend(workload(hardware=ok))["hardware"] == "1x abacus"


def test_a_local_config_gives_the_sizes(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_from_config(tmp_path)
    assert shape.params == pytest.approx(134_515_008, rel=0.001)  # SmolLM2-135M
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shape_from_config(tmp_path)


def test_a_draft_model_is_priced_by_its_size() -> None:
    heads = [{"family": "vanilla", "model": "meta-llama/Llama-3.2-1B", "params_b": 1.2}]
    rows = [{"family": "vanilla", "acceptance_per_position": [0.85, 0.7, 0.6, 0.5]}]
    page = recommend(workload(
        target={"model": "meta-llama/Llama-3.3-70B-Instruct"}, heads=heads,
        hardware={"name": "H100", "count": 4}, telemetry={"acceptance": rows},
        traffic={"concurrency": 1},
    ))  # fmt: skip
    assert page["family"] == "vanilla"
    assert '"method": "draft_model"' in page["configuration"]["vllm"]
    page = recommend(workload(heads=[{"family": "vanilla", "model": "x"}]))
    assert codes(page)["head_size"] == "refuse"


def test_the_training_budget_opens_heads() -> None:
    none = {"heads": [], "telemetry": {"acceptance": []}}
    families = {
        budget: {c["family"] for c in recommend(workload(training_budget=budget, **none))[
            "candidates"]}
        for budget in ("none", "small", "full")
    }  # fmt: skip
    assert families["none"] == {"ngram"}
    assert "eagle1" in families["small"]
    assert "eagle3" not in families["small"]
    assert "eagle3" in families["full"]


def test_facts_have_sources_and_known_names() -> None:
    for row in data("hardware")["rows"]:
        assert row["source"] in data("hardware")["sources"]
    names = {row["name"] for row in data("hardware")["rows"]}
    assert {"A100-80G", "H100", "H200", "B200", "L4", "L40S", "RTX 3090", "RTX 4090",
            "MI300X"} <= names  # fmt: skip
    for name in stack_names():
        for family, entry in data("stacks")["stacks"][name]["families"].items():
            assert entry["source"]
            version_key(entry["since"])
            assert has_family(name, entry["since"], family)


def test_the_example_is_a_workload(tmp_path: Path) -> None:
    import speculant.tune

    source = Path(speculant.tune.__file__).parent / "data" / "example.yaml"
    read = read_workload(source)
    assert recommend(read)["decision"] == "on"
    keys = schema()["properties"]
    assert set(read.model_dump()) == set(keys)
