"""A process in which Model Runner V2's own functions build forward contexts, for our op and for vLLM's own ops.

``python -m tests.sandbox.runner_v2 FOLDER '{"kv_cache_dtype": "fp8", ...}'`` prints one JSON line: by kind of
batch, what decided and whether the outputs and the KV cache are vLLM's own. V2's Triton kernels, and the one of AITER's
metadata builder, run through Triton's interpreter: the parent sets the environment of an engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from tests.sandbox import card
from tests.sandbox.model import TinyDeepseek

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
        real: rows whose output is read; the first ones.
        positions: [rows].
    """

    metadata: Any
    slots: Any
    mode: str
    rows: int
    real: int
    positions: torch.Tensor


class Setup:
    """One MLA layer over AITER's attention class, V2's buffers around it, and both ways to run a batch through it."""

    def __init__(
        self, folder: Path, kv_cache_dtype: str, drafts: int, arch: str, kernel: str, adaptive: bool = False
    ) -> None:
        self.drafts, self.adaptive = drafts, adaptive
        self.config = _config(folder, kv_cache_dtype, drafts, arch, kernel)
        if adaptive:  # not as an option: vLLM asks for graphs then, and the CPU's platform has none
            self.config.speculative_config.enable_adaptive_verification = True
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        from vllm_aiter_mla.serving.decision import PASSED
        from vllm_aiter_mla.serving.layer import Layer

        with set_current_vllm_config(self.config):
            meeting = f"file://{tempfile.mkdtemp()}/meeting"
            init_distributed_environment(1, 0, distributed_init_method=meeting, local_rank=0, backend="gloo")
            initialize_model_parallel(1, 1)
            self.layer, self.rope = _layer(self.config)
            self._v2()
        # No worker has checked its kernel here.
        Layer.of(self.layer).checked(dict.fromkeys(Layer.of(self.layer).backends.names, PASSED))
        # Decided now, as at a start: later the layer's forward is watched.
        assert Layer.of(self.layer).decision.our_first_kernel == kernel

    def _v2(self) -> None:
        """Make V2's own objects, as its runner does."""
        from vllm.config import CUDAGraphMode
        from vllm.platforms import current_platform
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.gpu.attn_utils import init_attn_backend
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.states import RequestState

        buffer_utils.is_uva_available = lambda: False  # without a card no memory is pinned
        type(current_platform).get_global_graph_pool = classmethod(lambda cls: None)
        compilation = self.config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes = [1, 2, 4, 6, 8, 12, 16, 18, 24, 32]
        compilation.max_cudagraph_capture_size = 32
        self.kv_config = KVCacheConfig(
            BLOCKS, [], [KVCacheGroupSpec([LAYER], self.layer.get_kv_cache_spec(self.config))]
        )
        self.groups, _, sizes = init_attn_backend(self.kv_config, self.config, CPU)
        self.buffers = InputBuffers(MAX_REQS, MAX_TOKENS, CPU)
        self.tables = BlockTables(sizes, MAX_REQS, MAX_TOKENS, [MAX_LEN // sizes[0]], CPU)
        self.states = RequestState(MAX_REQS, MAX_LEN, MAX_TOKENS, max(self.drafts, 1), 512, CPU)
        generator = torch.Generator().manual_seed(0)
        self.content = torch.randn(BLOCKS, sizes[0], L + R, generator=generator).to(torch.bfloat16)
        self.manager = CudaGraphManager(
            self.config, CPU, compilation.cudagraph_mode, 1 + self.drafts, varlen_decode=self.adaptive
        )
        self.runner = SimpleNamespace(
            input_buffers=self.buffers, block_tables=self.tables, req_states=self.states, device=CPU,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            adaptive_verification=_adaptive(self) if self.adaptive else None, pcp_manager=None, fast_prefill=None,
            model_config=self.config.model_config, max_num_reqs=MAX_REQS, decode_query_len=1 + self.drafts,
            use_pp=False, speculator=None,
        )  # fmt: skip
        self.model_state = SimpleNamespace(max_model_len=MAX_LEN, supports_mm_inputs=False)

    def compare(self, step: Step) -> dict[str, Any]:
        """Run a step through our op and through vLLM's own ops, from the same cache; what decided, what is equal."""
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

    def _run(self, step: Step, run: Callable[..., None]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context

        generator = torch.Generator().manual_seed(step.rows)
        q, k_pe, kv_c = (
            torch.randn(step.rows, *shape, generator=generator).to(torch.bfloat16) for shape in ((N, P + R), (R,), (L,))
        )
        output = torch.zeros(step.rows, N * V, dtype=torch.bfloat16)
        cache = self._cache()
        self.layer.kv_cache = cache if step.slots is not None else torch.tensor([])
        own = mock.patch.object(self.layer, "forward_impl", wraps=self.layer.forward_impl)
        mode = CUDAGraphMode[step.mode]
        with own as forward_impl, set_forward_context(
            step.metadata, self.config, num_tokens=step.rows, slot_mapping=step.slots, cudagraph_runtime_mode=mode
        ):  # fmt: skip
            run(q, k_pe, kv_c, step.positions, output)
        return output, cache.view(torch.uint8), forward_impl.called

    def _ours(self, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, at: torch.Tensor, out: torch.Tensor):
        table, is_neox = self.rope.cos_sin_cache, self.rope.is_neox_style
        op = torch.ops.vllm_aiter_mla.mla_attention_with_rope
        op(q, k_pe, kv_c, at, table, self.layer._k_scale, out, is_neox, "_C::rotary_embedding", LAYER)

    def _vllm(self, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, at: torch.Tensor, out: torch.Tensor):
        """As the model's own forward does, with vLLM's RoPE kernel."""
        ops, k = torch.ops.vllm, k_pe.unsqueeze(1)
        q_pe = q[..., P:].contiguous()
        torch.ops._C.rotary_embedding(at, q_pe, k, R, self.rope.cos_sin_cache, self.rope.is_neox_style)
        q[..., P:] = q_pe
        ops.unified_mla_kv_cache_update(kv_c, k, LAYER, self.layer.kv_cache_dtype, self.layer._k_scale)
        ops.unified_mla_attention_with_output(q, kv_c, k, out, LAYER)


def _rows(step: Step, count: int) -> str:
    """Say which rows of a step ``count`` rows are; where nothing is padded, they are the real ones."""
    if count == 0:
        return "none"
    return "real" if count == step.real else "all" if count == step.rows else str(count)


def _config(folder: Path, kv_cache_dtype: str, drafts: int, arch: str, kernel: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    kernel_of_vllm = rocm_aiter_mla._expand_page_indices_kernel
    card.pretend(arch, attention=True)
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


def _adaptive(setup: Setup) -> Any:
    """Return V2's own object that trims drafts. A step costs the same with any number of them."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

    vars(module)["_assign_draft_token_budget_compiled"] = module._assign_draft_token_budget
    with mock.patch.multiple(torch.cuda, Stream=mock.MagicMock(), Event=mock.MagicMock()):
        made = module.AdaptiveVerificationManager(setup.states, setup.buffers.query_start_loc, 1, MAX_TOKENS)
    made.cost_tables = (np.zeros(MAX_REQS + 1), np.ones(MAX_TOKENS + 1))
    return made


def _layer(config: Any) -> tuple[Any, Any]:
    """Return vLLM's ``MLAAttention`` with random weights, and its rotary embedding."""
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


def real(setup: Setup, *requests: tuple[int, int, int], drafts: tuple[int, ...] = (), graphs: bool = True,
         at_least: int = 0, optimism: int = 0, last_half: bool = False) -> Step:  # fmt: skip
    """Build a scheduled batch, as ``execute_model`` prepares it.

    Args:
        setup: of the process.
        requests: (prompt tokens, computed tokens, scheduled tokens) of each.
        drafts: draft tokens among each request's scheduled ones.
        graphs: whether graphs were captured.
        at_least: tokens to which another rank of a data-parallel group makes this one pad.
        optimism: drafts that Python still counts although the device has rejected them (async scheduling).
        last_half: whether to return the last of two microbatches (dual batch overlap).
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner, states = setup.runner, setup.states
    for name in list(states.req_id_to_index):
        states.remove_request(name)
    for number, (prompt, computed, _) in enumerate(requests):
        states.add_request(str(number), prompt, [7] * prompt, computed, 8)
        index = states.req_id_to_index[str(number)]
        states.num_computed_prefill_tokens[index] = min(prompt, computed)
        states.num_computed_tokens_np[index] = computed + optimism
        if setup.adaptive:  # the first request's drafts are the surest
            runner.adaptive_verification._confidence_probs[index] = 1 / (1 + number)
        setup.tables.append_block_ids(index, (list(range(1 + 4 * number, 5 + 4 * number)),), overwrite=True)
    states.apply_staged_writes()
    setup.tables.apply_staged_writes()
    scheduled = {str(number): tokens for number, (_, _, tokens) in enumerate(requests)}
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={str(number): [3] * count for number, count in enumerate(drafts) if count},
        has_structured_output_requests=False,
    )
    state, uniform = GPUModelRunner.gather_batch_req_state(runner, output, False)
    longest = None if state.has_prefill else max(scheduled.values())
    found = _dispatch(setup, len(requests), max(state.num_tokens, at_least), uniform, graphs, longest)
    batch = GPUModelRunner.prepare_inputs(runner, output, state, found, 0)
    tables, slots = GPUModelRunner.prepare_attn(runner, batch)
    if last_half:
        batch, tables, slots = _last_half(batch, tables, slots)
    return _step(setup, batch, found.cg_mode, tables, slots)


def _last_half(batch: Any, tables: Any, slots: Any) -> tuple[Any, Any, Any]:
    """As ``UBatchRunner.prepare``, which needs streams."""
    from vllm.v1.worker.gpu import ubatch_utils

    half = ubatch_utils.create_ubatch_slices(batch, 2)[-1]
    buffers = (torch.zeros(MAX_REQS + 1, dtype=torch.int32), *torch.zeros(2, MAX_REQS, dtype=torch.int32))
    tables = tuple(table[half.request_slice] for table in tables)
    return ubatch_utils._slice_input_batch(batch, half, *buffers), tables, slots[:, half.token_slice]


def _dispatch(setup: Setup, requests: int, tokens: int, uniform: int | None, graphs: bool, longest: int | None) -> Any:
    setup.manager._graphs_captured = graphs
    return setup.manager.dispatch(requests, tokens, uniform, 0, longest)


def dummy(setup: Setup, requests: int, graphs: bool) -> Step:
    """Build what a rank without work runs while the others of its data-parallel group have some."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    each = 1 + setup.drafts
    found = _dispatch(setup, requests, requests * each, each, graphs, each)
    batch = InputBatch.make_dummy(found.num_reqs or requests, found.num_tokens, setup.buffers)
    tables, slots = GPUModelRunner.prepare_dummy_attn(setup.runner, batch)
    step = _step(setup, batch, found.cg_mode, tables, slots, for_capture=found.cg_mode == CUDAGraphMode.FULL)
    return step._replace(real=0)


def _step(setup: Setup, batch: Any, mode: Any, tables: Any, slots: Any, for_capture: bool = False) -> Step:
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    metadata = DefaultModelState.prepare_attn(
        setup.model_state, batch, mode, tables, slots, setup.groups, setup.kv_config, for_capture=for_capture
    )
    by_layer = build_slot_mappings_by_layer(slots, setup.kv_config)
    # A full graph is replayed without a forward context; it was captured under mode NONE.
    shown = "NONE" if mode.name == "FULL" else mode.name
    return Step(metadata, by_layer, shown, batch.num_tokens_after_padding, batch.num_tokens, batch.positions)


def capture(setup: Setup, mode: str, requests: int, tokens: int, longest: int | None = None) -> Step:
    """Build the batch over which a graph is captured; ``longest``: most rows of a request, if they are unequal."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    state = SimpleNamespace(prepare_attn=partial(DefaultModelState.prepare_attn, setup.model_state))
    full = mode == "FULL"
    metadata, slots = prepare_inputs_to_capture(
        requests, tokens, state, setup.buffers, setup.tables, setup.groups, setup.kv_config, full_cudagraph=full,
        max_query_len=(longest or tokens // requests) if full else None,
    )  # fmt: skip
    return Step(metadata, slots, "NONE" if full else mode, tokens, 0, setup.buffers.positions[:tokens])


def draft_step(setup: Setup, *lengths: int) -> Step:
    """Build a step of the draft layer: one row per request, and one row that the drafter must not act on."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    real(setup, *((length, length, 1) for length in lengths))
    count, buffers = len(lengths), setup.buffers
    mapping = torch.tensor([setup.states.req_id_to_index[str(i)] for i in range(count)])
    mapping[-1] = -1
    buffers.positions[:count] = torch.tensor(lengths)
    buffers.seq_lens[:count] = torch.tensor(lengths, dtype=torch.int32) + 1
    buffers.query_start_loc[: count + 1] = torch.arange(count + 1)
    slots = setup.tables.compute_slot_mappings(mapping, buffers.query_start_loc[: count + 1], buffers.positions, count)
    drafter = SimpleNamespace(
        block_tables=setup.tables, input_buffers=buffers, attn_groups=setup.groups, kv_cache_config=setup.kv_config,
        dcp_size=1, max_model_len=MAX_LEN, draft_max_seq_len=MAX_LEN,
        draft_is_prefilling=torch.zeros(MAX_REQS, dtype=torch.bool),
    )  # fmt: skip
    found = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=count)
    metadata = DraftModelSpeculator._build_attn_metadata(
        drafter, count, found, np.arange(count + 1, dtype=np.int32), torch.tensor(lengths, dtype=torch.int32), 1
    )
    by_layer = build_slot_mappings_by_layer(slots, setup.kv_config)
    return Step(metadata, by_layer, "NONE", count, count - 1, buffers.positions[:count].clone())


def decodes(setup: Setup, *prefill: tuple[int, int, int], count: int = 5, **options: Any) -> Step:
    """Build a batch of ``count`` requests in decode with all their drafts, and of others in prefill."""
    requests = [(5 + i, 9 + i, 1 + setup.drafts) for i in range(count)]
    return real(setup, *requests, *prefill, drafts=(setup.drafts,) * count + (0,) * len(prefill), **options)


def trimmed(setup: Setup, drafts: int, *prefill: tuple[int, int, int], **options: Any) -> Step:
    """Build a batch as ``decodes`` whose requests keep ``drafts`` drafts altogether, the surest ones."""
    rows = 5 + drafts + sum(tokens for *_, tokens in prefill)
    costs = np.where(np.arange(MAX_TOKENS + 1) <= rows, 1.0, 1e6)
    with mock.patch.object(setup.runner.adaptive_verification, "cost_tables", (np.zeros(MAX_REQS + 1), costs)):
        step = decodes(setup, *prefill, **options)
    lengths = setup.buffers.query_start_loc[:6].diff().tolist()
    assert step.real == rows
    assert lengths[0] - lengths[-1] == min(drafts, setup.drafts), "an even split, as Python has it"
    return step


KINDS: dict[str, Callable[[Setup], Step]] = {
    "decode, no graph": lambda s: decodes(s, graphs=False),
    "decode, full graph, padded": lambda s: decodes(s),
    "decode, padded to another rank": lambda s: decodes(s, at_least=7 * (1 + s.drafts)),
    "decode, microbatch of padding": lambda s: decodes(s, graphs=False, at_least=MAX_TOKENS, last_half=True),
    "decode, async scheduling": lambda s: decodes(s, optimism=s.drafts),
    "prefill, piecewise, padded": lambda s: real(s, (5, 0, 5), (6, 0, 6)),
    "prefill, no graph": lambda s: real(s, (5, 0, 5), graphs=False),
    "mixed": lambda s: decodes(s, (5, 0, 5), count=2),
    "chunk after context": lambda s: decodes(s, (20, 8, 6), count=1),
    "one-token chunk": lambda s: real(s, (9, 9, 1), (20, 8, 1)),
    "drafts for some": lambda s: real(s, (5, 9, 1 + s.drafts), (6, 9, 1), drafts=(s.drafts, 0)),
    "dummy, no graph": lambda s: dummy(s, 2, graphs=False),
    "dummy, full graph": lambda s: dummy(s, 2, graphs=True),
    "capture of a full graph": lambda s: capture(s, "FULL", 4, 4 * (1 + s.drafts)),
    "capture of a piecewise graph": lambda s: capture(s, "PIECEWISE", 8, 8),
    "draft step": lambda s: draft_step(s, 9, 10, 11),
    # Memory profiling has neither metadata nor slots nor a cache.
    "profiling": lambda s: Step(None, None, "NONE", MAX_TOKENS, 0, torch.zeros(MAX_TOKENS, dtype=torch.int64)),
}
ADAPTIVE: dict[str, Callable[[Setup], Step]] = {
    "drafts for some": KINDS["drafts for some"],
    "unequal drafts, no graph": lambda s: trimmed(s, 4, graphs=False),
    "unequal drafts, full graph, padded": lambda s: trimmed(s, 4),
    "no draft left, full graph, padded": lambda s: trimmed(s, 0),
    "unequal drafts and prefill": lambda s: trimmed(s, 4, (5, 0, 5)),
    "capture of a full graph": lambda s: capture(s, "FULL", 8, 12, longest=1 + s.drafts),
}
"""Kinds of batches with adaptive verification, which trims drafts on the card: Python knows their sum only."""


def same_page_indices() -> bool:
    """Return whether the sandbox's kernel writes what vLLM's Triton kernel writes."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    vllm_own = rocm_aiter_mla._expand_page_indices_kernel
    table = torch.arange(24, dtype=torch.int32).flip(0).view(3, 8)
    bounds = torch.tensor([0, 5, 5, 37], dtype=torch.int32)
    operands = (table, *table.stride(), bounds, *((bounds.diff(),) if "num_real_tokens" in vllm_own.arg_names else ()))
    found = []
    for kernel in (vllm_own, card.PageIndices()):
        found.append(torch.full((40,), -1, dtype=torch.int32))
        kernel[(3, 1)](found[-1], *operands, KERNEL_BLOCK_SIZE=4, BLOCK_SIZE=1024)
    return bool(torch.equal(*found))


def main(folder: str, options: dict) -> dict:
    """Return what became of every kind of batch, and of one with a planted bug."""
    from tests.engine.engine_mutations import a_mixed_batch_counts_as_decode

    setup = Setup(Path(folder), **options)
    kinds = ADAPTIVE if setup.adaptive else KINDS
    found = {name: setup.compare(build(setup)) for name, build in kinds.items() if setup.drafts or "drafts" not in name}
    a_mixed_batch_counts_as_decode()
    return {"kinds": found, "planted": setup.compare(KINDS["mixed"](setup)), "page_indices": same_page_indices()}


if __name__ == "__main__":
    with torch.inference_mode():
        print("\n" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
