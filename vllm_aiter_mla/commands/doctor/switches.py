"""Checks of vLLM's environment variables that decide whether the fast path engages."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_aiter_mla.commands.doctor import machine
from vllm_aiter_mla.commands.doctor.check import Check, named
from vllm_aiter_mla.commands.doctor.given import Given

FP8_BMM, FP4_BMM = "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"


def use_aiter(given: Given) -> Check:
    """AITER must be switched on in vLLM, for MLA too: only then is the attention AITER's."""
    if machine.rocm_version() is None:
        return Check("ok", "VLLM_ROCM_USE_AITER has no effect without ROCm; with ROCm set it to 1")
    for name, default in (("VLLM_ROCM_USE_AITER", False), ("VLLM_ROCM_USE_AITER_MLA", True)):
        if not switched_on(given.env, name, default):
            origin = f"={given.env[name]}" if name in given.env else " is unset, which means off"
            return Check("problem", f"{name}{origin}: vLLM takes another MLA backend", f"set {name}=1")
    return Check("ok", "VLLM_ROCM_USE_AITER=1")


def fp8_bmm(given: Given) -> Check:
    """The fp8 absorb BMM is on by default with AITER; the kernels aiter and triton take its weights."""
    if machine.rocm_version() is None:
        return Check("ok", f"no ROCm here; where AITER is on, {FP8_BMM} is on too")
    if not switched_on(given.env, "VLLM_ROCM_USE_AITER", False):
        return Check("ok", "off with AITER")
    if not switched_on(given.env, FP8_BMM, True):
        return Check("ok", f"{FP8_BMM}=0: absorb weights in the activation dtype")
    origin = "is on" if FP8_BMM in given.env else "is unset, which means on"
    return Check("ok", f"{FP8_BMM} {origin}: fp8 absorb weights")


def fp4_bmm(given: Given) -> Check:
    """The fp4 absorb BMM is on by default on MI350X and MI355X for layers whose kv_b_proj is bfloat16."""
    if machine.gpu_arch() != "gfx950":
        return Check("ok", "has an effect on gfx950 only")
    if not switched_on(given.env, FP4_BMM, True):
        return Check("ok", f"{FP4_BMM}=0")
    return Check("warning", f"{FP4_BMM} is on: layers whose kv_b_proj is not quantised are declined",
        f"set {FP4_BMM}=0 for checkpoints with bfloat16 attention",
    )  # fmt: skip


def mla(given: Given) -> Check:
    """Without MLA there is nothing to do."""
    if switched_on(given.env, "VLLM_MLA_DISABLE", False):
        return Check("problem", "VLLM_MLA_DISABLE is set: no layer uses MLA", "unset VLLM_MLA_DISABLE")
    return Check("ok", "VLLM_MLA_DISABLE is not set")


def breakable_graphs(given: Given) -> Check:
    """Breakable CUDA graphs run the model without torch.compile."""
    if switched_on(given.env, "VLLM_USE_BREAKABLE_CUDAGRAPH", False):
        return Check(
            "problem",
            "VLLM_USE_BREAKABLE_CUDAGRAPH is set: nothing is compiled, nothing fused",
            "set VLLM_USE_BREAKABLE_CUDAGRAPH=0",
        )
    return Check("ok", "off")


def switched_on(env: Mapping[str, str], name: str, default: bool) -> bool:
    """vLLM's reading of a switch (vllm/envs.py)."""
    return env[name].lower() in ("1", "true") if name in env else default


CHECKS = named(use_aiter, fp8_bmm, fp4_bmm, mla, breakable_graphs)
