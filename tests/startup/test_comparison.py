"""What the self-check compares: each kernel that the decode limit reaches, over each cache; and what it reports."""

import logging
import math
from dataclasses import replace
from sys import maxsize

import pytest
import torch

from tests.sandbox.simulated_aiter import ROCM, install, op
from tests.support.opcalls import layer_of
from tests.support.worker import check
from vllm_aiter_mla.kernels import absorb, distance, formats, reference, stopwatch
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding, KernelBackend
from vllm_aiter_mla.kernels.distance import Difference
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.triton import launcher
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import comparison
from vllm_aiter_mla.startup.comparison import compare_with_reference

SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)
BF16 = LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False)
MI300X = Platform("gfx942", ROCM)


class Stepped(ReferenceBackend):
    """The reference under three names: up to 8 rows, up to 40, beyond."""

    def __init__(self):
        self.ran = []

    def tried_counts(self, inputs):
        return (41, 8, 40)

    def bind(self, inputs):
        tokens = inputs.num_tokens
        kernel = "few" if tokens <= 8 else "some" if tokens <= 40 else "many"
        return Binding(self._run, kernel)

    def _run(self, inputs):
        self.ran.append(inputs.num_tokens)
        return reference.prepare(inputs)


@pytest.mark.parametrize(("limit", "counts"), [(maxsize, [41, 40, 8]), (20, [20, 8]), (8, [8]), (1, [7])])
def test_each_kernel_up_to_the_limit_is_compared_once_at_its_largest_count(limit, counts):
    backend = Stepped()
    assert compare_with_reference(backend, SMALL, limit).has_passed
    assert backend.ran == [1, *(count for count in counts for _ in range(2))], "one row warms up, each batch runs twice"


class SecondBlock(ReferenceBackend):
    """Blocks of 16 rows, of which the second one is wrong."""

    def tried_counts(self, inputs):
        return (17,)

    def bind(self, inputs):
        def run(given):
            query = reference.prepare(given)
            query[16:] = 0
            return query

        return Binding(run, "16 rows a block")


def test_a_kernel_that_is_wrong_beyond_the_rows_of_a_small_batch_fails():
    assert compare_with_reference(SecondBlock(), SMALL, 16).has_passed
    assert not compare_with_reference(SecondBlock(), SMALL, 64).has_passed


class LaterCalls(ReferenceBackend):
    """Its first call is right, the later ones are not: Triton's dispatch, and the compiled kernel's own launcher."""

    def bind(self, inputs):
        calls = []

        def run(given):
            calls.append(given)
            query = reference.prepare(given)
            return query if len(calls) == 1 else query.neg()

        return Binding(run)


def test_the_call_that_serves_is_compared_and_not_the_first_one():
    assert not compare_with_reference(LaterCalls(), SMALL, maxsize).has_passed


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("opt", [False, True])
def test_self_check_passes_on_the_simulated_aiter_and_covers_each_kernel_that_serves(arch, block, opt):
    with install(arch):
        op.forget()
        platform = Platform(arch, ROCM)
        bound = AiterBackend(platform, opt=opt)
        result = compare_with_reference(bound, LayerShape(4, 16, platform.fp8, platform.fp8, block, False), maxsize)
    assert result.has_passed, result.message
    assert {name: d.steps for name, d in result.differences.items()} == dict.fromkeys(result.differences, 0)
    assert set(result.differences) == {"q nope", "q rope", "kv nope", "kv rope"}
    ran = op.forget()
    assert ran[0][1] == 1  # the warm-up with slot -1 comes first
    assert {kernel for kernel, _ in ran} == ({"opt"} if opt else {"per-head", "opt"})


@pytest.mark.parametrize("acts_as", ["gfx942", "gfx950"])  # which truncates, and which rounds everywhere
def test_self_check_accepts_inferred_truncation_and_rounding_too(fake_gfx942, monkeypatch, acts_as):
    """If gfx942 rounds after all, the card is better than its source says, and is not rejected for it."""
    monkeypatch.setattr("tests.sandbox.simulated_aiter.op.arch", lambda: acts_as)
    result = compare_with_reference(AiterBackend(MI300X), BF16, maxsize)
    assert result.has_passed, result.message
    assert ("opt", 256) in op.forget()


