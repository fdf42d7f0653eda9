"""Weights and rotary tables that vLLM loads again under the same tensor objects, without a version counter."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.support.made_up_clock import Named
from tests.support.opcalls import NAME
from tests.support.planted import raising
from tests.support.simulated_aiter import ROCM
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.inputs import synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends
from vllm_aiter_mla.startup import worker as startup


@pytest.fixture
def worker(monkeypatch):
    for method in startup.RELOADS:
        monkeypatch.setattr(Worker, method, lambda self: None, raising=False)
    one = Worker(ours(16))
    one.load_model()
    return one


@pytest.mark.parametrize("method", startup.RELOADS)
def test_a_reload_into_the_same_objects_binds_the_kernels_again(worker, method):
    layer, module = layer_in(worker), worker.vllm_config.compilation_config.static_forward_context[NAME]
    given = replace(synthetic_inputs(layer.shape(), 2), weight=layer.weight())
    first, same = layer.kernel(given), layer.kernel(given)
    assert first is same
    before = layer.weight()
    # The same sizes in other memory and with other strides.
    module.W_UK_T.data = torch.randn_like(module.W_UK_T.data).transpose(1, 2).contiguous().transpose(1, 2)
    getattr(worker, method)()
    assert layer.weight() is not before
    assert layer.weight().values.stride() == module.W_UK_T.stride()
    assert layer.kernel(given) is not first


@pytest.mark.parametrize("how", ["copied", "inference", "other memory"])
def test_aiters_halves_of_a_rotary_table_are_renewed_in_place(how):
    """Captured graphs hold the halves by their address."""
    backend = AiterBackend(Platform("gfx942", ROCM), op=lambda *_: None)
    with torch.inference_mode(how == "inference"):
        table, other = torch.randn(8, 4), torch.randn(8, 4)
        halves = backend.halves(table)
        addresses = [half.data_ptr() for half in halves]
        if how == "other memory":
            table.data = other.clone()
        else:
            table.data.copy_(other)
        backend.reloaded()
    assert [half.data_ptr() for half in halves] == addresses
    assert torch.equal(torch.cat(halves, -1), other)


@pytest.mark.mutation
def test_where_the_weights_cannot_be_read_again_the_layer_runs_vllms_own_kernels(worker, monkeypatch, said):
    layer = layer_in(worker)
    assert layer.why_skipped() is None

    monkeypatch.setattr(type(layer), "reloaded", raising(RuntimeError("planted")))
    worker.reload_weights()
    assert "planted" in layer.why_skipped().message
    assert sum("planted" in text for _, text in said) == 1


@pytest.fixture
def checked(monkeypatch, said):
    """A worker whose layer runs a kernel that was checked."""
    for method in startup.RELOADS:
        monkeypatch.setattr(Worker, method, lambda self: None, raising=False)
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: Named("triton"))
    one = Worker(ours(16), kernel="triton")
    one.load_model()
    assert layer_in(one).decision.ours == "triton"
    return one


def another_shape(module):
    module.num_heads = 4
    module.W_UK_T = torch.randn(4, *module.W_UK_T.shape[1:]).to(module.W_UK_T.dtype)


def a_window(module):
    module.sliding_window = 128


def falls_back_and_says_so(one, said, change, code):
    """The layer runs vLLM's own, one line says so, and the status has the reason: before the next step."""
    change(one.vllm_config.compilation_config.static_forward_context[NAME])
    one.reload_weights()
    assert layer_in(one)._decision is not None, "the next step would decide"
    assert layer_in(one).decision.skip is not None, "a kernel runs that was checked for another layer"
    assert layer_in(one).decision.skip.code == layer_in(one).outcome().skip[0] == code
    assert len([text for text in said.at(logging.ERROR) if "since weights were loaded again" in text]) == 1


@pytest.mark.parametrize(("change", "code"), [(another_shape, "kernel_shape"), (a_window, "sliding_window")])
def test_a_reload_after_which_no_checked_kernel_takes_the_layer_is_said_and_noted(checked, said, change, code):
    falls_back_and_says_so(checked, said, change, code)


@pytest.mark.mutation("I12")
def test_mutation_a_check_that_outlives_the_shape_it_was_made_for_is_caught(checked, said, monkeypatch):
    layer_in(checked)._checked_for = None
    with pytest.raises(AssertionError, match="checked for another layer"):
        falls_back_and_says_so(checked, said, another_shape, "kernel_shape")


def test_a_reload_tells_nothing_new_of_a_layer_that_its_graph_left_out(checked, said):
    """It ran vLLM's kernels before, for a reason that its weights do not change."""
    layer = layer_in(checked)
    layer.left_out = Skip("no_rope", "why")
    a_window(layer.module)
    checked.reload_weights()
    assert layer.outcome().skip == ("no_rope", "why")
    assert [text for text in said.at(logging.ERROR) if "since weights were loaded again" in text] == []
