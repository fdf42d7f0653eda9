"""The three ops: what they return, what their fakes look at, and when they refuse to run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests import generate_tests
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from tests.passes.stubs import AiterMLAImpl, forward
from tests.sandbox import gpu_ops
from tests.support import opcalls
from tests.support.opcalls import ATTENTION, FAKES, OPS, SIZES, arguments, batch_of, layer_of
from tests.support.planted import raising
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels.inputs import synthetic_inputs
from vllm_aiter_mla.kernels.reference import store_nope
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend, may_take_parts
from vllm_aiter_mla.serving import ops
from vllm_aiter_mla.serving.layer import Layer

ROPE = "mla_attention_with_rope"
fails = raising(RuntimeError("planted: out of shared memory"))
each_op = pytest.mark.parametrize("op", OPS)
each_cache = pytest.mark.parametrize("cache", ["auto", "fp8"])


@each_op
@each_cache
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck_passes(monkeypatch, op, cache, rows):
    if rows == 0:  # torch 2.13's own copy of an empty vector asks for a negative size
        monkeypatch.setattr(generate_tests, "clone_input", torch.clone)
    layer = layer_of(cache)
    with forward([layer], batch_of(rows)):
        utils = ("test_schema", "test_faketensor") if rows else ("test_faketensor",)
        args = arguments(op, layer, rows)
        if cache == "fp8":
            # opcheck compares with allclose, which CPU builds do not implement for fp8: the fake alone is checked.
            utils = ("test_faketensor",)
        torch.library.opcheck(OPS[op], args, test_utils=utils)


def test_decode_rows_are_prepared_without_a_change_to_q_and_k_pe():
    layer, batch = layer_of(), batch_of(6, decodes=4, slots=4)
    args = arguments(ROPE, layer, batch.rows)
    before = [arg.clone() for arg in args[:2]]
    with forward([layer], batch):
        OPS[ROPE](*args)
    assert all(map(torch.equal, before, args[:2]))
    assert (layer.kv_cache != layer.initial).any(-1).sum() == 4


def decisions_of_dummy_batches(monkeypatch, each=lambda layer: None):
    """How often the layer decides while its rank runs ten batches without metadata."""
    layer, batch, decided = layer_of(), batch_of(4, profiling=True), []
    skip = Layer.why_skipped
    monkeypatch.setattr(Layer, "why_skipped", lambda one, **given: (decided.append(one), skip(one, **given))[1])
    with forward([layer], batch):
        for _ in range(10):
            OPS[ROPE](*arguments(ROPE, layer, batch.rows))
            each(Layer.of(layer))
    return len(decided)


def test_idle_rank_decides_nothing_in_its_dummy_batches_after_the_first(monkeypatch):
    """A data-parallel rank without requests runs them while the others wait for it in their collectives."""
    assert decisions_of_dummy_batches(monkeypatch) == 1


@pytest.mark.mutation("I13")
def test_mutation_idle_rank_that_decides_in_every_dummy_batch_is_seen(monkeypatch):
    assert decisions_of_dummy_batches(monkeypatch, lambda layer: setattr(layer, "possible_kernels", None)) == 10


def test_only_real_rows_are_prepared(monkeypatch):
    """What pads a graph is read by nobody, so no kernel is given it."""
    seen, layer, batch = [], layer_of(), batch_of(6, decodes=4)
    real = Layer._bind
    monkeypatch.setattr(Layer, "_bind", lambda module, inputs: (seen.append(inputs), real(module, inputs))[1])
    with forward([layer], batch):
        OPS[ROPE](*arguments(ROPE, layer, batch.rows))
    (inputs,) = seen
    assert {inputs.num_tokens, *(t.shape[0] for t in (inputs.k_pe, inputs.kv_c, inputs.slot_mapping))} == {4}


def test_a_batch_with_prefill_rows_is_rotated_once_in_place_and_prepared_by_no_kernel(monkeypatch):
    layer, batch = layer_of(), batch_of(5, decodes=3, prefills=2)
    args = arguments(ROPE, layer, batch.rows)
    q, k_pe, calls = args[0].clone(), args[1].clone(), []
    monkeypatch.setattr(Layer, "_bind", lambda *_: pytest.fail("a kernel was asked for"))
    real = compat_layer.rotary_embedding
    monkeypatch.setattr(compat_layer, "rotary_embedding", lambda *given: (calls.append(given), real(*given))[1])
    given = []
    monkeypatch.setattr(layer, "forward_impl", lambda *got, **rest: given.append(got))
    with forward([layer], batch):
        OPS[ROPE](*args)
    assert len(calls) == len(given) == 1
    assert [got.data_ptr() for got in given[0][:3]] == [args[0].data_ptr(), args[2].data_ptr(), args[1].data_ptr()]
    rotated_q, rotated_k = q.clone(), k_pe.clone()
    gpu_ops.rotary_embedding(args[3], rotated_q[..., SIZES.p :], rotated_k, SIZES.r, args[4], True)
    assert torch.equal(args[0][..., SIZES.p :], rotated_q[..., SIZES.p :])
    assert torch.equal(args[1], rotated_k)


@each_cache
def test_a_kernel_that_raises_costs_the_layer_its_kernel_and_nothing_else(monkeypatch, caplog, cache):
    """The batch has the bytes of output and cache that it has where there is no kernel."""
    log._said.clear()
    outcomes = []
    for run in (None, fails):
        layer, batch = layer_of(cache), batch_of(4)
        args = arguments(ROPE, layer, batch.rows)
        monkeypatch.setattr(Layer, "_bind", lambda self, inputs, run=run: ("planted", run))
        with forward([layer], batch), caplog.at_level("ERROR"):
            OPS[ROPE](*args)
        outcomes.append((args[6], layer.kv_cache))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    skip = Layer.of(layer).why_skipped()
    assert skip.code == "kernel_failed"
    assert "planted: out of shared memory" in skip.message
    assert caplog.text.count("planted") == 1


def test_a_capture_of_decode_rows_above_the_limit_holds_vllms_own_attention(monkeypatch):
    layer, batch, given = layer_of(), batch_of(3), []
    Layer.of(layer).limit = 2
    monkeypatch.setattr(Layer, "_bind", lambda *_: pytest.fail("a kernel was asked for"))
    monkeypatch.setattr(layer, "forward_impl", lambda *got, **rest: given.append(got))
    opcalls.capturing(monkeypatch)
    with forward([layer], batch, CUDAGraphMode.FULL):
        OPS[ROPE](*arguments(ROPE, layer, batch.rows))
    assert len(given) == 1


def test_a_kernel_that_raises_inside_a_capture_ends_it(monkeypatch):
    """Half of a launch would be in the graph."""
    layer, batch = layer_of(), batch_of(4)
    monkeypatch.setattr(Layer, "_bind", lambda self, inputs: ("planted", fails))
    opcalls.capturing(monkeypatch)
    with forward([layer], batch), pytest.raises(RuntimeError, match="planted"):
        OPS[ROPE](*arguments(ROPE, layer, batch.rows))


def test_a_batch_without_slots_is_rotated_and_writes_nothing():
    layer, batch = layer_of(), batch_of(3, decodes=0, prefills=3)
    args = arguments(ROPE, layer, batch.rows)
    q, k_pe = args[0].clone(), args[1].clone()
    with forward([layer], batch):
        get_forward_context().slot_mapping = {}
        OPS[ROPE](*args)
    gpu_ops.rotary_embedding(args[3], q[..., SIZES.p :], k_pe, SIZES.r, args[4], True)
    assert torch.equal(args[0], q)
    assert torch.equal(args[1], k_pe)
    assert torch.equal(layer.kv_cache, layer.initial)


def test_decode_rows_without_a_cache_are_rotated_and_given_to_no_kernel(monkeypatch):
    """As in vLLM. A kernel would write its rows to memory that nobody has allocated."""
    layer, batch, given = layer_of(), batch_of(3), []
    monkeypatch.setattr(Layer, "_bind", lambda *_: pytest.fail("a kernel was asked for"))
    monkeypatch.setattr(layer, "forward_impl", lambda *got, **rest: given.append(got))
    args = arguments(ROPE, layer, batch.rows)
    before = args[1].clone()
    with forward([layer], batch):
        layer.kv_cache = torch.empty(0)
        OPS[ROPE](*args)
    assert len(given) == 1
    assert not torch.equal(args[1], before)


def test_a_call_is_bound_once_and_again_after_a_weight_was_replaced(monkeypatch):
    found, layer = [], layer_of()
    real = Layer._bind
    monkeypatch.setattr(Layer, "_bind", lambda *args: (found.append(args), real(*args))[1])
    args = arguments(ROPE, layer, 3)
    with forward([layer], batch_of(3)):
        for _ in range(3):
            OPS[ROPE](*args)
        assert len(found) == 1
        layer.W_UK_T = layer.W_UK_T * 2
        OPS[ROPE](*args)
        assert len(found) == 2
        assert found[1][1].weight.values is layer.W_UK_T
        Layer.of(layer).stop("planted")
        OPS[ROPE](*args)
    assert len(found) == 3


@pytest.mark.parametrize("bind", [raising(ValueError("planted")), lambda *_: "planted"], ids=["raises", "declines"])
def test_a_call_that_its_kernel_cannot_take_runs_vllms_own_attention(bind, monkeypatch, caplog):
    layer = layer_of()
    args, want = arguments(ROPE, layer, 3), arguments(ROPE, layer, 3)
    with forward([layer], batch_of(3)):
        OPS[ROPE](*want)
        layer.kv_cache.copy_(layer.initial)
        monkeypatch.setattr(Layer.of(layer).backends, "bind", bind)
        Layer.of(layer).reloaded()
        with caplog.at_level("ERROR"):
            OPS[ROPE](*args)
    assert torch.equal(args[6], want[6])
    assert "planted" in caplog.text


def test_i2_the_op_raises_when_captured_before_the_cache_is_bound(monkeypatch):
    opcalls.capturing(monkeypatch)
    layer = layer_of()
    with forward([layer], batch_of(3)):
        layer.kv_cache = torch.empty(0)
        with pytest.raises(RuntimeError, match="without KV cache"):
            OPS[ROPE](*arguments(ROPE, layer, 3))


@pytest.mark.parametrize(
    ("what", "op"), [("slot mapping", ROPE), *((what, op) for what in ("prefill", "splitting_ops") for op in ATTENTION)]
)
def test_i2_uniform_batch_the_op_raises_where_a_replay_would_be_wrong(monkeypatch, what, op):
    opcalls.capturing(monkeypatch)
    opcalls.assert_raises_while_capturing(what, op, layer_of())


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize(
    ("capturing", "mode"), [(True, CUDAGraphMode.FULL), (False, CUDAGraphMode.PIECEWISE), (False, CUDAGraphMode.NONE)]
)
def test_attention_runs_in_full_captures_and_beside_piecewise_graphs(monkeypatch, capturing, mode, op):
    opcalls.capturing(monkeypatch, capturing)
    layer = layer_of()
    args = arguments(op, layer, 3)
    output = args[6 if op == ROPE else 4]
    with forward([layer], batch_of(3), mode):
        before = output.clone()
        OPS[op](*args)
    assert not torch.equal(output, before)


@each_op
@each_cache
def test_i7_fake_looks_at_tensors_and_scalars_only(op, cache):
    opcalls.assert_fake_is_blind(FAKES[op], op, cache)
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in arguments(op, layer_of(), 3)]
        result = OPS[op](*args)  # the registered fake, outside any forward context
    assert result is None or tuple(result.shape[:2]) == tuple(args[0].shape[:2])


@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_uint8_storage_is_viewed_as_the_cards_flavour_without_a_copy(flavour, monkeypatch):
    """AITER ends the process on uint8: "kv cache data type is not supported"."""
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: flavour))
    raw = torch.zeros(2, 16, 576, dtype=torch.uint8)
    view = compat_layer.fp8_view(raw)
    assert (view.dtype, view.shape, view.data_ptr()) == (flavour, raw.shape, raw.data_ptr())
    other = torch.zeros(2, 16, 576)
    assert compat_layer.fp8_view(other) is other


class VLLMsKernels:
    """What vLLM's kernels do, by the reference's parts; a CPU build has none of them."""

    def __init__(self, out_dtype):
        self.out_dtype, self.given = out_dtype, []

    def rope_and_write(self, positions, q_pe, k_pe, kv_c, *rest):
        self.given += [q_pe, k_pe]
        q_pe.neg_()
        k_pe.neg_()

    def concat_quantise_fp8(self, absorbed, q_pe, scale):
        return store_nope(torch.cat([absorbed, q_pe], -1), 1 / scale, self.out_dtype)


@pytest.mark.parametrize("tokens", [0, 3])
def test_vllm_rotates_in_place_and_copies_nothing_before_its_last_kernel(tokens):
    given = synthetic_inputs(Layer.of(layer_of("fp8")).shape(), tokens)
    q, k_pe, out_dtype = given.q, given.k_pe, given.out_dtype
    vllms, before = VLLMsKernels(out_dtype), q.clone()
    backend = VLLMBackend(vllms)
    assert backend.refuse(given) is None
    query = backend.prepare(given)
    assert (query.shape, query.dtype) == ((tokens, SIZES.n, SIZES.latent + SIZES.r), out_dtype)
    given_ = (q[..., SIZES.p :], k_pe) if tokens else ()
    assert [one.data_ptr() for one in vllms.given] == [one.data_ptr() for one in given_]
    assert torch.equal(q[..., SIZES.p :], -before[..., SIZES.p :])
    assert torch.equal(q[..., : SIZES.p], before[..., : SIZES.p])


@pytest.mark.parametrize(("arch", "parts"), [("gfx950", True), ("gfx942", False)])
def test_vllm_is_timed_without_a_concat_that_vllms_decode_may_not_need(arch, parts):
    """Fewer than 16 heads over a cache of 16 bits on gfx950."""
    given = synthetic_inputs(Layer.of(layer_of()).shape(), 3)
    query = VLLMBackend(VLLMsKernels(given.out_dtype), arch).prepare(given)
    assert query.shape == (3, SIZES.n, SIZES.latent + (0 if parts else SIZES.r))


@pytest.mark.parametrize(
    ("arch", "heads", "fp8_cache", "expected"),
    [
        ("gfx950", 15, False, True),
        ("gfx950", 16, False, False),
        ("gfx950", 8, True, False),
        ("gfx942", 8, False, False),
        ("cpu", 8, False, False),
    ],
)
def test_vllms_decode_may_take_parts_where_its_own_rule_says_so(arch, heads, fp8_cache, expected, monkeypatch):
    """``use_gluon_decode`` and ``use_gluon_verify``, asked over a card of this name; ours says yes where either may."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    monkeypatch.setattr(rocm_aiter_mla, "_gluon_mla_decode_supported", lambda: arch == "gfx950")
    rule, cache = rocm_aiter_mla.AiterMLAHelper, "fp8" if fp8_cache else "auto"
    asked = rule.use_gluon_decode(heads, 1, cache, 1 << 20) or rule.use_gluon_verify(heads, 3, cache)
    assert may_take_parts(arch, heads, fp8_cache) is bool(asked) is expected


