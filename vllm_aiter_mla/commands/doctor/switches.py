"""Checks of vLLM's environment variables that decide whether the fast path engages."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_aiter_mla.commands.doctor import machine
from vllm_aiter_mla.commands.doctor.check import Check, named
from vllm_aiter_mla.commands.doctor.given import Given
from vllm_aiter_mla.compat import offline, switches
from vllm_aiter_mla.compat.switches import (
    BATCH_INVARIANT,
    BREAKABLE_GRAPHS,
    FP4_BMM,
    FP8_BMM,
    NO_MLA,
    USE_AITER,
    USE_AITER_MLA,
)  # fmt: skip


def use_aiter(given: Given) -> Check:
    """AITER must be switched on in vLLM, for MLA too: only then is the attention AITER's."""
    backend = "" if given.served is None else offline.backend_name(given.served)
    if backend:
        return _of_backend(backend)
    if machine.rocm_version() is None:
        return Check("ok", "VLLM_ROCM_USE_AITER has no effect without ROCm; with ROCm set it to 1")
    for name, default in ((USE_AITER, False), (USE_AITER_MLA, True)):
        if not switched_on(given.env, name, default):
            origin = f"={given.env[name]}" if name in given.env else " is unset, which means off"
            return Check("problem", f"{name}{origin}: vLLM takes another MLA backend", f"set {name}=1")
    return Check("ok", "VLLM_ROCM_USE_AITER=1")


def _of_backend(backend: str) -> Check:
    """vLLM takes the backend that is named, whatever the switches say."""
    from vllm_aiter_mla.compat.layer import KNOWN_IMPLS

    try:
        implementation = offline.impl_name(backend)
    except Exception as error:
        return Check("unknown", f"--attention-backend {backend}: vLLM cannot be asked for it ({type(error).__name__})")
    if implementation in KNOWN_IMPLS:
        return Check("ok", f"--attention-backend {backend}: AITER's MLA attention, whatever VLLM_ROCM_USE_AITER says")
    problem = f"--attention-backend {backend}: {implementation} is not admitted, no layer engages"
    return Check("problem", problem, "drop it, or name ROCM_AITER_MLA")


def batch_invariant(given: Given) -> Check:
    """vLLM looks for a backend that is batch invariant, and AITER's is not (``supports_batch_invariance``)."""
    if not switched_on(given.env, BATCH_INVARIANT, False):
        return Check("ok", f"{BATCH_INVARIANT} is off")
    return Check(
        "problem", f"{BATCH_INVARIANT} is on: vLLM takes Triton's MLA attention, and no layer engages", "unset it"
    )


def fp8_bmm(given: Given) -> Check:
    """Which form the absorb weight has beside an AITER that is on: fp8, or what fp4 leaves."""
    if machine.rocm_version() is None:
        return Check("ok", f"{FP8_BMM} has an effect on ROCm only")
    if not switched_on(given.env, USE_AITER, False):
        return Check("ok", f"off, because {USE_AITER} is off")
    return _bmm(given, FP8_BMM, "W_UK and W_UV in fp8", "W_UK and W_UV in the activation dtype")


def fp4_bmm(given: Given) -> Check:
    """On gfx950 vLLM asks for mxfp4 first, where ``kv_b_proj`` is bf16; the kernels take these weights too."""
    if machine.gpu_arch() != "gfx950":
        return Check("ok", "has an effect on gfx950 only")
    if not switched_on(given.env, USE_AITER, False):
        return Check("ok", f"off, because {USE_AITER} is off")
    return _bmm(given, FP4_BMM, "W_UK and W_UV in mxfp4 where kv_b_proj is bf16", f"see {FP8_BMM} above")


def _bmm(given: Given, name: str, held: str, otherwise: str) -> Check:
    """How the installed vLLM takes the switch ``name``: its default is not the same in every release."""
    try:
        on = switches.switched_on(name, given.env)
    except ValueError as error:
        return Check("problem", str(error), "correct it; vLLM would not start")
    if on is None:
        return Check("unknown", f"{name}: vLLM cannot be asked for its default", "see the line `vllm` above")
    origin = name if name in given.env else f"{name} is unset, in this vLLM"
    return Check("ok", f"{origin} {'on' if on else 'off'}: {held if on else otherwise}")


def mla(given: Given) -> Check:
    """Without MLA there is nothing to do."""
    if switched_on(given.env, NO_MLA, False):
        return Check("problem", "VLLM_MLA_DISABLE is set: no layer uses MLA", "unset VLLM_MLA_DISABLE")
    return Check("ok", "VLLM_MLA_DISABLE is not set")


def breakable_graphs(given: Given) -> Check:
    """Breakable CUDA graphs run the model without torch.compile: the passes cannot, the module can."""
    if switched_on(given.env, BREAKABLE_GRAPHS, False):
        return Check(
            "ok", "on: nothing is compiled, the module integration is taken; with integration=passes nothing is fused"
        )
    return Check("ok", "off")


def switched_on(env: Mapping[str, str], name: str, default: bool) -> bool:
    """vLLM's reading of a switch whose default is the same in every release of the window (vllm/envs.py)."""
    return env[name].lower() in ("1", "true") if name in env else default


CHECKS = named(use_aiter, batch_invariant, fp8_bmm, fp4_bmm, mla, breakable_graphs)
