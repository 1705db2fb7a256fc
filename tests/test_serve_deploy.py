"""The files around the server name what there is: metrics, flags, paths; and the tuner reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from serving import MODEL, Running, serving
from speculant.tune.telemetry import read_prometheus

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(tasks=("chat", "code")) as server:
        yield server


@pytest.fixture(scope="module")
def metrics(running: Running) -> str:
    """/metrics after a few requests of two tasks and two drafts."""
    talk: list[Any] = [{"role": "user", "content": "one two one two one two"}]
    for i in range(6):
        running.client().chat.completions.create(
            model=MODEL, messages=talk, max_tokens=30, temperature=0.2 * i, seed=i,
            extra_body={"task": ("chat", "code")[i % 2], "speculation": ("ngram", "vanilla")[i // 3]},
        )  # fmt: skip
    running.worker._switch_off("vanilla", "acceptance")
    running.worker.metrics.cancelled("timeout")
    running.worker.metrics.refused("queue_full")
    return urlopen(f"{running.url}/metrics").read().decode()


def names(text: str) -> set[str]:
    return set(re.findall(r"speculant:(\w+)", text))


def test_the_dashboard_asks_for_what_there_is(metrics: str) -> None:
    there = names(metrics)
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = names(json.dumps(board))
    assert len(asked) > 12
    assert asked <= there, asked - there
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        for target in panel["targets"]:
            used = set(", ".join(re.findall(r"by \(([\w, ]+)\)", target["expr"])).split(", ")) - {
                ""
            }
            assert used <= {"draft", "task", "position", "depth", "le", "finished_reason", "reason"}
            assert target["expr"].count("(") == target["expr"].count(")")


def test_the_docs_name_what_there_is(metrics: str) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    table = page[page.index("| metric |") : page.index("`task` is empty")]
    first = [line.split("|")[1] for line in table.splitlines() if line]
    told = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert len(told) > 15
    there = names(metrics)
    for name in told:
        assert name in there or f"{name}_count" in there, name
    told_of = {n.removesuffix(end) for n in told for end in ("_total", "")}
    for line in metrics.splitlines():
        if line.startswith("# TYPE"):
            name = line.split()[2].removeprefix("speculant:").removesuffix("_total")
            assert name in told_of or name.endswith("_created"), name


def test_the_tuner_reads_it(metrics: str, running: Running) -> None:
    """The counters by draft and task are those that the server holds."""
    counted = {(c.draft, c.task): c for c in read_prometheus(metrics, "metrics.txt")}
    assert set(counted) <= {(d, t) for d in ("ngram", "vanilla") for t in ("chat", "code")}
    assert ("vanilla", "chat") in counted
    for (draft, task), count in counted.items():
        labels = (MODEL, draft, task)
        held = running.service.metrics
        assert count.num_drafts == held.num_drafts.labels(*labels)._value.get()
        assert count.num_accepted_tokens == held.num_accepted.labels(*labels)._value.get()
        assert sum(count.accepted_per_pos) == count.num_accepted_tokens


def test_containers_are_probed_keyed_and_not_root() -> None:
    """Probed paths answer; keys come from a secret; nobody is root, and nothing can become it."""
    docker = (DEPLOY / "Dockerfile").read_text()
    stage = docker[docker.rindex("\nFROM python") : docker.index("# vLLM")]
    assert stage.index("\nUSER ") < stage.index("\nENTRYPOINT ")
    user = re.search(r"useradd .*--uid (\d+) (\w+)", stage)
    assert user
    assert f"\nUSER {user[2]}\n" in stage
    paths = set(re.findall(r"127\.0\.0\.1:8000(/\w+)", stage[stage.index("HEALTHCHECK") :]))
    assert "KEY=" not in stage
    kube = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    for pod in (d["spec"]["template"]["spec"] for d in kube if d["kind"] == "Deployment"):
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe"):
            if probe in container:
                paths.add(container[probe]["httpGet"]["path"])
                assert container[probe]["httpGet"]["port"] in ports
        (key,) = container["env"]
        assert key["name"] == "SPECULANT_API_KEY"
        assert key["valueFrom"]["secretKeyRef"] == {"name": "speculant", "key": "api-key"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert ports == {"http": 8000}
    first = next(d for d in kube if d["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert first["securityContext"]["runAsNonRoot"]
    assert first["securityContext"]["runAsUser"] == int(user[1])
    with serving(api_key="k") as keyed:  # probes bring no key
        for path in paths:
            assert urlopen(f"{keyed.url}{path}").status == 200


def test_flags_in_the_containers_exist() -> None:
    from typer.testing import CliRunner

    from speculant.cli import app

    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"}).output
    docker = (DEPLOY / "Dockerfile").read_text()
    kube = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pods = [d["spec"]["template"]["spec"] for d in kube if d["kind"] == "Deployment"]
    first, vllm = (pod["containers"][0]["args"] for pod in pods)
    built = re.findall(
        r'"(--[\w-]+)"', docker[docker.index("\nENTRYPOINT") : docker.index("# vLLM")]
    )
    for flag in (*built, *first, *(f for f in vllm if f != "--tensor-parallel-size")):
        if flag.startswith("--"):
            assert f"{flag} " in text, flag
    seconds = int(first[first.index("--shutdown-timeout") + 1])
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > seconds
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", docker, re.MULTILINE):
        for part in source.split():
            assert (ROOT / part).exists(), part
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["job_name"] == "speculant"