@pytest.mark.parametrize(("limit", "ok"), [(512, True), (128, False)])
def test_a_kernel_is_checked_at_the_counts_that_it_takes_and_fails_if_there_are_none(fake_gfx942, limit, ok):
    """AITER's opt kernel cuts a bf16 cache's rope part below 256 tokens on gfx942, where ours declines it."""
    op.forget()
    result = compare_with_reference(AiterBackend(MI300X, opt=True), BF16, limit)
    assert (result.has_passed, "it takes no batch: kernel" in result.message) == (ok, not ok), result.message
    assert [tokens for _, tokens in op.forget()] == [256, 256] * ok


@pytest.mark.parametrize(
    ("kernel", "spans"), [("auto", [(1, 512, "aiter")]), ("aiter-opt", [(1, 255, "vllm"), (256, 512, "aiter-opt")])]
)
def test_a_kernel_that_takes_large_batches_only_is_checked_without_a_warning(
    fake_gfx942, monkeypatch, said, kernel, spans
):
    """With default options over a bf16 cache, each start on a gfx942 once warned of aiter-opt."""
    shape = replace(BF16, heads=16)
    monkeypatch.setattr(Layer, "shape", lambda layer: shape)
    settings = Settings(enabled=True, kernel=kernel, measure=False)
    layer = Layer(layer_of("auto"), Backends(settings, MI300X), limit=512)
    check([layer], strict=True)
    assert [(span.first, span.last, span.kernel) for span in layer.decision.kernel_spans] == spans
    assert said.at(logging.WARNING) == said.at(logging.ERROR) == []


class Changed(ReferenceBackend):
    """The reference, but for what ``change`` makes of the result and of the cache."""

    def __init__(self, change):
        super().__init__()
        self.name, self.change = "changed", change

    def bind(self, operands):
        bound = super().bind(operands)
        return replace(bound, run=lambda given: self.change(bound.run(given), given.kv_cache))


def off(out, cache):
    cache.view(torch.uint8)[-1, -1, :5] ^= 1
    return out * 2


UNCALLED = AiterBackend(MI300X, op=lambda *_: None)


@pytest.mark.parametrize(
    ("bound", "shape", "stray", "says"),
    [
        (Changed(off), BF16, 5, "changed: self-check FAILED: q nope 128 step(s)"),
        (
            Changed(lambda out, cache: out.float()),
            BF16,
            0,
            "FAILED: it returned [7, 4, 576] torch.float32, expected",
        ),
        (UNCALLED, replace(BF16, cache_dtype=torch.uint8), 0, "it takes no batch: kv_cache: view uint8"),
    ],
)
def test_self_check_reports_what_is_wrong(bound, shape, stray, says):
    result = compare_with_reference(bound, shape, maxsize)
    assert (result.has_passed, result.num_stray_bytes, says in result.message) == (False, stray, True), result.message


def step(query, element):
    """Move one element of the query to its neighbour among bf16's values."""
    query.view(torch.int16)[0, 0, element] += 1
    return query


def test_one_step_is_allowed_in_what_is_rotated_and_nowhere_else():
    nope, rope = (compare_with_reference(Changed(lambda out, _, at=at: step(out, at)), BF16, maxsize) for at in (0, -1))
    assert (nope.has_passed, nope.failed_parts, nope.differences["q nope"].steps) == (False, ("q nope",), 1)
    assert (rope.has_passed, rope.differences["q rope"].steps) == (True, 1)


@pytest.mark.parametrize(
    ("found", "elements", "agrees"),
    [
        (Difference(1, 0.01), 1000, True),
        (Difference(1, 0.0101), 1000, False),
        (Difference(2, 0.001), 1000, False),
        (Difference(1, 1 / 64), 64, True),
        (Difference(1, 2 / 64), 64, False),
        (Difference(2, 1 / 64), 64, False),
        (Difference(0, 0.0), 0, True),
    ],
)
def test_the_bounds_belong_to_what_agrees(found, elements, agrees):
    assert distance.is_within(found, 1, 0.01, elements) is agrees


