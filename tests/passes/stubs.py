"""Stand-ins for what the ops find in vLLM's forward context: an MLA layer, its cache and a batch.

The layer computes real attention in plain PyTorch. Its decode rows read the whole cache, so that any KV row that is
missing, misplaced or wrong changes the output; its prefill rows read q, k_pe and kv_c as they are handed over, so that
a rotation that is missing or done twice changes it too.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backend import AttentionCGSupport

from tests.sandbox.gpu_ops import write_kv_rows
from vllm_aiter_mla.compat.layer import fp8_view
from vllm_aiter_mla.kernels.absorb import absorb_plain
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.reference import store_nope

BLOCKS, BLOCK_SIZE = 11, 4
"""More slots than rows in any test. Their number has no factor in common with the distance of two rows' slots."""


def scales_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k_scale and q_scale of a layer: others for each number in a name, as a checkpoint has them.

    vLLM divides KV rows by k_scale, kernels multiply by its reciprocal: the bytes are equal for powers of two only.
    """
    number = int("".join(filter(str.isdigit, name)) or 0)
    return torch.tensor(2.0 ** (number % 4 - 2)), torch.tensor(0.5 + number / 8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: N heads, P nope, R rope, L latent and V value widths, hidden and q_lora widths."""

    n: int = 2
    p: int = 8
    r: int = 16
    latent: int = 32
    v: int = 4
    hidden: int = 24
    q_lora: int = 20


class AiterMLAImpl:
    """Named as the implementation that admission knows."""

    is_sparse = False
    dcp_world_size = 1

    def __init__(self) -> None:
        self.supports_quant_query_input = True

    def forward_mqa(self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        """Every row over the whole cache: [T, N, L]. As in a real kernel, how many rows there are has a say in each."""
        assert metadata is not None, "a decode kernel reads the lengths of the sequences"
        scale_q, scale_k = (layer._q_scale, layer._k_scale) if is_fp8(q.dtype) else (1.0, 1.0)
        keys = kv_cache.float().view(-1, kv_cache.shape[-1]) * scale_k
        scores = (q.float() * scale_q) @ keys.T / keys.shape[-1] ** 0.5 * (1 + 1 / (1 + q.shape[0]))
        return (scores.softmax(-1) @ keys[:, : layer.kv_lora_rank]).to(layer.act), None


class StubLayer:
    """An MLA attention layer as the ops, the plan and admission see it."""

    hisparse_cache = None
    use_pcp = False
    dcp_q_replicate = False
    sliding_window = None
    q_pad_num_heads = None
    # As AITER's: full graphs hold decode rows.
    attn_backend = SimpleNamespace(
        get_builder_cls=lambda: SimpleNamespace(get_cudagraph_support=lambda *_: AttentionCGSupport.UNIFORM_BATCH)
    )
    is_aiter_triton_fp4_bmm_enabled = is_aiter_triton_fp8_bmm_enabled = is_amx_bmm_enabled = False

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        dtype: torch.dtype,
        cache_dtype: str = "auto",
        blocks: int = BLOCKS,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        self.layer_name, self.act, self.kv_cache_dtype = name, dtype, cache_dtype
        self.num_heads, self.kv_lora_rank, self.v_head_dim = sizes.n, sizes.latent, sizes.v
        self.qk_nope_head_dim, self.qk_rope_head_dim = sizes.p, sizes.r
        self.W_UK_T = torch.randn(sizes.n, sizes.p, sizes.latent, generator=generator).to(dtype)
        self.W_UV = torch.randn(sizes.n, sizes.latent, sizes.v, generator=generator).to(dtype)
        self._k_scale, self._q_scale = scales_of(name)
        rows = torch.randn(blocks, BLOCK_SIZE, sizes.latent + sizes.r, generator=generator)
        self.initial = rows.to(torch.float8_e4m3fn).view(torch.uint8) if cache_dtype == "fp8" else rows.to(dtype)
        self.kv_cache = self.initial.clone()
        self.impl = AiterMLAImpl()
        self._vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
            compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor"),
            additional_config={"aiter_mla": {"enabled": True, "debug": {"rounding": "two"}} | options},
        )

    def get_kv_cache_spec(self, config: Any) -> None:
        """No spec: the stub's builder does not ask."""

    def prepare_kv_cache_update(self, metadata: Any) -> None:
        """vLLM's hook before a write; nothing to do."""

    def update_kv_cache(self, kv_c, k_pe, cache, slots, *rest):
        write_kv_rows(kv_c, k_pe, cache, slots, rest[-1])

    def _decode_concat_quant_fp8_op(self, absorbed: torch.Tensor, q_pe: torch.Tensor, scale: Any) -> torch.Tensor:
        return store_nope(torch.cat([absorbed, q_pe], -1), scale.reciprocal(), torch.float8_e4m3fn)

    def _v_up_proj(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), self.W_UV).transpose(0, 1).reshape(out.shape))

    def forward_impl(self, q, kv_c, k_pe, kv_cache, metadata, output, **rest):
        """Decode rows from the cache, prefill rows from the arguments; zeros while profiling."""
        if metadata is None:
            output.zero_()
            return
        n, total = metadata.num_decode_tokens, metadata.num_actual_tokens
        assert k_pe.shape[1:] == (1, self.qk_rope_head_dim), "vLLM's kernels of prefill rows split its heads"
        q, kv_c, k_pe, output = (x[:total] for x in (q, kv_c, k_pe, output))
        absorbed, q_pe = absorb_plain(q[..., : self.qk_nope_head_dim], self.W_UK_T), q[..., self.qk_nope_head_dim :]
        if n:
            quantised = self.kv_cache_dtype == "fp8" and self.impl.supports_quant_query_input
            query = torch.cat([absorbed, q_pe], -1)
            if quantised:
                query = self._decode_concat_quant_fp8_op(absorbed, q_pe, self._q_scale)
            self._v_up_proj(self.impl.forward_mqa(query[:n], fp8_view(kv_cache), metadata, self)[0], output[:n])
        keys = torch.cat([kv_c[n:total], k_pe.flatten(1)[n:total]], -1).float()
        query = torch.cat([absorbed, q_pe], -1)[n:total].float()
        attended = (query @ keys.T / keys.shape[-1] ** 0.5).softmax(-1) @ keys[:, : self.kv_lora_rank]
        self._v_up_proj(attended.to(self.act), output[n:total])


