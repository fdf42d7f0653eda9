"""What a worker does between loading and its first request, and that nothing of ours takes it down."""

import logging
import pickle
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph
from vllm.config import CUDAGraphMode

from tests.support.made_up_clock import Named
from tests.support.opcalls import NAME, layer_of
from tests.support.planted import raising
from tests.support.strict import both_modes, stops
from tests.support.worker import CONFIG, Worker, layer_in, ours
from vllm_aiter_mla import admission, engine
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.compat.inductor import InductorPass
from vllm_aiter_mla.engine import Engine
from vllm_aiter_mla.passes import pipeline
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.serving import backends, module, ops
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import checks, timing
from vllm_aiter_mla.status import liveness
from vllm_aiter_mla.status.engine_status import EngineStatus


@pytest.mark.parametrize(
    "pass_",
    [None, SimpleNamespace(limit=5)],
    ids=["the gate declined", "the gate declined beside a user's pass with a limit"],
)
def test_a_worker_whose_fast_path_is_off_is_left_as_it_is(pass_):
    one = Worker(pass_)
    assert set(vars(one)) == {"vllm_config", "steps", "engine"}
    assert one.engine is None


def test_a_worker_that_inherits_no_variable_of_ours_joins_its_servers_run(monkeypatch):
    """As Ray starts workers: with the pickled config, and the variables whose names vLLM knows."""
    monkeypatch.setenv(liveness.RUN_VARIABLE, "front")
    sent = pickle.dumps(ours())
    monkeypatch.delenv(liveness.RUN_VARIABLE)
    Worker(pickle.loads(sent))
    assert liveness.ensure_run_name() == "front"


def test_loading_starts_a_status_checks_the_kernels_and_keys_the_cache(said, monkeypatch):
    given = []
    check = checks.check_kernels
    monkeypatch.setattr(checks, "check_kernels", lambda *args: (given.append(args), check(*args))[1])
    pass_ = ours(limit=8)
    one = Worker(pass_)
    one.engine.status.add_timing("of the load before")
    before = pass_.uuid()
    assert one.load_model() == "loaded"
    assert one.engine.status.shape_timings == []
    ((layer, sizes, _),) = given
    assert (layer.limit, sizes) == (8, [1, 8]), "a graph of exactly the limit is ours"
    assert (one.engine.layers, layer.backends, layer.engine_status) == (
        [layer_in(one)], one.engine.backends, one.engine.status,
    )  # fmt: skip
    assert pass_.key == one.engine.cache_key()
    assert pass_.uuid() != before


def test_a_worker_has_the_ops_before_it_loads_a_compiled_artifact_that_may_hold_them(monkeypatch):
    defined = []
    monkeypatch.setattr(ops, "register", lambda: defined.append("here"))
    Worker(None)
    assert defined == [], "a worker without the flag defines none"
    Worker(ours())
    assert defined == ["here"]


def test_under_the_module_integration_loading_decides_what_each_wrapper_calls(said):
    our_pass = AiterMLAPipeline(CONFIG, limit=16, settings=Settings(enabled=True), integration="module")
    Worker(our_pass).load_model()
    assert our_pass.key[-1] == f"{NAME}: unknown_forward", "the stub is in no wrapper of vLLM's"


@pytest.mark.parametrize("integration", ["passes", "module"])
def test_only_the_module_integration_sees_each_wrapper_while_the_model_is_built(said, monkeypatch, integration):
    within = []

    @contextmanager
    def installed():
        within.append("begun")
        yield
        within.append("ended")

    monkeypatch.setattr(module, "installed", installed)
    monkeypatch.setattr(Worker, "load_model", lambda self: within.append("loads"))
    Worker(AiterMLAPipeline(CONFIG, limit=16, settings=Settings(enabled=True), integration=integration)).load_model()
    assert within == (["begun", "loads", "ended"] if integration == "module" else ["loads"])


