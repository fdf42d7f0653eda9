"""The measured choice in a worker: with stub layers, kernels that are the reference, and a made-up clock."""

import json
import logging
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode

from tests.sandbox.rehearsal_card import RehearsalCard
from tests.support.made_up_clock import ORDER, MadeUpClock, costs, named_kernels
from tests.support.opcalls import NAME, layer_of
from tests.support.planted import raising
from tests.support.statuses import record_with
from tests.support.strict import both_modes, stops
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla import files, packages
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.decided import ShapeTiming, Span
from vllm_aiter_mla.engine import Engine
from vllm_aiter_mla.kernels import absorb, device, reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.device import Device
from vllm_aiter_mla.kernels.inputs import DecodeInputs, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends, decision
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup import checks, first_call, kept_figures, timing
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankRecord

planted = raising(torch.OutOfMemoryError("planted: out of memory"))
QUICK_TRITON = costs(aiter=8.0, triton=5.0, vllm=10.0)
LIMIT = 16
MACHINE_KEY = kept_figures.machine_key


class Card:
    """One made-up card: its clock, what was said, and the figures it keeps."""

    def __init__(self, monkeypatch, said):
        self.monkeypatch, self.said = monkeypatch, said
        self.set_clock(MadeUpClock(QUICK_TRITON))
        self.kernels = named_kernels(monkeypatch)
        platform = Platform("gfx942")
        monkeypatch.setattr(backends, "detect_platform", lambda: platform)
        monkeypatch.setattr(kept_figures, "machine_key", lambda: {"card": "made up"})
        monkeypatch.setattr(compat_config, "as_current", lambda config: nullcontext())

    def set_clock(self, clock):
        self.clock = clock
        clock.install(self.monkeypatch)

    def start(self, **options):
        one = Worker(ours(LIMIT), **options)
        one.load_model()
        return one


@pytest.fixture
def made_up(monkeypatch, said):
    return Card(monkeypatch, said)


def measured(one):
    return one.engine.status.shape_timings


def runs(one, tokens):
    return layer_in(one).decision.kernel_at(tokens)


def test_the_fastest_kernel_serves_and_the_status_line_and_the_status_say_so(made_up):
    figures = {"aiter": 8.0, "vllm": 10.0}
    cost = lambda name, tokens: figures.get(name, 5.0 if tokens <= 4 else 12.0)  # noqa: E731
    made_up.set_clock(MadeUpClock(cost))
    one = made_up.start()
    assert [runs(one, tokens) for tokens in (1, 4, 5, 16)] == ["triton", "triton", "aiter", "aiter"]
    assert layer_in(one).decision.our_first_kernel == "triton"
    found = record_with(layer_in(one), "aiter", LIMIT)
    assert status_line(found) == (
        "1/1 MLA layers engaged (triton 1..4, aiter 5..16; "
        "8.0 us a layer at 16 tokens against vLLM's own 10.0, measured here)"
    )
    assert found.shape_timings[0].layers == (NAME,)
    assert found.shape_timings[0].medians_us[4] == {"aiter": 8.0, "triton": 5.0, "vllm": 10.0}
    assert "1 layer shape(s)" in made_up.said.at(logging.INFO)[-1]
    assert made_up.clock.given_back == 1


def test_the_status_file_holds_what_was_decided_for_each_layer(made_up, tmp_path):
    one = made_up.start()
    one.compile_or_warm_up_model()
    (path,) = tmp_path.glob("status-*.json")
    (group,) = files.read_record(RankRecord, path).decision_groups
    assert (group.layers, group.decision) == ((NAME,), layer_in(one).decision)
    assert group.decision.kernel_spans == (Span(1, 16, "triton"),)
    assert {other.kernel for other in group.decision.rejected_kernels} == {"aiter", "aiter-opt", "vllm"}


def test_the_next_start_reads_the_figures_and_measures_nothing(made_up, tmp_path):
    made_up.start()
    assert len(list(tmp_path.glob("measured-*.json"))) == 1
    made_up.set_clock(MadeUpClock(costs(aiter=1.0, triton=9.0, vllm=9.0)))
    one = made_up.start()
    assert runs(one, 1) == "triton"
    assert made_up.clock.given_back == 0
    assert measured(one)[0].kept_since, "the line gives the day"
    one = made_up.start(measure="again")
    assert runs(one, 1) == "aiter"
    assert not measured(one)[0].kept_since


def test_ranks_time_if_the_tensors_of_the_engine_are_on_the_installed_card(made_up, monkeypatch):
    for installed, timed in ((Device(), 0), (RehearsalCard(), 1)):
        monkeypatch.setattr(device, "installed", installed)
        made_up.set_clock(MadeUpClock(QUICK_TRITON))
        one = Worker(ours(LIMIT))
        one.vllm_config.device_config = SimpleNamespace(device_type="cpu")
        one.load_model()
        assert len(measured(one)) == made_up.clock.given_back == timed


