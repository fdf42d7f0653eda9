"""What the back end declines and why, its tile table, its launch and its warm-up, without running a kernel."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planted import break_import
from tests.support.triton_cases import Case, build, sparse_bytes

pytest.importorskip("triton")

from tests.support.bare_layer import bare_layer
from tools import aot
from vllm_aiter_mla.commands.plan.kernels import PlanBackends
from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.triton import backend, kernel, launcher, tiles
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving import backends
from vllm_aiter_mla.settings import Settings


@pytest.fixture
def on_any_device(monkeypatch):
    """Let the checks past the device, as under the interpreter."""
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    monkeypatch.setattr(TritonBackend, "arch", "gfx942")


class Recorder:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *given, **options: self.launches.append((grid, given, options))


@pytest.fixture
def recorder(monkeypatch, on_any_device):
    recorder = Recorder()
    monkeypatch.setattr(launcher, "decode_prep_kernel", recorder)
    monkeypatch.setattr(launcher, "_compiled", set())
    return recorder


def argument(given, name):
    return given[kernel.decode_prep_kernel.arg_names.index(name)]


def operands(**changes):
    return build(Case(**{"cache": "float8_e4m3fnuz"} | changes))[0]


def test_triton_backend_on_a_cpu_says_that_it_needs_a_gpu():
    inputs = operands()
    assert TritonBackend().refuse(inputs) == "a GPU is needed, q is on cpu"
    with pytest.raises(match="triton: a GPU is needed"):
        TritonBackend().prepare(inputs)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'", name="triton"), OSError("GLIBC")])
def test_a_triton_that_cannot_be_imported_is_a_reason_with_its_error(monkeypatch, on_any_device, error):
    break_import(monkeypatch, "triton", error)
    monkeypatch.delitem(sys.modules, launcher.__name__)
    monkeypatch.delattr(f"{backend.__package__}.launcher")
    reason = TritonBackend().bind(operands())
    assert (type(error).__name__ in reason, str(error) in reason) == (True, True)
    shape = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 64, False, device="meta")
    named = {"triton": lambda *_: TritonBackend()}
    points, offers = backends.Backends(Settings(kernel="triton"), Platform("gfx942"), named).offers(shape, 512)
    assert offers["triton"].declines == dict.fromkeys(points, reason), "a start asks every back end"
    _, planned = PlanBackends("gfx942", Settings()).offers(shape, 512)
    assert not planned["triton"].declines, "plan looks at no Triton of this machine"


def far_rows(inputs):
    """q whose rows lie 2**29 elements apart, in address space that takes no memory."""
    rows, stride = inputs.q.shape[0], 1 << 29
    return sparse_bytes(2 * rows * stride).view(torch.bfloat16).as_strided(inputs.q.shape, (stride, 192, 1))


# One operand out of order, and a word of the skip it must meet.
BROKEN = {
    "k_pe": (lambda x: {"k_pe": x.k_pe[:4]}, "k_pe: shape [5, 64] expected"),
    "kv_c": (lambda x: {"kv_c": x.kv_c.t().contiguous().t()}, "kv_c: last stride 1"),
    "w_uk_t": (lambda x: {"weight": AbsorbWeight("plain", x.weight.values.repeat(1, 2, 2)[:, ::2, ::2])},
     "w_uk_t: stride 1 along P or L"),
    "kv_cache": (lambda x: {"kv_cache": x.kv_cache.view(torch.uint8)}, "view uint8 storage"),
    "flavour": (lambda x: {"kv_cache": x.kv_cache.view(torch.float8_e4m3fn), "out_dtype": torch.float8_e4m3fn},
     "would be a software cast"),
    "slot_mapping": (lambda x: {"slot_mapping": x.slot_mapping[:4]}, "slot_mapping: shape [5] expected"),
    "positions": (lambda x: {"positions": x.positions.int()}, "positions: torch.int64"),
    "cos_sin_cache": (lambda x: {"cos_sin_cache": x.cos_sin_cache[:0]}, "at least one row"),
    "span": (lambda x: {"q": far_rows(x)}, "q: 2147484032 elements"),
    "device": (lambda x: {"q_scale": x.q_scale.to("meta")}, "q_scale: cpu (that of q) expected, got meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_triton_backend_names_the_operand_it_declines(on_any_device, name):
    (change, word), inputs = BROKEN[name], operands()
    assert word in str(TritonBackend().refuse(replace(inputs, **change(inputs))))


CODES, MXFP4 = {"weight": "float8_e4m3fnuz"}, {"weight": "mxfp4", "cache": "float8_e4m3fn"}
SET = "W_K: gfx950 multiplies mxfp4 in hardware, {} would in software; set VLLM_ROCM_USE_AITER_FP4BMM=0"
# Architecture, case, and how the reason starts.
DECLINED = [
    *[("gfx942", {"nope": nope}, "nope width: blocks of 128 and a power of two from 16") for nope in (8, 96, 136)],
    *[("gfx942", CODES | {"nope": n}, "nope width: blocks of 128 and a power of two from 32")
     for n in (8, 96, 136, 144)],
    *[("gfx950", MXFP4 | {"nope": nope}, "W_K: a nope width of 128, 256, 512 and so") for nope in (64, 192, 384)],
    *[(a, MXFP4 | {"cache": "bfloat16"}, SET.format(a)) for a in ("gfx942", "sm90", "sm100", "gfx1201")],
    ("gfx950", MXFP4 | {"act": "float16", "cache": "float16"}, "W_K: bf16 activations expected"),
    ("gfx942", {"rope": 48}, "rope width: a power of two from 16 on"),
    ("gfx942", {"latent": 8}, "latent width: a power of two from 16 on"),
    ("gfx942", {"weight": "float8_e4m3fn"}, "W_K: gfx942 converts to torch.float8_e4m3fnuz in hardware"),
    ("gfx942", {"act": "float32", "cache": "float32"}, "q: torch.bfloat16 or torch.float16"),
]  # fmt: skip
TAKEN = [
    *[("gfx942", {"nope": nope}) for nope in (128, 144, 192)],
    *[("gfx942", CODES | more) for more in ({}, {"w_major": "P", "nope": 192}, {"out": "bfloat16"})],
    *[("gfx942", {name: value}) for name, value in (("is_neox", True), ("w_major", "P"), ("out", "bfloat16"))],
    *[("gfx942", {"tokens": 0}), ("gfx950", MXFP4 | {"cache": "bfloat16"})],
]


@pytest.mark.parametrize(("arch", "case", "reason"), [*DECLINED, *((*taken, "None") for taken in TAKEN)])
def test_triton_backend_declines_what_its_kernel_cannot_do_alone(on_any_device, monkeypatch, arch, case, reason):
    monkeypatch.setattr(TritonBackend, "arch", arch)
    assert str(TritonBackend().refuse(operands(**case))).startswith(reason)


def test_triton_backend_declines_a_format_that_its_kernel_cannot_read(on_any_device, monkeypatch):
    monkeypatch.setattr(TritonBackend, "arch", "gfx950")
    monkeypatch.setitem(absorb.FORMATS, "mxfp5", absorb.FORMATS["mxfp4"])
    inputs = operands(**MXFP4)
    assert TritonBackend().refuse(inputs) is None
    found = TritonBackend().refuse(replace(inputs, weight=replace(inputs.weight, format="mxfp5")))
    assert "one of the formats plain, fp8, mxfp4" in str(found)


def test_triton_kernel_of_a_call_is_the_tile_it_runs_on(on_any_device):
    names = {TritonBackend().kernel_of(operands(tokens=tokens, heads=32)) for tokens in (1, 16, 17, 33, 65, 129)}
    assert names == {tiles.tile_for("gfx942", count, 32).label for count in tiles.tried_counts("gfx942", 32)}


@given(st.sampled_from([*tiles.TABLE, "sm80"]), st.integers(1, 512))
def test_triton_check_tries_every_tile_that_any_batch_runs_on_and_a_second_block_of_the_last(arch, heads):
    counts = tiles.tried_counts(arch, heads)
    tried = [tiles.tile_for(arch, count, heads) for count in counts]
    assert len(set(tried)) == len(tried)
    many = range(1, counts[-1] + 2)
    assert set(tried) == {tiles.tile_for(arch, tokens, heads) for tokens in many}
    assert counts[-1] > tried[-1].block_t
    assert tiles.tile_for(arch, 1 << 20, heads) == tried[-1]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@given(st.integers(1, 1024), st.integers(1, 128))
def test_triton_query_tiles_are_no_smaller_than_the_card_needs(arch, tokens, heads):
    """At most two query tiles for each unit, unless they are the largest; none mostly of rows that are not there."""
    tile = tiles.tile_for(arch, tokens, heads)
    programs = launcher.programs(tokens, heads, 512, tile)[0]
    largest = (tile.block_t, tile.block_l * tile.blocks) == (64, 256)
    assert tile.block_t <= max(16, 2 * tokens)
    assert largest or programs <= 512


def test_what_is_remembered_of_a_call_is_all_that_the_triton_checks_depend_on(on_any_device, monkeypatch):
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: TritonBackend())
    one, inputs = bare_layer("triton", Platform("gfx942")), operands()
    assert one.kernel(inputs) is not None
    for name, (change, _) in BROKEN.items():
        for call, taken in ((replace(inputs, **change(inputs)), False), (inputs, True)):
            one.cache_view(call.kv_cache)  # as the op does in each step
            assert (one.kernel(call) is not None) == taken, name


def test_triton_backend_answers_for_a_layer_before_there_is_a_batch(monkeypatch):
    """A layer asks with operands without memory; on a GPU as under the interpreter."""
    monkeypatch.setattr(TritonBackend, "arch", "gfx942")
    shape = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 16, False, device="meta")
    assert TritonBackend().refuse(synthetic_inputs(shape, tokens=1)) is None


def test_triton_grid_counts_query_tiles_rope_rows_and_cache_rows(recorder):
    inputs = operands(tokens=70, heads=3)
    TritonBackend().prepare(inputs)
    ((grid,), given, options) = recorder.launches[0]
    assert options["enable_fp_fusion"] is tiles.FP_FUSION
    assert grid == 3 * 5 * 8 + 7 + 3 + 18
    assert [argument(given, name) for name in kernel.STEP_ARGS] == [70, inputs.cos_sin_cache.shape[0] - 1]


def test_triton_no_token_launches_nothing_and_an_empty_cache_gets_no_row(recorder):
    assert TritonBackend().prepare(operands(tokens=0)).shape == (0, 2, 576)
    assert recorder.launches == []
    inputs = operands()
    TritonBackend().prepare(replace(inputs, kv_cache=inputs.kv_cache[:0]))
    tile = tiles.tile_for("gfx942", 5, 2)
    assert recorder.launches[0][0] == (sum(launcher.programs(5, 2, 512, tile)[:2]),)


def test_triton_step_arguments_are_not_specialised_on():
    """T = 1 or T = 16 in a graph must not need a compilation that T = 5 did not make."""
    parameters = {p.name: p for p in kernel.decode_prep_kernel.params}
    assert all(parameters[name].do_not_specialize for name in kernel.STEP_ARGS)
    assert all(parameters[name].do_not_specialize_on_alignment for name in kernel.SCALAR_POINTERS)


def test_triton_warm_up_compiles_each_tile_once_with_one_row_and_no_slot(recorder):
    inputs = operands(tokens=5, heads=32)
    TritonBackend().warm_up(inputs, [0, 1, 2, 8, 24, 64, 256, 512])
    expected = [tiles.tile_for("gfx942", count, inputs.num_heads) for count in (1, 24, 64, 256)]
    found = [[named[one] for one in ("BLOCK_T", "BLOCK_L", "BLOCKS", "num_warps")] for *_, named in recorder.launches]
    assert sorted(found) == sorted([tile.block_t, tile.block_l, tile.blocks, tile.num_warps] for tile in expected)
    rows = [(argument(given, "num_tokens"), argument(given, "slot_ptr").tolist()) for _, given, _ in recorder.launches]
    assert rows == [(1, [-1])] * len(expected)


def test_triton_capture_of_a_variant_nobody_compiled_raises_and_after_warm_up_does_not(recorder, monkeypatch):
    capturing = [True]
    monkeypatch.setattr(card(), "is_capturing", lambda: capturing[0])
    inputs = operands(tokens=20, heads=32)
    with pytest.raises(RuntimeError, match="call warm_up before"):
        TritonBackend().prepare(inputs)
    capturing[0] = False
    TritonBackend().warm_up(inputs, [1, 20])
    capturing[0] = True
    for tokens in (20, 17, 1):
        TritonBackend().prepare(operands(tokens=tokens, heads=32))
    with pytest.raises(RuntimeError, match="call warm_up before"):
        TritonBackend().prepare(operands(tokens=70, heads=32))


def test_triton_variant_whose_compilation_fails_is_not_taken_for_compiled(recorder, monkeypatch):
    inputs = operands(tokens=20)
    run = launcher.Launch(inputs, tiles.tile_for("gfx942", 20, 2))
    with monkeypatch.context() as failing:
        failing.setattr(launcher, "decode_prep_kernel", {})
        with pytest.raises(KeyError):
            run(inputs)
    monkeypatch.setattr(card(), "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call warm_up before"):
        run(inputs)


@pytest.mark.parametrize("weight", ["plain", "float8_e4m3fnuz"])
def test_triton_bound_call_sees_a_weight_that_is_loaded_again_into_the_same_object(recorder, weight):
    inputs = operands(weight=weight, w_major="L" if weight == "plain" else "P")
    run, values = launcher.Launch(inputs, tiles.tile_for("gfx942", 5, 2)), inputs.weight.values
    run(inputs)
    values.data = values.detach().transpose(1, 2).contiguous().transpose(1, 2)  # another address, other strides
    run(inputs)
    first, second = (given for _, given, _ in recorder.launches)
    assert argument(second, "w_ptr").data_ptr() == values.data_ptr()
    names = ("w_stride_h", "w_stride_p", "w_stride_l")
    assert [argument(second, name) for name in names] == list(inputs.weight.as_npl.stride())
    assert [argument(first, name) for name in names] != [argument(second, name) for name in names]


def test_triton_large_cache_is_another_variant_and_the_tensor_is_asked_before_its_storage(recorder, monkeypatch):
    def capturing_after(span):
        inputs = operands()
        inputs.kv_cache.ptr_range = lambda: span
        run = launcher.Launch(inputs, tiles.tile_for("gfx942", 5, 2))
        with monkeypatch.context() as captured:
            captured.setattr(card(), "is_capturing", lambda: True)
            run(inputs)

    TritonBackend().prepare(operands())
    capturing_after(2**31 - 1)
    with pytest.raises(RuntimeError, match="call warm_up before"):
        capturing_after(2**31)


def specialisation(arch, launched):
    """What Triton's launcher makes of a recorded launch on ``arch``: (type, hints) per argument, constants as such."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    target = aot.TARGETS[arch]
    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp_size))
    jit = kernel.decode_prep_kernel
    bind = create_function_from_signature(jit.signature, jit.params, backend)
    _, given, options = launched
    bound, found, _ = bind(*given, **options)
    return {
        name: entry if entry[0] == "constexpr" else (entry[0], backend.parse_attr(entry[1] or ""))
        for name, entry in zip(bound, found, strict=True)
    }


