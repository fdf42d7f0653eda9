# SPDX-License-Identifier: Apache-2.0
"""The back end ``triton``: what it takes, what it declines and why."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_aiter_mla.decided import Spans
from vllm_aiter_mla.kernels.absorb import AbsorbWeight, drops_values
from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import CARDS
from vllm_aiter_mla.kernels.reference import TRITON
from vllm_aiter_mla.kernels.triton import interpreted, tiles, tuning
from vllm_aiter_mla.kernels.triton.tiles import BLOCK_K, INT32_SPAN, MXFP4_ARCH, Tile, tile_for

FORMATS = ("plain", "fp8", "mxfp4")  # of the absorbed weight, which the kernel can read
# Rows that any program addresses with one 32-bit offset: the largest block_t or rope_rows of the table.
BLOCK_ROWS = 128
# Below 16 neither the matrix instructions nor 16-byte accesses have anything to work on.
MIN_WIDTH = 16
# Along the reduction one fp8 matrix instruction multiplies 32 values.
MIN_FP8_WIDTH = 32


class TritonBackend(KernelBackend):
    """One portable launch, absorb BMM included. With ``kernel=auto`` it runs if start-up timed it as the fastest.

    Args:
        chosen: tiles that were timed on this card, as ``tuning.load`` returns them; other calls get the table's.
    """

    name = "triton"
    bounds = OWN_BMM
    caches = (False, True)  # Triton compiles another variant, with 64-bit offsets, for a large cache

    def __init__(self, chosen: Mapping[str, Spans] | None = None) -> None:
        self._chosen = dict(chosen or {})
        self._untuned: set[tuple[Any, ...]] = set()  # shapes that failed their check with the chosen tiles

    @property
    def arch(self) -> str:
        """The architecture that the kernel is compiled for: gfx942, gfx950, sm90, ..., or "interpreter"."""
        return "interpreter" if interpreted() else card().arch

    def tile(self, inputs: DecodeInputs, tokens: int) -> Tile:
        """Return the tile of calls like ``inputs`` with ``tokens`` rows."""
        # Beyond what was timed the table's.
        label = next((span.kernel for span in self._spans(inputs) if tokens <= span.last), None)
        return tile_for(self.arch, tokens, inputs.num_heads) if label is None else tiles.allowed(self.arch)[label]

    def tuned(self, inputs: DecodeInputs) -> str:
        """See the base class: tiles by tokens, as in "16x64/4w 1..32"."""
        return ", ".join(f"{span.kernel} {span.tokens_text}" for span in self._spans(inputs))

    def untune(self, inputs: DecodeInputs) -> None:
        """See the base class: the table's tiles take over for calls of this shape. Others have passed their check."""
        self._untuned.add(_shape(inputs))

    def _spans(self, inputs: DecodeInputs) -> Spans:
        """Return which tiles a file has chosen for calls of this shape, by tokens."""
        return () if _shape(inputs) in self._untuned else self._chosen.get(tuning.key_of(inputs), ())

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class: one launch, on the tile that belongs to the call's shape.

        Every row of the result is defined. fp8 saturates in both halves; NaN becomes the lowest finite value. The run
        raises KernelCaptureError if a graph is being captured and this variant was not compiled beforehand.
        """
        if (reason := _device(inputs)) is not None:
            return reason
        try:
            from vllm_aiter_mla.kernels.triton import launcher
        except Exception as error:  # Triton is absent, or it is here and broken
            return f"Triton cannot be imported: {type(error).__name__}: {error}"

        if (reason := refused_on(self.arch, inputs)) is not None:
            return reason
        tile = self.tile(inputs, inputs.num_tokens)
        return Binding(launcher.Launch(inputs, tile), tile.label, TRITON)

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """See the base class: one for each tile."""
        return tiles.tried_counts(self.arch, inputs.num_heads, self._spans(inputs))

    def warm_up(self, template: DecodeInputs, token_counts: Iterable[int]) -> None:
        """Compile and load every variant that captures of ``token_counts`` rows need. Call it outside capture.

        One launch per distinct tile, on the first row of ``template`` with no slot: it reads one row, writes a fresh
        query and no byte of the cache. One row is enough because T and the table's length are not specialised on.
        What decides a variant is the tile, the dtypes, the strides' and pointers' alignment and the constants of the
        layer: the row shares them with every batch of its layer. ``template`` has the strides that serving has.
        """
        from vllm_aiter_mla.kernels.triton import launcher

        rows = {name: getattr(template, name)[:1] for name in ("q", "k_pe", "kv_c", "positions")}
        one = replace(template, slot_mapping=torch.full_like(template.slot_mapping[:1], -1), **rows)
        for tile in {self.tile(template, tokens=n) for n in token_counts if n > 0}:
            launcher.Launch(one, tile)(one)


def _shape(inputs: DecodeInputs) -> tuple[Any, ...]:
    """Return what is checked at once: ``LayerShape`` without the block size and the pairing."""
    return (tuning.key_of(inputs), inputs.out_heads)


def refused_on(arch: str, inputs: DecodeInputs) -> str | None:
    """Return why a card of ``arch`` does not run this call, or None; ``plan`` asks about a card that is not there."""
    return contract_violation(inputs) or next(_broken(arch, inputs), None)


def _device(inputs: DecodeInputs) -> str | None:
    device = inputs.q.device
    # Operands without memory ask about a layer, before there is a batch.
    if device.type not in ("cpu" if interpreted() else card().torch_device, "meta"):
        return f"a GPU is needed, q is on {device.type}"
    for name, tensor in inputs.tensors:
        if tensor.device != device:
            return f"{name}: {device} (that of q) expected, got {tensor.device}"
    return None


def _broken(arch: str, inputs: DecodeInputs) -> Iterator[str]:
    """What the kernel cannot do with operands that keep the shared contract; each check relies on those before it."""
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        yield f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
    if inputs.cos_sin_cache.shape[0] == 0:
        yield "cos_sin_cache: at least one row expected, got none"
    yield from _broken_widths(inputs)
    for name in ("q", "k_pe", "kv_c", "kv_cache", "cos_sin_cache", "slot_mapping", "positions"):
        tensor = getattr(inputs, name)
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            yield f"{name}: last stride 1 expected, got {tensor.stride(-1)}"
    yield from _broken_weight(inputs.weight, arch)
    for name, span in _spans(inputs).items():
        if span >= INT32_SPAN:
            yield f"{name}: {span} elements from the first to the last of one block, 32 bits of offset expected"
    if arch == "interpreter":
        return
    native = CARDS.get(arch)
    for name, tensor in (("kv_cache", inputs.kv_cache), inputs.weight.tensors[0]):
        if is_fp8(dtype := tensor.dtype) and dtype != native:
            yield f"{name}: {arch} converts to {native or 'no e4m3 type'} in hardware, {dtype} would be a software cast"


def _broken_weight(weight: AbsorbWeight, arch: str) -> Iterator[str]:
    name = weight.tensors[0][0]
    if weight.format not in FORMATS:
        yield f"{name}: one of the formats {', '.join(FORMATS)} expected, got {weight.format}"
    if 1 not in (stride := weight.as_npl.stride())[1:]:
        yield f"{name}: stride 1 along P or L expected, got {stride} of [N, P, L]"
    if weight.format == "mxfp4" and arch not in (MXFP4_ARCH, "interpreter"):
        yield (
            f"W_K: {MXFP4_ARCH} multiplies mxfp4 in hardware, {arch} would in software; set "
            "VLLM_ROCM_USE_AITER_FP4BMM=0, and VLLM_ROCM_USE_AITER_FP8BMM=0 for 16 bits; W_UV too"
        )


def _broken_widths(inputs: DecodeInputs) -> Iterator[str]:
    """Also why the reduction over P cannot be cut into blocks: 128 each, the rest a power of two.

    Over mxfp4 P has to be one at which vLLM's own GEMM drops no values: elsewhere nothing right is known.
    """
    for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
        if width < MIN_WIDTH or width & (width - 1):
            yield f"{name} width: a power of two from {MIN_WIDTH} on expected, got {width}"
    nope, rest = inputs.nope_dim, inputs.nope_dim % BLOCK_K
    if inputs.weight.format == "mxfp4":
        if why := drops_values(inputs.weight.format, nope):
            yield why
        return
    least = MIN_FP8_WIDTH if inputs.weight.format == "fp8" else MIN_WIDTH
    if nope < least or (rest and (rest < least or rest & (rest - 1))):
        yield f"nope width: blocks of {BLOCK_K} and a power of two from {least} on expected, got {nope}"


def _spans(inputs: DecodeInputs) -> dict[str, int]:
    """Elements that one 32-bit offset within a block of rows has to reach; the block's own base is 64-bit."""
    rows, weight = min(inputs.num_tokens, BLOCK_ROWS), inputs.weight
    spans = {name: _span(getattr(inputs, name), rows) for name in ("q", "k_pe", "kv_c")}
    spans["cos_sin_cache"] = _span(inputs.cos_sin_cache, inputs.cos_sin_cache.shape[0])
    # The one scale of fp8 codes is not stepped over.
    held = weight.tensors[:1] if weight.format == "fp8" else weight.tensors
    return spans | {name: _span(tensor, 1) for name, tensor in held}


def _span(tensor: torch.Tensor, rows: int) -> int:
    """Elements from the first to the last of ``rows`` along the first dimension."""
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return max(rows - 1, 0) * tensor.stride(0) + inner + 1
