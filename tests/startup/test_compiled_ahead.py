"""What a start compiles ahead is what vLLM's own attention then runs: nothing is compiled while the engine serves."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode
from vllm.model_executor import custom_op
from vllm.model_executor.layers.attention.mla_attention import _DecodeConcatQuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform

from tests.support.opcalls import NAME, SIZES, layer_of
from tests.support.worker import Worker, ours
from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup import prefill

# (rows of the step, decode rows among them): with and without prefill rows or padding, one row and more.
STEPS = ((64, 37), (37, 37), (8, 5), (64, 64), (4, 3), (3, 2), (2, 2), (8, 1), (1, 1))


@pytest.fixture
def compiled(monkeypatch):
    """A layer that quantises by vLLM's own function, and the graphs that torch has compiled of the function."""
    graphs = []

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph

    options = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor", custom_ops=["none"])
    monkeypatch.setattr(custom_op, "get_cached_compilation_config", lambda: options)
    monkeypatch.setattr(type(current_platform), "simple_compile_backend", staticmethod(backend))
    monkeypatch.setattr(custom_op, "maybe_disable_graph_partition", lambda *given: {})
    layer = layer_of("fp8")
    layer._decode_concat_quant_fp8_op = _DecodeConcatQuantFP8(
        static=True, group_shape=GroupShape.PER_TENSOR, compile_native=True
    )
    torch._dynamo.reset()
    return SimpleNamespace(layer=layer, graphs=graphs)


@torch.inference_mode()
def served(layer):
    """Quantise as vLLM's ``forward_impl`` does in a step."""
    z = SIZES
    for total, rows in STEPS:
        q = torch.ones(total, z.n * (z.p + z.r), dtype=layer.act).view(total, z.n, z.p + z.r)
        q_nope, q_pe = q[:rows].split([z.p, z.r], dim=-1)
        layer._decode_concat_quant_fp8_op(q_nope.new_empty(rows, z.n, z.latent), q_pe, layer._q_scale)


def test_vllms_quantiser_is_not_compiled_again_by_any_step(compiled):
    worker = Worker(ours())
    compiled.layer._vllm_config = worker.vllm_config
    worker.vllm_config.compilation_config.static_forward_context[NAME] = compiled.layer
    worker.load_model()
    ahead = len(compiled.graphs)
    assert ahead == 2, "one row, and more"
    served(compiled.layer)
    assert len(compiled.graphs) == ahead


def test_what_elastic_parallelism_has_dropped_is_compiled_again_before_the_engine_serves(compiled):
    """It resets torch's compiler, and warms up again with decode batches alone."""
    worker = Worker(ours())
    compiled.layer._vllm_config = worker.vllm_config
    worker.vllm_config.compilation_config.static_forward_context[NAME] = compiled.layer
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert len(compiled.graphs) == 2
    torch._dynamo.reset()
    worker.compile_or_warm_up_model()
    assert len(compiled.graphs) == 4
    served(compiled.layer)
    assert len(compiled.graphs) == 4


@pytest.mark.parametrize("query", ["fp8", "auto"])
def test_vllms_product_over_mxfp4_runs_at_each_captured_size_as_its_own_warm_up_has_it(monkeypatch, query):
    """Triton compiles AITER's GEMM for a scale of the query, which none of ours hands over, and by token counts."""
    calls = []

    def gemm(q, codes, scale, transpose_bm, prequant, y_scale=None):
        calls.append((q.shape[1], y_scale is not None))
        return q.new_zeros(q.shape[1], q.shape[0], SIZES.latent)

    monkeypatch.setitem(absorb.GEMMS, "mxfp4", gemm)
    layer = Layer.of(layer_of(query))
    made = absorb.make(torch.ones(SIZES.n, 32, SIZES.latent, dtype=layer.module.act), ("mxfp4",))
    monkeypatch.setattr(type(layer), "weight", lambda self: made)
    shape = replace(layer.shape(), weight=("mxfp4",), nope_dim=32)
    monkeypatch.setattr(type(layer), "shape", lambda self: shape)
    prefill.compile_product(layer, lambda: [1, 8, 16])
    assert calls == ([(1, True), (8, True), (16, True)] if query == "fp8" else [])


@pytest.mark.mutation
def test_mutation_operands_from_outside_inference_mode_are_compiled_again(compiled, monkeypatch):
    zeros = torch.zeros

    def made_outside(*sizes, **options):
        with torch.inference_mode(False):
            return zeros(*sizes, **options)

    monkeypatch.setattr(prefill.torch, "zeros", made_outside)
    with pytest.raises(AssertionError, match="assert 4 == 2"):
        test_vllms_quantiser_is_not_compiled_again_by_any_step(compiled)