def test_partial_figures_are_kept_and_the_next_start_times_the_rest(made_up, tmp_path):
    made_up.set_clock(MadeUpClock(QUICK_TRITON, replay_s=stopwatch.BUDGET_S / 2 / (13 * 3)))
    found = []
    for _ in range(3):
        one = made_up.start()
        found.append((list(measured(one)[0].medians_us), runs(one, 8), runs(one, 16)))
    assert found == [
        ([1, 8], "triton", "vllm"),  # nothing shows yet that ours is not slower at 16
        ([1, 2, 4, 8], "triton", "vllm"),
        ([1, 2, 4, 8, 16], "triton", "triton"),
    ]


def test_a_start_without_time_for_the_rest_serves_by_the_figures_that_were_kept(made_up):
    made_up.set_clock(MadeUpClock(QUICK_TRITON, replay_s=stopwatch.BUDGET_S / 2 / (13 * 3)))
    made_up.start()
    made_up.set_clock(MadeUpClock(QUICK_TRITON, replay_s=1.0))
    one = made_up.start()
    assert runs(one, 8) == "triton"
    assert measured(one)[0].kept_since, "the line gives the day"
    assert made_up.said.at(logging.WARNING) == []


def test_a_limit_that_no_batch_reaches_is_timed_up_to_the_largest_batch(made_up):
    one = Worker(ours(4 * LIMIT))
    one.vllm_config.scheduler_config.max_num_batched_tokens = LIMIT
    one.load_model()
    assert list(measured(one)[0].medians_us) == [1, 2, 4, 8, LIMIT]
    assert (runs(one, LIMIT), runs(one, 4 * LIMIT)) == ("triton", "vllm")


def test_a_count_that_memory_does_not_suffice_for_costs_the_others_nothing(made_up, monkeypatch):
    """Also at the next start, which tries again: the figures that were kept still count."""
    inner = stopwatch.calls_of

    def calls_of(shape, weights, tokens, resident):
        return (planted if tokens > 4 else inner)(shape, weights, tokens, resident)

    monkeypatch.setattr(stopwatch, "calls_of", calls_of)
    monkeypatch.setattr(stopwatch, "FIRST_TIMED", (1,))
    for since in (False, True):
        one = made_up.start()
        assert (runs(one, 4), runs(one, 16), list(measured(one)[0].medians_us)) == ("triton", "vllm", [1, 2, 4])
        assert bool(measured(one)[0].kept_since) is since
        assert made_up.said.at(logging.WARNING) == []


KEY_OF = {
    "card": ("machine", lambda patch, given: patch(RehearsalCard, "name", lambda card: "another")),
    "units": ("machine", lambda patch, given: patch(RehearsalCard, "units", lambda card: 38)),
    "driver": ("machine", lambda patch, given: patch(kept_figures, "_driver_version", lambda: "another")),
    "triton": ("machine", lambda patch, given: patch(stopwatch, "triton_release", lambda: "another")),
    "torch": ("machine", lambda patch, given: patch(torch, "__version__", "another")),
    "python": ("machine", lambda patch, given: patch(stopwatch.platform, "python_version", lambda: "another")),
    "runtime": ("machine", lambda patch, given: patch(RehearsalCard, "built_for", "another")),
    **{
        name: ("machine", lambda patch, given, name=name: stamp_field(patch, **{name: "another"}))
        for name in ("plugin", "vllm", "aiter", "host")
    },
    "code": ("code", lambda patch, given: patch(packages, "fingerprint", lambda: "another")),
    "shape": ("shape", lambda patch, given: given.update(shape=replace(given["shape"], heads=1))),
    "custom ops": ("compiled", lambda patch, given: patch(given["config"].compilation_config, "custom_ops", ["all"])),
    "graphs": ("graphs", lambda patch, given: patch(
        given["config"].compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)),
    "engine": ("engine", lambda patch, given: patch(
        compat_config, "metric_labels", lambda config: {"model_name": None, "engine": "another"})),
    "rank": ("rank", lambda patch, given: given.update(rank=1)),
    "counts": ("counts", lambda patch, given: given.update(token_counts=(1, 4))),
    "tile": ("candidates", lambda patch, given: patch(
        given["backends"]["triton"], "kernel_of", lambda call: "another")),
}  # fmt: skip
"""What the figures depend on: the fact of the key that tells it, and another value of it."""


def stamp_field(patch, **changed):
    stamp = files.stamp("measured")
    patch(files, "stamp", lambda schema: replace(stamp, **changed))