class OwnProduct(KernelBackend):
    """As our Triton kernel, with a product of its own, times a factor before it is stored."""

    name, bounds = "own", OWN_BMM

    def __init__(self, factor, store=formats.round_saturating):
        self.factor, self.store = factor, store

    def bind(self, inputs):
        return Binding(self.run, numerics=reference.TRITON)

    def run(self, inputs):
        query = reference.prepare(inputs, reference.TRITON)
        product = inputs.weight.reference(inputs.q_nope).float() * (self.factor / inputs.q_scale)
        query[..., : inputs.latent_dim] = self.store(product, formats.FLAVOURS[inputs.out_dtype])
        return query


FP8 = torch.float8_e4m3fn
OVER_FP8 = LayerShape(16, 128, FP8, FP8, 16, False)
WEIGHTS = [("plain",), ("fp8", FP8), ("mxfp4",)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda key: key[0])
@pytest.mark.parametrize("factor", [1.0, 0.94, 1.06])
def test_a_product_that_is_a_step_off_nearly_everywhere_is_wrong(weight, factor):
    """An fp8 step is 6 to 12 % of a value. Sums in another order move one value in a hundred."""
    found = compare_with_reference(OwnProduct(factor), replace(OVER_FP8, weight=weight), maxsize)
    assert found.differences["q nope"].steps <= 1
    assert found.failed_parts == (() if factor == 1 else ("q nope",))


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda key: key[0])
def test_a_product_whose_overflow_becomes_nan_is_wrong(weight):
    found = compare_with_reference(
        OwnProduct(1.0, formats.round_overflowing), replace(OVER_FP8, weight=weight), maxsize
    )
    assert (found.failed_parts, found.writes_nan) == (("q nope",), True)


def test_a_kernel_with_a_product_of_its_own_may_not_be_a_step_off_in_a_kv_row():
    class OneStepInTheCache(OwnProduct):
        def run(self, inputs):
            query = super().run(inputs)
            row = inputs.kv_cache.view(torch.uint8).flatten(0, 1)[int(inputs.slot_mapping[-1])]
            row[0] ^= 1
            return query

    assert compare_with_reference(OwnProduct(1.0), OVER_FP8, maxsize).has_passed
    found = compare_with_reference(OneStepInTheCache(1.0), OVER_FP8, maxsize)
    assert (found.failed_parts, found.differences["kv nope"].steps) == (("kv nope",), 1)


def test_an_infinite_value_leaves_no_slack_for_the_others():
    wanted = torch.tensor([math.inf, 1.0, 2.0])
    assert distance.difference(torch.tensor([math.inf, 7.0, 2.0]), wanted, slack=2**-8).share == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="one shape"):
        distance.difference(wanted, wanted[:1])


def test_a_query_without_the_room_that_vllm_pads_is_compared_by_its_heads():
    dense = Changed(lambda out, _: out[:, ::2].contiguous())  # as `DecodeInputs.real_heads` finds 4 heads among 8
    assert compare_with_reference(dense, replace(BF16, out_heads=8), maxsize).has_passed
    changed = Changed(lambda out, _: out[:, :3])
    assert not compare_with_reference(changed, replace(BF16, out_heads=8), maxsize).has_passed