@pytest.mark.parametrize(("mode", "steps"), [("NONE", 1), ("PIECEWISE", 1), ("FULL_AND_PIECEWISE", 0)])
def test_a_rank_whose_kernel_was_rejected_runs_as_many_decode_steps_as_the_others(said, mode, steps):
    """They hold collectives: a rank that ran one more would wait for the others, or read their answers to another."""
    ranks = [Worker(ours()), Worker(ours(), kernel="triton")]
    for one in ranks:
        one.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        one.load_model()
    layer_in(ranks[1]).stop("planted")
    for one in ranks:
        one.compile_or_warm_up_model()
    assert [one.steps for one in ranks] == [steps] * 2


@pytest.mark.parametrize(("limit", "steps"), [(8, 0), (7, 1)])
def test_a_captured_full_graph_of_exactly_the_limit_has_run_the_kernels(said, limit, steps):
    one = Worker(ours(limit))
    one.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    one.vllm_config.compilation_config.cudagraph_capture_sizes = [8, 64]
    one.load_model()
    one.compile_or_warm_up_model()
    assert one.steps == steps


class Spoilt:
    """Something that raises when it is asked anything."""

    def __getattr__(self, name):
        raise KeyError("planted")


planted = raising(KeyError("planted"))


def test_vllms_own_quantiser_is_warm_before_a_mixed_batch_needs_it(said, monkeypatch):
    """In inference mode, of each layer whose query is fp8: one row, for which torch compiles apart, and more."""
    called = []
    one = Worker(ours())
    layer = layer_of("fp8")

    def op(absorbed, q_pe, scale):
        assert absorbed.dtype == q_pe.dtype == torch.bfloat16
        called.append((absorbed.shape[0], absorbed.shape[:2] == q_pe.shape[:2], torch.is_inference_mode_enabled()))

    layer._decode_concat_quant_fp8_op = op
    layer._vllm_config = one.vllm_config
    one.vllm_config.compilation_config.static_forward_context[NAME] = layer
    one.load_model()
    assert called == [(2, True, True), (1, True, True)]


def test_a_layer_whose_quantiser_cannot_be_compiled_ahead_costs_the_others_nothing(said):
    called, one = [], Worker(ours())
    for name in ("model.layers.0.attn", "model.layers.1.attn"):
        layer = layer_of("fp8")
        layer.layer_name, layer._vllm_config = name, one.vllm_config
        layer._decode_concat_quant_fp8_op = planted if not called else lambda *given: called.append(given)
        called.append(name)
        one.vllm_config.compilation_config.static_forward_context[name] = layer
    one.load_model()
    assert len(called) == 2 + 2, "one row and more, of the second layer"
    assert [level for level, text in said if "compiled ahead" in text] == [logging.WARNING]


def test_a_failed_warm_up_hands_over_to_the_other_ranks_and_raises_its_error_before_they_come(said, monkeypatch):
    handed = []
    they_come, done = Event(), Event()

    def exchange(mine):
        assert they_come.wait(60)
        handed.append(mine)
        done.set()
        return 0, [mine]

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", planted)
    one = Worker(ours(), strict=True)
    one.load_model()
    monkeypatch.setattr(engine.ranks, "exchange", exchange)
    with pytest.raises(KeyError, match="planted"):
        one.compile_or_warm_up_model()
    assert handed == []
    they_come.set()
    assert done.wait(60)
    assert handed == [None]


class FailsToLoad(Worker):
    def load_model(self):
        raise KeyError("planted")


def failed_load(monkeypatch, seconds=10, **options):
    """What a rank whose model cannot be loaded hands over to the others."""
    handed, done = [], Event()
    monkeypatch.setattr(engine.ranks, "exchange", lambda mine: (handed.append(mine), done.set(), (0, [mine]))[2])
    with pytest.raises(KeyError, match="planted"):
        FailsToLoad(ours(), **options).load_model()
    done.wait(seconds)
    return handed


def test_a_rank_that_cannot_load_its_model_hands_over_its_answer_so_that_the_others_do_not_wait(said, monkeypatch):
    (answer,) = failed_load(monkeypatch)
    chosen, troubles = timing.merge_choices([{}, answer])
    assert (chosen, len(troubles)) == ({}, 1)
    assert failed_load(monkeypatch, 0, measure=False) == [], "the others exchange nothing either"


