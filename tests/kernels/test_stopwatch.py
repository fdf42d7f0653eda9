"""The measured choice with a made-up clock: what is chosen, what noise may do, and what is kept between starts."""

import json
import random
import statistics
from itertools import pairwise

import pytest
import torch

from tests.sandbox.rehearsal_card import RehearsalCard
from tests.support.decisions import spans
from tests.support.made_up_clock import ORDER, MadeUpClock, Named, costs
from tests.support.planted import break_import
from vllm_aiter_mla.decided import kernel_at
from vllm_aiter_mla.kernels import absorb, reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, contract_violation, synthetic_inputs
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.startup import kept_figures

SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)
SLOW, QUICK = 10.0, 8.0
EQUAL = costs(aiter=1, triton=1, vllm=1)


def timed(clock, counts=(1, 2, 4), budget=None, **most):
    backends = {name: Named(name, most.get(name, 1 << 30)) for name in ORDER}
    with pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        weight = synthetic_inputs(SHAPE).weight
        return stopwatch.time_shape(backends, SHAPE, weight, counts, budget or stopwatch.Budget())


def chosen(clock, **options):
    return decision.fastest_spans(timed(clock, **options), ORDER)


def best_by_tokens(name, tokens):
    return QUICK if name == ("triton" if tokens <= 2 else "aiter" if tokens <= 8 else "vllm") else SLOW


def test_the_fastest_runs_at_each_token_count_and_only_where_it_takes_one():
    clock = MadeUpClock(best_by_tokens)
    assert chosen(clock, counts=(1, 2, 4, 8, 13)) == spans((1, 2, "triton"), (3, 8, "aiter"), (9, 13, "vllm"))
    assert chosen(MadeUpClock(costs(aiter=9.0, triton=QUICK, vllm=SLOW)), triton=2) == spans(
        (1, 2, "triton"),
        (3, 4, "aiter"),
    )


def test_outliers_in_a_few_rounds_change_nothing():
    quick = costs(aiter=QUICK, triton=SLOW, vllm=SLOW)
    for seed in range(20):
        rounds = timed(MadeUpClock(quick, noise=0.005, seed=seed))
        for by in rounds.values():
            by["aiter"][seed % stopwatch.ROUNDS] *= 20
            by["vllm"][(seed + 3) % stopwatch.ROUNDS] /= 20
        assert decision.fastest_spans(rounds, ORDER) == spans((1, 4, "aiter"))


def slower_choices(noise, starts):
    """Token counts, over many starts, at which something ran that is truly slower than vLLM by over the margin."""
    truth = {"aiter": SLOW * 1.035, "triton": SLOW * 1.05, "vllm": SLOW}
    draw, wrong = random.Random(7), 0
    for _ in range(starts):
        names = {n: [t * draw.lognormvariate(0, noise) for _ in range(stopwatch.ROUNDS)] for n, t in truth.items()}
        wrong += truth[decision.fastest(names, ORDER)] > SLOW * (1 + decision.MARGIN)
    return wrong


def test_a_noisy_clock_chooses_nothing_slower_by_more_than_the_margin_and_finds_what_is_clearly_faster():
    assert slower_choices(noise=0.05, starts=5000) == 0
    quick = costs(aiter=SLOW, triton=QUICK, vllm=SLOW)
    assert {chosen(MadeUpClock(quick, noise=0.03, seed=seed)) for seed in range(20)} == {spans((1, 4, "triton"))}


@pytest.mark.mutation
def test_mutation_a_choice_by_nothing_but_the_median_is_slower_on_a_noisy_clock(monkeypatch):
    monkeypatch.setattr(decision, "beats", lambda a, b: statistics.median(a) < statistics.median(b))
    assert slower_choices(noise=0.05, starts=5000) > 0


@pytest.mark.parametrize(
    ("limit", "first", "last"), [(1024, 10, (512, 1024)), (2048, 11, (1024, 2048)), (48, 6, (32, 48)), (1, 0, (1,))]
)
def test_the_token_counts_are_powers_of_two_and_end_at_the_limit(limit, first, last):
    counts = stopwatch.token_counts(limit)
    assert counts[:-1] == tuple(1 << power for power in range(first))
    assert counts[-2:] == last


def test_the_budget_is_one_for_all_shapes_of_a_rank_and_ends_the_timing():
    clock, budget = MadeUpClock(EQUAL, replay_s=0.02), stopwatch.Budget()
    timed(clock, (1, 2), budget)
    assert stopwatch.BUDGET_S - budget.left == pytest.approx(2 * 13 * 3 * 0.02)
    assert set(timed(clock, (1, 2, 4), budget)) == {1}
    assert clock.seconds < stopwatch.BUDGET_S + 3 * 0.02
    with pytest.raises(stopwatch.OverBudgetError, match="before one token count was timed"):
        timed(clock, (1,), budget)


