"""The one object per layer: what it decides, what start-up finds out about it, and what it then runs."""

import logging
import weakref
from dataclasses import replace

import pytest
import torch
from vllm.platforms import current_platform

from tests.passes.stubs import BLOCK_SIZE, Sizes, StubLayer
from tests.support.opcalls import NAME, layer_of
from tests.support.planted import raising
from tests.support.strict import both_modes, stops
from tests.support.worker import Worker, check, ours
from vllm_aiter_mla import engine
from vllm_aiter_mla.admission import Skip, layer_skips
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import absorb, reference
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import LayerShape, contract_violation, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings, SettingsError
from vllm_aiter_mla.status.engine_status import EngineStatus

pytestmark = pytest.mark.usefixtures("said")


class Candidate(KernelBackend):
    """A "triton" kernel that is the reference, or ``does`` and ``warms`` what a test plants."""

    name = "triton"
    launches = 0
    warmed: tuple[int, ...] = ()

    def __init__(self, does=reference.prepare, warms=lambda: None):
        self.does, self.warms = does, warms

    def bind(self, inputs):
        return contract_violation(inputs) or Binding(self.run)

    def run(self, inputs):
        self.launches += 1
        return self.does(inputs)

    def warm_up(self, inputs, sizes):
        self.warms()
        self.warmed = tuple(sizes)


def wrong(inputs):
    return -reference.prepare(inputs)


def two(candidate, monkeypatch, limit=1024, other=None, **spoilt):
    """Two layers of an engine that ask for ``candidate``.

    They have one shape, or the second is ``other``; ``spoilt``: attributes of the first module.
    """
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: candidate)
    modules = [layer_of(), other or layer_of()]
    modules[1]._vllm_config = modules[0]._vllm_config
    for index, module in enumerate(modules):
        module.layer_name = f"layers.{index}"
        module._vllm_config.additional_config["aiter_mla"]["kernel"] = "triton"
    for name, value in spoilt.items():
        setattr(modules[0], name, value)
    shared, told = backends.of_config(modules[0]._vllm_config), EngineStatus()
    return [Layer(module, shared, told, limit).keep() for module in modules]


def kernels(found):
    return [layer.decision.our_first_kernel or None for layer in found]


def levels(said):
    return [level for level, _ in said if level > logging.DEBUG]


def runs_the_candidate(layer, candidate):
    """Whether the op's own path runs it."""
    candidate.launches = 0
    inputs = synthetic_inputs(Layer.of(layer_of()).shape())
    run = layer.kernel(inputs)
    if run is not None:
        run(inputs)
    return candidate.launches > 0


def test_a_module_keeps_the_layer_that_its_engine_has_made(monkeypatch):
    one, other = two(Candidate(), monkeypatch)
    assert (Layer.of(one.module), Layer.of(other.module)) == (one, other)
    unloaded = layer_of()
    assert Layer.of(unloaded) is Layer.of(unloaded)


def test_i15_two_engines_with_equal_options_share_no_back_end(monkeypatch):
    """What one engine keeps off, as after an abort in AITER, the other may run."""
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: Candidate())
    first, second = (Worker(ours(), kernel="triton").engine.make_layers() for _ in range(2))
    first.leave_out("triton", "aborted before")
    assert isinstance(second.get("triton"), Candidate), "an engine keeps off what another one does"


@pytest.mark.mutation("I15")
def test_mutation_i15_back_ends_that_equal_options_share_are_caught(monkeypatch):
    shared = backends.Backends(Settings(enabled=True, kernel="triton"), Platform("cpu"))
    monkeypatch.setattr(engine, "Backends", lambda settings, platform: shared)
    with pytest.raises(AssertionError, match="keeps off what another one does"):
        test_i15_two_engines_with_equal_options_share_no_back_end(monkeypatch)