StubLayer.__name__ = "MLAAttention"  # named as the layer that admission knows


@dataclass(frozen=True)
class Batch:
    """What a step holds: ``rows`` of the graph, of which the first ``decodes`` and the next ``prefills`` are real."""

    name: str
    rows: int
    decodes: int = 0
    prefills: int = 0
    slots: int | None = None
    profiling: bool = False
    blocks: int = BLOCKS  # of the layers' caches

    @property
    def real(self) -> int:
        """Rows whose output counts."""
        return self.rows if self.profiling else self.decodes + self.prefills

    def metadata(self) -> Any:
        """As vLLM's MLA builders make it; None while profiling."""
        if self.profiling:
            return None
        return SimpleNamespace(
            decode=SimpleNamespace() if self.decodes else None, prefill=SimpleNamespace() if self.prefills else None,
            num_prefills=int(self.prefills > 0), num_decodes=self.decodes, num_decode_tokens=self.decodes,
            num_actual_tokens=self.real,
        )  # fmt: skip

    def slot_mapping(self, layer: int = 0) -> torch.Tensor | None:
        """A slot per real row, scattered over the cache, elsewhere in each layer; -1 for graph padding."""
        if self.profiling:
            return None
        count = self.rows if self.slots is None else self.slots
        slots = (torch.arange(count) * 5 + layer) % (self.blocks * BLOCK_SIZE)
        return torch.where(torch.arange(count) < self.real, slots, -1)


DECODE = Batch("decode", rows=5, decodes=5)
PADDED = Batch("padded decode", rows=6, decodes=4)
MIXED = Batch("mixed", rows=6, decodes=3, prefills=2)
PREFILL = Batch("prefill", rows=4, prefills=4)
PROFILE = Batch("profiling", rows=3, profiling=True)
BATCHES = (DECODE, PADDED, MIXED, PREFILL, PROFILE)


@contextlib.contextmanager
def forward(layers, batch, mode=CUDAGraphMode.NONE):
    """vLLM's forward context around one step, with each layer's cache as it was before."""
    by_name = {layer.layer_name: layer for layer in layers}
    for layer in layers:
        layer.kv_cache = layer.initial.clone()
    # As in a hybrid model, whose groups of layers have caches and slots of their own.
    slots = {name: batch.slot_mapping(index) for index, name in enumerate(by_name)}
    context = ForwardContext(
        no_compile_layers=by_name,
        attn_metadata=None if batch.profiling else dict.fromkeys(by_name, batch.metadata()),
        slot_mapping={} if batch.profiling else slots,
        cudagraph_runtime_mode=mode,
    )
    with override_forward_context(context):
        yield by_name
