"""Checks of the options that are meant for ``vllm serve``, where they are given to doctor as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_aiter_mla.admission import KV_UPDATE_OP, ConfigView, admit_config
from vllm_aiter_mla.report.doctor.check import Check, Given
from vllm_aiter_mla.settings import FLAG_FIELD, PASS_CONFIG_FIELDS, Settings, SettingsError, resolve, unused_options

STOCK_FLAG = "fuse_rope_kvcache_cat_mla"
SLOT = "post_grad_custom_post_pass"
SWITCH_ON = f"-cc.pass_config.{FLAG_FIELD}=true"
GIVE = "give doctor the same --compilation-config"


def settings(given: Given) -> Check:
    """The plugin's own options, in both spellings."""
    try:
        found = _settings(given)
    except SettingsError as error:
        return Check("settings", "problem", str(error), "correct the option; vLLM would not start")
    unused = unused_options(found)
    if unused:
        return Check("settings", "warning", f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect", SWITCH_ON)
    if found.enabled:
        return Check("settings", "ok", f"on, kernel {found.kernel}{', strict' if found.strict else ''}")
    return Check("settings", "ok", f"off, the default; switch it on with {SWITCH_ON}")


def graph(given: Given) -> Check:
    """Knobs that cut the graph, or leave none: admission's own judgement."""
    compilation = given.compilation or {}
    splitting = compilation.get("splitting_ops")
    refusal = admit_config(
        ConfigView(
            mode=_mode(compilation.get("mode")),
            backend=compilation.get("backend") or "inductor",
            use_inductor_graph_partition=compilation.get("use_inductor_graph_partition"),
            splitting_ops=None if splitting is None else tuple(splitting),
        )
    )
    if refusal is not None:
        return Check("graph", "problem", str(refusal), "the line names the knob")
    if given.compilation is None:
        return Check("graph", "ok", f"left unset, the knobs of the graph are right; else {GIVE}")
    return Check("graph", "ok", "the graph holds whole MLA layers")


def dead_flag(given: Given) -> Check:
    """vLLM's own RoPE + KV fusion: switched on alone it is on in the log and matches nothing."""
    compilation = given.compilation or {}
    wanted = _mapping(compilation.get("pass_config")).get(STOCK_FLAG)
    condition = (
        f"{STOCK_FLAG}=true alone is on in vLLM's log and matches nothing, because the graph is cut at {KV_UPDATE_OP}"
    )
    if not wanted:
        return Check("dead-flag", "ok", f"{STOCK_FLAG} is not set here; {condition}")
    splitting = compilation.get("splitting_ops")
    if compilation.get("use_inductor_graph_partition") or (splitting is not None and KV_UPDATE_OP not in splitting):
        return Check("dead-flag", "ok", f"{STOCK_FLAG} and a graph it can match in")
    if _is_on(given) and compilation.get("use_inductor_graph_partition") is None and splitting is None:
        return Check("dead-flag", "ok", f"{STOCK_FLAG}: this plugin opens the graph, so it can match")
    remedy = "set use_inductor_graph_partition=true with it, or drop it"
    return Check("dead-flag", "problem", condition, remedy)


def user_pass(given: Given) -> Check:
    """Another custom pass in the slot that this plugin's pass takes."""
    if given.compilation is None:
        return Check("user-pass", "ok", f"not looked for; to have it checked, {GIVE}")
    if SLOT in _mapping(given.compilation.get("inductor_compile_config")):
        return Check(
            "user-pass", "problem", f"inductor_compile_config[{SLOT!r}] holds text: it cannot be chained",
            "name it in inductor_passes, which vLLM resolves",
        )  # fmt: skip
    named = _mapping(given.compilation.get("inductor_passes")).get(SLOT)
    if named is not None:
        return Check(
            "user-pass", "warning", f"{named} stands in the slot: it is kept and runs first", "nothing, if wanted"
        )
    return Check("user-pass", "ok", "the slot of the custom pass is free")


def _settings(given: Given) -> Settings:
    passes = _mapping((given.compilation or {}).get("pass_config"))
    return resolve({name: passes[name] for name in PASS_CONFIG_FIELDS if name in passes}, given.additional or {})


def _is_on(given: Given) -> bool:
    try:
        return _settings(given).enabled
    except SettingsError:
        return False


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mode(value: Any) -> str:
    """vLLM takes the number or the name; unset means 3 at every optimisation level above 0."""
    names = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
    if value is None:
        return names[3]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else str(value).upper()


CHECKS = (("settings", settings), ("graph", graph), ("dead-flag", dead_flag), ("user-pass", user_pass))