@pytest.mark.mutation
def test_mutation_a_failed_load_that_hands_over_nothing_is_caught(said, monkeypatch):
    told = []
    monkeypatch.setattr(Engine, "on_load_failed", lambda one: told.append(one))
    assert (failed_load(monkeypatch, 0), len(told)) == ([], 1)


# What the check asks, and how each of it may raise.
AT_THE_CHECK = {
    "the status": lambda patch, one: patch(engine, "EngineStatus", planted),
    "the check": lambda patch, one: patch(Engine, "check_layers", planted),
    "the key": lambda patch, one: patch(Engine, "cache_key", planted),
    "the layers": lambda patch, one: patch(one.vllm_config.compilation_config, "static_forward_context", Spoilt()),
    "the sizes": lambda patch, one: patch(one.vllm_config.compilation_config, "cudagraph_capture_sizes", [None]),
    "the card": lambda patch, one: patch(engine, "current_platform", planted),
    "a layer of vLLM's": lambda patch, one: patch(Layer, "keep", planted),
    "the layer": lambda patch, one: patch(compat_layer, "layer_view", planted),
    "the weights": lambda patch, one: patch(compat_layer, "activation_dtype", planted),
    "the back ends": lambda patch, one: patch(Layer, "kernels_to_check", planted),
    "the decision": lambda patch, one: patch(Layer, "not_admitted", planted),
    "the shape": lambda patch, one: patch(Layer, "shape", planted),
    "the rows": lambda patch, one: patch("vllm_aiter_mla.serving.backends.meta_inputs", planted),
}


@pytest.mark.parametrize("spoil", AT_THE_CHECK.values(), ids=AT_THE_CHECK)
@both_modes
def test_fail_closed_whatever_raises_at_the_check_no_layer_runs_unchecked(said, monkeypatch, spoil, strict):
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: Named("triton"))
    one = Worker(ours(), strict=strict, kernel="triton")
    module = compat_config.mla_modules(one.vllm_config)[NAME]
    with monkeypatch.context() as patching, stops(strict):
        spoil(patching.setattr, one)
        assert one.load_model() == "loaded"
    lines = [level for level, text in said if "'planted'" in text or "TypeError" in text]
    assert lines == [logging.ERROR] * (not strict), "one line says so"
    layer = Layer.of(module)
    assert isinstance(layer.why_skipped(), admission.Skip), "the passes would rewrite it"


@pytest.mark.mutation("I12")
def test_mutation_fail_closed_a_check_that_raised_counts_as_made(said, monkeypatch):
    monkeypatch.setattr(Layer, "stop", lambda self, reason, code="": None)
    with pytest.raises(AssertionError, match="the passes would rewrite it"):
        test_fail_closed_whatever_raises_at_the_check_no_layer_runs_unchecked(
            said, monkeypatch, AT_THE_CHECK["the key"], strict=False
        )


@pytest.mark.mutation("I12")
def test_mutation_fail_closed_a_strict_mode_that_ends_no_start_is_caught(said, monkeypatch):
    asked = []
    monkeypatch.setattr(Engine, "end_strict_start", lambda self, reason, cause=None: asked.append(reason))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_fail_closed_whatever_raises_at_the_check_no_layer_runs_unchecked(
            said, monkeypatch, AT_THE_CHECK["the check"], strict=True
        )
    assert ["planted" in reason for reason in asked] == [True]


@pytest.mark.mutation("I12")
def test_mutation_fail_closed_the_hook_swallows_what_the_check_raises(said, monkeypatch):
    swallowed = []

    def swallowing(one, method, then, **_):
        inner = getattr(one, method)

        def call():
            try:
                then()
            except Exception as error:
                swallowed.append(str(error))
            return inner()

        setattr(one, method, call)

    monkeypatch.setattr(patches, "after", swallowing)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_fail_closed_whatever_raises_at_the_check_no_layer_runs_unchecked(
            said, monkeypatch, AT_THE_CHECK["the check"], strict=True
        )
    assert ["planted" in error for error in swallowed] == [True]


