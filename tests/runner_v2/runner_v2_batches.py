"""Every kind of forward pass that Model Runner V2 starts, built by V2's own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.runner_v2.runner_v2_setup import MAX_LEN, MAX_REQS, MAX_TOKENS, Setup, Step


def real(setup: Setup, *requests: tuple[int, int, int], drafts: tuple[int, ...] = (), graphs: bool = True,
         at_least: int = 0, optimism: int = 0) -> Step:  # fmt: skip
    """A scheduled batch, as ``execute_model`` prepares it.

    Args:
        setup: of the process.
        requests: (prompt tokens, computed tokens, scheduled tokens) of each.
        drafts: draft tokens among each request's scheduled ones.
        graphs: whether graphs were captured.
        at_least: tokens to which another rank of a data-parallel group makes this one pad.
        optimism: drafts that Python still counts although the device has rejected them (async scheduling).
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
        blocks = list(range(1 + 4 * number, 5 + 4 * number))
        setup.tables.append_block_ids(index, (blocks,), overwrite=True)
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
    found = _dispatch(setup, len(requests), max(state.num_tokens, at_least), uniform, graphs)
    batch = GPUModelRunner.prepare_inputs(runner, output, state, found, 0)
    tables, slots = GPUModelRunner.prepare_attn(runner, batch)
    return _step(setup, batch, found.cg_mode, tables, slots)


def _dispatch(setup: Setup, requests: int, tokens: int, uniform: int | None, graphs: bool) -> Any:
    setup.manager._graphs_captured = graphs
    return setup.manager.dispatch(requests, tokens, uniform, 0)


def dummy(setup: Setup, requests: int, tokens: int, graphs: bool) -> Step:
    """What a rank without work runs beside the others of its data-parallel group."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    found = _dispatch(setup, requests, tokens, tokens // requests, graphs)
    batch = InputBatch.make_dummy(found.num_reqs or requests, found.num_tokens, setup.buffers)
    tables, slots = GPUModelRunner.prepare_dummy_attn(setup.runner, batch)
    step = _step(setup, batch, found.cg_mode, tables, slots, capture=found.cg_mode == CUDAGraphMode.FULL)
    return step._replace(real=0)


def _step(setup: Setup, batch: Any, mode: Any, tables: Any, slots: Any, capture: bool = False) -> Step:
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    metadata = DefaultModelState.prepare_attn(
        setup.model_state, batch, mode, tables, slots, setup.groups, setup.kv_config, for_capture=capture
    )
    by_layer = build_slot_mappings_by_layer(slots, setup.kv_config)
    # A full graph is replayed without a forward context: what it holds was captured in one of mode NONE.
    shown = "NONE" if mode.name == "FULL" else mode.name
    return Step(metadata, by_layer, shown, batch.num_tokens_after_padding, batch.num_tokens, batch.positions)


def capture(setup: Setup, mode: str, requests: int, tokens: int) -> Step:
    """The made-up batch over which a graph is captured."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    state = SimpleNamespace(prepare_attn=partial(DefaultModelState.prepare_attn, setup.model_state))
    full = mode == "FULL"
    metadata, slots = prepare_inputs_to_capture(
        requests, tokens, state, setup.buffers, setup.tables, setup.groups, setup.kv_config, full_cudagraph=full,
        max_query_len=tokens // requests if full else None,
    )  # fmt: skip
    return Step(metadata, slots, "NONE" if full else mode, tokens, 0, setup.buffers.positions[:tokens])


def draft_step(setup: Setup, *lengths: int) -> Step:
    """A step of the draft layer: one row per request, and one row that the drafter must not act on."""
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
    upper = torch.tensor(lengths, dtype=torch.int32)
    metadata = DraftModelSpeculator._build_attn_metadata(
        drafter, count, found, np.arange(count + 1, dtype=np.int32), upper, 1
    )
    by_layer = build_slot_mappings_by_layer(slots, setup.kv_config)
    return Step(metadata, by_layer, "NONE", count, count - 1, buffers.positions[:count].clone())


def profile(setup: Setup) -> Step:
    """Memory profiling: neither metadata nor slots nor a cache."""
    return Step(None, None, "NONE", MAX_TOKENS, 0, torch.zeros(MAX_TOKENS, dtype=torch.int64))


def decoding(setup: Setup, count: int = 5) -> list[tuple[int, int, int]]:
    """Requests in decode with all their drafts: (prompt, computed, scheduled)."""
    return [(5 + i, 9 + i, 1 + setup.drafts) for i in range(count)]


def _drafts(setup: Setup, count: int = 5) -> tuple[int, ...]:
    return (setup.drafts,) * count


KINDS: dict[str, Callable[[Setup], Step]] = {
    "decode, no graph": lambda s: real(s, *decoding(s), drafts=_drafts(s), graphs=False),
    "decode, full graph, padded": lambda s: real(s, *decoding(s), drafts=_drafts(s)),
    "decode, padded to another rank": lambda s: real(s, *decoding(s), drafts=_drafts(s), at_least=7 * (1 + s.drafts)),
    "decode, async scheduling": lambda s: real(s, *decoding(s), drafts=_drafts(s), optimism=s.drafts),
    "prefill, piecewise, padded": lambda s: real(s, (5, 0, 5), (6, 0, 6)),
    "prefill, no graph": lambda s: real(s, (5, 0, 5), graphs=False),
    "mixed": lambda s: real(s, *decoding(s, 2), (5, 0, 5), drafts=(*_drafts(s, 2), 0)),
    "chunk after context": lambda s: real(s, *decoding(s, 1), (20, 8, 6), drafts=(*_drafts(s, 1), 0)),
    "one-token chunk": lambda s: real(s, (9, 9, 1), (20, 8, 1)),
    "drafts for some": lambda s: real(s, (5, 9, 1 + s.drafts), (6, 9, 1), drafts=(s.drafts, 0)),
    "dummy, no graph": lambda s: dummy(s, 2, 2 * (1 + s.drafts), graphs=False),
    "dummy, full graph": lambda s: dummy(s, 2, 2 * (1 + s.drafts), graphs=True),
    "capture of a full graph": lambda s: capture(s, "FULL", 4, 4 * (1 + s.drafts)),
    "capture of a piecewise graph": lambda s: capture(s, "PIECEWISE", 8, 8),
    "draft step": lambda s: draft_step(s, 9, 10, 11),
    "profiling": profile,
}
