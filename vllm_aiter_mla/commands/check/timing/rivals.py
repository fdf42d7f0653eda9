# SPDX-License-Identifier: Apache-2.0
"""Kernels that the step ``timing`` times beside ours, and that never serve.

Where neither vLLM's kernels nor AITER are, the only one is ``stand_in``. On AMD's cards there are two. One is AITER's
op behind vLLM's fp8 product on another tile. The other is AITER's own single launch,
``fused_fp8_bmm_rope_cat_and_cache_mla`` and its mxfp4 twin, which does what our Triton launch does: absorb BMM, RoPE,
concat, KV write. It takes no scale of the query and clamps no position. Over a rotary table in 16 bits it rounds each
product of the rotation, so it is given float32 halves. Read from aiter/ops/triton/fusions/fused_bmm_rope_kv_cache.py;
docs/kernels.md says what running it showed.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_aiter_mla.commands.check.timing.record import DECODE_TILE, ONE_LAUNCH, STAND_IN
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.absorb import FP8_GROUP
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError, Op
from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, contract_violation, meta_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.startup import checks

MODULE = "aiter.ops.triton.fusions.fused_bmm_rope_kv_cache"
FUNCTIONS = {"fp8": "fused_fp8_bmm_rope_cat_and_cache_mla", "mxfp4": "fused_fp4_bmm_rope_cat_and_cache_mla"}
"""By weight format."""
MAX_ROWS = 256
Ops = Mapping[str, Callable[..., Any]]


def load() -> Ops:
    """Import AITER's functions.

    Raises:
        AiterUnavailableError: this AITER does not have them.
    """
    try:
        module = importlib.import_module(MODULE)
        return {format: getattr(module, name) for format, name in FUNCTIONS.items()}
    except Exception as error:  # AITER's import runs rocminfo, compilers and a registry: anything may come out
        raise AiterUnavailableError(f"{MODULE}: {type(error).__name__}: {error}") from error


class NotTimedError(RuntimeError):
    """A rival cannot be timed on a shape; the message says why."""


def check_rivals(
    platform: Platform, shape: LayerShape, most: int, vllm_is_here: bool
) -> tuple[dict[str, KernelBackend], dict[str, str]]:
    """Check the rivals of this card with up to ``most`` rows.

    Returns:
        The rivals that can be timed on this shape, and why the others cannot, by name.
    """
    able, untimed = dict[str, KernelBackend](), dict[str, str]()
    makers: dict[str, Callable[[], KernelBackend]] = {}
    if platform.arch in ARCHITECTURES:
        makers[DECODE_TILE] = lambda: _decode_tile_backend(platform, shape, most)
        makers[ONE_LAUNCH] = lambda: _one_launch_backend(platform, shape, most)
    else:
        untimed |= dict.fromkeys((DECODE_TILE, ONE_LAUNCH), f"it is for {' and '.join(ARCHITECTURES)}")
        if not vllm_is_here:
            makers[STAND_IN] = lambda: _stand_in_backend(shape, most)
    for name, make in makers.items():
        try:
            able[name] = make()
        except (AiterUnavailableError, NotTimedError) as error:
            untimed[name] = str(error)
    return able, untimed


def _check(backend: KernelBackend, shape: LayerShape, rows: int) -> None:
    """Raise NotTimedError if a rival differs from the reference."""
    result = checks.check_kernel(backend.name, backend, shape, (), rows)
    if not result.has_passed:
        raise NotTimedError(result.message)


def _decode_tile_backend(platform: Platform, shape: LayerShape, most: int) -> KernelBackend:
    backend = DecodeTileBackend(platform)
    _check(backend, shape, min(most, MAX_ROWS))
    return backend


def _one_launch_backend(platform: Platform, shape: LayerShape, most: int) -> KernelBackend:
    # The single launch scales no query and clamps no overflow, so it is checked in 16 bits.
    _check(OneLaunchBackend(platform), replace(shape, out_dtype=shape.act, cache_dtype=shape.act), most)
    return OneLaunchBackend(platform, unit_scale=True)


def _stand_in_backend(shape: LayerShape, most: int) -> KernelBackend:
    try:
        from vllm_aiter_mla.commands.check.timing.stand_in import StandInBackend
    except ImportError as error:  # no Triton
        raise NotTimedError(str(error)) from error
    backend = StandInBackend()
    if (why := backend.refuse(meta_inputs(shape))) is not None:
        raise NotTimedError(why)
    _check(backend, shape, most)
    return backend


class DecodeTileBackend(AiterBackend):
    """AITER's op behind vLLM's fp8 product on a tile for few rows, as SGLang chooses one.

    AITER's own table has 128 columns a tile: 64 programs for 16 heads and up to 16 rows, on a card of 304 units. Here
    the columns are halved until the programs fill three quarters of the units.

    Args:
        platform: the card.
        units: compute units; the current card's by default.
        op: AITER's op; imported by default.

    Raises:
        AiterUnavailableError: no ``op`` was given and AITER cannot be used.
    """

    def __init__(self, platform: Platform, units: int = 0, op: Op | None = None) -> None:
        super().__init__(platform, op)
        self.name = DECODE_TILE
        self._units = units or card().units()

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        if inputs.weight.format != "fp8":
            return "vLLM's fp8 product is the one that takes a tile"
        if inputs.num_tokens > MAX_ROWS:
            return f"a tile for up to {MAX_ROWS} rows, not for {inputs.num_tokens}"
        return super().bind(inputs)

    def _options(self, inputs: DecodeInputs) -> dict[str, Any]:
        return {"config": decode_tile(inputs.num_tokens, inputs.num_heads, inputs.latent_dim, self._units)}


def decode_tile(tokens: int, heads: int, latent: int, units: int) -> dict[str, Any]:
    """Return AITER's ``config`` of its fp8 GEMM for ``tokens`` rows on a card of so many compute units."""
    rows = next(size for size in (16, 32, 64) if tokens <= size or size == 64)
    columns, blocks = 128, heads * -(-tokens // rows)
    while columns > 16 and blocks * latent // columns < 0.75 * units:
        columns //= 2
    return {
        "BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2,
        "waves_per_eu": 1 if blocks * latent // columns <= units else 2, "matrix_instr_nonkdim": 16, "kpack": 2,
        "cache_modifier": ".cg",
    }  # fmt: skip


class OneLaunchBackend(KernelBackend):
    """``KernelBackend`` over AITER's single launch.

    Args:
        platform: the card.
        ops: AITER's functions by weight format; imported by default.
        unit_scale: whether the scale of every query is taken for 1, as it is where AITER's users call these functions.
            Otherwise a query in fp8 is declined.

    Raises:
        AiterUnavailableError: no ``ops`` were given and AITER has none.
    """

    name = ONE_LAUNCH
    bounds = OWN_BMM

    def __init__(self, platform: Platform, ops: Ops | None = None, unit_scale: bool = False) -> None:
        self._platform, self._unit_scale = platform, unit_scale
        self._ops = load() if ops is None else ops
        self._halves: dict[tuple[int, torch.Size], tuple[torch.Tensor, ...]] = {}

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. The run's first call with a rotary table must not come in a capture."""
        reason = contract_violation(inputs) or next(self._broken(inputs), None)
        return reason or Binding(partial(self._run, self._ops[inputs.weight.format]))

    def _broken(self, inputs: DecodeInputs) -> Iterator[str]:
        weight, cache = inputs.weight, inputs.kv_cache
        if weight.format not in self._ops:
            yield f"AITER's single launch multiplies fp8 and mxfp4 weights, not {weight.format} ones"
        if (reason := weight.refuse(self._platform)) is not None:
            yield reason
        if inputs.q.dtype not in (torch.bfloat16, torch.float16):
            yield f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
        if formats.is_fp8(inputs.out_dtype) and not self._unit_scale:
            yield "the query is to be fp8, and AITER's single launch does not scale it"
        if formats.is_fp8(cache.dtype) and cache.dtype != self._platform.fp8:
            yield f"kv_cache: {self._platform.fp8} expected on {self._platform.arch}, got {cache.dtype}"
        if inputs.num_tokens == 0:
            yield "q: at least one row expected, got none"
        for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
            if width & (width - 1):
                yield f"{name} width: a power of two expected, got {width}"
        if not cache.is_contiguous():
            yield f"kv_cache: contiguous blocks expected, got strides {cache.stride()}"

    def _run(self, op: Callable[..., Any], inputs: DecodeInputs) -> torch.Tensor:
        table, width = inputs.cos_sin_cache, inputs.kv_cache.shape[-1]
        key = (table.data_ptr(), table.shape)
        if key not in self._halves:  # with the table, so that no other can come to lie there
            self._halves[key] = (*(half.float().contiguous() for half in table.chunk(2, dim=-1)), table)
        cos, sin, _ = self._halves[key]
        (_, values), (_, scale) = inputs.weight.tensors
        # A scale that is given beside a 16-bit cache would scale it.
        k_scale = inputs.k_scale if formats.is_fp8(inputs.kv_cache.dtype) else None
        group = {"group_size": FP8_GROUP} if inputs.weight.format == "fp8" else {}
        return op(
            inputs.q_nope.transpose(0, 1), values, scale, inputs.q[..., inputs.nope_dim :], inputs.kv_c.unsqueeze(1),
            inputs.k_pe.unsqueeze(1), inputs.kv_cache.view(-1, 1, width), inputs.slot_mapping, inputs.positions, cos,
            sin, k_scale=k_scale, is_neox=inputs.is_neox, q_out_dtype=inputs.out_dtype, **group,
        )[0]  # fmt: skip
