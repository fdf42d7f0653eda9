"""Sizes of CUDA graphs, compared with what vLLM's two model runners plan for the same config."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat.config import GraphSizes

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
BOTH = "FULL_AND_PIECEWISE"
TO_24 = [1, 2, 3, 4, 6, 8, 12, 16, 24]
TIERS = [(1, 2, 3), (3, 5, 1), (6, 8, 0)]
"""Drafts by the number of requests: (first, last, drafts)."""


def config_of(is_v2, mode, sizes, drafts=0, requests=8, cut=True, adaptive=False, tiers=None):
    """As much of a ``VllmConfig`` as the runners read; ``cut``: the graph is cut at attention."""
    ops = list(CompilationConfig._attention_ops) if cut else []
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=max(sizes), splitting_ops=ops,
    )  # fmt: skip
    speculative = SimpleNamespace(
        enable_adaptive_verification=adaptive,
        uses_dynamic_speculative_decoding=lambda: tiers is not None,
        num_speculative_tokens_per_batch_size=tiers,
    )
    return SimpleNamespace(
        compilation_config=compilation, scheduler_config=SimpleNamespace(max_num_seqs=requests),
        speculative_config=speculative if drafts else None, num_speculative_tokens=drafts, use_v2_model_runner=is_v2,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1), lora_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )  # fmt: skip


def of_the_runner(config):
    """What the config's runner plans. It writes into the config, as it does in a worker."""
    compilation, width = config.compilation_config, 1 + config.num_speculative_tokens
    support, is_v2 = AttentionCGSupport.UNIFORM_BATCH, config.use_v2_model_runner
    mode = compilation.resolve_cudagraph_mode_and_sizes(support, "MLA", width, use_v2_model_runner=is_v2)
    if is_v2:
        adaptive = config.speculative_config is not None and config.speculative_config.enable_adaptive_verification
        rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        pool = mock.patch.object(type(current_platform), "get_global_graph_pool", return_value=None)
        with mock.patch.object(cudagraph_utils, "get_pp_group", return_value=rank), pool:
            made = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, width, varlen_decode=adaptive)
        found = made._capture_descs
    else:
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, width)
        found = dispatcher.cudagraph_keys
    kinds = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
    return GraphSizes(*(sorted({one.num_tokens for one in found.get(kind, ())}) for kind in kinds))


def outcome(ask, config):
    """What ``ask`` returns, or the error with which a runner refuses the config."""
    try:
        return ask(config)
    except ValueError as error:
        return str(error)


def assert_as_planned(config):
    """Check the sizes before the worker's runner starts, and after."""
    compilation = config.compilation_config
    listed, mode = [*compilation.cudagraph_capture_sizes], compilation.cudagraph_mode
    before = outcome(compat_config.graph_sizes, config)
    assert (compilation.cudagraph_capture_sizes, compilation.cudagraph_mode) == (listed, mode), "the config has changed"
    planned = outcome(of_the_runner, config)
    assert before == planned, "not as planned"
    assert outcome(compat_config.graph_sizes, config) == planned


@pytest.mark.parametrize(("config", "full", "pieces"), [
    (config_of(True, BOTH, TO_24, drafts=2, requests=4), [3, 6, 9, 12], TO_24),
    (config_of(False, BOTH, TO_24, drafts=2, requests=4), [3, 6, 9, 12], [3, 6, 9, 12, 18, 24]),
    (config_of(True, BOTH, [1, 2], drafts=2), [], [1, 2]),
    (config_of(True, BOTH, TO_24), [1, 2, 3, 4, 6, 8], TO_24),
    (config_of(False, "PIECEWISE", TO_24, drafts=2), [], TO_24),
    (config_of(True, "FULL", TO_24, cut=False), [1, 2, 3, 4, 6, 8], []),
    (config_of(True, BOTH, TO_24, drafts=3, adaptive=True), TO_24, TO_24),
    (config_of(True, "FULL_DECODE_ONLY", TO_24, drafts=3, tiers=TIERS), [1, 2, 3, 4, 6, 8, 12, 16, 24], []),
    (config_of(True, "FULL_DECODE_ONLY", [5, 30], drafts=3, tiers=TIERS), [5, 6, 8], []),
    (config_of(True, "NONE", TO_24), [], []),
])  # fmt: skip
def test_full_graphs_hold_whole_requests_of_all_their_drafts(config, full, pieces):
    assert_as_planned(config)
    assert compat_config.graph_sizes(config) == (full, pieces)


@given(data=st.data())
def test_sizes_are_those_that_each_runner_plans_for_any_options(data):
    is_v2, drafts, requests = data.draw(st.booleans()), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 12))
    sizes, mode = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1))), data.draw(st.sampled_from(MODES))
    cut = "PIECEWISE" in mode or data.draw(st.booleans())
    adaptive = is_v2 and mode in ("FULL_DECODE_ONLY", BOTH) and data.draw(st.booleans())  # vLLM has it nowhere else
    assert_as_planned(config_of(is_v2, mode, sizes, drafts, requests, cut, adaptive))


def test_the_first_runner_starts_with_no_size_below_one_request():
    config = config_of(False, BOTH, [1, 2], drafts=2)
    with pytest.raises(ValueError, match="No valid cudagraph sizes"):
        compat_config.graph_sizes(config)


@pytest.mark.mutation
@pytest.mark.parametrize(("is_v2", "name", "planted", "seen"), [
    (True, "_decode_graphs", lambda config: [(1, 3 * config.scheduler_config.max_num_seqs)], "not as planned"),
    (False, "copy", lambda compilation: compilation, "the config has changed"),
], ids=["sizes of the config", "the config itself"])  # fmt: skip
def test_mutation_sizes_or_a_config_that_only_one_runner_has_are_caught(monkeypatch, is_v2, name, planted, seen):
    monkeypatch.setattr(compat_config, name, planted)
    with pytest.raises(AssertionError, match=seen):
        assert_as_planned(config_of(is_v2, BOTH, TO_24, drafts=2, requests=4))
