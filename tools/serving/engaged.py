"""Proof that the arms are what they are called: the on-arm's layers engaged, the off-arm's did not.

Read from the server's log (the plugin's census line) or its ``/metrics`` (the plugin's gauge). A table that compares
stock with stock is worse than none.
"""

from __future__ import annotations

import re

from serving.errors import ServingError

GAUGE = "vllm:aiter_mla_layers"
_ENGAGED = re.compile(r"aiter-mla: (\d+/\d+ MLA layers engaged \(.*)")
_DECLINED = re.compile(r"aiter-mla: (0/\d+: .*|off although it was switched on: .*|.* failed, vLLM runs stock.*)")
_GAUGE = re.compile(rf'^{GAUGE}\{{[^}}]*state="(engaged|refused)"[^}}]*\}} ([0-9.eE+]+)', re.MULTILINE)
_FUSIONS = re.compile(r"Enabled custom fusions: (.*)")
_NO_STOCK_PASS = "MLA KV cache update with RoPE fusion enabled but"


def gauge(metrics: str | None) -> dict[str, int]:
    """Layers by state from a ``/metrics`` page; empty where the gauge is absent. Several engines are summed."""
    found: dict[str, int] = {}
    for state, value in _GAUGE.findall(metrics or ""):
        found[state] = found.get(state, 0) + int(float(value))
    return found


def check_on(log: str | None, metrics: str | None) -> str:
    """The census of the on-arm as one line.

    Args:
        log: text of the server's log, or None for a server that somebody else started.
        metrics: text of its ``/metrics``, or None.

    Raises:
        ServingError: nothing engaged, with the reason that the server gave, or no proof at all.
    """
    layers = gauge(metrics)
    lines = _ENGAGED.findall(log or "")
    if layers.get("engaged", 0) > 0 or (lines and not layers):
        return lines[-1].strip() if lines else f"{_of(layers)} MLA layers engaged (by /metrics)"
    reasons = _DECLINED.findall(log or "")
    if reasons:
        raise ServingError(f"the on-arm is not on, so there is nothing to compare: {reasons[-1].strip()}")
    if layers:
        raise ServingError(f"the on-arm is not on: {_of(layers)} MLA layers engaged; its own log says why")
    raise ServingError(
        f"no proof that the on-arm is on: no census line in its log and no {GAUGE} on /metrics; "
        "is vllm-aiter-mla installed beside the server, and its flag on?"
    )


def check_off(log: str | None, metrics: str | None) -> None:
    """Raise ServingError where the fast path is on in the off-arm."""
    if gauge(metrics).get("engaged", 0) > 0 or _ENGAGED.search(log or ""):
        raise ServingError("the off-arm has the fast path on: both arms would be the same")


def check_baseline(log: str | None, baseline: str) -> str:
    """What the off-arm's log says of vLLM's own pass.

    Raises:
        ServingError: "stock-fused" was asked for, and vLLM says that its pass is off.
    """
    if log is None:
        return "not checked: the server was started by somebody else"
    if baseline != "stock-fused":
        return "vLLM's own pass is off"
    enabled = _FUSIONS.findall(log)
    if _NO_STOCK_PASS in log or (enabled and "rope_kvcache_cat_mla" not in enabled[-1]):
        raise ServingError("the baseline is not stock-fused: vLLM switched its own pass off; use --baseline stock")
    if not enabled:
        return "not proved: vLLM's log does not list its passes"
    return f"vLLM lists its own pass as on ({enabled[-1].strip()}); whether it matched is not logged"


def _of(layers: dict[str, int]) -> str:
    return f"{layers.get('engaged', 0)}/{sum(layers.values())}"
