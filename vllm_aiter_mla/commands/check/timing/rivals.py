# SPDX-License-Identifier: Apache-2.0
"""Kernels that the step ``timing`` compares with ours, and that never serve.

On AMD's cards there are two rivals. ``DecodeTileBackend`` is AITER's op behind vLLM's fp8 product, on another tile.
``OneLaunchBackend`` is AITER's single launch, ``fused_fp8_bmm_rope_cat_and_cache_mla`` and its mxfp4 twin. It does what
our Triton launch does: absorb BMM, RoPE, concat, KV write. On other cards, without vLLM's kernels, ``stand_in`` is the
only rival.

AITER's single launch takes no scale of the query and clamps no position. With a 16-bit rotary table it rounds each
product of the rotation, so it gets float32 halves here. This was read in
aiter/ops/triton/fusions/fused_bmm_rope_kv_cache.py; docs/kernels.md has the results of running it.
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

ONE_LAUNCH_MODULE = "aiter.ops.triton.fusions.fused_bmm_rope_kv_cache"
ONE_LAUNCH_FUNCTIONS = {"fp8": "fused_fp8_bmm_rope_cat_and_cache_mla", "mxfp4": "fused_fp4_bmm_rope_cat_and_cache_mla"}
"""By weight format."""
MAX_DECODE_TILE_TOKENS = 256
"""Most tokens of a call for which AITER's op has a tile for few rows here."""
AiterFunctions = Mapping[str, Callable[..., Any]]


def load_aiter_functions() -> AiterFunctions:
    """Import AITER's functions.

    Raises:
        AiterUnavailableError: this AITER does not have them.
    """
    try:
        module = importlib.import_module(ONE_LAUNCH_MODULE)
        return {weight_format: getattr(module, name) for weight_format, name in ONE_LAUNCH_FUNCTIONS.items()}
    except Exception as error:  # AITER's import runs rocminfo, compilers and a registry, which may raise anything
        raise AiterUnavailableError(f"{ONE_LAUNCH_MODULE}: {type(error).__name__}: {error}") from error


class NotTimedError(RuntimeError):
    """A rival cannot be timed on a shape. The message says why."""


def check_rivals(
    platform: Platform,
    shape: LayerShape,
    max_tokens: int,
    is_vllm_here: bool,
    ended_checks: Mapping[str, str],
    on_check: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, KernelBackend], dict[str, str]]:
    """Check the rivals of this card with up to ``max_tokens`` tokens.

    A rival in ``ended_checks`` is not called. ``on_check`` is called with the name of a rival before its check.

    Returns:
        The rivals that can be timed on this shape, and why the others cannot, by name.
    """
    runnable, untimed_reasons = dict[str, KernelBackend](), dict[str, str]()
    make_by_name: dict[str, Callable[[], KernelBackend]] = {}
    if platform.arch in ARCHITECTURES:
        make_by_name[DECODE_TILE] = lambda: _decode_tile_backend(platform, shape, max_tokens)
        make_by_name[ONE_LAUNCH] = lambda: _one_launch_backend(platform, shape, max_tokens)
    else:
        untimed_reasons |= dict.fromkeys((DECODE_TILE, ONE_LAUNCH), f"it is for {' and '.join(ARCHITECTURES)}")
        if not is_vllm_here:
            make_by_name[STAND_IN] = lambda: _stand_in_backend(shape, max_tokens)
    for name, make_backend in make_by_name.items():
        if name in ended_checks:
            untimed_reasons[name] = ended_checks[name]
            continue
        on_check(name)
        try:
            runnable[name] = make_backend()
        except (AiterUnavailableError, NotTimedError, torch.OutOfMemoryError) as error:
            untimed_reasons[name] = str(error)
    return runnable, untimed_reasons


def _check_rival(backend: KernelBackend, shape: LayerShape, max_tokens: int) -> None:
    """Raise NotTimedError if a rival differs from the reference."""
    checked = checks.check_kernel(backend.name, backend, shape, (), max_tokens)
    if not checked.has_passed:
        raise NotTimedError(checked.message)


def _decode_tile_backend(platform: Platform, shape: LayerShape, max_tokens: int) -> KernelBackend:
    backend = DecodeTileBackend(platform)
    _check_rival(backend, shape, min(max_tokens, MAX_DECODE_TILE_TOKENS))
    return backend


def _one_launch_backend(platform: Platform, shape: LayerShape, max_tokens: int) -> KernelBackend:
    # The single launch neither scales the query nor clamps an overflow, so it is checked in 16 bits.
    _check_rival(OneLaunchBackend(platform), replace(shape, out_dtype=shape.act, cache_dtype=shape.act), max_tokens)
    return OneLaunchBackend(platform, has_unit_scale=True)


def _stand_in_backend(shape: LayerShape, max_tokens: int) -> KernelBackend:
    try:
        from vllm_aiter_mla.commands.check.timing.stand_in import StandInBackend
    except ImportError as error:  # no Triton
        raise NotTimedError(str(error)) from error
    backend = StandInBackend()
    if (reason := backend.refuse(meta_inputs(shape))) is not None:
        raise NotTimedError(reason)
    _check_rival(backend, shape, max_tokens)
    return backend


