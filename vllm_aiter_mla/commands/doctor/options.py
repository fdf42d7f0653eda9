"""Checks of vLLM's environment variables, and of the options of ``vllm serve`` that doctor was given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_aiter_mla.admission import KV_UPDATE_OP, OVERFLOW, ConfigView, admit_config, integration_of, why_not_passes
from vllm_aiter_mla.commands.doctor import machine
from vllm_aiter_mla.commands.doctor.check import Check, Given, NotKnownError
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import offline
from vllm_aiter_mla.compat.offline import (  # fmt: skip
    BATCH_INVARIANT,
    BREAKABLE_GRAPHS,
    FP4_BMM,
    FP8_BMM,
    NO_MLA,
    USE_AITER,
    USE_AITER_MLA,
)
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings, SettingsError, unused_options

VLLM_FLAG = "fuse_rope_kvcache_cat_mla"
SWITCH_ON = f"-cc.pass_config.{FLAG_FIELD}=true"
GIVE = "give doctor the options of your `vllm serve`"
CORRECT = "correct it; vLLM would not start"


def read(arguments: Sequence[str]) -> Given:
    """Read options of ``vllm serve`` with vLLM's own parser."""
    if not arguments:
        return Given()
    from vllm_aiter_mla import plugin

    plugin.register()
    try:
        _reject_two_spellings(arguments)
        return Given(served=offline.serve_options(arguments))
    except ValueError as error:
        return Given(finding=Check("problem", str(error), CORRECT))
    except (Exception, SystemExit) as error:  # vLLM is missing, or breaks while it is imported
        return Given(finding=Check("unknown", f"{type(error).__name__}: {error}", machine.ELSEWHERE))


def _reject_two_spellings(arguments: Sequence[str]) -> None:
    """Raise ValueError if one config is given as JSON and as dotted values: vLLM would drop the first."""
    heads = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for names in (("--compilation-config", "-cc"), ("--additional-config",)):
        if set(names) & set(heads) and any(head.startswith(f"{name}.") for name in names for head in heads):
            raise ValueError(f"{names[0]}: given as JSON and as {names[0]}.NAME=VALUE; vLLM would use one of them only")


def use_aiter(given: Given) -> Check:
    """Check that vLLM's attention is AITER's."""
    backend = "" if given.served is None else offline.backend_name(given.served)
    if backend:
        return _of_backend(backend)
    if machine.rocm_version() is None:
        return Check("ok", f"{USE_AITER} has no effect without ROCm; with ROCm set it to 1")
    for name, default in ((USE_AITER, False), (USE_AITER_MLA, True)):
        if not _on(given.env, name, default):
            origin = f"={given.env[name]}" if name in given.env else " is unset, which means off"
            return Check("problem", f"{name}{origin}: vLLM takes another MLA backend", f"set {name}=1")
    return Check("ok", f"{USE_AITER}=1")


def _of_backend(backend: str) -> Check:
    """Check a backend that is named: vLLM takes it, whatever the variables say."""
    from vllm_aiter_mla.compat.layer import KNOWN_IMPLS

    option = f"--attention-backend {backend}"
    try:
        implementation = offline.impl_name(backend)
    except Exception as error:
        raise NotKnownError(f"{option}: vLLM cannot be asked for it ({type(error).__name__})") from error
    if implementation in KNOWN_IMPLS:
        return Check("ok", f"{option}: AITER's MLA attention, whatever {USE_AITER} says")
    remedy = "drop it, or name ROCM_AITER_MLA"
    return Check("problem", f"{option}: {implementation} is not admitted, no layer engages", remedy)


def fp8_bmm(given: Given) -> Check:
    """Say which dtype vLLM gives the absorb weights when AITER is on: fp8, or the activation dtype."""
    if machine.rocm_version() is None:
        return Check("ok", f"{FP8_BMM} has an effect on ROCm only")
    return _bmm(given, FP8_BMM, "W_UK and W_UV in fp8", "W_UK and W_UV in the activation dtype")


def fp4_bmm(given: Given) -> Check:
    """Say whether vLLM makes mxfp4 absorb weights: on gfx950, if ``kv_b_proj`` is bf16."""
    if machine.gpu_arch() != "gfx950":
        return Check("ok", "has an effect on gfx950 only")
    return _bmm(given, FP4_BMM, "W_UK and W_UV in mxfp4 if kv_b_proj is bf16", f"see {FP8_BMM} above")


def _bmm(given: Given, name: str, held: str, otherwise: str) -> Check:
    """Ask the installed vLLM how it reads a variable: the default differs between releases."""
    if not _on(given.env, USE_AITER):
        return Check("ok", f"off, because {USE_AITER} is off")
    try:
        on = offline.switched_on(name, given.env)
    except ValueError as error:
        return Check("problem", str(error), CORRECT)
    if on is None:
        raise NotKnownError(f"{name}: vLLM cannot be asked for its default", machine.SEE_VLLM)
    origin = name if name in given.env else f"{name} is unset, in this vLLM"
    return Check("ok", f"{origin} {'on' if on else 'off'}: {held if on else otherwise}")