@both_modes
@pytest.mark.parametrize("step", [(patches, "after"), (ops, "register")], ids=["hooks", "ops"])
def test_fail_closed_a_worker_that_cannot_be_hooked(said, monkeypatch, strict, step):
    monkeypatch.setattr(*step, planted)
    with stops(strict, "could not be hooked: KeyError"):
        assert layer_in(Worker(ours(), strict=strict, kernel="triton")).why_skipped().code.startswith("kernel_")
        assert [level for level, text in said if "could not be hooked" in text] == [logging.ERROR]


@both_modes
def test_fail_closed_a_pass_whose_worker_was_never_hooked_rewrites_nothing(said, monkeypatch, strict):
    """Nor does it take an artifact of a worker whose kernels were checked: they have another key."""
    rewritten = []
    monkeypatch.setattr(pipeline, "rewrite", lambda *args: (rewritten.append(args), {"matched": 0})[1])
    context = SimpleNamespace(compile_range=SimpleNamespace(start=1, end=16))
    monkeypatch.setattr(pipeline, "get_pass_context", lambda: context)
    pass_ = AiterMLAPipeline(CONFIG, limit=16, settings=Settings(enabled=True, strict=strict))
    unchecked = pass_.uuid()
    with stops(strict, "never checked"):
        pass_(Graph())
    assert rewritten == []
    assert strict or said == [(logging.ERROR, "no graph is rewritten: the kernels of this worker were never checked")]
    pass_.key = ()
    pass_(Graph())
    assert len(rewritten) == 1
    assert pass_.uuid() != unchecked


class UsersPass(InductorPass):
    """A pass of the user's for graphs of up to 32 tokens, which notes each graph that it is given."""

    def __init__(self, ran):
        self.ran = ran

    def __call__(self, graph):
        self.ran.append("theirs")

    def is_applicable_for_range(self, compile_range):
        return compile_range.end <= 32


RANGES = {(1, 16): ["theirs", "ours"], (1, 32): ["theirs"], (17, 32): ["theirs"], (17, 64): [], (1, 64): []}
"""What runs of two passes, in order: a user's for graphs of up to 32 tokens, then ours for those of up to 16."""


def test_i5_our_pass_runs_only_inside_the_decode_limit_and_a_users_first_in_its_own_ranges(said, monkeypatch):
    for (start, end), wanted in RANGES.items():
        ran = []
        monkeypatch.setattr(pipeline, "rewrite", lambda *_, ran=ran: (ran.append("ours"), {"matched": 0})[1])
        compile_range = SimpleNamespace(start=start, end=end)
        monkeypatch.setattr(pipeline, "get_pass_context", lambda r=compile_range: SimpleNamespace(compile_range=r))
        pass_ = AiterMLAPipeline(CONFIG, limit=16, settings=Settings(enabled=True), chained=UsersPass(ran))
        pass_.key = ()
        assert pass_.is_applicable_for_range(compile_range) == bool(wanted)
        pass_(Graph())
        assert ran == wanted, (start, end)


@pytest.mark.mutation("I5")
@pytest.mark.parametrize(
    ("owner", "name", "bug", "seen"),
    [
        (admission, "is_within_limit", lambda end, limit: True, r"\['theirs', 'ours'\] == \['theirs'\]"),
        (AiterMLAPipeline, "_mine", lambda *_: True, r"\['theirs', 'ours'\] == \['theirs'\]"),
        (AiterMLAPipeline, "_chained_wants", lambda *_: False, r"\['ours'\] == \['theirs', 'ours'\]"),
        (AiterMLAPipeline, "_chained_wants", lambda *_: True, "^assert True == False"),
    ],
    ids=["the range is ignored", "no limit", "the user's pass is dropped", "the user's pass runs everywhere"],
)
def test_mutation_i5_a_pass_that_runs_in_another_range_is_caught(said, monkeypatch, owner, name, bug, seen):
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError, match=seen):
        test_i5_our_pass_runs_only_inside_the_decode_limit_and_a_users_first_in_its_own_ranges(said, monkeypatch)