def test_a_right_kernel_is_checked_once_a_shape_and_warmed_for_the_captured_sizes(monkeypatch, said):
    candidate = Candidate()
    found = two(candidate, monkeypatch)
    check(found[:1], strict=True)
    once, candidate.launches = candidate.launches, 0
    check(found, strict=True, capture_sizes=[1, 8])
    assert (candidate.launches, candidate.warmed) == (once, (1, 8))
    check(found, strict=True, capture_sizes=[1, 2, 4, 8], is_v2=True, drafts=2)
    assert candidate.warmed == (1, 2, 3, 4, 6, 8), "full graphs of one row a request (a draft's), and of three"
    assert kernels(found) == ["triton", "triton"]
    assert levels(said) == []


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (Candidate(wrong), "q nope"),
        (Candidate(lambda inputs: reference.prepare(inputs) * (-1 if inputs.is_neox else 1)), "q nope"),
        (Candidate(raising(torch.OutOfMemoryError("HIP out of memory"))), "HIP out of memory"),
        (Candidate(warms=raising(RuntimeError("out of shared memory"))), "out of shared memory"),
    ],
    ids=["wrong", "wrong for NeoX", "raises", "does not warm up"],
)
def test_a_kernel_that_fails_its_check_runs_no_layer_and_stops_strict_mode(monkeypatch, said, candidate, why):
    found = two(candidate, monkeypatch)
    with pytest.raises(SettingsError, match="strict=true") as raised:
        check(found, strict=True, capture_sizes=[1])
    assert why in str(raised.value)
    found = two(candidate, monkeypatch)
    check(found, strict=False, capture_sizes=[1])
    assert kernels(found) == [None, None]
    assert not runs_the_candidate(found[1], candidate)
    (line,) = [text for level, text in said if level == logging.ERROR]
    assert why in line


def fp8_weight():
    """The second layer of a checkpoint that leaves the first one's ``kv_b_proj`` in 16 bits."""
    module = layer_of()
    made = absorb.make(module.W_UK_T, ("fp8", torch.float8_e4m3fn))
    module.is_aiter_triton_fp8_bmm_enabled, (module.W_K, module.W_K_scale) = True, (held for _, held in made.tensors)
    return module


OTHERS = {
    "heads": (lambda: StubLayer(NAME, Sizes(n=3), torch.bfloat16), lambda inputs: inputs.num_heads == 3),
    "widths": (lambda: StubLayer(NAME, Sizes(p=4), torch.bfloat16), lambda inputs: inputs.nope_dim == 4),
    "cache": (lambda: layer_of("fp8"), lambda inputs: is_fp8(inputs.kv_cache.dtype)),
    "weight": (fp8_weight, lambda inputs: inputs.weight.format == "fp8"),
}
"""A layer of another shape than ``layer_of``, and how its calls differ."""


@pytest.mark.parametrize("what", OTHERS)
def test_a_kernel_that_is_wrong_for_one_shape_runs_the_layers_of_the_other(monkeypatch, said, what):
    other, is_its = OTHERS[what]
    candidate = Candidate(lambda inputs: (wrong if is_its(inputs) else reference.prepare)(inputs))
    found = two(candidate, monkeypatch, other=other())
    found[0].module._vllm_config.model_config.dtype = torch.bfloat16
    check(found, strict=False)
    assert kernels(found) == ["triton", None]
    assert "self-check FAILED" in found[1].why_skipped().message


@pytest.mark.mutation
@pytest.mark.parametrize("what", OTHERS)
def test_mutation_a_check_that_stands_for_every_shape_is_caught(monkeypatch, said, what):
    monkeypatch.setattr(LayerShape, "__eq__", lambda *_: True)
    monkeypatch.setattr(LayerShape, "__hash__", lambda _: 0)
    with pytest.raises(AssertionError, match=r"\['triton', 'triton'\] == \['triton', None\]"):
        test_a_kernel_that_is_wrong_for_one_shape_runs_the_layers_of_the_other(monkeypatch, said, what)


def test_i15_two_engines_in_one_process_decide_apart(monkeypatch, said):
    """The first engine's kernel fails its check; the second one's, with the same options and shapes, runs."""
    candidate = Candidate(wrong)
    first = two(candidate, monkeypatch)
    check(first, strict=False)
    candidate.does = reference.prepare
    second = two(candidate, monkeypatch)
    check(second, strict=False)
    assert (kernels(first), kernels(second)) == ([None, None], ["triton", "triton"])
    assert runs_the_candidate(second[0], candidate)
    assert not runs_the_candidate(first[0], candidate)


@pytest.mark.mutation("I15")
def test_mutation_i15_a_failed_check_that_the_back_ends_keep_is_caught(monkeypatch, said):
    shared = {}
    checked = Layer.checked

    def sharing(layer, checks, shape):
        shared.update({name: check for name, check in checks.items() if check.failed})
        checked(layer, checks | shared, shape)

    monkeypatch.setattr(Layer, "checked", sharing)
    with pytest.raises(AssertionError, match=r"\[None, None\] != \['triton', 'triton'\]"):
        test_i15_two_engines_in_one_process_decide_apart(monkeypatch, said)


