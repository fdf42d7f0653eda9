"""Weights and rotary tables that vLLM loads again under the same tensor objects, without a version counter."""

import logging
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.worker import gpu_worker

from tests.support.made_up_clock import Named
from tests.support.opcalls import NAME
from tests.support.planted import raising
from tests.support.simulated_aiter import ROCM
from tests.support.statuses import wait_for_the_file
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.engine import RELOAD_METHODS, Engine
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends
from vllm_aiter_mla.settings import SettingsError
from vllm_aiter_mla.status import engine_status
from vllm_aiter_mla.status.engine_status import EngagementChanges, EngineStatus
from vllm_aiter_mla.status.record import RankRecord


@pytest.fixture
def worker(monkeypatch):
    for method in RELOAD_METHODS:
        monkeypatch.setattr(Worker, method, lambda self: None, raising=False)
    one = Worker(ours(16))
    one.load_model()
    return one


@pytest.mark.parametrize("method", RELOAD_METHODS)
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


@pytest.mark.parametrize("how", ["copied", "other memory"])
@pytest.mark.parametrize("table_in_inference_mode", [False, True])
@pytest.mark.parametrize("steps_in_inference_mode", [False, True])
def test_aiters_halves_of_a_rotary_table_are_renewed_in_place(how, table_in_inference_mode, steps_in_inference_mode):
    """Captured graphs hold the halves by their address. vLLM's steps are in inference mode, and its reloads are not."""
    backend = AiterBackend(Platform("gfx942", ROCM), op=lambda *_: None)
    with torch.inference_mode(table_in_inference_mode):
        table, other = torch.randn(8, 4), torch.randn(8, 4)
    with torch.inference_mode(steps_in_inference_mode):
        halves = backend.halves(table)
    addresses = [half.data_ptr() for half in halves]
    with torch.inference_mode(table_in_inference_mode):
        if how == "other memory":
            table.data = other.clone()
        else:
            table.data.copy_(other)
    backend.reloaded()
    assert [half.data_ptr() for half in halves] == addresses
    assert torch.equal(torch.cat(halves, -1), other)


def test_a_reload_lets_each_back_end_that_was_built_renew_what_it_derived(worker, monkeypatch):
    renewed = []
    monkeypatch.setattr(KernelBackend, "reloaded", lambda self: renewed.append(self.name))
    layer_in(worker).backends.leave_out("aiter", "planted")
    worker.reload_weights()
    assert renewed == ["reference"]


@pytest.mark.mutation
def test_where_the_weights_cannot_be_read_again_the_layer_runs_vllms_own_kernels(worker, monkeypatch, said):
    layer = layer_in(worker)
    assert layer.why_skipped() is None

    monkeypatch.setattr(type(layer), "reloaded", raising(RuntimeError("planted")))
    worker.reload_weights()
    assert "planted" in layer.why_skipped().message
    assert sum("planted" in text for _, text in said) == 1


def reloads_strictly(monkeypatch, said):
    """What raises when weights are loaded again, in an engine whose start was strict and is over."""
    for method in RELOAD_METHODS:
        monkeypatch.setattr(Worker, method, lambda self: None, raising=False)
    one = Worker(ours(16), strict=True)
    one.load_model()
    one.compile_or_warm_up_model()
    monkeypatch.setattr(type(layer_in(one)), "reloaded", raising(RuntimeError("planted")))
    try:
        one.reload_weights()
    except SettingsError:
        return "the server ends"
    return layer_in(one).why_skipped().code


def test_strict_mode_ends_a_start_and_no_engine_that_serves(monkeypatch, said):
    assert reloads_strictly(monkeypatch, said) == "kernel_shape"


@pytest.mark.mutation
def test_mutation_a_strict_mode_that_outlives_the_start_is_caught(monkeypatch, said):
    monkeypatch.setattr(Engine, "strict", property(lambda self: True, lambda self, value: None), raising=False)
    assert reloads_strictly(monkeypatch, said) == "the server ends"


