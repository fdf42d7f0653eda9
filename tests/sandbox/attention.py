"""A reference MLA back end for the CPU that also takes an fp8 KV cache stored as uint8 and a quantised query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.sandbox.gpu_ops import write_kv_rows
from tests.sandbox.simulated_aiter.mla import attend


class SandboxMLABackend(CPUMLABackend):
    """CPU MLA with fp8 caches, under the name of the unmodified vLLM backend that it overrides."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_impl_cls() -> type[SandboxMLAImpl]:
        """The implementation class."""
        return SandboxMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SandboxMLABuilder]:
        """The builder of its metadata."""
        return SandboxMLABuilder


class SandboxMLABuilder(MLACommonMetadataBuilder):
    """As AITER's builder: a request's draft tokens are decode rows, as many for every request; full graphs hold those.

    All tensors of a decode batch's metadata are views of persistent buffers.
    """

    query_len_support = QueryLenSupport.UNIFORM
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class SandboxMLAImpl(CPUMLAImpl):
    """CPU MLA whose decode reads fp8 caches and fp8 queries as AITER's does; other caches go to vLLM's kernel."""

    is_sparse = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = True

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the KV rows: see ``write_kv_rows``. vLLM 0.33 sets ``skip_scale`` where the scale is one."""
        write_kv_rows(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode attention over the latent cache: out [T, N, L]; no LSE. Rows without keys, which pad a graph, are NaN.

        Raises:
            TypeError: an fp8 cache that is not viewed as fp8, or a query of another type.
        """
        if kv_c_and_k_pe_cache.dtype.itemsize > 1:
            rows = _row_by_row(q, attn_metadata.decode)
            # vLLM's kernel wants a key for every row; a request that pads has the null block.
            some = SimpleNamespace(block_table=rows.block_table, seq_lens=rows.seq_lens.clamp(min=1))
            batch: Any = SimpleNamespace(decode=some)
            out, _ = super().forward_mqa(q, kv_c_and_k_pe_cache, batch, layer)
            return out.masked_fill_((rows.seq_lens < 1).view(-1, 1, 1), float("nan")), None
        fp8 = current_platform.fp8_dtype()
        if kv_c_and_k_pe_cache.dtype != fp8 or not isinstance(q, torch.Tensor) or q.dtype != fp8:
            raise TypeError(f"fp8 decode expects an {fp8} view and query, got {kv_c_and_k_pe_cache.dtype} and {q}")
        return self._decode_fp8(q, kv_c_and_k_pe_cache, attn_metadata.decode, layer), None

    def _decode_fp8(self, q: torch.Tensor, cache: torch.Tensor, decode: Any, layer: Any) -> torch.Tensor:
        block_size, width = cache.shape[1], cache.shape[2]
        seq_lens = decode.seq_lens.tolist()
        out = torch.full((q.shape[0], q.shape[1], self.kv_lora_rank), float("nan"), dtype=layer.W_UV.dtype)
        queries = (q.float() * layer._q_scale).chunk(max(len(seq_lens), 1))
        for request, (query, seq_len, rows) in enumerate(zip(queries, seq_lens, out.chunk(len(queries)), strict=False)):
            if seq_len < 1:
                continue
            blocks = decode.block_table[request, : -(-seq_len // block_size)].long()
            keys = cache.view(torch.uint8)[blocks].view(cache.dtype).float().view(-1, width)[:seq_len] * layer._k_scale
            rows.copy_(attend(query, keys, keys[:, : self.kv_lora_rank], self.scale, causal=True)[0])
        return out


def _row_by_row(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], decode: Any) -> Any:
    """The batch as if every row were one request: vLLM's CPU kernel takes one row per request.

    The last row of a request sees its whole sequence, the row before it one key less.
    """
    per_request = (q[0] if isinstance(q, tuple) else q).shape[0] // max(decode.seq_lens.shape[0], 1)
    if per_request <= 1:
        return decode
    hidden = torch.arange(per_request - 1, -1, -1, dtype=decode.seq_lens.dtype).repeat(decode.seq_lens.shape[0])
    return SimpleNamespace(
        block_table=decode.block_table.repeat_interleave(per_request, 0),
        seq_lens=decode.seq_lens.repeat_interleave(per_request) - hidden,
    )


def register() -> None:
    """Make vLLM's CPU_MLA back end resolve to the sandbox's."""
    register_backend(AttentionBackendEnum.CPU_MLA, f"{SandboxMLABackend.__module__}.{SandboxMLABackend.__qualname__}")