def test_the_last_kernel_of_vllm_is_the_one_that_vllms_layers_call():
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    absorbed, q_pe, scale = torch.randn(3, 2, 32).bfloat16(), torch.randn(3, 2, 16).bfloat16(), torch.tensor(0.5)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))):
        query = compat_layer.concat_quantise_fp8(absorbed, q_pe, scale)
    expected = store_nope(torch.cat([absorbed, q_pe], -1), 1 / scale, torch.float8_e4m3fn)
    assert torch.equal(query.view(torch.uint8), expected.view(torch.uint8))


class _Unreadable:
    """Metadata that may not be looked at."""

    def __getattr__(self, name):
        raise AssertionError(f"the op read {name} of the batch's metadata")


def test_i2_query_preparation_reads_nothing_of_the_batch():
    """It may be inside a piecewise graph, where a decision from the metadata would be frozen."""
    layer, batch = layer_of(), batch_of(3)
    with forward([layer], batch):
        get_forward_context().attn_metadata = dict.fromkeys(get_forward_context().attn_metadata, _Unreadable())
        OPS["mla_decode_q_prep"](*arguments("mla_decode_q_prep", layer, batch.rows))
        with pytest.raises(AssertionError, match="of the batch's metadata"):
            OPS[ROPE](*arguments(ROPE, layer, batch.rows))


