"""vLLM's AITER attention on a CPU: ``AiterMLABackend``, its metadata builder, ``AiterMLAImpl`` and AITER's prefill.

The classes run as they are. Stand-ins are what a card would run: AITER's kernels (``simulated_aiter.mla``), vLLM's own
kernels (``gpu_ops``) and one of its Triton kernels. gfx950's fp8 prefill is left out, because it needs pinned memory
and events: vLLM then takes ``flash_attn_varlen_func``, as with an AITER that lacks it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

_ENV = "SIMULATED_AITER_ATTENTION"
BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla.AiterMLABackend"


def take(arch: str) -> None:
    """Let every MLA layer of this process and its workers use vLLM's AITER classes.

    Call it after ``simulated_aiter.engine.pretend(arch)``, before a config is built.
    """
    os.environ[_ENV] = arch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tests.sandbox import platform
    from vllm_aiter_mla.compat.layer import KNOWN_IMPLS

    # Nothing is admitted here but what is admitted in serving.
    KNOWN_IMPLS.discard("SandboxMLAImpl")
    with _on_a_card(arch):
        import vllm.platforms.rocm  # noqa: F401
    _replace_kernels()
    register_backend(AttentionBackendEnum.CPU_MLA, BACKEND)
    prefill = MLAPrefillBackendEnum.ROCM_AITER_FA.get_class()
    type(current_platform).get_mla_prefill_backend_cls = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, selector: prefill
    )
    platform.chunks_fp8_prompts = True


def resume() -> None:
    """In a spawned worker: take the classes if the parent did."""
    arch = os.environ.get(_ENV)
    if arch is not None:
        take(arch)


@contextmanager
def _on_a_card(arch: str) -> Iterator[None]:
    """What vLLM's ROCm platform asks while it is imported: the driver, and two compiled libraries.

    A CPU build has AVX-512 code under the name of the first: loaded by name, it ends an older processor's process.
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