@pytest.mark.parametrize(("fact", "change"), KEY_OF.values(), ids=KEY_OF)
def test_figures_hold_only_for_what_they_depend_on(made_up, monkeypatch, fact, change):
    """With vLLM's version above all: its own kernels are among those timed."""
    RehearsalCard().install(monkeypatch)
    monkeypatch.setattr(kept_figures, "machine_key", MACHINE_KEY)
    one = Worker(ours(LIMIT))
    one.load_model()
    layer = layer_in(one)
    given = {
        "config": one.vllm_config,
        "shape": layer.shape(),
        "backends": layer.usable(),
        "token_counts": (1, 2),
        "rank": 0,
    }
    before = kept_figures.key_of(**given)
    assert before.keys() == {fact for fact, _ in KEY_OF.values()}, "a fact of the key is in no case"
    assert kept_figures.key_of(**given) == before
    change(monkeypatch.setattr, given)
    after = kept_figures.key_of(**given)
    assert fact in {name for name in before if after[name] != before[name]}


def test_figures_of_another_tile_at_one_count_are_not_taken(made_up):
    made_up.start()
    made_up.kernels["triton"].kernel_of = lambda call: "another" if call.num_tokens == 8 else None
    assert not measured(made_up.start())[0].kept_since
    assert measured(made_up.start())[0].kept_since


def test_without_vllms_own_kernels_as_a_rival_nothing_is_timed_and_they_serve(made_up, monkeypatch, tmp_path):
    monkeypatch.setitem(backends.FACTORIES, "vllm", lambda platform, settings: "planted: not in this build")
    one = made_up.start()
    assert (runs(one, 16), layer_in(one).decision.skip.code, measured(one)) == ("vllm", "not_timed", [])
    assert made_up.clock.given_back == len(list(tmp_path.glob("measured-*"))) == 0
    (line,) = made_up.said.at(logging.WARNING)
    assert timing.NO_BASELINE in line


def test_a_query_that_vllm_pads_is_timed_with_that_copy_under_the_engines_config(made_up, monkeypatch):
    heads = layer_in(Worker(ours(LIMIT))).module.num_heads
    padded, current = [], []
    monkeypatch.setattr(compat_layer, "padded_heads", lambda _: compat_layer.PaddedHeads(2 * heads, None, None))
    monkeypatch.setattr(compat_layer, "pad_query", lambda module, query: padded.append((module, query.shape[1])))
    monkeypatch.setattr(compat_config, "as_current", lambda config: (current.append(config), nullcontext())[1])
    dense = partial(DecodeInputs.new_query, padded=False)
    dense.name = "vllm"
    made_up.kernels["vllm"].bind = lambda _: Binding(dense)
    one = made_up.start()
    assert set(padded) == {(layer_in(one).module, heads)}
    calls = stopwatch.MIN_SETS * len(measured(one)[0].medians_us)
    assert len(padded) == calls, "vLLM's own at each count, over each weight, and no kernel that leaves room"
    assert current == [one.vllm_config]