@pytest.fixture
def checked(monkeypatch, said):
    """A worker that serves, whose layer runs a kernel that was checked."""
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    for method in RELOAD_METHODS:
        monkeypatch.setattr(Worker, method, lambda self: None, raising=False)
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: Named("triton"))
    one = Worker(ours(16), kernel="triton")
    one.load_model()
    one.compile_or_warm_up_model()
    assert layer_in(one).decision.our_first_kernel == "triton"
    assert skipped(one) == {}
    return one


def skipped(one):
    """What the status file says of the layers that are left to vLLM."""
    wait_for_the_file()
    held = layer_in(one).engine_status
    assert files.read_record(RankRecord, held.path) == held.record
    assert set(held.record.engaged) | set(held.record.skipped) == {NAME}
    return {name: skip.code for name, skip in held.record.skipped.items()}


def another_shape(module):
    module.num_heads = 4
    module.W_UK_T = torch.randn(4, *module.W_UK_T.shape[1:]).to(module.W_UK_T.dtype)


def a_window(module):
    module.sliding_window = 128


def a_strange_weight(module):
    module.W_UK_T = module.W_UK_T.view(torch.int16)


def lines_of_fallback(said):
    return [text for text in said.at(logging.ERROR) if "since weights were loaded again" in text]


def falls_back_and_says_so(one, said, change, code):
    """The layer runs vLLM's own, one line says so, and the status has the reason: before the next step."""
    change(layer_in(one).module)
    one.reload_weights()
    assert layer_in(one)._decision is not None, "the next step would decide"
    assert layer_in(one).decision.skip is not None, "a kernel runs that was checked for another layer"
    assert layer_in(one).decision.skip.code == code
    assert skipped(one) == {NAME: code}, "the status file still says that the layer is engaged"
    assert [group.decision.kernel_spans for group in layer_in(one).engine_status.record.decision_groups] == [()]
    assert len(lines_of_fallback(said)) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [(another_shape, "kernel_shape"), (a_window, "sliding_window"), (a_strange_weight, "kernel_shape")],
)
def test_a_reload_after_which_no_checked_kernel_takes_the_layer_is_said_and_noted(checked, said, change, code):
    falls_back_and_says_so(checked, said, change, code)


@pytest.mark.mutation("I12")
def test_mutation_a_check_that_outlives_the_shape_it_was_made_for_is_caught(checked, said, monkeypatch):
    layer_in(checked)._checked_for = None
    with pytest.raises(AssertionError, match="checked for another layer"):
        falls_back_and_says_so(checked, said, another_shape, "kernel_shape")


@pytest.mark.mutation("I8")
def test_mutation_a_reload_that_leaves_the_status_as_it_was_is_caught(checked, said, monkeypatch):
    monkeypatch.setattr(EngineStatus, "update", lambda *given, **fields: EngagementChanges({}, []))
    with pytest.raises(AssertionError, match="still says that the layer is engaged"):
        falls_back_and_says_so(checked, said, another_shape, "kernel_shape")


def test_a_reload_that_cannot_renew_what_follows_from_the_weights_is_in_the_status(checked, said, monkeypatch):
    monkeypatch.setattr(type(layer_in(checked).backends), "reloaded", raising(RuntimeError("planted")))
    checked.reload_weights()
    assert skipped(checked) == {NAME: "kernel_shape"}


def test_a_layer_that_another_reload_brings_back_is_engaged_again(checked, said):
    module = layer_in(checked).module
    heads, weight = module.num_heads, module.W_UK_T
    another_shape(module)
    checked.reload_weights()
    module.num_heads, module.W_UK_T = heads, weight
    checked.reload_weights()
    assert layer_in(checked).decision.our_first_kernel == "triton"
    assert skipped(checked) == {}
    assert "engage again" in said.at(logging.INFO)[-1]


def updated_by_a_trainer(one):
    """As vLLM's weight transfer does it: in between the layer has no absorbed weight."""
    module = layer_in(one).module
    weight = module.W_UK_T
    one._weight_update_active, module.W_UK_T = True, None
    for _ in range(2):
        one.update_weights()
    one._weight_update_active, module.W_UK_T = False, weight.clone()
    one.finish_weight_update()


