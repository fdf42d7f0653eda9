"""Checks of the options that are meant for ``vllm serve``, where they are given to doctor as well."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from vllm_aiter_mla.admission import KV_UPDATE_OP, ConfigView, admit_config, integration_of, why_not_passes
from vllm_aiter_mla.commands.doctor import switches
from vllm_aiter_mla.commands.doctor.check import Check, named
from vllm_aiter_mla.commands.doctor.given import Given
from vllm_aiter_mla.compat import offline
from vllm_aiter_mla.compat.switches import BREAKABLE_GRAPHS
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings, SettingsError, unused_options

VLLM_FLAG = "fuse_rope_kvcache_cat_mla"
SWITCH_ON = f"-cc.pass_config.{FLAG_FIELD}=true"
GIVE = "give doctor the options of your `vllm serve`"
CORRECT = "correct the option; vLLM would not start"
SEE_SETTINGS = "see the line `settings` above"


def settings(given: Given) -> Check:
    """The plugin's own options, in both spellings, and options that vLLM refuses."""
    if given.wrong:
        return Check("problem", given.wrong, CORRECT)
    try:
        found = _settings(given)
    except SettingsError as error:
        return Check("problem", str(error), CORRECT)
    near = _near_namespace(given)
    if near is not None:
        return Check(
            "warning" if found.enabled else "problem",
            f"additional_config.{near} is not read by this plugin, whose key is {NAMESPACE}"
            + ("" if found.enabled else ": the fast path stays off"),
            f"write {NAMESPACE}, unless another plugin reads it",
        )
    unused = unused_options(found)
    if unused:
        return Check("warning", f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect", SWITCH_ON)
    if given.unread:
        return Check("unknown", given.unread, "install vLLM, or run doctor on the machine that serves")
    if found.enabled:
        return Check("ok", f"on, kernel {found.kernel}{', strict' if found.strict else ''}")
    return Check("ok", f"off, the default; switch it on with {SWITCH_ON}")


def graph(given: Given) -> Check:
    """What the options say of the graph: declined, for the module integration, or for the passes."""
    if _unknown(given):
        return Check("unknown", "the options were not read", SEE_SETTINGS)
    view = _view(given)
    skip = admit_config(view)
    if skip is not None:
        return Check("problem", str(skip), "change the option that the line names")
    if integration_of(view) == "module":
        because = why_not_passes(view)
        return Check("ok", f"the module integration is taken{f'; {because}' if because else ', as asked for'}")
    if given.served is None:
        return Check("ok", f"no options given; vLLM's defaults are right; else {GIVE}")
    return Check("ok", "the graph holds whole MLA layers")


def dead_flag(given: Given) -> Check:
    """vLLM's own RoPE + KV fusion: switched on alone it is on in the log and matches nothing."""
    if _unknown(given):
        return Check("unknown", "the options were not read", SEE_SETTINGS)
    if given.served is None or not offline.pass_asked_for(given.served, VLLM_FLAG):
        return Check("ok", f"{VLLM_FLAG}: not set")
    view = _view(given)
    partition, splitting = view.use_inductor_graph_partition, view.splitting_ops
    if partition or (splitting is not None and KV_UPDATE_OP not in splitting):
        return Check("ok", f"{VLLM_FLAG} and a graph it can match in")
    if _settings(given).enabled and partition is None and splitting is None:
        return Check("ok", f"{VLLM_FLAG}: this plugin opens the graph, so it can match")
    condition = (
        f"{VLLM_FLAG}=true alone is on in vLLM's log and matches nothing, because the graph is cut at {KV_UPDATE_OP}"
    )
    return Check("problem", condition, "set use_inductor_graph_partition=true with it, or drop it")


def user_pass(given: Given) -> Check:
    """Another custom pass in the slot that this plugin's pass takes."""
    if _unknown(given):
        return Check("unknown", "the options were not read", SEE_SETTINGS)
    if given.served is None:
        return Check("ok", f"not looked for; to have it checked, {GIVE}")
    from vllm_aiter_mla.compat import config as compat_config

    compilation = given.served.compilation_config
    skip = compat_config.why_not_chainable(compilation)
    if skip is not None:
        return Check("problem", skip.message, "name it in inductor_passes, which vLLM resolves")
    present = compilation.inductor_passes.get(compat_config.pass_slot())
    if present is None:
        return Check("ok", "the slot of the custom pass is free")
    return Check("warning", f"{present} stands in the slot: it is kept and runs first", "nothing, if wanted")


def _unknown(given: Given) -> bool:
    """Whether vLLM's options cannot be judged: one is wrong, or vLLM is not there to read them."""
    return bool(given.unread) or settings(given).status == "problem"


def _settings(given: Given) -> Settings:
    from vllm_aiter_mla.compat import config as compat_config

    return Settings() if given.served is None else compat_config.settings_of(given.served)


def _view(given: Given) -> ConfigView:
    view = ConfigView() if given.served is None else offline.view_of_options(given.served)
    breakable = switches.switched_on(given.env, BREAKABLE_GRAPHS, False)
    return replace(view, breakable_cudagraph=True, mode="NONE") if breakable else view


def _near_namespace(given: Given) -> str | None:
    """A key of the additional config that looks like ours and is not; others' keys are theirs."""
    keys: Any = getattr(given.served, "additional_config", None) or {}
    close = difflib.get_close_matches(NAMESPACE, [key for key in keys if key != NAMESPACE], n=1, cutoff=0.8)
    return close[0] if close else None


CHECKS = named(settings, graph, dead_flag, user_pass)