def test_on_a_new_machine_the_folder_of_the_files_is_made(made_up, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "aiter_mla"
    monkeypatch.setattr(compat_config, "cache_folder", lambda: folder)
    one = made_up.start()
    one.compile_or_warm_up_model()
    assert {path.name.partition("-")[0] for path in folder.glob("*.json")} >= {"measured", "status"}
    assert made_up.said.at(logging.WARNING) == []


def test_figures_without_full_graphs_count_the_host_and_those_of_other_functions_of_vllm_are_kept_apart(
    made_up, monkeypatch, tmp_path
):
    used = []
    for how in ("record", "looped"):
        inner = getattr(stopwatch, how)
        monkeypatch.setattr(stopwatch, how, lambda *given, how=how, inner=inner: (used.append(how), inner(*given))[1])
    for mode, functions in (("FULL", "none"), ("PIECEWISE", "none"), ("PIECEWISE", "all")):
        one = Worker(ours(LIMIT))
        one.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        one.vllm_config.compilation_config.custom_ops = [functions]
        one.load_model()
    assert set(used) == {"record", "looped"}
    assert len(list(tmp_path.glob("measured-*.json"))) == 3


def test_the_time_that_the_timing_took_is_said(made_up):
    made_up.set_clock(MadeUpClock(QUICK_TRITON, replay_s=0.01))
    made_up.start()
    assert f" in {made_up.clock.seconds:.1f} s, with a budget of " in made_up.said.at(logging.INFO)[-1]


def test_a_batch_that_the_kernel_refuses_is_named_once_whatever_its_size(made_up):
    one = made_up.start(kernel="aiter")
    layer = layer_in(one)
    shape = layer.shape()
    bind = made_up.kernels["aiter"].bind
    most = "at {} tokens: too many"
    made_up.kernels["aiter"].bind = lambda one: bind(one) if one.num_tokens <= 4 else most.format(one.num_tokens)
    found = [layer._bind(synthetic_inputs(shape, tokens))[0] for tokens in (4, 8, 16)]
    assert found == ["aiter", "", ""]
    (line,) = made_up.said.at(logging.ERROR)
    assert line.endswith("aiter: at 8 tokens: too many")


CANNOT = {
    "no memory": lambda patch, card_: patch(stopwatch, "cold_weights", planted),
    "no events": lambda patch, card_: patch(stopwatch, "looped", planted),
    "over budget": lambda patch, card_: patch(card_.clock, "replay_s", 1.0),
    "no clock": lambda patch, card_: patch(device.card(), "now", planted),
    "no card": lambda patch, card_: patch(kept_figures, "machine_key", planted),
    "no counts": lambda patch, card_: patch(stopwatch, "token_counts", planted),
    "no exchange": lambda patch, card_: patch(timing.ranks, "exchange", planted),
}


@pytest.mark.parametrize("spoil", CANNOT.values(), ids=CANNOT)
@both_modes
def test_a_start_that_cannot_time_leaves_vllms_own_kernels_and_says_so_once(made_up, monkeypatch, spoil, strict):
    spoil(monkeypatch.setattr, made_up)
    state = torch.get_rng_state()
    one = made_up.start(strict=strict)
    assert {runs(one, tokens) for tokens in (1, 16, 40)} == {"vllm"}
    assert layer_in(one).state().skip.code == "not_timed"
    (line,) = made_up.said.at(logging.WARNING)
    assert line.endswith("vLLM's own kernels run")
    assert measured(one) == []
    assert torch.equal(state, torch.get_rng_state())


UNANSWERED = {
    "no exchange": planted,
    "a rank that could not time": lambda mine: (0, [mine, timing.NotTimed("planted")]),
}


@pytest.mark.parametrize("exchange", UNANSWERED.values(), ids=UNANSWERED)
def test_figures_are_kept_although_the_ranks_cannot_agree(made_up, monkeypatch, exchange):
    with monkeypatch.context() as patching:
        patching.setattr(timing.ranks, "exchange", exchange)
        assert runs(made_up.start(), 4) == "vllm"
    assert made_up.clock.given_back == 1
    one = made_up.start()
    assert (runs(one, 4), made_up.clock.given_back) == ("triton", 1), "timed a second time"
    assert measured(one)[0].kept_since


def test_where_the_engines_device_cannot_be_read_no_kernel_runs_that_nobody_timed(made_up):
    one = Worker(ours(LIMIT))
    one.vllm_config.device_config = None
    one.load_model()
    assert runs(one, 4) == "vllm"
    assert layer_in(one).decision.skip.code == "not_timed"
    assert len(made_up.said.at(logging.WARNING)) == 1


@pytest.mark.mutation
def test_mutation_an_engine_that_is_not_timed_because_it_cannot_be_asked_is_caught(made_up, monkeypatch):
    asked = timing._is_timing_on
    monkeypatch.setattr(timing, "_is_timing_on", lambda *given: given[0].device_config is not None and asked(*given))
    with pytest.raises(AssertionError, match="'aiter' == 'vllm'"):
        test_where_the_engines_device_cannot_be_read_no_kernel_runs_that_nobody_timed(made_up)


@pytest.mark.parametrize("options", [{"kernel": "aiter"}, {"measure": False}])
def test_a_named_kernel_or_the_option_skips_the_timing(made_up, options):
    made_up.start(**options)
    assert made_up.clock.given_back == 0
    assert "measure" not in " ".join(text for _, text in made_up.said)


def test_where_vllms_kernels_were_named_the_line_says_so(made_up):
    """As the pages advise after a kernel has raised."""
    one = made_up.start(kernel="vllm")
    one.compile_or_warm_up_model()
    assert made_up.said.at(logging.WARNING)[-1].startswith("0/1: kernel_vllm: ")


@pytest.mark.mutation
def test_mutation_a_static_order_that_nobody_timed_is_caught(made_up, monkeypatch):
    told = []
    monkeypatch.setattr(Layer, "timed", lambda layer, figures: told.append(figures))
    with pytest.raises(AssertionError, match=r"^assert \{'aiter'\} == \{'vllm'\}"):
        test_a_start_that_cannot_time_leaves_vllms_own_kernels_and_says_so_once(
            made_up, monkeypatch, CANNOT["over budget"], strict=False
        )
    assert told


def test_where_one_of_two_shapes_could_not_be_timed_the_line_says_so(made_up):
    timing._log_untimed([timing.RankReason(rank, None, "planted") for rank in range(2)], 1)
    (line,) = made_up.said.at(logging.WARNING)
    assert "planted (and 1 more); " in line
    assert line.endswith("vLLM's own kernels run; 1 other layer shape(s) were timed")


def two_shapes(made_up, monkeypatch, spoil):
    """A start with a second layer of one head; ``spoil`` is asked with the heads of each shape that is timed."""
    one = Worker(ours(LIMIT))
    other = layer_of()
    other.layer_name, other.num_heads, other._vllm_config = "model.layers.1.attn", 1, one.vllm_config
    other.W_UK_T = other.W_UK_T[:1].contiguous()
    one.vllm_config.compilation_config.static_forward_context[other.layer_name] = other
    whole = stopwatch.time_shape
    monkeypatch.setattr(stopwatch, "time_shape", lambda *given: (spoil(given[1].heads), whole(*given))[1])
    one.load_model()
    return one.engine.layers


def each_shape_has_its_own_reason(made_up, monkeypatch):
    def spoil(heads):
        raise ValueError(f"planted for {heads} heads")

    layers = two_shapes(made_up, monkeypatch, spoil)
    heads = [layer.module.num_heads for layer in layers]
    assert len(set(heads)) == 2
    for layer, number in zip(layers, heads, strict=True):
        assert f"planted for {number} heads" in layer.decision.skip.message, "another shape's reason"
    (line,) = made_up.said.at(logging.WARNING)
    assert "(and 1 more)" in line


def test_a_shape_that_could_not_be_timed_says_its_own_reason(made_up, monkeypatch):
    each_shape_has_its_own_reason(made_up, monkeypatch)


@pytest.mark.mutation
def test_mutation_the_first_reason_for_all_shapes_is_caught(made_up, monkeypatch):
    whole = timing.merge_choices

    def of_all_shapes(choices):
        agreed, reasons = whole(choices)
        return agreed, [reason._replace(shape=None) for reason in reasons]

    monkeypatch.setattr(timing, "merge_choices", of_all_shapes)
    with pytest.raises(AssertionError, match="another shape's reason"):
        each_shape_has_its_own_reason(made_up, monkeypatch)


def test_a_shape_that_cannot_be_timed_costs_another_one_nothing(made_up, monkeypatch):
    def spoil(heads):
        if heads == 1:
            raise ValueError("planted")

    timed, untimed = two_shapes(made_up, monkeypatch, spoil)
    assert (timed.decision.kernel_at(1), untimed.decision.skip.code) == ("triton", "not_timed")


def test_a_shape_whose_layers_cannot_be_given_their_figures_runs_vllms_own_and_costs_another_one_nothing(
    made_up, monkeypatch
):
    """The failure comes once the layers have their figures; another rank logs for the engine."""
    monkeypatch.setattr(timing.ranks, "exchange", lambda mine: (1, [mine, mine]))
    monkeypatch.setattr(
        timing, "ShapeTiming", lambda *given: (planted if "1 heads" in given[0] else ShapeTiming)(*given)
    )
    timed, failed = two_shapes(made_up, monkeypatch, lambda heads: None)
    assert (timed.decision.kernel_at(1), failed.decision.skip.code) == ("triton", "not_timed")
    (line,) = made_up.said.at(logging.WARNING)
    assert "planted" in line
    assert line.endswith("; 1 other layer shape(s) were timed")


def timing_is_marked(made_up, monkeypatch, folder):
    monkeypatch.setattr(compat_config, "cache_folder", lambda: folder)
    found = []
    two_shapes(made_up, monkeypatch, lambda heads: found.append(sorted(folder.glob("first-call-*.json"))))
    assert [len(markers) for markers in found] == [2, 2], "a start that dies while it times goes unnoticed"
    assert not list(folder.glob("first-call-*"))


def test_a_start_that_dies_while_it_times_leaves_the_marker_of_a_first_call(made_up, monkeypatch, tmp_path):
    """The kernels run at token counts that the check has not run."""
    timing_is_marked(made_up, monkeypatch, tmp_path)


def test_only_families_that_are_timed_now_are_marked_while_they_are_timed(made_up, monkeypatch):
    """What dies in a family that is not timed is no reason to leave the other one out."""
    marked = []

    def mark_all(markers, names):
        marked.append({markers._markers[name].family for name in names if name in markers._markers})
        return nullcontext()

    monkeypatch.setattr(first_call.FirstCallMarkers, "mark_all", mark_all)
    made_up.start()
    made_up.start()  # by the figures that were kept
    made_up.kernels["triton"].bind = lambda inputs: Binding(lambda inputs: -reference.prepare(inputs))
    made_up.start(measure="again")
    assert marked == [{"AITER", "Triton"}, {"AITER"}]


def test_timing_again_keeps_the_figures_of_counts_that_it_has_no_time_for(made_up):
    made_up.set_clock(MadeUpClock(QUICK_TRITON))
    every = list(measured(made_up.start())[0].medians_us)
    made_up.set_clock(MadeUpClock(QUICK_TRITON, replay_s=stopwatch.BUDGET_S / 2 / (13 * 3)))
    (again,) = measured(made_up.start(measure="again"))
    assert (list(again.medians_us), again.kept_since) == (every, "")


def test_memory_that_does_not_suffice_for_a_check_is_no_failure_of_the_kernel(made_up):
    made_up.kernels["triton"].bind = planted
    one = made_up.start()
    (line,) = made_up.said.at(logging.ERROR)
    assert ("OutOfMemoryError" in line, "self-check FAILED" in line) == (True, False)
    assert layer_in(one).decision.skip is not None


def test_a_start_that_waits_for_another_rank_has_no_marker_and_one_that_cannot_be_removed_keeps_nobody_waiting(
    made_up, monkeypatch, tmp_path
):
    """Whoever ends a start that waits ends no kernel."""
    answers = []

    def exchange(mine):
        answers.append((isinstance(mine, dict), list(tmp_path.glob("first-call-*.json"))))
        return 0, [mine]

    @contextmanager
    def fails(markers, names):
        yield
        raise OSError("planted")

    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(timing.ranks, "exchange", exchange)
    made_up.start()
    monkeypatch.setattr(first_call.FirstCallMarkers, "mark_all", fails)
    made_up.start(measure="again")
    assert answers == [(True, [])] * 2
    assert any("planted" in line for line in made_up.said.at(logging.WARNING))


def test_kernels_whose_marker_cannot_be_written_are_not_timed_and_the_other_ranks_are_answered(made_up, monkeypatch):
    """A crash there would repeat at each start."""
    answers = []
    monkeypatch.setattr(timing.ranks, "exchange", lambda mine: (0, [answers.append(mine) or mine]))
    monkeypatch.setattr(first_call.FirstCallMarkers, "mark_all", raising(OSError(28, "planted")))
    one = made_up.start()
    assert (len(answers), layer_in(one).decision.skip.code, made_up.clock.given_back) == (1, "not_timed", 1)
    assert any("OSError" in line for line in made_up.said.at(logging.WARNING))


@pytest.mark.mutation
def test_mutation_timing_without_a_marker_is_caught(made_up, monkeypatch, tmp_path):
    monkeypatch.setattr(first_call.FirstCallMarkers, "mark_all", lambda markers, names: nullcontext())
    with pytest.raises(AssertionError, match="goes unnoticed"):
        timing_is_marked(made_up, monkeypatch, tmp_path)


def test_a_rank_says_first_what_no_other_rank_knows(made_up, monkeypatch):
    def exchange(mine):
        (small,) = (shape for shape in mine if "1 heads" in shape)
        return 1, [mine, {**mine, small: timing.NotTimed("elsewhere")}]

    monkeypatch.setattr(timing.ranks, "exchange", exchange)
    monkeypatch.setattr(timing, "ShapeTiming", planted)
    two_shapes(made_up, monkeypatch, lambda heads: None)
    (line,) = made_up.said.at(logging.WARNING)
    assert "rank 0: the agreed kernels could not be applied: OutOfMemoryError: planted: out of memory (and 1" in line


def test_a_contender_that_fails_its_check_is_not_timed_and_is_no_error(made_up):
    made_up.kernels["triton"].bind = lambda inputs: Binding(lambda inputs: -reference.prepare(inputs))
    one = made_up.start(strict=True)
    assert runs(one, 1) == "aiter"
    assert set(measured(one)[0].medians_us[1]) == {"aiter", "vllm"}
    assert [text for text in made_up.said.at(logging.WARNING) if "triton: self-check FAILED" in text]


def test_the_compile_cache_key_does_not_depend_on_which_of_ours_is_faster(made_up, tmp_path):
    keys = []
    for quick in ("triton", "aiter"):
        for path in tmp_path.glob("measured-*.json"):
            path.unlink()
        made_up.set_clock(MadeUpClock(costs(**({"aiter": 9.0, "triton": 9.0, "vllm": 9.0} | {quick: 5.0}))))
        one = made_up.start()
        assert runs(one, 1) == quick
        keys.append(layer_in(one).cache_key())
    assert keys[0] == keys[1] != ()
    made_up.set_clock(MadeUpClock(costs(aiter=9.0, triton=9.0, vllm=5.0)))
    assert layer_in(made_up.start(measure="again")).cache_key() != keys[0], "then the graph is vLLM's"


def test_where_vllms_own_kernels_are_the_fastest_the_status_says_so_for_all_counts(made_up):
    made_up.set_clock(MadeUpClock(costs(aiter=9.0, triton=9.0, vllm=5.0)))
    assert measured(made_up.start())[0].chosen_spans == (Span(1, LIMIT, "vllm"),)


OURS = (Span(1, LIMIT, "aiter"),)


def test_ranks_choose_nothing_of_a_shape_that_one_of_them_could_not_time():
    # A rank without a layer has nothing to say about any shape.
    for other, shapes in (
        ({"a": timing.NotTimed("planted"), "b": OURS}, {"b"}),
        (timing.NotTimed("planted"), set()),
    ):
        chosen, reasons = timing.merge_choices([{"a": OURS, "b": OURS}, other, {}])
        assert (set(chosen), list(map(str, reasons))) == (shapes, ["rank 1: planted"])
        assert all(choices == (OURS, OURS) for choices in chosen.values())


@pytest.mark.mutation
def test_mutation_ranks_choose_without_the_one_that_could_not_time_is_caught(monkeypatch):
    whole = timing.merge_choices
    monkeypatch.setattr(timing, "merge_choices", lambda answers: whole([one for one in answers if type(one) is dict]))
    with pytest.raises(AssertionError, match="'b'"):
        test_ranks_choose_nothing_of_a_shape_that_one_of_them_could_not_time()


RANKS = {"aiter": 5.0, "triton": 20.0, "vllm": 10.0}, {"aiter": 9.5, "triton": 20.0, "vllm": 9.0}
"""Microseconds of two cards: AITER's is the fastest on the first one, vLLM's own on the second."""


def test_ranks_choose_by_their_own_figures_and_run_ours_where_all_have_chosen_it(made_up, monkeypatch, tmp_path):
    answers = []
    monkeypatch.setattr(timing.ranks, "exchange", lambda mine: (answers.append(mine), (0, answers))[1])
    for rank in (1, 0):
        monkeypatch.setattr(Worker, "rank", rank)
        made_up.set_clock(MadeUpClock(costs(**RANKS[rank])))
        one = made_up.start()
    assert {runs(one, tokens) for tokens in (1, 4, 16)} == {"vllm"}, "one rank's kernel is slower than vLLM's own"
    assert layer_in(one).decision.skip.code == "vllm_faster"
    assert measured(one)[0].medians_us[16] == RANKS[0], "the status has this rank's own figures"
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("measured-*.json")]
    assert {one["key"]["rank"]: one["rounds"]["16"]["aiter"][0] for one in kept} == {0: 5.0, 1: 9.5}