def test_a_weight_transfer_tells_of_no_fallback_and_leaves_the_status_as_it_was(checked, said):
    updated_by_a_trainer(checked)
    assert layer_in(checked).decision.our_first_kernel == "triton"
    assert (skipped(checked), lines_of_fallback(said)) == ({}, []), "half a transfer is taken for the whole"


def test_a_layer_whose_weight_is_there_is_decided_in_the_middle_of_a_weight_transfer(checked):
    checked._weight_update_active = True
    checked.update_weights()
    assert (layer_in(checked).decision.our_first_kernel, skipped(checked)) == ("triton", {})
    layer_in(checked).module.sliding_window = 128
    checked.update_weights()
    assert skipped(checked) == {NAME: "sliding_window"}


@pytest.mark.mutation
def test_mutation_a_decision_in_the_middle_of_a_weight_transfer_is_caught(checked, said, monkeypatch):
    monkeypatch.setattr(compat_config, "is_updating_weights", lambda worker: False)
    with pytest.raises(AssertionError, match="taken for the whole"):
        test_a_weight_transfer_tells_of_no_fallback_and_leaves_the_status_as_it_was(checked, said)


@pytest.mark.parametrize("method", RELOAD_METHODS)
def test_a_reload_that_raises_drops_what_followed_from_the_weights_too(monkeypatch, said, method):
    """Also in the middle of a weight transfer, which then has no end."""
    monkeypatch.setattr(Worker, method, raising(KeyError("planted")), raising=False)
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    one = Worker(ours(16))
    one.load_model()
    one.compile_or_warm_up_model()
    layer, weight = layer_in(one), layer_in(one).weight()
    one._weight_update_active, layer.module.W_UK_T = True, None
    with pytest.raises(KeyError, match="planted"):
        getattr(one, method)()
    assert layer._weight is not weight
    assert skipped(one) == {NAME: "no_absorbed_weight"}


def test_vllms_own_worker_is_in_a_weight_transfer_from_its_start_to_its_end():
    one = gpu_worker.Worker.__new__(gpu_worker.Worker)
    one.vllm_config, one.model_runner, one.weight_transfer_engine = VllmConfig(), Mock(), Mock()
    one._weight_update_active = False
    found = []
    for method, given in (("start_weight_update", ()), ("update_weights", ({},)), ("finish_weight_update", ())):
        getattr(one, method)(*given)
        found.append(compat_config.is_updating_weights(one))
    assert found == [True, True, False]


@pytest.mark.parametrize("kept", [True, False])
def test_a_reload_tells_nothing_new_of_a_layer_that_its_graph_left_out(checked, said, kept):
    """It ran vLLM's kernels before, for a reason that its weights do not change; a warm start knows it from a file."""
    layer, skip = layer_in(checked), Skip("no_rope", "why")
    layer.ran_kernel, layer.graph_skip = "", None if kept else skip
    held = layer.engine_status
    held.add_kept_skips({NAME: skip} if kept else {})
    held.set_record(replace(held.record, engaged={}, skipped={NAME: skip}))
    held.write(held.path.parent)
    checked.reload_weights()
    assert (skipped(checked), lines_of_fallback(said)) == ({NAME: "no_rope"}, [])


def test_a_reload_leaves_a_layer_whose_batches_no_kernel_took_where_it_was(checked, said):
    """Also where another layer has run the kernel that this one was to run."""
    layer, held = layer_in(checked), layer_in(checked).engine_status
    layer.ran_kernel, layer.possible_kernels = "", ("triton",)
    layer._falls_back("a stride")
    held.set_record(replace(held.record, engaged={"another": "triton"}, skipped={NAME: layer.state().skip}))
    checked.reload_weights()
    assert held.record.skipped == {NAME: Skip("kernel_shape", "a stride")}


def test_a_fallback_is_said_where_no_file_can_be_written_and_each_time(checked, said, monkeypatch):
    monkeypatch.setattr(files, "write_record", raising(OSError("No space left on device")))
    module = layer_in(checked).module
    for window in (128, None, 128):
        module.sliding_window = window
        checked.reload_weights()
    assert len(lines_of_fallback(said)) == 2
    assert sum("engage again" in text for text in said.at(logging.INFO)) == 1