class Reading(ReferenceBackend):
    """The reference over operands that ``change`` has changed."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def bind(self, inputs):
        return Binding(lambda given: reference.prepare(replace(given, **self.change(given))))


def a_dense_weight(inputs):
    """Heads that are P * L values apart."""
    values = inputs.weight.values
    dense = values.as_strided(values.shape, (values.shape[1] * values.shape[2], values.shape[2], 1))
    return {"weight": replace(inputs.weight, values=dense)}


def never_the_first(inputs):
    return {"positions": inputs.positions.clamp(min=1)}


def never_the_last(inputs):
    return {"positions": inputs.positions.clamp(max=len(inputs.cos_sin_cache) - 2)}


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda inputs: {}, ()),
        (a_dense_weight, ("q nope",)),
        (never_the_first, ("q rope", "kv rope")),
        (never_the_last, ("q rope", "kv rope")),
    ],
    ids=["right", "dense weight", "never the first position", "never the last position"],
)
@pytest.mark.parametrize("weight", [("plain",), ("plain", absorb.P_MAJOR)], ids=len)
def test_mutation_an_operand_that_is_read_otherwise_fails(weight, change, failed):
    found = compare_with_reference(Reading(change), replace(BF16, weight=weight), maxsize)
    assert found.failed_parts == failed


@pytest.mark.parametrize("weight", [("plain",), ("plain", absorb.P_MAJOR)], ids=len)
def test_a_synthetic_plain_weight_has_the_strides_of_vllms(weight):
    """``kv_b_proj`` is [N * (P + V), L] as it is loaded, or [L, N * (P + V)] as vLLM dequantises it."""
    kv_b_proj = torch.zeros(512, 4 * 32) if absorb.P_MAJOR in weight else torch.zeros(4 * 32, 512).T
    vllms = kv_b_proj.view(512, 4, 32)[..., :16].permute(1, 2, 0)
    made = synthetic_inputs(replace(BF16, weight=weight)).weight
    assert (made.key, made.values.shape, made.values.stride()) == (weight, vllms.shape, vllms.stride())
    assert absorb.read({"W_UK_T": vllms}).key == weight


def nothing_written_is_nothing_shown(monkeypatch):
    def without_a_slot(*given, **options):
        inputs = synthetic_inputs(*given, **options)
        return replace(inputs, slot_mapping=inputs.slot_mapping.fill_(-1))

    monkeypatch.setattr(comparison, "synthetic_inputs", without_a_slot)
    assert not compare_with_reference(ReferenceBackend(), BF16, maxsize).has_passed, "no KV row was compared"


def test_a_comparison_of_no_row_fails(monkeypatch):
    nothing_written_is_nothing_shown(monkeypatch)


@pytest.mark.mutation
def test_mutation_a_batch_without_rows_that_passes_is_caught(monkeypatch):
    """As where the difference of empty parts counts as agreement."""
    inner, seen = comparison._compare, []

    def passes(*given):
        seen.append(inner(*given))
        return replace(seen[-1], has_passed=True)

    monkeypatch.setattr(comparison, "_compare", passes)
    with pytest.raises(AssertionError, match="no KV row was compared"):
        nothing_written_is_nothing_shown(monkeypatch)
    assert "no row to compare" in seen[0].message


def test_every_answer_follows_from_bind():
    class Refusing(KernelBackend):
        name = "refusing"

        def bind(self, inputs):
            return "never"

    operands = synthetic_inputs(SMALL)
    assert Refusing().refuse(operands) == "never"
    assert Refusing().kernel_of(operands) is None
    with pytest.raises(match="refusing: never"):
        Refusing().prepare(operands)
    assert not compare_with_reference(Refusing(), SMALL, maxsize).has_passed
    assert Refusing().caches == (False,), "without variants, over a small cache only"


def test_synthetic_operands_on_meta_take_no_memory_whatever_their_number():
    ghost = synthetic_inputs(replace(SMALL, device="meta"), 1 << 32)
    assert ghost.num_tokens == 1 << 32
    assert {tensor.device.type for _, tensor in ghost.tensors} == {"meta"}


# What serving meets: caches above 2 GiB, and blocks of another size.
SHAPE = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 16, False)


def is_large(inputs):
    return launcher._reach(inputs.kv_cache) >= 1 << 31


@pytest.mark.parametrize("large", [False, True])
def test_a_synthetic_large_cache_is_one_to_triton_and_as_small_as_the_other(large):
    inputs = synthetic_inputs(SHAPE, 3, large=large)
    assert is_large(inputs) is large
    assert inputs.kv_cache.numel() * 2 < 1 << 20
    assert large in TritonBackend.caches


@pytest.mark.parametrize(("opt", "kernel"), [(False, "per-head"), (True, "opt")])
def test_another_block_size_leads_to_the_kernel_of_aiters_that_was_checked(opt, kernel):
    """vLLM settles the block size after the check."""
    aiter = AiterBackend(Platform("gfx950", ROCM), op=lambda *_: None, opt=opt)
    caches = [synthetic_inputs(replace(SHAPE, block_size=size)) for size in (1, 16, 64)]
    assert {aiter.kernel_of(inputs) for inputs in caches} == {kernel}


def test_what_is_timed_is_the_variant_for_a_large_cache():
    weight = synthetic_inputs(SHAPE, 1).weight
    assert all(map(is_large, stopwatch.calls_of(SHAPE, [weight], 2, resident=1)))