@pytest.mark.mutation
def test_mutation_ranks_choose_from_one_table_with_the_slowest_figure_of_each_is_caught(made_up, monkeypatch, tmp_path):
    """AITER's figure of the second card against vLLM's of the first, as if they had been taken in turns."""
    slowest = {name: [max(us[name] for us in RANKS)] * 4 for name in RANKS[0]}
    seen = []
    merged = lambda ranks, tokens: (seen.append(tokens), decision.fastest(slowest, ORDER))[1]  # noqa: E731
    monkeypatch.setattr(decision, "_chosen_by_all", merged)
    with pytest.raises(AssertionError, match="slower than vLLM's own"):
        test_ranks_choose_by_their_own_figures_and_run_ours_where_all_have_chosen_it(made_up, monkeypatch, tmp_path)
    assert seen


def fails_each_check(patch, kernels):
    for name in ("aiter", "triton"):
        patch(kernels[name], "bind", lambda inputs: Binding(lambda inputs: -reference.prepare(inputs)))


WITHOUT_OURS = {
    "each kernel fails its check": fails_each_check,
    "its check raises": lambda patch, kernels: patch(checks, "check_kernels", planted),
}


def runs_vllms_where_another_rank_does(made_up, monkeypatch, tmp_path, spoil):
    """Rank 1 has none of our kernels, for its own reason; rank 0, which starts then, hears of it and could run ours."""
    answers, layers = [], []
    monkeypatch.setattr(timing.ranks, "exchange", lambda mine: (answers.insert(0, mine), (0, answers))[1])
    for rank in (1, 0):
        monkeypatch.setattr(Worker, "rank", rank)
        with monkeypatch.context() as patching:
            if rank:
                spoil(patching.setattr, made_up.kernels)
            one = made_up.start()
        layers.append(layer_in(one))
        assert runs(one, 4) == "vllm", "ours runs on one rank only"
    there, here = (layer.decision.skip for layer in layers)
    assert (there.code, here.code) == ("kernel_shape", "kernel_shape")
    assert here.message.endswith(f": rank 1: {there.message}")
    assert list(measured(one)[0].medians_us) == [1, 2, 4, 8, 16]
    assert len(list(tmp_path.glob("measured-*.json"))) == 1, "rank 0 times again at its next start"
    assert [text for text in made_up.said.at(logging.WARNING) if "could not be timed" in text] == []


