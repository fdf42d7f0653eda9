"""The measured choice with a made-up clock: what is chosen, what noise may do, and what is kept between starts."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_aiter_mla.kernels import absorb, reference, select
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, contract_violation, synthetic_inputs
from vllm_aiter_mla.kernels.measure import operands, store, sweep, table
from vllm_aiter_mla.kernels.platform import Platform

SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)
ORDER = ("aiter", "triton", "vllm")
SLOW, QUICK = 10.0, 8.0

Cost = Callable[[str, int], float]
"""Microseconds per call of a candidate at a number of tokens."""


class MadeUpClock:
    """Costs by a function, with noise and outliers from a seeded generator; a second a replay if asked for."""

    def __init__(self, cost: Cost, noise: float = 0.0, seed: int = 0, outliers: float = 0.0, replay_s: float = 0.0):
        self.cost, self.noise, self.outliers, self.replay_s = cost, noise, outliers, replay_s
        self.draw, self.seconds, self.given_back = random.Random(seed), 0.0, 0

    def now(self) -> float:
        return self.seconds

    def resident(self) -> int:
        return 4096

    def record(self, name: str, run: Any, calls: Sequence[DecodeInputs]) -> Callable[[], float]:
        tokens = calls[0].num_tokens

        def replay() -> float:
            self.seconds += self.replay_s
            factor = 20.0 if self.draw.random() < self.outliers else self.draw.lognormvariate(0.0, self.noise)
            return self.cost(name, tokens) * factor

        return replay

    def give_back(self) -> None:
        self.given_back += 1


class Named(KernelBackend):
    """The reference under another name; takes at most ``most`` tokens."""

    def __init__(self, name: str, most: int = 1 << 30) -> None:
        self.name, self.most = name, most  # type: ignore[misc]

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        if inputs.num_tokens > self.most:
            return f"{inputs.num_tokens} tokens are too many"
        return contract_violation(inputs) or Binding(reference.prepare)


def costs(**by_name: float) -> Cost:
    return lambda name, tokens: by_name[name]


def timed(clock: MadeUpClock, counts: Sequence[int] = (1, 2, 4), seconds: float = 3.0, **most: int) -> table.Rounds:
    backends = {name: Named(name, most.get(name, 1 << 30)) for name in ORDER}
    weight = synthetic_inputs(SHAPE).weight
    return sweep.time_shape(backends, SHAPE, weight, counts, clock, sweep.Budget(clock, seconds))


def chosen(clock: MadeUpClock, **options: Any) -> str:
    return table.described(table.ranges(timed(clock, **options), ORDER))


def test_the_fastest_runs_at_each_token_count_in_ranges_without_a_gap() -> None:
    def cost(name: str, tokens: int) -> float:
        best = "triton" if tokens <= 2 else "aiter" if tokens <= 8 else "vllm"
        return QUICK if name == best else SLOW

    assert chosen(MadeUpClock(cost), counts=(1, 2, 4, 8, 13)) == "triton 1..2, aiter 3..8, unmodified vLLM 9..13"


@pytest.mark.parametrize(("aiter", "runs"), [(SLOW, "vllm"), (0.98 * SLOW, "vllm"), (0.96 * SLOW, "aiter")])
def test_vllm_runs_wherever_nothing_beats_it_by_three_percent(aiter: float, runs: str) -> None:
    assert chosen(MadeUpClock(costs(aiter=aiter, triton=SLOW, vllm_own=SLOW))) == f"{runs} 1..4"


def test_a_tie_between_two_that_beat_vllm_goes_to_the_static_order() -> None:
    assert chosen(MadeUpClock(costs(aiter=8.0, triton=7.9, vllm_own=SLOW))) == "aiter 1..4"
    assert chosen(MadeUpClock(costs(aiter=8.0, triton=7.5, vllm_own=SLOW))) == "triton 1..4"


def test_outliers_in_a_few_rounds_change_nothing() -> None:
    quick = costs(aiter=QUICK, triton=SLOW, vllm_own=SLOW)
    for seed in range(20):
        rounds = timed(MadeUpClock(quick, noise=0.005, seed=seed))
        for by in rounds.values():
            by["aiter"][seed % sweep.ROUNDS] *= 20
            by["vllm"][(seed + 3) % sweep.ROUNDS] /= 20
        assert table.described(table.ranges(rounds, ORDER)) == "aiter 1..4"


def slower_choices(noise: float, starts: int) -> int:
    """Token counts, over many starts, at which something ran that is truly slower than vLLM by over the margin."""
    truth = {"aiter": SLOW * 1.035, "triton": SLOW * 1.05, "vllm": SLOW}
    draw, wrong = random.Random(7), 0
    for _ in range(starts):
        names = {n: [t * draw.lognormvariate(0, noise) for _ in range(sweep.ROUNDS)] for n, t in truth.items()}
        wrong += truth[table.fastest(names, ORDER)] > SLOW * (1 + table.MARGIN)
    return wrong


def test_a_noisy_clock_never_chooses_something_slower_by_more_than_the_margin() -> None:
    assert slower_choices(noise=0.05, starts=5000) == 0


def test_a_noisy_clock_still_finds_what_is_clearly_faster() -> None:
    quick = costs(aiter=SLOW, triton=QUICK, vllm_own=SLOW)
    found = [chosen(MadeUpClock(quick, noise=0.03, seed=seed)) for seed in range(20)]
    assert found == ["triton 1..4"] * 20


def median_alone(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return statistics.median(ours) < statistics.median(theirs)


@pytest.mark.mutation
def test_mutation_a_choice_by_medians_without_the_margin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "beats", median_alone)
    assert slower_choices(noise=0.05, starts=5000) > 0
    with pytest.raises(AssertionError):
        test_vllm_runs_wherever_nothing_beats_it_by_three_percent(0.98 * SLOW, "vllm")


@pytest.mark.mutation
def test_mutation_a_margin_of_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MARGIN", 0.0)
    with pytest.raises(AssertionError):
        test_a_tie_between_two_that_beat_vllm_goes_to_the_static_order()


def test_the_token_counts_are_about_a_dozen_and_end_at_the_limit() -> None:
    assert sweep.token_counts(1024) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert sweep.token_counts(2048)[-2:] == (1024, 2048)
    assert sweep.token_counts(48)[-2:] == (32, 48)
    assert sweep.token_counts(1) == (1,)


def test_a_back_end_that_declines_a_count_is_left_out_there() -> None:
    rounds = timed(MadeUpClock(costs(aiter=9.0, triton=QUICK, vllm_own=SLOW)), triton=2)
    assert table.described(table.ranges(rounds, ORDER)) == "triton 1..2, aiter 3..4"


def test_over_the_budget_the_timing_ends_and_says_how_far_it_came() -> None:
    clock = MadeUpClock(costs(aiter=1, triton=1, vllm_own=1), replay_s=0.03)
    with pytest.raises(sweep.OverBudgetError, match="more than the 3 s that it may take, after 2 of 4 token counts"):
        timed(clock, counts=(1, 2, 4, 8))
    assert clock.seconds < 3.2


def test_the_budget_is_one_for_all_shapes_of_a_rank() -> None:
    clock = MadeUpClock(costs(aiter=1, triton=1, vllm_own=1), replay_s=0.02)
    budget, weight = sweep.Budget(clock), synthetic_inputs(SHAPE).weight
    backends = {name: Named(name) for name in ORDER}
    sweep.time_shape(backends, SHAPE, weight, (1, 2), clock, budget)
    assert budget.spent == pytest.approx(2 * 13 * 3 * 0.02)
    with pytest.raises(sweep.OverBudgetError):
        sweep.time_shape(backends, SHAPE, weight, (1, 2, 4), clock, budget)


@pytest.mark.parametrize("key", [("plain",), ("fp8", torch.float8_e4m3fn)])
def test_the_weights_of_a_sweep_are_cold_and_keep_their_strides(key: tuple[Any, ...]) -> None:
    drawn = torch.randn(4, 16, 2).to(torch.bfloat16).permute(2, 1, 0)
    weight = absorb.make(drawn, key)
    copies = operands.cold_weights(weight, resident=1 << 14)
    assert len(copies) * operands.bytes_of(weight) >= 2 << 14
    places = {tensor.data_ptr() for copy in copies for name, tensor in copy.tensors[:1]}
    assert len(places) == len(copies)
    first, last = dict(weight.tensors), dict(copies[-1].tensors)
    assert all(
        last[name].stride() == tensor.stride()
        and torch.equal(
            last[name].view(torch.uint8) if tensor.itemsize == 1 else last[name],
            tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor,
        )
        for name, tensor in first.items()
    )


def test_a_sweep_draws_no_number_of_the_process() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    timed(MadeUpClock(costs(aiter=1, triton=1, vllm_own=1)))
    assert torch.equal(before, torch.get_rng_state())


KEY = {"card": "a card", "driver": "1", "shape": "2 heads", "counts": [1, 2, 4], "candidates": list(ORDER)}


def test_two_starts_choose_the_same_because_the_figures_are_kept(tmp_path: Path) -> None:
    near = costs(aiter=9.68, triton=9.72, vllm_own=SLOW)
    rounds = timed(MadeUpClock(near, noise=0.02, seed=1))
    store.write(tmp_path, KEY, rounds)
    kept = store.read(tmp_path, KEY)
    assert kept == rounds
    assert table.ranges(kept, ORDER) == table.ranges(rounds, ORDER)


@pytest.mark.parametrize("part", ["card", "driver", "shape"])
def test_figures_of_another_card_driver_or_shape_are_not_read(tmp_path: Path, part: str) -> None:
    store.write(tmp_path, KEY, timed(MadeUpClock(costs(aiter=1, triton=1, vllm_own=1))))
    assert store.read(tmp_path, KEY | {part: "another"}) is None


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "half a file": lambda data: json.dumps(data)[:100],
    "another layout": lambda data: data | {"evidence": data["evidence"] | {"schema_version": 99}},
    "no stamp": lambda data: {name: data[name] for name in ("key", "rounds")},
    "another key": lambda data: data | {"key": KEY | {"card": "another"}},
    "a count missing": lambda data: data | {"rounds": {"1": data["rounds"]["1"]}},
    "a negative figure": lambda data: data | {"rounds": data["rounds"] | {"2": {"vllm": [-1.0]}}},
    "a text": lambda data: data | {"rounds": data["rounds"] | {"2": {"vllm": ["fast"]}}},
    "no unmodified vLLM": lambda data: data | {"rounds": data["rounds"] | {"2": {"aiter": [1.0]}}},
    "uneven rounds": lambda data: data | {"rounds": data["rounds"] | {"2": {"vllm": [1.0], "aiter": [1.0, 2.0]}}},
    "an unknown kernel": lambda data: data | {"rounds": data["rounds"] | {"2": {"vllm": [1.0], "mine": [1.0]}}},
    "too large": lambda data: " " * (store.LARGEST + 1),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_broken_or_foreign_file_is_refused_by_its_name(tmp_path: Path, spoil: Callable[[Any], Any]) -> None:
    store.write(tmp_path, KEY, timed(MadeUpClock(costs(aiter=1, triton=1, vllm_own=1))))
    path = store.path_of(tmp_path, KEY)
    spoilt = spoil(json.loads(path.read_text()))
    path.write_text(spoilt if isinstance(spoilt, str) else json.dumps(spoilt))
    with pytest.raises(ValueError, match=path.name):
        store.read(tmp_path, KEY)


def test_ranks_agree_by_the_slowest_and_on_what_all_have_timed() -> None:
    one = {1: {"aiter": [8.0], "vllm": [10.0], "triton": [5.0]}, 2: {"aiter": [8.0], "vllm": [10.0]}}
    two = {1: {"aiter": [9.9], "vllm": [9.0]}}
    assert table.slowest([one, two]) == table.slowest([two, one]) == {1: {"aiter": [9.9], "vllm": [10.0]}}


def selector(kernel: str = "auto", arch: str = "gfx942") -> select.Selector:
    factories = {name: (lambda platform, name=name: Named(name)) for name in ORDER}
    return select.Selector(kernel, Platform(arch), factories)


def inputs(tokens: int) -> DecodeInputs:
    return synthetic_inputs(SHAPE, tokens)


def runs(of: select.Selector, tokens: int) -> str:
    backend = of.choose(inputs(tokens)).backend
    assert backend is not None
    return backend.name


def test_a_selector_runs_what_was_measured_and_the_static_order_elsewhere() -> None:
    one = selector()
    assert runs(one, 1) == "aiter"
    one.prefer(inputs(1), ((1, 2, "triton"), (3, 4, "vllm")))
    assert [runs(one, tokens) for tokens in (1, 2, 3, 4, 5)] == ["triton", "triton", "vllm", "vllm", "aiter"]
    one.reject("triton", inputs(1), "planted")
    assert runs(one, 1) == "aiter"
    one.prefer(inputs(1), ())
    assert runs(one, 3) == "aiter"


@pytest.mark.parametrize(
    ("kernel", "arch", "names"),
    [
        ("auto", "gfx942", ORDER),
        ("auto", "gfx950", ORDER),
        ("auto", "sm90", ("triton", "vllm")),
        ("auto", "cpu", ()),
        *[(kernel, "gfx942", ()) for kernel in ("aiter", "triton", "vllm", "reference")],
    ],
)
def test_only_auto_on_a_card_is_measured(kernel: str, arch: str, names: tuple[str, ...]) -> None:
    assert select.contenders(kernel, Platform(arch)) == names


def test_what_declines_a_layer_or_was_rejected_is_not_timed() -> None:
    one = selector()
    assert list(one.takers(inputs(1))) == list(ORDER)
    one.reject("aiter", inputs(1), "planted")
    assert list(one.takers(inputs(1))) == ["triton", "vllm"]


@pytest.mark.gpu
def test_a_real_device_times_two_kernels_and_gives_its_memory_back() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("triton")
    from vllm_aiter_mla.kernels.measure.clock import DeviceClock

    from vllm_aiter_mla.kernels.triton import baselines
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    class Unfused(Named):
        def bind(self, inputs: DecodeInputs) -> Binding | str:
            return contract_violation(inputs) or Binding(baselines.unfused)

    shape = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 64, False, device="cuda")
    clock, before = DeviceClock(), torch.cuda.memory_reserved()
    found = {"triton": TritonBackend(), "vllm": Unfused("vllm")}
    weight = synthetic_inputs(shape).weight
    rounds = sweep.time_shape(found, shape, weight, sweep.token_counts(256), clock, sweep.Budget(clock))
    del weight
    clock.give_back()
    assert set(rounds[256]) == {"triton", "vllm"}
    assert all(0.1 < value < 1e5 for by in rounds.values() for values in by.values() for value in values)
    assert torch.cuda.memory_reserved() <= before + (32 << 20)
