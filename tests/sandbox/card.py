"""Let an engine on a CPU believe that it runs on an AMD card with AITER, and, if asked, over vLLM's AITER attention.

What a card would run is replaced: AITER's kernels (``simulated_aiter``), vLLM's own kernels (``gpu_ops``) and one of
its Triton kernels. vLLM's classes run unchanged: ``AiterMLABackend``, its metadata builder, ``AiterMLAImpl`` and
AITER's prefill. gfx950's fp8 prefill needs pinned memory and events and is left out: vLLM then takes
``flash_attn_varlen_func``, as with an AITER that lacks it.
"""

from __future__ import annotations

import atexit
import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch

from tests.sandbox.simulated_aiter import ROCM, install
from tests.sandbox.simulated_aiter.op import FP8
from vllm_aiter_mla.kernels.platform import Platform

BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla.AiterMLABackend"
_ARCH, _ATTENTION = "SIMULATED_AITER_ARCH", "SIMULATED_AITER_ATTENTION"
_installed = ExitStack()
atexit.register(_installed.close)


def pretend(arch: str, attention: bool = False) -> None:
    """Install the simulated AITER for ``arch`` for the rest of this process, and change the checks that lead to it.

    Call it after vLLM's plugins are loaded and before a config is built. Spawned workers inherit the import path and
    the environment, and call :func:`resume`.

    Args:
        arch: "gfx942" or "gfx950".
        attention: let every MLA layer use vLLM's AITER classes.

    Raises:
        ValueError: an unknown ``arch``.
    """
    if arch not in FP8:
        raise ValueError(f"the simulated AITER knows gfx942 and gfx950, not {arch!r}")
    _installed.close()
    _installed.enter_context(install(arch))
    if attention:
        os.environ[_ATTENTION] = "1"
    resume()


def admit() -> None:
    """Let the gate take this machine for an AMD card whose attention is AITER's: it asks vLLM's platform."""
    from vllm_aiter_mla.compat import config

    config.platform_facts = lambda vllm_config: {}


def resume() -> None:
    """In a spawned worker: change the checks again if the parent did."""
    arch = os.environ.get(_ARCH)
    if arch is not None:
        _change_checks(arch)
        if os.environ.get(_ATTENTION):
            _take_attention(arch)


def hold_weights_in_fp8() -> None:
    """Let vLLM keep absorbed weights in fp8 and multiply by AITER's batched GEMM, as it does by default on ROCm.

    Call it after :func:`pretend`, before a model is loaded. vLLM calls the GEMM once for each of 1024 batch sizes while
    it loads a layer, to compile them; the simulated GEMM has nothing to compile, so two are left.
    """
    from vllm.model_executor.layers.attention import mla_attention

    _switch_on("is_fp8bmm_enabled")
    vars(mla_attention)["tqdm"] = lambda sizes, **_: sizes[:2]


def hold_weights_in_fp4() -> None:
    """Let vLLM keep absorbed weights in mxfp4, as it did by default on gfx950 with a bf16 ``kv_b_proj``.

    Call it after :func:`pretend`, before a model is loaded.
    """
    _switch_on("is_fp4bmm_enabled")


def _switch_on(name: str) -> None:
    from vllm._aiter_ops import rocm_aiter_ops

    setattr(rocm_aiter_ops, name, classmethod(lambda cls: True))


def _change_checks(arch: str) -> None:
    """Change what the plugin takes the card for, and vLLM's fp8 type.

    The type is e4m3fnuz on gfx942, of which vLLM uses 224 of the 240 it reaches.
    """
    from vllm.platforms import current_platform

    from vllm_aiter_mla.serving import backends

    dtype, card = FP8[arch], Platform(arch, ROCM)
    vllm_platform: Any = type(current_platform)
    vllm_platform.fp8_dtype = classmethod(lambda cls: dtype)
    vllm_platform.is_fp8_fnuz = classmethod(lambda cls: dtype == torch.float8_e4m3fnuz)
    _renew_constants(dtype)
    backends.detect_platform = lambda: card


def _renew_constants(dtype: torch.dtype) -> None:
    """Replace what vLLM's modules asked the platform for when they were imported; later imports ask the changed one."""
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


def _take_attention(arch: str) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tests.sandbox import platform
    from vllm_aiter_mla.compat.layer import KNOWN_IMPLS

    # Only what is admitted in serving is admitted here.
    KNOWN_IMPLS.discard("SandboxMLAImpl")
    with _driver(arch):
        import vllm.platforms.rocm  # noqa: F401
    _replace_kernels()
    register_backend(AttentionBackendEnum.CPU_MLA, BACKEND)
    prefill = MLAPrefillBackendEnum.ROCM_AITER_FA.get_class()
    type(current_platform).get_mla_prefill_backend_cls = classmethod(lambda cls, selector: prefill)
    platform.chunks_fp8_prompts = True


@contextmanager
def _driver(arch: str) -> Iterator[None]:
    """What vLLM's ROCm platform needs while it is imported: the card's name, and compiled libraries.

    A CPU build has AVX-512 code under the name of the first library, which would end an older processor's process.
    """
    import vllm._custom_ops  # noqa: F401

    absent = [name for name in ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C") if name not in sys.modules]
    ask = torch.cuda.get_device_properties
    vars(torch.cuda)["get_device_properties"] = lambda device: types.SimpleNamespace(gcnArchName=arch)
    sys.modules.update({name: types.ModuleType(name) for name in absent})
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask
        for name in absent:
            del sys.modules[name]


def _replace_kernels() -> None:
    from vllm import _aiter_ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    if not hasattr(torch.ops.vllm, "rocm_aiter_mla_decode_fwd"):
        # vLLM registers the ops over AITER on ROCm only.
        direct_register_custom_op(
            op_name="rocm_aiter_mla_decode_fwd",
            op_func=_aiter_ops._rocm_aiter_mla_decode_fwd_impl,
            mutates_args=["o"],
        )
    rocm_aiter_mla._expand_page_indices_kernel = PageIndices()
    vars(mla_attention)["current_platform"] = _NoCPU(current_platform)


class _NoCPU:
    """The platform as vLLM's attention layer sees it: no CPU, so that it gathers context with its GPU kernel."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        """Always False."""
        return False


class PageIndices:
    """vLLM's Triton kernel that turns block numbers into one index per key."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self._launch

    def _launch(
        self,
        page_indices: torch.Tensor,
        block_table: torch.Tensor,
        stride_0: int,
        stride_1: int,
        cu_num_tokens: torch.Tensor,
        num_real_tokens: torch.Tensor | None = None,  # from vLLM 0.33 on
        *,
        KERNEL_BLOCK_SIZE: int,  # noqa: N803
        BLOCK_SIZE: int,  # noqa: N803
        CLAMP_TAIL: bool = False,  # noqa: N803
    ) -> None:
        bounds = cu_num_tokens.tolist()
        for request, (first, end) in enumerate(pairwise(bounds)):
            key = torch.arange(end - first)
            if CLAMP_TAIL and num_real_tokens is not None:
                key = torch.where(key < num_real_tokens[request], key, 0)
            blocks = block_table[request, key // KERNEL_BLOCK_SIZE]
            page_indices[first:end] = (blocks * KERNEL_BLOCK_SIZE + key % KERNEL_BLOCK_SIZE).to(page_indices.dtype)