@pytest.mark.parametrize("spoil", WITHOUT_OURS.values(), ids=WITHOUT_OURS)
def test_a_rank_that_has_none_of_our_kernels_takes_the_others_to_vllms_own_with_its_reason(
    made_up, monkeypatch, tmp_path, spoil
):
    runs_vllms_where_another_rank_does(made_up, monkeypatch, tmp_path, spoil)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("vote", "spoil", "seen"),
    [
        (lambda chosen: {}, "its check raises", "on one rank only"),
        (
            lambda chosen: dict.fromkeys(chosen, timing.NotTimed("planted")),
            "each kernel fails its check",
            "'not_timed'",
        ),
        (lambda chosen: dict.fromkeys(chosen, (Span(1, LIMIT, "vllm"),)), "its check raises", "'vllm_faster'"),
    ],
    ids=["none", "not timed", "as if vLLM's were faster"],
)
def test_mutation_a_rank_without_our_kernels_that_gives_no_or_another_reason_is_caught(
    made_up, monkeypatch, tmp_path, vote, spoil, seen
):
    inner, silenced = timing._choose_kernels, []

    def choose(groups, timings):
        chosen = inner(groups, timings)
        if timings:
            return chosen
        silenced.append(chosen)
        return vote(chosen)

    monkeypatch.setattr(timing, "_choose_kernels", choose)
    with pytest.raises(AssertionError, match=seen):
        runs_vllms_where_another_rank_does(made_up, monkeypatch, tmp_path, WITHOUT_OURS[spoil])
    assert [type(choice) for chosen in silenced for choice in chosen.values()] == [timing.NoKernelOfOurs]


