"""The sweep's benchmark command: proves that the server is what its side is called, then becomes the client.

With the flag on, layers must have engaged; with it off, none. Read from the server's log (the plugin's status line) or
its ``/metrics`` (the plugin's gauge). A table that compares unmodified vLLM with unmodified vLLM is worse than none.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.common import RunError
from tools.serving.sides import OFF, ON

GAUGE = "vllm:aiter_mla_layers"
_ENGAGED = re.compile(r"aiter-mla: (\d+/\d+ MLA layers engaged \(.*)")
_DECLINED = re.compile(r"aiter-mla: (0/\d+: .*|off although it was switched on: .*|.* failed, vLLM runs unmodified.*)")
_GAUGE = re.compile(rf"^{GAUGE}\{{([^}}]*)\}} ([0-9.eE+]+)", re.MULTILINE)
_STATE = re.compile(r'\bstate="(engaged|refused)"')
_FUSIONS = re.compile(r"Enabled custom fusions: (.*)")
_NO_VLLM_PASS = "MLA KV cache update with RoPE fusion enabled but"
# A proxy for the outside must not be asked for this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float = 10.0) -> str | None:
    """The body of a page, or None where it cannot be had."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            return answer.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return None


def gauge(metrics: str | None) -> dict[str, int]:
    """Layers by state from a ``/metrics`` page; empty where the gauge is absent. Several engines are summed."""
    found: dict[str, int] = {}
    for labels, value in _GAUGE.findall(metrics or ""):
        for state in _STATE.findall(labels):
            found[state] = found.get(state, 0) + int(float(value))
    return found


def check_on(log: str | None, metrics: str | None) -> str:
    """The status file of the server with the flag on, as one line.

    Args:
        log: text of the server's log, or None for a server that somebody else started.
        metrics: text of its ``/metrics``, or None.

    Raises:
        RunError: nothing engaged, with the reason that the server gave, or no proof at all.
    """
    layers = gauge(metrics)
    lines = _ENGAGED.findall(log or "")
    count = f"{layers.get('engaged', 0)}/{sum(layers.values())} MLA layers engaged"
    if layers.get("engaged", 0) > 0 or (lines and not layers):
        return lines[-1].strip() if lines else f"{count} (by /metrics)"
    reasons = _DECLINED.findall(log or "")
    if reasons:
        raise RunError(f"nothing to compare, the fast path is not on with the flag on: {reasons[-1].strip()}")
    if layers:
        raise RunError(f"the fast path is not on with the flag on: {count}; the server's own log says why")
    raise RunError(
        f"no proof that the fast path is on with the flag on: no status line in the log and no {GAUGE} on /metrics; "
        "is vllm-aiter-mla installed beside the server, and its flag on?"
    )


def check_off(log: str | None, metrics: str | None) -> None:
    """Raise RunError where the fast path is on with the flag off."""
    if gauge(metrics).get("engaged", 0) > 0 or _ENGAGED.search(log or ""):
        raise RunError("the fast path is on with the flag off: both sides would be the same")


def check_baseline(log: str | None, baseline: str) -> str:
    """What the log with the flag off says of vLLM's own pass.

    Raises:
        RunError: "vllm-fused" was asked for, and vLLM says that its pass is off.
    """
    if log is None:
        return "not checked: the server was started by somebody else"
    if baseline != "vllm-fused":
        return "vLLM's own pass is off"
    enabled = _FUSIONS.findall(log)
    if _NO_VLLM_PASS in log or (enabled and "rope_kvcache_cat_mla" not in enabled[-1]):
        raise RunError(
            "the baseline is not unmodified vLLM-fused: vLLM switched its own pass off; use --baseline unmodified vLLM"
        )
    if not enabled:
        return "not proved: vLLM's log does not list its passes"
    return f"vLLM lists its own pass as on ({enabled[-1].strip()}); whether it matched is not logged"


def prove(current: dict[str, Any], folder: Path, baseline: str) -> dict[str, Any]:
    """What the server says of itself, kept in ``proof-SIDE.json`` and returned.

    Raises:
        RunError: it is not what its side is called, lists no model, or is another vLLM than the other side's.
    """
    side, url = current["side"], current["url"]
    log = Path(current["log"]).read_text(errors="replace") if current["log"] else None
    metrics = get(f"{url}/metrics")
    found: dict[str, Any] = {"gauge": gauge(metrics), "version": _json(get(f"{url}/version")).get("version", "unknown")}
    if side == ON:
        found["status"] = check_on(log, metrics)
    else:
        check_off(log, metrics)
        found["baseline"] = check_baseline(log, baseline)
    models = _json(get(f"{url}/v1/models")).get("data")
    if not models:
        raise RunError(f"{url}/v1/models lists no model")
    found["served"] = models[0]["id"]
    other = folder / f"proof-{OFF if side == ON else ON}.json"
    if other.is_file() and (version := json.loads(other.read_text())["version"]) != found["version"]:
        raise RunError(f"the sides run different versions of vLLM: {side} {found['version']}, the other {version}")
    (folder / f"proof-{side}.json").write_text(json.dumps(found))
    return found


def _json(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    """Prove, and become the client; a failed proof is left in ``failure.txt``, for the tool to show."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--run", type=int)
    parser.add_argument("--point", type=int)
    given, rest = parser.parse_known_args()
    folder, spec = given.spec.parent, json.loads(given.spec.read_text())
    current = json.loads((folder / "current.json").read_text())
    try:
        served = prove(current, folder, spec["baseline"])["served"]
    except RunError as error:
        (folder / "failure.txt").write_text(str(error))
        sys.exit(1)
    step = f"flag {current['side']}: run {given.run + 1}, point {given.point + 1}"
    print(step, file=sys.stderr, flush=True)
    with (folder / f"client-{current['side']}-{given.run + 1}-{given.point + 1}.log").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    command = [*spec["client"], "--base-url", current["url"], "--model", served, *rest]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