# Microseconds a call with gaps at 64 tokens and 16 heads, and at 512 and 128, after traces that others have published
# of MI300X and MI355X (docs/kernels.md); between them by rows. An estimate: no card was at hand.
PUBLISHED = {"vllm": (20.0, 70.0), "aiter": (13.0, 55.0), "aiter-opt": (13.0, 55.0), "triton": (8.0, 35.0)}


@pytest.mark.parametrize(("heads", "name"), [(8, "Kimi-K2 at TP 8"), (16, "DeepSeek-R1 at TP 8")])
def test_the_timing_of_a_published_model_fits_the_budget(heads, name):
    fp8 = torch.float8_e4m3fnuz
    shape = LayerShape(heads, 128, fp8, fp8, 64, False, weight=("fp8", fp8))
    spent = 0.0
    for tokens in stopwatch.token_counts(1024):
        step = sum(low + (high - low) * (tokens * heads - 1024) / (65536 - 1024) for low, high in PUBLISHED.values())
        calls = stopwatch.calls_needed(shape, heads * 128 * 512, tokens, resident=256 << 20)
        rounds = (stopwatch.DISCARDED + stopwatch.ROUNDS) * (1 + (calls < stopwatch.FEW_CALLS))
        spent += calls * step * rounds / 1e6
    assert 1.0 < spent < stopwatch.BUDGET_S, name


def test_a_short_graph_is_replayed_once_ahead_of_the_first_event(monkeypatch):
    done = []
    monkeypatch.setattr(card(), "record", lambda make: make() or (lambda: done.append("run")))
    monkeypatch.setattr(card(), "time_us", lambda run: done.append("event") or run() or 500)
    for calls in (stopwatch.FEW_CALLS - 1, stopwatch.FEW_CALLS):
        assert stopwatch.record(lambda call: call, [None] * calls)() == 500 / calls
    assert done == ["run", "event", "run", "event", "run"]


def test_no_two_calls_in_a_row_read_the_same_query():
    calls = stopwatch.calls_of(SHAPE, [synthetic_inputs(SHAPE).weight], 2, resident=1 << 20)
    addresses = [call.q.data_ptr() for call in calls]
    assert len(set(addresses)) == stopwatch.QUERIES
    assert all(first != second for first, second in pairwise(addresses))


def test_queries_are_not_copied_beyond_the_memory_that_timing_may_take(monkeypatch):
    one = synthetic_inputs(SHAPE, 2)
    monkeypatch.setattr(stopwatch, "MOST_RESULTS", 3 * one.q.nbytes)
    calls = stopwatch.calls_of(SHAPE, [one.weight], 2, resident=1 << 20)
    assert len({call.q.data_ptr() for call in calls}) == 1 + 3


def test_partial_figures_are_of_counts_far_apart_and_the_rest_follows_the_nearest():
    counts, seconds = stopwatch.token_counts(1024), stopwatch.BUDGET_S / 4 / (13 * 3)
    rounds = timed(MadeUpClock(costs(aiter=SLOW, triton=1.0, vllm=SLOW), replay_s=seconds), counts, stopwatch.Budget())
    assert tuple(rounds) == stopwatch.FIRST_TIMED
    chosen = decision.fastest_spans(rounds, ORDER)
    assert {kernel_at(chosen, tokens) for tokens in (1, 5, 300, 1024)} == {"triton"}


@pytest.mark.parametrize("key", [("plain",), ("fp8", torch.float8_e4m3fn)])
def test_the_weights_of_a_sweep_are_cold_and_keep_their_strides(key):
    drawn = torch.randn(4, 16, 2).to(torch.bfloat16).permute(2, 1, 0)
    weight = absorb.make(drawn, key)
    copies = stopwatch.cold_weights(weight, resident=1 << 14)
    assert len(copies) * stopwatch.bytes_of(weight) >= 2 << 14
    assert len({copy.values.data_ptr() for copy in copies}) == len(copies)
    for (_, first), (_, last) in zip(weight.tensors, copies[-1].tensors, strict=True):
        assert last.stride() == first.stride()
        assert torch.equal(last.float(), first.float())