AT_THE_STATUS = {
    "the decode step": lambda patch, one: patch(compat_config, "run_decode_step", planted),
    "the layers": lambda patch, one: patch(one.vllm_config.compilation_config, "static_forward_context", Spoilt()),
    "the labels": lambda patch, one: patch(compat_config, "metric_labels", planted),
    "the cache": lambda patch, one: patch(one.vllm_config, "cache_config", None),
    "the rank": lambda patch, one: patch(Worker, "rank", property(planted)),
    "the record": lambda patch, one: patch(EngineStatus, "make_record", planted),
    "the line": lambda patch, one: patch(engine, "status_line", planted),
}


@pytest.mark.parametrize("spoil", AT_THE_STATUS.values(), ids=AT_THE_STATUS)
@both_modes
def test_fail_closed_whatever_raises_at_the_status(said, monkeypatch, spoil, strict):
    one = Worker(ours(), strict=strict)
    one.load_model()
    spoil(monkeypatch.setattr, one)
    with stops(strict):
        assert one.compile_or_warm_up_model() == "warm"
        assert [text for level, text in said if level == logging.ERROR and "serving goes on" in text]


@pytest.mark.parametrize("raises", ["the card", "the first layer", "the second layer"])
def test_layers_that_cannot_be_made_are_counted_with_the_reason(said, monkeypatch, raises):
    """Their status said 0/0 or 0/1: of a model of 61 layers the layers behind the one that raised were missing."""
    one, keep, kept = Worker(ours()), Layer.keep, []
    second = layer_of()
    second.layer_name, second._vllm_config = "model.layers.1.attn", one.vllm_config
    one.vllm_config.compilation_config.static_forward_context[second.layer_name] = second

    def keeps(layer):
        kept.append(layer.name)
        return planted() if raises == "the first layer" or len(kept) == 2 else keep(layer)

    with monkeypatch.context() as patching:
        if raises == "the card":
            patching.setattr(engine, "current_platform", planted)
        else:
            patching.setattr(Layer, "keep", keeps)
        one.load_model()
    one.compile_or_warm_up_model()
    (line,) = [text for _, text in said if text.startswith("0/")]
    assert line.startswith("0/2: kernel_shape: the kernels could not be checked: KeyError"), line


def test_fail_closed_a_layer_that_cannot_be_asked_costs_no_line(said, monkeypatch, tmp_path):
    one = Worker(ours())
    one.load_model()
    monkeypatch.setattr(compat_layer, "layer_view", planted)
    layer_in(one).reloaded()  # what it was decided to run on is asked for again
    one.compile_or_warm_up_model()
    assert any(text.startswith("0/1: kernel_shape") for _, text in said)
    assert len(list(tmp_path.glob("status-*.json"))) == 1


def test_fail_closed_a_decode_step_that_raises_costs_no_line(said, monkeypatch, tmp_path):
    one = Worker(ours())
    one.load_model()
    monkeypatch.setattr(compat_config, "run_decode_step", planted)
    one.compile_or_warm_up_model()
    assert said[-1][1].startswith("0/1: not_run")
    assert len(list(tmp_path.glob("status-*.json"))) == 1


@both_modes
@pytest.mark.parametrize("spoilt", ["compute_hash", "cudagraph_mode"])
def test_fail_closed_what_only_the_files_need_costs_no_line(said, monkeypatch, spoilt, strict):
    one = Worker(ours(), strict=strict)
    one.load_model()
    config = one.vllm_config
    monkeypatch.setattr(config if spoilt == "compute_hash" else config.compilation_config, spoilt, Spoilt())
    assert one.compile_or_warm_up_model() == "warm"
    assert [text for _, text in said if text.startswith("1/1 MLA layers engaged")]
    assert len([level for level, _ in said if level > logging.INFO]) == 1