def test_a_layer_that_is_stopped_takes_the_others_of_its_shape_to_vllms_own(made_up, monkeypatch):
    """The ranks agree by shape: on another rank the same layer would run ours."""
    one, other, check = Worker(ours(LIMIT)), layer_of(), Engine.check_layers
    other.layer_name, other._vllm_config = "model.layers.1.attn", one.vllm_config
    one.vllm_config.compilation_config.static_forward_context[other.layer_name] = other
    monkeypatch.setattr(Engine, "check_layers", lambda *given: (check(*given), given[0].layers[0].stop("planted"))[1])
    one.load_model()
    stopped, other = (layer.decision.skip for layer in one.engine.layers)
    assert (stopped.code, other.code) == ("kernel_shape", "kernel_shape")
    assert other.message.endswith(": rank 0: planted")
    assert len(measured(one)) == 1


def test_a_layer_whose_weight_has_no_known_format_costs_another_one_nothing(made_up, monkeypatch):
    read = absorb.read

    def of_one_head(tensors):
        if any(tensor.dim() and tensor.shape[0] == 1 for tensor in tensors.values()):
            raise absorb.UnknownWeightError("planted")
        return read(tensors)

    monkeypatch.setattr(absorb, "read", of_one_head)
    timed, unknown = two_shapes(made_up, monkeypatch, lambda heads: None)
    assert (timed.decision.kernel_at(1), unknown.decision.skip.code) == ("triton", "kernel_shape")