def batch_invariant(given: Given) -> Check:
    """Check that vLLM need not be batch-invariant: AITER's attention is not."""
    if not _on(given.env, BATCH_INVARIANT):
        return Check("ok", f"{BATCH_INVARIANT} is off")
    return Check("problem", f"{BATCH_INVARIANT} is on: vLLM takes Triton's MLA attention, no layer engages", "unset it")


def mla(given: Given) -> Check:
    """Check that layers may use MLA."""
    if not _on(given.env, NO_MLA):
        return Check("ok", f"{NO_MLA} is off")
    return Check("problem", f"{NO_MLA} is on: no layer uses MLA", f"unset {NO_MLA}")


def breakable_graphs(given: Given) -> Check:
    """Say which integration breakable graphs leave: nothing is compiled then."""
    if not _on(given.env, BREAKABLE_GRAPHS):
        return Check("ok", f"{BREAKABLE_GRAPHS} is off")
    return Check("ok", "on: the module integration runs; with integration=passes nothing is fused")


def settings(given: Given) -> Check:
    """Check the plugin's own options, and say which option vLLM rejects."""
    if given.finding is not None:
        return given.finding
    try:
        found = _settings(given)
    except SettingsError as error:
        return Check("problem", str(error), CORRECT)
    keys = getattr(given.served, "additional_config", None) or {}
    near = difflib.get_close_matches(NAMESPACE, [key for key in keys if key != NAMESPACE], n=1, cutoff=0.8)
    if near:
        detail = f"additional_config.{near[0]} is not read by this plugin, whose key is {NAMESPACE}"
        remedy = f"write {NAMESPACE}, unless another plugin reads it"
        off = "" if found.enabled else ": the fast path stays off"
        return Check("warning" if found.enabled else "problem", detail + off, remedy)
    unused = unused_options(found)
    if unused:
        return Check("warning", f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect", SWITCH_ON)
    if found.enabled and found.kernel == "aiter" and _view(given).kv_cache_dtype.startswith("fp8"):
        return Check("warning", f"on, kernel aiter: by its sources it {OVERFLOW}", "leave kernel at auto")
    if found.enabled:
        return Check("ok", f"on, kernel {found.kernel}{', strict' if found.strict else ''}")
    return Check("ok", f"off, the default; switch it on with {SWITCH_ON}")


def graph(given: Given) -> Check:
    """Say which integration the options lead to, or why the engine would be skipped."""
    view = _view(given)
    skip = admit_config(view)
    if skip is not None:
        return Check("problem", str(skip), "change the option that the line names")
    if integration_of(view) == "module":
        because = why_not_passes(view)
        return Check("ok", f"the module integration runs{f'; {because}' if because else ', as asked for'}")
    if given.served is None:
        return Check("ok", f"no options given; vLLM's defaults are right; else {GIVE}")
    return Check("ok", "the graph holds whole MLA layers")


def dead_flag(given: Given) -> Check:
    """Check that vLLM's own RoPE + KV fusion can match if it is on: without more options it matches nothing."""
    view = _view(given)
    if given.served is None or not offline.pass_asked_for(given.served, VLLM_FLAG):
        return Check("ok", f"{VLLM_FLAG}: not set")
    partition, splitting = view.use_inductor_graph_partition, view.splitting_ops
    if partition or (splitting is not None and KV_UPDATE_OP not in splitting):
        return Check("ok", f"{VLLM_FLAG} and a graph it can match in")
    if _settings(given).enabled and partition is None and splitting is None:
        return Check("ok", f"{VLLM_FLAG}: this plugin opens the graph, so it can match")
    detail = f"{VLLM_FLAG}=true is on in vLLM's log and matches nothing, because the graph is cut at {KV_UPDATE_OP}"
    return Check("problem", detail, "set use_inductor_graph_partition=true with it, or drop it")


def user_pass(given: Given) -> Check:
    """Check for another custom pass in the slot that this plugin's pass takes."""
    _require_read(given)
    if given.served is None:
        return Check("ok", f"no options given; {GIVE}")
    compilation = given.served.compilation_config
    skip = compat_config.why_not_chainable(compilation)
    if skip is not None:
        return Check("problem", skip.message, "name it in inductor_passes, which vLLM resolves")
    present = compilation.inductor_passes.get(compat_config.pass_slot())
    if present is None:
        return Check("ok", "the slot of the custom pass is free")
    return Check("warning", f"{present} is in the slot: it is kept and runs first", "nothing, if wanted")


def _on(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Read a variable as vLLM does; its default is the same in every release of the window (vllm/envs.py)."""
    return env[name].lower() in ("1", "true") if name in env else default


def _require_read(given: Given) -> None:
    if settings(given).status in ("problem", "unknown"):
        raise NotKnownError("the options were not read", "see the line `settings` above")


def _settings(given: Given) -> Settings:
    return Settings() if given.served is None else compat_config.settings_of(given.served)


def _view(given: Given) -> ConfigView:
    _require_read(given)
    view = ConfigView() if given.served is None else offline.view_of_options(given.served)
    breakable = _on(given.env, BREAKABLE_GRAPHS)
    return replace(view, breakable_cudagraph=True, mode="NONE") if breakable else view


CHECKS = (
    use_aiter, fp8_bmm, fp4_bmm, batch_invariant, mla, breakable_graphs, settings, graph, dead_flag, user_pass,
)  # fmt: skip
