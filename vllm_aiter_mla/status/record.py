"""The status file of one rank as plain containers, and the status line that it comes to, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_aiter_mla.status import state

NOT_RUN = ("not_run", "its fused op has not run")
"""Code and reason of a layer that nobody has refused and that is not engaged."""

MEASURED_CARDS: frozenset[str] = frozenset()
"""Architectures on which this project has measured; docs/results.md has the figures."""

SHOWN = 64
"""Tokens of the step whose measured time the line gives, or the nearest count that was timed."""


def as_record(
    total: Sequence[str], limit: int, kv_cache_dtype: str, rank: int, integration: str = "passes", card: str = "cpu"
) -> dict[str, Any]:
    """What this process has counted; a layer that is not engaged counts as refused, with the reason that is known.

    Args:
        total: names of the model's MLA layers.
        limit: L of the decode limit.
        kv_cache_dtype: of the engine, as vLLM spells it.
        rank: of this worker.
        integration: who puts the op into the layers.
        card: its architecture, or "cpu".
    """
    now = state.current()
    why = {name: now.skipped.get(name) or now.partial.get(name) or NOT_RUN for name in total}
    return {
        "rank": rank,
        "integration": integration,
        "card": card,
        "total": len(total),
        "engaged": {name: now.engaged[name] for name in total if name in now.engaged},
        "skipped": {name: list(reason) for name, reason in why.items() if name not in now.engaged},
        "partial": {name: list(reason) for name, reason in now.partial.items()},
        "compiled": now.compiled,
        "measured": now.measured,
        "decode_limit": [1, limit],
        "capture_sizes": [],
        "kv_cache_dtype": kv_cache_dtype,
    }


def of_declined(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> dict[str, Any]:
    """As ``as_record`` for an engine that was declined as a whole: nothing of ours runs in its workers.

    Args:
        code: the skip's code.
        message: its line.
        layers: indices of the model's MLA layers; their names are known to the workers alone.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    return {
        "rank": 0,
        "integration": "",
        "card": "",
        "total": len(layers),
        "engaged": {},
        "skipped": {f"layer {index}": [code, message] for index in layers},
        "partial": {},
        "compiled": {},
        "measured": [],
        "decode_limit": [],
        "capture_sizes": [],
        "kv_cache_dtype": kv_cache_dtype,
    }


def of_engine(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first stage's record with the layers of all pipeline stages; a stage without a record is counted."""
    known = [stage for stage in stages if stage]
    merged = dict(known[0], stages=len(stages), silent_stages=len(stages) - len(known))
    merged["total"] = sum(stage["total"] for stage in known)
    for name in ("engaged", "skipped", "partial"):
        merged[name] = {layer: found for stage in known for layer, found in stage[name].items()}
    return merged


def line(record: dict[str, Any]) -> str:
    """The status line in one line."""
    engaged, total = record["engaged"], record["total"]
    if not engaged:
        return f"0/{total}: {first_reason(record)} (run: vllm-aiter-mla doctor){_where(record)}"
    by = ", integration module" if record.get("integration") == "module" else ""
    text = f"{len(engaged)}/{total} MLA layers engaged ({_measured(record) or _kernels(record)}{by}){_where(record)}"
    return text if len(engaged) == total else f"{text}; {total - len(engaged)} refused: {first_reason(record)}"


def _where(record: dict[str, Any]) -> str:
    """Which part of a deployment the line speaks for; nothing where there is one engine of one stage."""
    stages, silent, replica = record.get("stages", 1), record.get("silent_stages", 0), record.get("replica")
    found = f" in {stages} pipeline stages" if stages > 1 else ""
    found += f", {silent} of which made no status line" if silent else ""
    return found if replica is None else f"{found}, data-parallel engine {replica}"


def _kernels(record: dict[str, Any]) -> str:
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record["kv_cache_dtype"], "fp8")
    low, high = record["decode_limit"]
    names = "+".join(sorted(set(record["engaged"].values())))
    return f"{names}, {cache} KV, decode limit {low}..{high}{unmeasured(record.get('card', 'cpu'))}"


def unmeasured(card: str) -> str:
    """What is said once of a card on which nobody has timed the plugin; nothing of a measured card or a CPU."""
    return "" if card == "cpu" or card in MEASURED_CARDS else f"; speed on {card} not measured"


def _measured(record: dict[str, Any]) -> str | None:
    """What runs where and what it gains, for the shape of most layers; None where nothing was measured."""
    if not record["measured"]:
        return None
    most, *others = sorted(record["measured"], key=lambda one: -len(one["layers"]))
    where = ", ".join(f"{name} {first}..{last}" for first, last, name in most["chosen"])
    tokens = min(most["us"], key=lambda count: abs(count - SHOWN))
    ours, vllm_own = chosen_and_vllm(most, tokens)
    figures = (
        f"{ours:.1f} us a layer at {tokens} token{'s' * (tokens != 1)} against vLLM's own {vllm_own:.1f}, measured here"
    )
    more = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    return f"{where}; {figures}{more}"


def chosen_and_vllm(shape: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Microseconds a layer at a count that was timed, of what runs there and of vLLM's own sequence."""
    name = next(name for first, last, name in shape["chosen"] if first <= tokens <= last)
    return shape["us"][tokens][name], shape["us"][tokens]["vllm"]


def saved_us(record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Microseconds that a step saves against vLLM's own sequence: by token count and engaged layer."""
    found: dict[int, dict[str, float]] = {}
    for shape in record.get("measured", ()):
        for tokens in shape["us"]:
            ours, vllm_own = chosen_and_vllm(shape, tokens)
            layers = (name for name in shape["layers"] if name in record["engaged"])
            found.setdefault(tokens, {}).update(dict.fromkeys(layers, vllm_own - ours))
    return found


def first_reason(record: dict[str, Any]) -> str:
    """Code and reason of one layer that is not engaged; a layer that stopped half way tells more than others."""
    reasons = record["partial"] or record["skipped"]
    if not reasons:
        return "the model has no MLA layer"
    text = ": ".join(next(iter(reasons.values())))
    # It may come from a file: one line, without what would drive a terminal.
    return "".join(letter if letter.isprintable() else " " for letter in text)
