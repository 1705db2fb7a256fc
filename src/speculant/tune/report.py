"""The recommendation as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LANGUAGE = {"vllm": "sh", "sglang": "sh", "tensorrt-llm": "yaml", "speculant": "sh"}


def render(page: dict[str, Any]) -> str:
    """The page; the same dictionary gives the same text."""
    return "\n".join(_lines(page)).rstrip() + "\n"


def _lines(page: dict[str, Any]) -> Iterator[str]:
    yield f"# Speculative decoding for {page['target']}"
    yield ""
    yield (
        f"{page['target_params_b']:g} billion parameters, {page['hardware']}, {page['stack']}, "
        f"batch {page['usual_batch']}, {page['context']} tokens of context; times from the "
        f"{page['times_from']}."
    )
    yield ""
    yield f"**{_verdict(page)}** {page['reason'][0].upper()}{page['reason'][1:]}."
    yield from _findings(page)
    yield from _families(page)
    if "arithmetic" in page:
        yield from _arithmetic(page)
    if "arithmetic" in page and page["decision"] != "off":
        yield from _trees(page)
        yield from _gate(page)
        yield from _batches(page)
    yield from _rollback(page)
    if "expected_speedup" in page:
        yield from _expected(page)
    yield from _configuration(page)
    yield from _plan(page)


def _verdict(page: dict[str, Any]) -> str:
    if page["decision"] == "on":
        n = page["num_draft_tokens"]
        use: dict[str, Any] = next(r for r in page["trees"] if r["batch"] == page["usual_batch"])
        form = f"a tree of {use['nodes']} nodes" if use["use"] == "tree" else f"N = {n}"
        return f"Use {page['family']}, {form}."
    return "Calibrate first." if page["decision"] == "calibrate" else "Leave it off."


def _findings(page: dict[str, Any]) -> Iterator[str]:
    told = [f for f in page["findings"] if f["text"] != page["reason"]]
    if told:
        yield ""
    for finding in told:
        yield f"- {finding['level'].capitalize()}: {finding['text']}."


def _families(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 1. Draft family", "")
    if not page["candidates"]:
        yield "No family can be used."
        return
    rows = [
        (
            c["family"] + (" (to train)" if c["needs_training"] else ""),
            f"{c['nodes']}",
            f"{c['expected_tokens']:.2f}",
            f"{c['round_ms']:.3g}",
            f"{c['speedup']:.2f}x",
            "measured" if c["measured"] else "published",
        )
        for c in page["candidates"]
    ]
    head = ("family", "drafted", "tokens/forward", "round ms", "speed-up", "acceptance")
    yield from _table(head, rows)
    other = page["runner_up"]
    if other is not None:
        yield ""
        yield f"Runner-up: {other['family']}, {other['speedup']:.2f}x ({other['reason']})."


def _arithmetic(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 2. Draft length", "")
    rates = ", ".join(f"{r:.2f}" for r in page["acceptance_per_position"])
    yield f"Acceptance per position: {rates}. Time per token = round / tokens a forward."
    yield ""
    rows = [
        (
            "plain" if a["num_draft_tokens"] == 0 else f"N = {a['num_draft_tokens']}",
            f"{a['expected_tokens']:.2f}",
            f"{a['round_ms']:.3g}",
            f"{a['token_ms']:.3g}",
            f"{a['speedup']:.2f}x",
        )
        for a in page["arithmetic"]
    ]
    yield from _table(("", "tokens/forward", "round ms", "ms/token", "speed-up"), rows)
    even, stop = page["break_even_acceptance"], page["stops_paying_at_batch"]
    yield ""
    yield (
        ("No acceptance pays here. " if even is None else f"Break-even alpha {even:.2f}. ")
        + ("" if stop is None else f"No length pays from batch {stop} on.")
    ).rstrip()


def _trees(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 3. Tree", "")
    rows = []
    for row in page["trees"]:
        tree = "depth" in row
        rows.append(
            (
                str(row["batch"]),
                f"{row['depth']} x {row['branching']}, {row['nodes']} nodes" if tree else "none",
                f"{row['tree_speedup']:.2f}x" if tree else "-",
                f"{row['chain_speedup']:.2f}x (N = {row['chain_length']})",
                row["use"],
            )
        )
    yield from _table(("batch", "best tree (depth x branching)", "tree", "chain", "use"), rows)
    yield ""
    usual = next(r for r in page["trees"] if r["batch"] == page["usual_batch"])
    yield f"Memory: {usual['memory']}."


def _gate(page: dict[str, Any]) -> Iterator[str]:
    gate = page["temperature_gate"]
    yield from ("", "## 4. Temperature gate", "")
    speeds = ", ".join(f"{r['temperature']:g}: {r['speedup']:.2f}x" for r in gate["table"])
    if gate["threshold"] is None:
        yield f"None needed up to {gate['table'][-1]['temperature']:g} ({speeds})."
    else:
        above = "nothing (plain decoding)" if gate["above"] == "off" else gate["above"]
        yield (
            f"From temperature {gate['threshold']:g} on ({speeds}) use {above}: below "
            f"{gate['worth']:.2f}x it is not worth it. Switching off is "
            f"{page['rollback']['per_request_off']}."
        )
    yield "Above temperature 1 nothing is published: these figures go on in a line."


def _batches(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 5. Draft length per batch size", "")
    table = page["num_speculative_tokens_per_batch_size"]
    how = page["rollback"]["dynamic_length"]
    if not page["dynamic_length"]:
        how = f"{how}: the configuration has the one of batch {page['usual_batch']}"
    yield f"`{table}` ([first batch, last batch, N]; {how})."
    checks = page["rechecks"]
    for below, above in zip(checks[::2], checks[1::2], strict=True):
        one, two = below["lengths"]
        sides = " and ".join(
            f"{c['predicted_token_ms'][0]:.3g} against {c['predicted_token_ms'][1]:.3g} ms/token at "
            f"{c['batch']}"
            for c in (below, above)
        )
        yield f"- re-check N = {one} against {two}: predicted {sides}"


def _rollback(page: dict[str, Any]) -> Iterator[str]:
    back = page["rollback"]
    yield from ("", "## 6. Roll-back", "")
    fits = "supported" if back["ragged_at_this_batch"] else "not supported"
    yield f"{back['mechanism'][0].upper()}{back['mechanism'][1:]}."
    yield f"Ragged rejection at batch {page['usual_batch']}: {fits} ({back['ragged']})."


def _expected(page: dict[str, Any]) -> Iterator[str]:
    e, latency = page["expected_speedup"], page["latency"]
    yield from ("", "## 7. Expected", "")
    yield f"{e['low']:.2f}x to {e['high']:.2f}x (point {e['point']:.2f}x)."
    yield (
        f"{latency['token_ms']:.3g} ms a token against {latency['plain_ms']:.3g} plain; "
        f"{latency['worst_ms']:.3g} when nothing is accepted."
    )
    for name, worst in (("p50", "token_ms"), ("p99", "worst_ms")):
        wanted = latency[f"{name}_target_ms"]
        if wanted is not None:
            met = "met" if latency[f"{name}_met"] else "missed"
            yield f"Target {name} {wanted:g} ms: {met} ({latency[worst]:.3g} ms)."
    yield from (f"- {doubt}" for doubt in e["uncertainty"])


def _configuration(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 8. Configuration", "")
    for name, text in page["configuration"].items():
        if text is None:
            continue
        yield f"{name}:"
        yield f"```{LANGUAGE.get(name, '')}"
        yield text
        yield "```"


def _plan(page: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## 9. First week", "")
    for alert in page["telemetry_plan"]["alerts"]:
        marks = ", ".join(
            f"{key.replace('_', ' ')} {value:g}"
            for key, value in alert.items()
            if isinstance(value, (int, float))
        )
        yield f"- `{alert['watch']}`: {marks + '; ' if marks else ''}{alert['why']}"
    yield from (f"- {line}" for line in page["telemetry_plan"]["first_week"])
    yield ""
    yield f"Calibration: {page['calibration']['how']}."
    yield "```sh"
    yield from page["calibration"]["commands"]
    yield "```"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