def test_decode_rows_without_a_slot_each_are_no_decode_batch():
    """A kernel would be given fewer slots than rows; the layer's own attention says what vLLM says of it."""
    layer, batch = layer_of(), batch_of(6, decodes=4, slots=3)
    with forward([layer], batch):
        metadata, slots = get_forward_context().attn_metadata[layer.layer_name], batch.slot_mapping()
        assert not compat_layer.is_decode_only(metadata, slots)
        assert compat_layer.is_decode_only(metadata, batch_of(6, decodes=4, slots=4).slot_mapping())


@pytest.mark.parametrize("decode", [SimpleNamespace(), None], ids=["decode", "neither"])
def test_a_batch_of_nothing_but_padding_is_given_to_no_kernel(monkeypatch, decode):
    """A microbatch of vLLM's V2 may hold no real row. vLLM launches nothing; HIP refuses a grid of none."""
    layer, batch, args = layer_of(), batch_of(6, decodes=0), arguments(ROPE, layer_of(), 6)
    for owner, name in (
        (Layer, "_bind"), (AiterMLAImpl, "forward_mqa"), (compat_layer, "rope_and_write"),
        (compat_layer, "rotary_embedding"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} of no row"))
    before, output = [arg.clone() for arg in args[:7]], args[6]
    with forward([layer], batch):
        for metadata in get_forward_context().attn_metadata.values():
            metadata.decode = decode
        OPS[ROPE](*args)
        get_forward_context().slot_mapping = {}
        OPS[ROPE](*args)
        OPS[ATTENTION[0]](args[0], args[2], args[1].unsqueeze(1), torch.zeros(6, 1), output, args[9], None)
    assert all(map(torch.equal, before, args[:7])), "as vLLM's: rows that nobody reads stay as they are"
    assert torch.equal(layer.kv_cache, layer.initial)


@pytest.mark.parametrize("name", ["q", "k_pe", "kv_c", "positions", "cos_sin_cache", "slot_mapping", "k_scale"])
def test_a_call_with_another_dtype_is_bound_anew(monkeypatch, name):
    """What was found for one dtype holds for no other: AITER reads bytes."""
    layer, batch = layer_of(), batch_of(3)
    asked = []
    monkeypatch.setattr(Layer, "_bind", lambda self, inputs: (asked.append(inputs), ("", None))[1])
    args = arguments(ROPE, layer, batch.rows)
    with forward([layer], batch):
        OPS[ROPE](*args)
        kept = Layer.of(layer)
        kept.kernel(asked[0])
        assert len(asked) == 1, "the same call was bound twice"
        kept.kernel(replace(asked[0], **{name: getattr(asked[0], name).to(torch.float64)}))
    assert len(asked) == 2


@pytest.mark.parametrize(("rows", "branch"), [(4, "decode"), (5, "vllm_forward")])
def test_a_decode_batch_above_the_limit_is_the_layers_own(rows, branch, monkeypatch):
    """The module integration has no compile range that ends at L: the op itself keeps to it."""
    ran = []
    for owner, name in ((ops, "decode"), (Layer, "vllm_forward")):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _in=inner, _name=name: (ran.append(_name), _in(*a))[1])
    layer, batch = layer_of(), batch_of(rows)
    Layer.of(layer).limit = 4
    with forward([layer], batch):
        OPS[ROPE](*arguments(ROPE, layer, rows))
    assert ran == [branch]