def test_layers_whose_kernels_raise_alike_say_so_once(monkeypatch, said):
    for layer in two(Candidate(), monkeypatch):
        layer.fail(RuntimeError("HIP error"))
        assert layer.why_skipped().code == "kernel_failed"
    (line,) = [text for level, text in said if level == logging.ERROR]
    assert "HIP error" in line


def test_a_layer_without_a_check_runs_no_kernel_that_needs_one(monkeypatch, said):
    """A compiled artifact may hold the op in a process whose start-up hook never ran."""
    candidate = Candidate()
    checked, unchecked = two(candidate, monkeypatch)
    assert not runs_the_candidate(checked, candidate)
    check([checked], strict=True)
    assert runs_the_candidate(checked, candidate)
    assert not runs_the_candidate(unchecked, candidate)
    assert isinstance(unchecked.why_skipped(), Skip)
    assert [text for text in said.at(logging.ERROR) if text.endswith(f": {unchecked.why_skipped()}")]
    assert unchecked.ran_kernel == ""


@pytest.mark.parametrize(
    "spoilt",
    [
        {"is_aiter_triton_fp4_bmm_enabled": True, "W_UK_T": torch.zeros(2, 8, 32, dtype=torch.uint8)},
        {"num_heads": None},
    ],
    ids=["not admitted", "not readable"],
)
def test_a_layer_that_cannot_be_checked_hides_no_other(monkeypatch, said, spoilt):
    found = two(Candidate(wrong), monkeypatch, **spoilt)
    check(found, strict=False)
    assert all(isinstance(layer.why_skipped(), Skip) for layer in found)
    assert "self-check FAILED" in found[1].why_skipped().message, "the other one was checked"


def test_a_layer_that_was_not_admitted_at_the_check_stays_unchecked(monkeypatch, said):
    found = two(Candidate(), monkeypatch, sliding_window=128)
    check(found, strict=True)
    found[0].module.sliding_window = None
    assert kernels(found) == [None, "triton"]


@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "needs no check"])
def test_a_kernel_that_raises_while_serving_takes_the_layer_off_the_fast_path(monkeypatch, said, trusted):
    candidate = Candidate()
    candidate.trusted = trusted
    found = two(candidate, monkeypatch)
    check(found, strict=True)
    found[0].fail(RuntimeError("planted"))
    assert [runs_the_candidate(layer, candidate) for layer in found] == [False, True]
    assert trusted or kernels(found) == [None, "triton"]
    assert levels(said) == [logging.ERROR]


@pytest.mark.parametrize("limit", [4, 16])
def test_each_check_and_warm_up_stays_within_the_decode_limit(monkeypatch, said, limit):
    seen = []
    candidate = Candidate(lambda inputs: (seen.append(inputs.num_tokens), reference.prepare(inputs))[1])
    candidate.tried_counts = lambda inputs: (9,)
    candidate.kernel_of = lambda inputs: f"{inputs.num_tokens}"
    candidate.warm_up = lambda inputs, sizes: warmed.add((inputs.num_tokens, hasattr(inputs.kv_cache, "ptr_range")))
    candidate.caches, warmed = (False, True), set()
    check(two(candidate, monkeypatch, limit), strict=True, capture_sizes=(1,))
    assert max(seen) == max(7, min(limit, 9)), "seven rows whatever the limit"
    assert warmed == {(1, False), (1, True)}


def test_what_became_of_a_layer_has_its_decision_and_no_refusal_once_it_has_run(monkeypatch, said):
    (layer, _), (failed, _) = two(Candidate(), monkeypatch), two(Candidate(wrong), monkeypatch)
    check([failed], strict=False)
    assert failed.state() == (failed.decision, "", (), failed.decision.skip)
    monkeypatch.setitem(backends.FACTORIES, "triton", lambda platform, settings: Candidate())
    check([layer], strict=True)
    refused = replace(synthetic_inputs(layer.shape()), slot_mapping=torch.zeros(7, dtype=torch.int32))
    assert layer.kernel(refused) is None
    assert layer.state().skip is not None, "no batch has run it, and this is why"
    layer.ran_kernel = "triton"
    found = layer.state()
    assert (found.ran_kernel, found.skip, found.decision) == ("triton", None, layer.decision)


def test_a_graph_in_another_dtype_than_the_checked_one_is_left_to_vllm():
    skip = Layer.of(layer_of()).why_skipped(act=torch.float16)
    assert skip.code == "activation_dtype"