@pytest.mark.parametrize("arch", ["gfx942", "sm90"])
def test_triton_launches_of_one_tile_share_one_variant_whatever_t_and_alignment(recorder, arch):
    """The warm-up's promise, by Triton's own rules: one row without a slot compiles what every batch needs."""
    TritonBackend().warm_up(operands(tokens=5, heads=4), [5])
    for tokens in (1, 5, 16):
        inputs = operands(tokens=tokens, heads=4)
        odd = torch.empty(tokens + 1, dtype=torch.int64)[1:].copy_(inputs.positions)
        TritonBackend().prepare(replace(inputs, positions=odd))
    first, *others = [specialisation(arch, launched) for launched in recorder.launches]
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("arch", "w_major", "form"),
    [
        *[(arch, *kind) for arch in ("gfx942", "sm90") for kind in (("L", "plain"), ("P", "plain"), ("P", "fp8"))],
        ("gfx950", "P", "mxfp4"),
    ],
)
def test_triton_hints_of_the_gate_are_those_the_launcher_finds(recorder, arch, w_major, form):
    """What tools/isa_report.py compiles is what a GPU would run, not something better."""
    target = aot.TARGETS[arch]
    dtype = "float8_e4m3fnuz" if arch == "gfx942" else "float8_e4m3fn"
    inputs = build(Case(heads=16, w_major=w_major, cache=dtype, weight=dtype if form == "fp8" else form))[0]
    tile = tiles.tile_for(arch, 5, 16)
    launcher.Launch(inputs, tile)(inputs)
    stored = {"cache_ptr": target.fp8_type, "out_ptr": target.fp8_type}
    stored |= {"fp8": {"w_ptr": target.fp8_type}, "mxfp4": aot.MXFP4_TYPES}.get(form, {})
    compiled = aot.constants(target, aot.Variant(tile, 16, weight_major=w_major, weight=form))
    for name, found in specialisation(arch, recorder.launches[0]).items():
        assert (found[0] == "constexpr") == (name in compiled), name
        if found[0] != "constexpr":
            assert found == aot._argument(target, name, stored, ()), name
