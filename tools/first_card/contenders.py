"""What a card times beside our kernel: vLLM's sequence as stand-ins, and AITER's own Triton kernels of this region."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_aiter_mla.commands.check.timing import rivals
from vllm_aiter_mla.commands.check.timing.stand_in import StandInBackend
from vllm_aiter_mla.kernels import absorb, formats
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.triton.backend import TritonBackend

NAMES = OURS, UNFUSED, PAIR, ONE = "triton", StandInBackend.name, "aiter pair", "aiter one launch"
FUSED = ("aiter.ops.triton.fusions.fused_kv_cache", "fused_qk_rope_cat_and_cache_mla")
FP8_BMM = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
FOR_AMD = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "instruction_sched_variant")
"""Options of a launch that only AMD's compiler knows."""
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.fusions", "aiter.ops.triton.utils")


class AiterPair(KernelBackend):
    """AITER's ``fused_qk_rope_cat_and_cache_mla`` behind the absorb product. It takes no scale of the query."""

    name = PAIR

    def __init__(self, op: Callable[..., Any]) -> None:
        self._op = op
        self._halves: dict[int, tuple[torch.Tensor, ...]] = {}  # by the table's address; with it, so that it stays

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. The run's first call with a rotary table must not come in a capture."""
        return contract_violation(inputs) or Binding(self._run)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        table, width = inputs.cos_sin_cache, inputs.kv_cache.shape[-1]
        if table.data_ptr() not in self._halves:
            cos_sin = (half.float().contiguous() for half in table.chunk(2, dim=-1))
            self._halves[table.data_ptr()] = (*cos_sin, table)
        cos, sin, _ = self._halves[table.data_ptr()]
        return self._op(
            inputs.weight.product(inputs.q_nope), inputs.q[..., inputs.nope_dim :], inputs.kv_c.unsqueeze(1),
            inputs.k_pe.unsqueeze(1), inputs.kv_cache.view(-1, 1, width), inputs.slot_mapping, inputs.positions, cos,
            sin, inputs.k_scale, inputs.is_neox, apply_scale=formats.is_fp8(inputs.kv_cache.dtype),
            q_out_dtype=inputs.out_dtype,
        )[0]  # fmt: skip


def contenders(platform: Platform, aiter: Path | None) -> tuple[dict[str, KernelBackend], dict[str, str]]:
    """Return the contenders by name, and why others are absent.

    Args:
        platform: the card.
        aiter: the folder that holds AITER's ``aiter/ops/triton``; None: it was not carried.
    """
    found: dict[str, KernelBackend] = {OURS: TritonBackend(), UNFUSED: StandInBackend()}
    if aiter is None:
        return found, dict.fromkeys((PAIR, ONE), "AITER's files were not carried")
    try:
        _install(aiter)
        absorb.GEMMS["fp8"] = _function(f"aiter.ops.triton.gemm.batched.{FP8_BMM}", FP8_BMM)
        found[UNFUSED] = StandInBackend(("plain", "fp8"))
        found[PAIR] = AiterPair(_function(*FUSED))
        one = {"fp8": _function(rivals.ONE_LAUNCH_MODULE, rivals.ONE_LAUNCH_FUNCTIONS["fp8"])}
        found[ONE] = rivals.OneLaunchBackend(platform, one, has_unit_scale=True)
    except Exception as error:  # another AITER may have its functions elsewhere
        return found, {name: f"{type(error).__name__}: {error}" for name in (PAIR, ONE) if name not in found}
    return found, {}


def _install(folder: Path) -> None:
    """Make ``aiter.ops.triton`` importable without AITER's own ``__init__``, which wants ROCm and builds C++.

    AITER takes the card for a gfx950, which has the fp8 type of an H100; of its C++ part it wants one decorator.
    """
    for name in PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    for name in ("aiter.jit", "aiter.jit.utils", "aiter.jit.utils.torch_guard"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["aiter.jit.utils.torch_guard"].torch_compile_guard = lambda **_: lambda function: function  # type: ignore[attr-defined]
    arch = importlib.import_module("aiter.ops.triton.utils._triton.arch_info")
    arch.get_arch = lambda: "gfx950"  # type: ignore[attr-defined]


def _function(module: str, name: str) -> Callable[..., Any]:
    """Import one of AITER's functions; its launches leave out the options that only AMD's compiler knows."""
    found = importlib.import_module(module)
    for kernel, value in list(vars(found).items()):
        if kernel.endswith("_kernel") and hasattr(value, "__getitem__") and not isinstance(value, _Portable):
            setattr(found, kernel, _Portable(value))
    function: Callable[..., Any] = getattr(found, name)
    return function


class _Portable:
    """A kernel of AITER, launched on another card than AMD's."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]
        return lambda *given, **named: launch(*given, **{k: v for k, v in named.items() if k not in FOR_AMD})