@both_modes
def test_a_rank_whose_check_raises_still_answers_the_others(made_up, monkeypatch, strict):
    sent = []
    monkeypatch.setattr(timing.ranks, "exchange", lambda mine: (sent.append(mine), (0, [mine]))[1])
    monkeypatch.setattr(Engine, "check_layers", planted)
    with stops(strict, "planted"):
        made_up.start(strict=strict)
    assert len(sent) == 1, "the other ranks wait for ever"
    assert sent == [timing.NotTimed("its kernels could not be checked")]


@pytest.mark.mutation
def test_mutation_an_exchange_only_after_a_check_that_passed_is_caught(made_up, monkeypatch):
    choose = timing.time_kernels
    monkeypatch.setattr(timing, "time_kernels", lambda *given: given[3] and choose(*given))
    with pytest.raises(AssertionError, match="wait for ever"):
        test_a_rank_whose_check_raises_still_answers_the_others(made_up, monkeypatch, strict=True)


# vLLM's groups hold a gloo group each; importing vLLM itself takes a process ten seconds.
CHILD = """
import json, sys, types
import torch
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = lambda size, rank: types.SimpleNamespace(
    world_size=size, rank_in_group=rank, cpu_group=torch.distributed.group.WORLD)
state = types.SimpleNamespace(
    model_parallel_is_initialized=lambda: True, get_tp_group=lambda: group(2, rank), get_pp_group=lambda: group(1, 0))
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm.distributed"] = types.SimpleNamespace(parallel_state=state)
from vllm_aiter_mla.decided import ShapeTiming, Span
from vllm_aiter_mla.startup import timing
from vllm_aiter_mla import files, packages
from vllm_aiter_mla.compat import ranks
good = {"a": (Span(1, 8 + rank, "aiter"),)}
bad = timing.NotTimed("planted")
print("apart:", ranks.apart("the same", 2), flush=True)
for mine in (good, bad if rank else good):
    place, answers = ranks.exchange(mine)
    print(json.dumps(files.to_plain([place, *timing.merge_choices(answers)])), flush=True)
# A rank that ends while the other still talks to it makes gloo abort that one.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_vllm_has_the_groups_that_the_exchange_goes_over():
    from vllm.distributed import parallel_state

    for name in ("model_parallel_is_initialized", "get_tp_group", "get_pp_group"):
        assert callable(getattr(parallel_state, name))
    assert {"world_size", "rank_in_group", "cpu_group"} <= set(parallel_state.GroupCoordinator.__annotations__)


@pytest.mark.slow
def test_two_ranks_over_gloo_choose_the_same_and_none_waits_for_ever(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], outputs
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("[")] for out, _ in outputs]
    assert [first[0] for first, _ in found] == [0, 1]
    assert all("apart: []" in out.splitlines() for out, _ in outputs), "both decided the same"
    chosen = files.to_plain({"a": [[Span(1, 8, "aiter")], [Span(1, 9, "aiter")]]})
    assert found[0][0][1:] == found[1][0][1:] == [chosen, []]
    assert found[0][1][1:] == found[1][1][1:] == [{}, [[1, None, "planted"]]]
