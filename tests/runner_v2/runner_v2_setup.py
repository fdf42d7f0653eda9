"""One MLA layer over AITER's attention class, V2's buffers around it, and both ways to run a batch through it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

MAX_REQS, MAX_TOKENS, MAX_LEN, BLOCKS = 8, 32, 64, 40
LAYER = "model.layers.0.self_attn.attn"
N, P, R, L, V = 8, 128, 64, 512, 128
CPU = torch.device("cpu")


class Step(NamedTuple):
    """One forward pass as V2 would start it.

    Attributes:
        metadata, slots: by layer, for the forward context.
        mode: name of the CUDA graph mode that the forward context shows.
        rows: rows of the step, padding included.
        real: rows that somebody reads; the first ones.
        positions: [rows].
    """

    metadata: Any
    slots: Any
    mode: str
    rows: int
    real: int
    positions: torch.Tensor


class Setup:
    """See the module; ``drafts`` is the number of draft tokens of a step."""

    def __init__(self, folder: Path, kv_cache_dtype: str, drafts: int, arch: str, kernel: str) -> None:
        self.drafts = drafts
        self.config = _config(folder, kv_cache_dtype, drafts, arch, kernel)
        from vllm.config import set_current_vllm_config

        from vllm_aiter_mla import layer as layers

        with set_current_vllm_config(self.config):
            _alone()
            self.layer, self.rope = _layer(self.config)
            self._v2(drafts)
        layers.of(self.layer).trust()  # no worker has checked its kernel here

    def _v2(self, drafts: int) -> None:
        """V2's own objects, as its runner makes them."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.gpu.attn_utils import init_attn_backend
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.states import RequestState

        buffer_utils.is_uva_available = lambda: False  # without a card no memory is pinned
        compilation = self.config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes = [1, 2, 4, 6, 8, 12, 16, 18, 24, 32]
        compilation.max_cudagraph_capture_size = 32
        spec = self.layer.get_kv_cache_spec(self.config)
        self.kv_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([LAYER], spec)])
        self.groups, _, sizes = init_attn_backend(self.kv_config, self.config, CPU)
        self.buffers = InputBuffers(MAX_REQS, MAX_TOKENS, CPU)
        self.tables = BlockTables(sizes, MAX_REQS, MAX_TOKENS, [MAX_LEN // sizes[0]], CPU)
        self.states = RequestState(MAX_REQS, MAX_LEN, MAX_TOKENS, max(drafts, 1), 512, CPU)
        generator = torch.Generator().manual_seed(0)
        self.content = torch.randn(BLOCKS, sizes[0], L + R, generator=generator).to(torch.bfloat16)
        self.manager = object.__new__(CudaGraphManager)
        vars(self.manager).update(
            vllm_config=self.config, compilation_config=compilation, max_num_reqs=MAX_REQS,
            cudagraph_mode=compilation.cudagraph_mode, decode_query_len=1 + drafts, varlen_decode=False,
            ubatch_runner=None, lora_capture_cases=[0], _lora_dispatch_map={}, _max_lora_case=0, _candidates={},
            _capture_descs={}, _graphs_captured=True,
        )  # fmt: skip
        self.manager._init_candidates()
        self.runner = SimpleNamespace(
            input_buffers=self.buffers, block_tables=self.tables, req_states=self.states, device=CPU,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1), adaptive_verification=None,
            pcp_manager=None, fast_prefill=None, model_config=self.config.model_config, max_num_reqs=MAX_REQS,
            decode_query_len=1 + drafts, use_pp=False, speculator=None,
        )  # fmt: skip
        self.model_state = SimpleNamespace(max_model_len=MAX_LEN, supports_mm_inputs=False)

    def compare(self, step: Step) -> dict[str, Any]:
        """Run a step through our op and through vLLM's own, from the same cache; what decided, what is equal."""
        ours, ours_cache, by_the_layer = self._run(step, self._ours)
        vllm_own, vllm_cache, _ = self._run(step, self._vllm)
        metadata = step.metadata and step.metadata[LAYER]
        return {
            "decided": "nobody" if metadata is None else "the layer" if by_the_layer else "the op",
            "counted": "no metadata" if metadata is None else _rows(step, metadata.num_actual_tokens),
            "written": "no slots" if step.slots is None else _rows(step, int((step.slots[LAYER] >= 0).sum())),
            "output": bool(torch.equal(ours[: step.real], vllm_own[: step.real])),
            "cache": bool(torch.equal(ours_cache, vllm_cache)),
            "changed": int((ours_cache != self._cache().view(torch.uint8)).any(-1).sum()),
        }

    def _cache(self) -> torch.Tensor:
        from vllm.platforms import current_platform

        if self.layer.kv_cache_dtype == "auto":
            return self.content.clone()
        return self.content.to(current_platform.fp8_dtype()).view(torch.uint8)

    def _run(self, step: Step, run: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context

        generator = torch.Generator().manual_seed(step.rows)
        q, k_pe, kv_c = (
            torch.randn(step.rows, *shape, generator=generator).to(torch.bfloat16) for shape in ((N, P + R), (R,), (L,))
        )
        output = torch.zeros(step.rows, N * V, dtype=torch.bfloat16)
        cache = self._cache()
        self.layer.kv_cache = cache if step.slots is not None else torch.tensor([])
        with (
            mock.patch.object(self.layer, "forward_impl", wraps=self.layer.forward_impl) as own,
            set_forward_context(
                step.metadata,
                self.config,
                num_tokens=step.rows,
                slot_mapping=step.slots,
                cudagraph_runtime_mode=CUDAGraphMode[step.mode],
            ),
        ):
            run(q, k_pe, kv_c, step.positions, output)
        return output, cache.view(torch.uint8), own.called

    def _ours(
        self, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, at: torch.Tensor, output: torch.Tensor
    ) -> None:
        torch.ops.vllm_aiter_mla.mla_attention_with_rope(
            q, k_pe, kv_c, at, self.rope.cos_sin_cache, self.layer._k_scale, output, self.rope.is_neox_style, LAYER
        )

    def _vllm(
        self, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, at: torch.Tensor, output: torch.Tensor
    ) -> None:
        """As the model's own forward does, with vLLM's RoPE kernel."""
        ops, k = torch.ops.vllm, k_pe.unsqueeze(1)
        q_pe = q[..., P:].contiguous()
        torch.ops._C.rotary_embedding(at, q_pe, k, R, self.rope.cos_sin_cache, self.rope.is_neox_style)
        q[..., P:] = q_pe
        ops.unified_mla_kv_cache_update(kv_c, k, LAYER, self.layer.kv_cache_dtype, self.layer._k_scale)
        ops.unified_mla_attention_with_output(q, kv_c, k, output, LAYER)


def _rows(step: Step, count: int) -> str:
    """Which rows of a step so many rows are; where nothing is padded, they are the real ones."""
    if count == 0:
        return "none"
    return "real" if count == step.real else "all" if count == step.rows else str(count)


def _config(folder: Path, kv_cache_dtype: str, drafts: int, arch: str, kernel: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    from tests.sandbox import aiter_attention
    from tests.sandbox.model import TinyDeepseek
    from tests.sandbox.simulated_aiter import engine

    kernel_of_vllm = rocm_aiter_mla._expand_page_indices_kernel
    engine.pretend(arch)
    aiter_attention.take(arch)
    rocm_aiter_mla._expand_page_indices_kernel = kernel_of_vllm
    model = TinyDeepseek(num_hidden_layers=1, num_attention_heads=N, num_nextn_predict_layers=int(drafts > 0))
    return EngineArgs(
        model=str(model.save(folder)),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        kv_cache_dtype=kv_cache_dtype,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
        additional_config={"aiter_mla": {"enabled": True, "kernel": kernel, "debug": {"rounding": "two"}}},
    ).create_engine_config()


def _alone() -> None:
    """vLLM's groups of one process."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    meeting = f"file://{tempfile.mkdtemp()}/meeting"
    init_distributed_environment(1, 0, distributed_init_method=meeting, local_rank=0, backend="gloo")
    initialize_model_parallel(1, 1)


def _layer(config: Any) -> tuple[Any, Any]:
    """vLLM's ``MLAAttention`` with random weights, and its rotary embedding."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.rotary_embedding import get_rope

    torch.set_default_dtype(torch.bfloat16)
    up = ColumnParallelLinear(L, N * (P + V), bias=False, prefix="kv_b_proj")
    up.cpu_linear = torch.nn.functional.linear
    generator = torch.Generator().manual_seed(1)
    up.weight.data.copy_(torch.randn(up.weight.shape, generator=generator) / L**0.5)
    rope = get_rope(R, max_position=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    layer = MLAAttention(
        num_heads=N, scale=(P + R) ** -0.5, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, q_lora_rank=None,
        kv_lora_rank=L, kv_b_proj=up, cache_config=config.cache_config, prefix=LAYER,
    )  # fmt: skip
    layer.process_weights_after_loading(torch.bfloat16)
    layer._k_scale.fill_(0.5)
    layer._q_scale.fill_(0.7)
    return layer, rope