class DecodeTileBackend(AiterBackend):
    """AITER's op behind vLLM's fp8 product, on a tile for few rows like SGLang's.

    AITER's own table has 128 columns a tile. That gives 64 programs for 16 heads and up to 16 rows, on a card of 304
    units. Here the columns are halved until the programs fill three quarters of the units.

    Args:
        platform: the card.
        units: compute units; by default those of the current card.
        op: AITER's op; imported by default.

    Raises:
        AiterUnavailableError: ``op`` is None and AITER cannot be used.
    """

    def __init__(self, platform: Platform, units: int = 0, op: Op | None = None) -> None:
        super().__init__(platform, op)
        self.name = DECODE_TILE
        self._units = units or card().units()

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        if inputs.weight.format != "fp8":
            return "only vLLM's fp8 product takes a tile"
        if inputs.num_tokens > MAX_DECODE_TILE_TOKENS:
            return f"a tile for up to {MAX_DECODE_TILE_TOKENS} rows, not for {inputs.num_tokens}"
        return super().bind(inputs)

    def _options(self, inputs: DecodeInputs) -> dict[str, Any]:
        return {"config": decode_tile(inputs.num_tokens, inputs.num_heads, inputs.latent_dim, self._units)}


def decode_tile(tokens: int, heads: int, latent: int, units: int) -> dict[str, Any]:
    """Return the ``config`` of AITER's fp8 GEMM for ``tokens`` rows on a card with ``units`` compute units."""
    tile_rows = next(size for size in (16, 32, 64) if tokens <= size or size == 64)
    tile_columns, row_tiles = 128, heads * -(-tokens // tile_rows)
    while tile_columns > 16 and row_tiles * latent // tile_columns < 0.75 * units:
        tile_columns //= 2
    return {
        "BLOCK_SIZE_M": tile_rows, "BLOCK_SIZE_N": tile_columns, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2,
        "waves_per_eu": 1 if row_tiles * latent // tile_columns <= units else 2, "matrix_instr_nonkdim": 16, "kpack": 2,
        "cache_modifier": ".cg",
    }  # fmt: skip


class OneLaunchBackend(KernelBackend):
    """``KernelBackend`` over AITER's single launch.

    Args:
        platform: the card.
        functions: AITER's functions by weight format; imported by default.
        has_unit_scale: whether to assume that the scale of every query is 1, as AITER's users of these functions do.
            Otherwise a query in fp8 is skipped.

    Raises:
        AiterUnavailableError: ``functions`` is None and AITER does not have the functions.
    """

    name = ONE_LAUNCH
    bounds = OWN_BMM

    def __init__(
        self, platform: Platform, functions: AiterFunctions | None = None, has_unit_scale: bool = False
    ) -> None:
        self._platform, self._has_unit_scale = platform, has_unit_scale
        self._functions = load_aiter_functions() if functions is None else functions
        self._halves: dict[tuple[int, torch.Size], tuple[torch.Tensor, ...]] = {}

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. The first call with a rotary table must not be inside a capture."""
        reason = contract_violation(inputs) or next(self._violations(inputs), None)
        return reason or Binding(partial(self._run, self._functions[inputs.weight.format]))

    def _violations(self, inputs: DecodeInputs) -> Iterator[str]:
        weight, cache = inputs.weight, inputs.kv_cache
        if weight.format not in self._functions:
            yield f"AITER's single launch multiplies fp8 and mxfp4 weights, not {weight.format} ones"
        if (reason := weight.refuse(self._platform)) is not None:
            yield reason
        if inputs.q.dtype not in (torch.bfloat16, torch.float16):
            yield f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
        if formats.is_fp8(inputs.out_dtype) and not self._has_unit_scale:
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

    def _run(self, function: Callable[..., Any], inputs: DecodeInputs) -> torch.Tensor:
        table, cache_width = inputs.cos_sin_cache, inputs.kv_cache.shape[-1]
        table_key = (table.data_ptr(), table.shape)
        if table_key not in self._halves:  # keep the table too, so that no other table can get its address
            self._halves[table_key] = (*(half.float().contiguous() for half in table.chunk(2, dim=-1)), table)
        cos, sin, _ = self._halves[table_key]
        (_, values), (_, scale) = inputs.weight.tensors
        # A scale would also scale a 16-bit cache.
        k_scale = inputs.k_scale if formats.is_fp8(inputs.kv_cache.dtype) else None
        group_argument = {"group_size": FP8_GROUP} if inputs.weight.format == "fp8" else {}
        return function(
            inputs.q_nope.transpose(0, 1), values, scale, inputs.q[..., inputs.nope_dim :], inputs.kv_c.unsqueeze(1),
            inputs.k_pe.unsqueeze(1), inputs.kv_cache.view(-1, 1, cache_width), inputs.slot_mapping, inputs.positions,
            cos, sin, k_scale=k_scale, is_neox=inputs.is_neox, q_out_dtype=inputs.out_dtype, **group_argument,
        )[0]  # fmt: skip
