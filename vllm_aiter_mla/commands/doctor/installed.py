"""Checks of what is installed: vLLM and what the plugin calls in it, the plugin's entry point, AITER, ATOM."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.doctor import machine
from vllm_aiter_mla.commands.doctor.check import Check, Given, named
from vllm_aiter_mla.settings import NAMESPACE

SEE_VLLM = "see the line `vllm` above"
NO_VLLM = Check("unknown", "vLLM is not installed", SEE_VLLM)
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"


def vllm(given: Given) -> Check:
    """Check vLLM's version against the window, without importing vLLM."""
    from vllm_aiter_mla.compat.config import WINDOW, in_window

    version = vllm_version()
    window = "{}.{} <= vLLM < {}.{}".format(*WINDOW[0], *WINDOW[1])
    if version is None:
        return Check("problem", "vLLM is not installed", f"install vLLM for ROCm, {window}")
    if in_window(version):
        return Check("ok", f"{version}, inside {window}")
    remedy = "use a release inside, or try additional_config.aiter_mla.debug.untested_vllm=true"
    return Check("problem", f"{version} is outside {window}: the plugin stays off", remedy)


def plugin(given: Given) -> Check:
    """Check that vLLM finds this plugin, and name the other plugins."""
    points = importlib.metadata.entry_points(group=GENERAL)
    ours = {point.value for point in points if point.name == NAMESPACE}
    others = {point.name for point in points if point.name != NAMESPACE and _package(point) != "vllm"}
    also = f"; other plugins: {', '.join(sorted(others))}" if others else ""
    if not ours:
        return Check("problem", f"no entry point {NAMESPACE} in {GENERAL}{also}", "in a checkout: pip install .")
    if len(ours) > 1:
        return Check("warning", f"{NAMESPACE} is registered more than once", "remove all but one installation")
    return Check("ok", f"entry point {NAMESPACE} = {ours.pop()}{also}")


def vllm_plugins(given: Given) -> Check:
    """Check that ``VLLM_PLUGINS``, an allow-list, names this plugin if it is set."""
    allowed = given.env.get("VLLM_PLUGINS")
    if allowed is None:
        return Check("ok", "VLLM_PLUGINS is unset: every plugin is loaded")
    if NAMESPACE in [name.strip() for name in allowed.split(",")]:
        return Check("ok", f"VLLM_PLUGINS={allowed}")
    remedy = f"add {NAMESPACE} to VLLM_PLUGINS, or unset it"
    return Check("problem", f"VLLM_PLUGINS={allowed!r} leaves {NAMESPACE} out: the flag will be unknown", remedy)


def surface(given: Given) -> Check:
    """Check that vLLM has the hooks that the plugin needs."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla.compat.config import missing_capabilities

    missing = missing_capabilities()
    if missing:
        return Check("problem", f"this vLLM lacks {', '.join(missing)}: the plugin stays off", SEE_VLLM)
    return Check("ok", "vLLM has every hook that the plugin needs")


def mla_ops(given: Given) -> Check:
    """Check that vLLM's MLA ops have the arguments that the passes know."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla.compat.config import ATTENTION_MODULE, OP_ARGUMENTS, op_differences

    imported = machine.module(ATTENTION_MODULE)
    if isinstance(imported, Exception):
        return Check("unknown", f"{ATTENTION_MODULE} is not importable: {imported}")
    found = op_differences()
    if found:
        return Check("problem", f"{'; '.join(found)}: the plugin stays off", SEE_VLLM)
    return Check("ok", ", ".join(OP_ARGUMENTS))


def patches(given: Given) -> Check:
    """Apply the plugin's patches as vLLM would have them applied."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla import plugin as ours
    from vllm_aiter_mla.compat import patches

    ours.register()
    failures = patches.failures()
    if not failures:
        return Check("ok", ", ".join(patches.PATCHES))
    shown = "; ".join(f"{name}: {error}" for name, error in failures.items())
    if patches.failed_requirements():
        return Check("problem", f"{shown}: vLLM runs unmodified", f"{SEE_VLLM}; report it with this line")
    return Check("warning", shown, "use additional_config.aiter_mla instead of the flag")


def aiter(given: Given) -> Check:
    """Check AITER from its files, without importing it."""
    from vllm_aiter_mla.kernels.aiter.op import locate_aiter

    found = locate_aiter()
    if found.reason is not None:
        if found.package is None and found.distribution is None and machine.rocm_version() is None:
            return Check("unknown", "not installed here, and no ROCm either", machine.ELSEWHERE)
        return Check("problem", found.reason, "see docs/aiter.md")
    detail = f"{found.distribution or 'without metadata'}, {len(found.signature)} arguments"
    if found.prebuilt:
        return Check("ok", f"{detail}, built")
    detail += "; module_cache is not built: the first start compiles it, which takes minutes"
    return Check("warning", detail, "nothing; expect a slow first start")


def atom(given: Given) -> Check:
    """Check that ATOM's platform plugin, which replaces the models, is absent or off."""
    if not any(_package(point) == "atom" for point in importlib.metadata.entry_points(group=PLATFORM)):
        return Check("ok", "ATOM's vLLM plugin is not installed")
    if given.env.get("ATOM_DISABLE_VLLM_PLUGIN") == "1":
        return Check("ok", "installed and switched off by ATOM_DISABLE_VLLM_PLUGIN=1")
    return Check("problem", "ATOM's plugin owns the model: this plugin stays off", "set ATOM_DISABLE_VLLM_PLUGIN=1")


def vllm_version() -> str | None:
    """Return vLLM's version, from metadata if there are any; None if it is not installed."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return None
    except (ImportError, ValueError):
        return None
    from vllm_aiter_mla.compat import config as compat_config

    return files.stamp("doctor", 1)[files.KEY]["vllm"] or compat_config.vllm_version()


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition(".")[0]


CHECKS = named(vllm, plugin, vllm_plugins, surface, mla_ops, patches, aiter, atom)