def test_weights_whose_heads_lie_apart_are_copied_with_their_gaps():
    """As vLLM leaves 16-bit weights: W_UV lies between the heads, and a clone would close the gaps."""
    weight = absorb.AbsorbWeight("plain", torch.randn(4, 2, 24)[..., :16].permute(1, 2, 0))
    for copy in stopwatch.cold_weights(weight, resident=1 << 14):
        assert copy.values.stride() == weight.values.stride()
        assert torch.equal(copy.values, weight.values)


def test_each_weight_of_a_sweep_has_a_binding_of_its_own_as_each_layer_has():
    """Ours keeps what it has read of a weight; with one binding for all, every call would read another one anew."""
    bound, ran = [], []

    class Binds(reference.ReferenceBackend):
        def bind(self, inputs):
            mine = inputs.weight
            bound.append(mine)
            return Binding(lambda given: (ran.append(given.weight is mine), reference.prepare(given))[1])

    weights = stopwatch.cold_weights(synthetic_inputs(SHAPE).weight, resident=1 << 14)
    calls = stopwatch.calls_of(SHAPE, weights, 2, resident=1 << 14)
    run = stopwatch._loaded({"one": Binds()}, calls, None)["one"]
    assert len(bound) == len(ran) == len(weights) > 1, "each has run once"
    for call in calls:
        run(call)
    assert all(ran)


def test_a_sweep_draws_no_number_of_the_process():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    timed(MadeUpClock(EQUAL))
    assert torch.equal(before, torch.get_rng_state())


KEY = {"card": "a card", "driver": "1", "shape": "2 heads", "counts": [1, 2, 4], "candidates": list(ORDER)}


@pytest.mark.parametrize("name", KEY)
def test_figures_of_another_machine_are_a_miss_and_a_broken_file_is_named(tmp_path, name):
    kept_figures.write(tmp_path, KEY, timed(MadeUpClock(EQUAL)))
    path = kept_figures.path_of(tmp_path, KEY)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"key": KEY | {name: "another"}}))
    assert kept_figures.read(tmp_path, KEY) is None
    path.write_text(json.dumps(data)[:100])
    with pytest.raises(ValueError, match=path.name):
        kept_figures.read(tmp_path, KEY)


def test_figures_of_another_compute_partition_are_a_miss(monkeypatch, tmp_path):
    """A card in CPX keeps its host and driver, and perhaps its name, and is an eighth of it in SPX."""
    parts = RehearsalCard().install(monkeypatch)
    kept_figures.write(tmp_path, kept_figures.machine_key(), timed(MadeUpClock(EQUAL)))
    assert kept_figures.read(tmp_path, kept_figures.machine_key()).rounds
    monkeypatch.setattr(parts, "units", lambda: 38)
    assert kept_figures.read(tmp_path, kept_figures.machine_key()) is None


@pytest.mark.parametrize("by", [{"aiter": [1.0]}, {"vllm": [], "aiter": []}, {"vllm": [1.0], "aiter": [1.0, 2.0]}])
def test_figures_that_lack_some_are_not_kept(by):
    with pytest.raises(ValueError, match="missing at 1 tokens"):
        kept_figures.KeptFigures({}, {1: by})


@pytest.mark.parametrize(
    ("error", "said"),
    [(ModuleNotFoundError("No module named 'triton'", name="triton"), "none"),
     (ImportError("libtriton.so: undefined symbol"), "undefined symbol"), (OSError("GLIBC"), "GLIBC")],
)  # fmt: skip
def test_the_machine_of_the_figures_tells_a_broken_triton_from_none(monkeypatch, error, said):
    break_import(monkeypatch, "triton", error)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert said in stopwatch.machine()["triton"]
    assert (stopwatch.machine()["triton"] == "none") == (said == "none")


@pytest.mark.gpu
def test_a_real_device_times_two_kernels_and_gives_its_memory_back():
    pytest.importorskip("triton")
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    class PyTorch(Named):
        def bind(self, inputs):
            return contract_violation(inputs) or Binding(reference.prepare)

    shape = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 64, False, device="cuda")
    before = torch.cuda.memory_reserved()
    found = {"triton": TritonBackend(), "vllm": PyTorch("vllm")}
    weight = synthetic_inputs(shape).weight
    rounds = stopwatch.time_shape(found, shape, weight, stopwatch.token_counts(256), stopwatch.Budget())
    del weight
    card().give_back()
    assert set(rounds[256]) == {"triton", "vllm"}
    assert all(0.1 < value < 1e5 for by in rounds.values() for values in by.values() for value in values)
    assert torch.cuda.memory_reserved() <= before + (32 << 20)
