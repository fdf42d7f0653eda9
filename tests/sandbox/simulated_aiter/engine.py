"""Let a sandbox engine believe that it runs on an AMD card with AITER: for the demo and the engine tests."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack

import torch

from tests.sandbox.simulated_aiter.op import FP8
from tests.sandbox.simulated_aiter.trees import install
from vllm_aiter_mla.kernels.platform import Platform

ROCM = (7, 0)
_ENV = "SIMULATED_AITER_ARCH"
_installed = ExitStack()
atexit.register(_installed.close)


def pretend(arch: str) -> Platform:
    """Install the fake for ``arch`` for the rest of this process, and fake the platform checks that lead to it.

    Two checks are faked: what the plugin takes the card for, and vLLM's fp8 type (e4m3fnuz on gfx942, of which vLLM
    vLLM uses 224 of the 240 it reaches). Call it after vLLM's plugins are loaded and before a config is built.
    Spawned workers inherit the import path and the environment, and call :func:`resume`.

    Raises:
        ValueError: ``arch`` is neither "gfx942" nor "gfx950".
    """
    if arch not in FP8:
        raise ValueError(f"the simulated AITER knows gfx942 and gfx950, not {arch!r}")
    _installed.close()
    _installed.enter_context(install(arch))
    return _fake_platform(arch)


def hold_weights_in_fp8() -> None:
    """Let vLLM keep absorbed weights in fp8 and multiply by AITER's batched GEMM, as it does by default on ROCm.

    Call it after :func:`pretend`, before a model is loaded. vLLM calls the GEMM once for each of 1024 batch sizes while
    it loads a layer, to compile them; the fake has nothing to compile, so two are left.
    """
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.model_executor.layers.attention import mla_attention

    def enabled(cls: type) -> bool:
        return True

    rocm_aiter_ops.is_fp8bmm_enabled = classmethod(enabled)  # type: ignore[method-assign, assignment]
    vars(mla_attention)["tqdm"] = lambda sizes, **_: sizes[:2]


def hold_weights_in_fp4() -> None:
    """Let vLLM keep absorbed weights in mxfp4, as it did by default on gfx950 beside a bf16 ``kv_b_proj``.

    Call it after :func:`pretend`, before a model is loaded.
    """
    from vllm._aiter_ops import rocm_aiter_ops

    def enabled(cls: type) -> bool:
        return True

    rocm_aiter_ops.is_fp4bmm_enabled = classmethod(enabled)  # type: ignore[method-assign, assignment]


def resume() -> Platform | None:
    """In a spawned worker: fake the checks again if the parent did; the import path is inherited. None otherwise."""
    arch = os.environ.get(_ENV)
    return None if arch is None else _fake_platform(arch)


def _fake_platform(arch: str) -> Platform:
    from vllm.platforms import current_platform

    from vllm_aiter_mla import backends

    platform = Platform(arch, ROCM)

    def fp8_dtype(cls: type) -> torch.dtype:
        return FP8[arch]

    def is_fp8_fnuz(cls: type) -> bool:
        return FP8[arch] == torch.float8_e4m3fnuz

    vllm_platform = type(current_platform)
    vllm_platform.fp8_dtype = classmethod(fp8_dtype)  # type: ignore[method-assign, assignment]
    vllm_platform.is_fp8_fnuz = classmethod(is_fp8_fnuz)  # type: ignore[method-assign, assignment]
    _renew_constants(FP8[arch])
    backends.detect_platform = lambda: platform
    backends.forget()
    return platform


def _renew_constants(dtype: torch.dtype) -> None:
    """Replace what vLLM's modules asked the platform for when they were imported; later imports ask the faked one."""
    utils = sys.modules.get("vllm.model_executor.layers.quantization.utils.quant_utils")
    attention = sys.modules.get("vllm.model_executor.layers.attention.mla_attention")
    quant = sys.modules.get("vllm.model_executor.layers.quantization.input_quant_fp8")
    if utils is not None and hasattr(utils.get_fp8_min_max, "cache_clear"):
        utils.get_fp8_min_max.cache_clear()
    if attention is not None:
        vars(attention)["_FP8_DTYPE"] = dtype
    if quant is not None and utils is not None:
        low, high = utils.get_fp8_min_max()
        vars(quant).update(_FP8_DTYPE=dtype, _FP8_MIN=low, _FP8_MAX=high)
