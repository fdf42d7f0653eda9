"""The server's options with the flag off and with it on. What stands after ``--`` goes to both sides.

vLLM takes several spellings of one option (JSON, dotted, short), and of a JSON and a dotted one the last replaces the
other. So both options that are touched here are taken out, merged, and given back as one JSON each.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.common import UsageError
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, PASS_CONFIG_FIELDS, SettingsError, resolve

OFF, ON = "off", "on"
BASELINES = ("vllm-fused", "vllm")
VLLM_PASS = "fuse_rope_kvcache_cat_mla"
ADDITIONAL = ("--additional-config",)
COMPILATION = ("--compilation-config", "-cc")
# Options that the tools give themselves, or cannot see through.
TAKEN = {
    "--model": "give MODEL as the tool's first argument",
    "--port": "the tool chooses it",
    "--host": "the tool's servers listen on 127.0.0.1",
    "--uds": "the tool's servers listen on 127.0.0.1",
    "--config": "the file may hold options that the tool has to merge; give them on the command line",
    "--api-key": "the tool's clients send none",
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison.

    Attributes:
        name: ``OFF`` or ``ON``.
        options: of the server, without model, host and port.
        url: of a server that runs already, else None.
        environment: variables of this side's server alone; None removes one.
    """

    name: str
    options: tuple[str, ...] = ()
    url: str | None = None
    environment: dict[str, str | None] = field(default_factory=dict)


def build(user: Sequence[str], baseline: str) -> tuple[Side, Side]:
    """Off and on, from the options after ``--``.

    Args:
        baseline: "vllm-fused" switches vLLM's own RoPE + KV pass on in both, "vllm" off; both open the graph
            (``use_inductor_graph_partition``) unless the user has said otherwise.

    Raises:
        UsageError: an option is malformed, taken by the tool, or contradicts the comparison.
    """
    for option in user:
        name = _canonical(option.partition("=")[0])
        if name in TAKEN:
            raise UsageError(f"{option} after --: not possible here: {TAKEN[name]}")
    rest, additional = take(user, ADDITIONAL)
    rest, compilation = take(rest, COMPILATION)
    passes = compilation.get("pass_config", {})
    if not isinstance(passes, dict):
        raise UsageError(f"--compilation-config pass_config={json.dumps(passes)} after --: a mapping is expected")
    fused = baseline == "vllm-fused"
    if passes.get(VLLM_PASS, fused) is not fused:
        raise UsageError(f"pass_config.{VLLM_PASS}={json.dumps(passes[VLLM_PASS])} after -- contradicts --baseline")
    on = merge({"use_inductor_graph_partition": True, "pass_config": {VLLM_PASS: fused}}, compilation)
    vllm_own = {name: value for name, value in on["pass_config"].items() if name not in PASS_CONFIG_FIELDS}
    off = {**on, "pass_config": vllm_own}
    return (
        Side(OFF, (*rest, *_given(off, _without_plugin(additional)))),
        Side(ON, (*rest, *_given(on, _switched_on(additional, passes)))),
    )


def take(options: Sequence[str], names: Sequence[str]) -> tuple[list[str], Json]:
    """Split ``options`` into those of other names, and one merged mapping of those of ``names``.

    ``--name JSON``, ``--name=JSON``, ``--name.a.b VALUE``, ``--name.a.b=VALUE`` and ``--name.a+ x,y`` are known, with
    underscores for dashes in the name. Later values win, mappings are merged.

    Raises:
        UsageError: a value is missing, or JSON of another kind than a mapping.
    """
    rest: list[str] = []
    merged: Json = {}
    queue = list(options)
    while queue:
        option = queue.pop(0)
        head, equals, value = option.partition("=")
        stem, *keys = _canonical(head).split(".")
        if stem not in names:
            rest.append(option)
            continue
        if not equals:
            if not queue:
                raise UsageError(f"{option} after --: a value is missing")
            value = queue.pop(0)
        merged = merge(merged, _nested(option, keys, value))
    return rest, merged


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Json:
    """Both mappings, ``high`` where they differ; mappings inside are merged too."""
    out = copy.deepcopy(dict(low))
    for key, value in high.items():
        inner = out.get(key)
        out[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return out


def _canonical(head: str) -> str:
    # As vLLM's parser: underscores become dashes before the first dot only.
    return re.sub(r"^--[^.]*", lambda name: name[0].replace("_", "-"), head)


def _nested(option: str, keys: list[str], text: str) -> Json:
    value: Any
    if keys and keys[-1].endswith("+"):
        keys, value = [*keys[:-1], keys[-1][:-1]], text.split(",")
    else:
        try:
            value = json.loads(text)
        except ValueError as error:
            if not keys:
                raise UsageError(f"{option} {text} after --: not JSON: {error}") from error
            value = text
        if not keys and not isinstance(value, dict):
            raise UsageError(f"{option} {text} after --: a JSON mapping is expected")
    for key in reversed(keys):
        value = {key: value}
    return value


def _without_plugin(additional: Json) -> Json:
    return {name: value for name, value in additional.items() if name != NAMESPACE}


def _switched_on(additional: Json, passes: Json) -> Json:
    ours = additional.get(NAMESPACE)
    if isinstance(ours, dict) and ours.get("enabled") is False:
        raise UsageError(f"additional_config.{NAMESPACE}.enabled=false after --: the flag is what is compared")
    if passes.get(FLAG_FIELD) is False:
        raise UsageError(f"pass_config.{FLAG_FIELD}=false after --: the flag is what is compared")
    try:
        resolve({name: passes.get(name) for name in PASS_CONFIG_FIELDS}, additional)
    except SettingsError as error:
        raise UsageError(f"{error} (after --)") from error
    return merge(additional, {NAMESPACE: {"enabled": True}})


def _given(compilation: Json, additional: Json) -> list[str]:
    out = ["--compilation-config", json.dumps(compilation, sort_keys=True)]
    return [*out, "--additional-config", json.dumps(additional, sort_keys=True)] if additional else out
