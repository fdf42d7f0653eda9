"""Checks of the options that are meant for ``vllm serve``, where they are given to doctor as well."""

from __future__ import annotations

from vllm_aiter_mla.admission import KV_UPDATE_OP, ConfigView, admit_config
from vllm_aiter_mla.commands.doctor import knobs, switches
from vllm_aiter_mla.commands.doctor.check import Check, Given
from vllm_aiter_mla.commands.fields import FieldError, mapping
from vllm_aiter_mla.settings import (
    FLAG_FIELD,
    NAMESPACE,
    PASS_CONFIG_FIELDS,
    Settings,
    SettingsError,
    resolve,
    unused_options,
)

STOCK_FLAG = "fuse_rope_kvcache_cat_mla"
PARTITION = "use_inductor_graph_partition"
SLOT = "post_grad_custom_post_pass"
SWITCH_ON = f"-cc.pass_config.{FLAG_FIELD}=true"
GIVE = "give doctor the same --compilation-config"
CORRECT = "correct the option; vLLM would not start"


def settings(given: Given) -> Check:
    """The plugin's own options, in both spellings, and names beside them that nobody knows."""
    try:
        knobs.check_names(given.compilation or {})
        found = _settings(given)
    except (SettingsError, FieldError) as error:
        return Check("settings", "problem", str(error), CORRECT)
    near = knobs.near_namespace(given.additional or {})
    if near is not None:
        return Check(
            "settings", "warning", f"additional_config.{near} is not read by this plugin: its key is {NAMESPACE}",
            f"write {NAMESPACE}, unless another plugin reads it",
        )  # fmt: skip
    unused = unused_options(found)
    if unused:
        return Check("settings", "warning", f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect", SWITCH_ON)
    if found.enabled:
        return Check("settings", "ok", f"on, kernel {found.kernel}{', strict' if found.strict else ''}")
    return Check("settings", "ok", f"off, the default; switch it on with {SWITCH_ON}")


def graph(given: Given) -> Check:
    """Knobs that cut the graph, or leave none, and a kernel that declines all layers: admission's own judgement."""
    compilation = given.compilation or {}
    try:
        view = ConfigView(
            mode=knobs.mode(compilation),
            backend=knobs.backend(compilation),
            fp8_bmm=switches.fp8_absorb(given.env),
            kernel=_kernel(given),
            use_inductor_graph_partition=knobs.flag(compilation, PARTITION),
            splitting_ops=knobs.splitting_ops(compilation),
        )
    except FieldError as error:
        return Check("graph", "problem", str(error), CORRECT)
    refusal = admit_config(view)
    if refusal is not None:
        return Check("graph", "problem", str(refusal), "the line names the knob")
    if given.compilation is None:
        return Check("graph", "ok", f"left unset, the knobs of the graph are right; else {GIVE}")
    return Check("graph", "ok", "the graph holds whole MLA layers")


def dead_flag(given: Given) -> Check:
    """vLLM's own RoPE + KV fusion: switched on alone it is on in the log and matches nothing."""
    compilation = given.compilation or {}
    try:
        wanted = knobs.flag(mapping(compilation, "pass_config"), STOCK_FLAG)
        partition, splitting = knobs.flag(compilation, PARTITION), knobs.splitting_ops(compilation)
    except FieldError as error:
        return Check("dead-flag", "unknown", str(error), "see the lines `settings` and `graph` above")
    if not wanted:
        return Check("dead-flag", "ok", f"{STOCK_FLAG}: not set")
    if partition or (splitting is not None and KV_UPDATE_OP not in splitting):
        return Check("dead-flag", "ok", f"{STOCK_FLAG} and a graph it can match in")
    if _is_on(given) and partition is None and splitting is None:
        return Check("dead-flag", "ok", f"{STOCK_FLAG}: this plugin opens the graph, so it can match")
    condition = (
        f"{STOCK_FLAG}=true alone is on in vLLM's log and matches nothing, because the graph is cut at {KV_UPDATE_OP}"
    )
    remedy = "set use_inductor_graph_partition=true with it, or drop it"
    return Check("dead-flag", "problem", condition, remedy)


def user_pass(given: Given) -> Check:
    """Another custom pass in the slot that this plugin's pass takes."""
    if given.compilation is None:
        return Check("user-pass", "ok", f"not looked for; to have it checked, {GIVE}")
    try:
        config = mapping(given.compilation, "inductor_compile_config")
        named = mapping(given.compilation, "inductor_passes").get(SLOT)
    except FieldError as error:
        return Check("user-pass", "problem", str(error), CORRECT)
    if SLOT in config:
        return Check(
            "user-pass", "problem", f"inductor_compile_config[{SLOT!r}] holds text: it cannot be chained",
            "name it in inductor_passes, which vLLM resolves",
        )  # fmt: skip
    if named is not None:
        return Check(
            "user-pass", "warning", f"{named} stands in the slot: it is kept and runs first", "nothing, if wanted"
        )
    return Check("user-pass", "ok", "the slot of the custom pass is free")


def _settings(given: Given) -> Settings:
    passes = mapping(given.compilation or {}, "pass_config")
    return resolve({name: passes[name] for name in PASS_CONFIG_FIELDS if name in passes}, given.additional or {})


def _is_on(given: Given) -> bool:
    try:
        return _settings(given).enabled
    except (SettingsError, FieldError):
        return False


def _kernel(given: Given) -> str:
    """The kernel asked for; where that cannot be read, the line `settings` says so."""
    try:
        return _settings(given).kernel
    except (SettingsError, FieldError):
        return Settings().kernel


CHECKS = (("settings", settings), ("graph", graph), ("dead-flag", dead_flag), ("user-pass", user_pass))