def test_a_missing_product_does_not_matter_to_a_kernel_that_does_not_call_it(monkeypatch):
    module = fp8_weight()
    module._vllm_config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(absorb, "GEMMS", {})
    assert Layer.of(module).decision.our_first_kernel == "reference"


def test_the_cache_key_tells_a_usable_kernel_from_one_that_is_missing_or_failed(monkeypatch, said):
    """A graph that was left alone because a kernel was missing must not be loaded once the kernel is there."""
    keys = []
    for candidate in (Candidate(), Candidate(), "not installed", Candidate(wrong)):
        made = check(two(candidate, monkeypatch), strict=False)
        keys.append(made.cache_key())
    usable, again, absent, failed = keys
    assert usable == again
    assert len(usable) == 1, "one line a shape"
    assert "device='cpu'" in usable[0]
    assert "kernel_" in absent[0]
    assert "not installed" not in absent[0], "what a message says may differ at every start"
    assert usable not in (absent, failed)


@both_modes
def test_fail_closed_a_key_that_cannot_be_asked_for(monkeypatch, said, strict):
    found = two(Candidate(), monkeypatch)
    made = check(found, strict=strict)
    with monkeypatch.context() as patching:
        patching.setattr(Layer, "shape", raising(KeyError("planted")))
        with stops(strict, "planted"):
            assert made.cache_key() == ("layers.0: kernel_shape", "layers.1: kernel_shape")
    assert strict or kernels(found) == [None, None]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_cache_that_vllm_throws_away_is_not_kept_alive(cache):
    layer = Layer.of(layer_of(cache))
    thrown = layer.module.kv_cache.clone()
    view = layer.cache_view(thrown)
    assert (view is thrown) == (cache == "auto")
    assert layer.cache_view(thrown) is view, "made once per cache"
    gone = weakref.ref(view)
    del thrown, view
    assert gone() is None


def test_a_layer_reached_without_a_batch_says_what_would_run_it_in_that_dtype(monkeypatch, said):
    layer, _ = two(Candidate(), monkeypatch)
    check([layer], strict=True)
    for dtype, kernels_ in ((torch.bfloat16, ("triton",)), (torch.float16, ())):
        layer.reached(dtype)
        assert layer.possible_kernels == kernels_


def test_the_shape_is_a_key_without_the_block_size():
    small, large = layer_of(), layer_of()
    large._vllm_config.cache_config.block_size = 2 * BLOCK_SIZE
    shapes = [Layer.of(module).shape() for module in (small, large)]
    assert shapes[0] == shapes[1]
    assert [shape.block_size for shape in shapes] == [BLOCK_SIZE, 2 * BLOCK_SIZE]


def test_what_is_checked_has_the_blocks_that_vllm_sets_once_the_model_is_loaded(monkeypatch, said):
    """Its executor asks the platform behind ``load_model``, and pages of a hybrid model need larger blocks."""

    def larger(config):
        config.cache_config.block_size *= 4

    for asked, size in ((larger, 4 * BLOCK_SIZE), (raising(KeyError("planted")), BLOCK_SIZE)):
        monkeypatch.setattr(type(current_platform), "update_block_size_for_backend", staticmethod(asked))
        one = Worker(ours(), kernel="triton")
        one.engine.make_layers()
        assert [layer.shape().block_size for layer in one.engine.layers] == [size]
        assert one.vllm_config.cache_config.block_size == BLOCK_SIZE, "vLLM's own config is as it was"
    assert [text for level, text in said if "block size" in text] != []


class Without:
    """An object that lacks one attribute, given by its path."""

    def __init__(self, whole, path):
        self._whole, (self._name, _, self._rest) = whole, path.partition(".")

    def __getattr__(self, name):
        if name != self._name:
            return getattr(self._whole, name)
        if not self._rest:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), self._rest)


@pytest.mark.parametrize("name", compat_layer.ATTRIBUTES)
def test_a_layer_without_a_required_attribute_is_skipped_by_its_name(name):
    """The engine tests show that the installed vLLM has them all: a layer that lacks one is not engaged."""
    skip, *_ = layer_skips(compat_layer.layer_view(Without(layer_of(), name)))
    assert (skip.code, skip.message.rpartition(" lacks ")[2]) == ("capability", name)


@pytest.mark.mutation
def test_mutation_a_layer_that_is_not_looked_at_is_not_taken_for_a_neutral_one(monkeypatch):
    monkeypatch.setattr(compat_layer, "ATTRIBUTES", ())
    with pytest.raises(AttributeError, match="use_pcp"):
        compat_layer.layer_view(Without(layer_of(), "use_pcp"))
