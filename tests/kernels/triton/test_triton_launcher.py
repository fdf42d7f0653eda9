"""The launch past Triton's dispatch: it gives a compiled kernel what the dispatch would, and only that kernel's calls.

Triton's own dispatch and compiler run, for a card that is not there; what would go to HIP is recorded.
"""

import importlib.util
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from tests.support.triton_cases import Case, build

pytest.importorskip("triton")

from tools import aot, triton_driver
from vllm_aiter_mla.kernels.triton import launcher, tiles

GFX950 = aot.TARGETS["gfx950"]


class Launcher:
    """Stands in for the launcher of one compiled kernel, and notes its launches."""

    made: ClassVar[list["Launcher"]] = []

    def __init__(self, src, metadata):
        self.launches = []
        Launcher.made.append(self)

    def __call__(self, *given):
        addresses = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given[9:]]
        self.launches.append((given[:6], given[7:9], addresses))


@pytest.fixture
def on_card(monkeypatch):
    monkeypatch.setattr(Launcher, "made", [])
    with triton_driver.installed(GFX950, lambda *given: None, Launcher):
        yield Launcher.made


def operands(**changes):
    return build(Case(**{"heads": 4, "cache": "float8_e4m3fn"} | changes))[0]


def launch_of(inputs):
    return launcher.Launch(inputs, tiles.tile_for("gfx950", inputs.num_tokens, inputs.num_heads))


def misaligned(tensor):
    """The values at an address that is no multiple of 16."""
    odd = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return odd.view(tensor.shape).copy_(tensor)


def of_two_gib(tensor):
    """A view of the cache that says of itself what one in 2 GiB would."""
    view = tensor[:]
    view.ptr_range = lambda: 1 << 31
    return view


CASES = [{}, {"heads": 8, "out_heads": 16}, {"weight": "float8_e4m3fn", "w_major": "P"}, {"weight": "mxfp4"}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_launch_past_the_dispatch_gives_what_the_dispatch_gives(on_card, case):
    inputs = operands(**case)
    run = launch_of(inputs)
    outs = [run(inputs), run(inputs)]
    (kernel,) = on_card
    dispatched, direct = kernel.launches
    at = inputs_of_kernel("out_ptr")
    assert [given[2][at] for given in (dispatched, direct)] == [out.data_ptr() for out in outs]
    for given in (dispatched, direct):
        given[2][at] = None
    assert direct == dispatched


def inputs_of_kernel(name):
    return launcher.decode_prep_kernel.arg_names.index(name)


def test_triton_launch_past_the_dispatch_takes_the_operands_of_its_own_call(on_card):
    first = operands(weight="float8_e4m3fn", w_major="P")
    second = operands(weight="float8_e4m3fn", w_major="P", seed=1)
    second = replace(second, weight=first.weight)
    run = launch_of(first)
    run(first), run(second)
    (kernel,) = on_card
    given = kernel.launches[1][2]
    for name in ("q", "k_pe", "kv_c", "q_scale", "k_scale"):
        assert given[inputs_of_kernel(f"{name}_ptr")] == getattr(second, name).data_ptr(), name
    for name, tensor in (("slot", second.slot_mapping), ("pos", second.positions), ("cos_sin", second.cos_sin_cache)):
        assert given[inputs_of_kernel(f"{name}_ptr")] == tensor.data_ptr(), name
    assert given[inputs_of_kernel("cache_ptr")] == second.kv_cache.data_ptr()


OTHERS = {
    "q": lambda x: replace(x, q=misaligned(x.q.contiguous())),
    "cos_sin_cache": lambda x: replace(x, cos_sin_cache=misaligned(x.cos_sin_cache)),
    "kv_cache": lambda x: replace(x, kv_cache=of_two_gib(x.kv_cache)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_triton_operand_that_needs_another_variant_gets_it(on_card, name):
    inputs = replace(operands(), q=operands().q.contiguous())
    run, other = launch_of(inputs), OTHERS[name](inputs)
    for given in (inputs, other, inputs, other):
        run(given)
    assert [len(kernel.launches) for kernel in on_card] == [2, 2]


@pytest.mark.mutation
@pytest.mark.parametrize("name", OTHERS)
def test_triton_mutation_launch_that_does_not_look_at_an_operand_uses_the_wrong_variant(on_card, monkeypatch, name):
    monkeypatch.setattr(launcher, "SPECIALISED", ())
    monkeypatch.setattr(launcher, "_reach", lambda tensor: 0)
    inputs = replace(operands(), q=operands().q.contiguous())
    run = launch_of(inputs)
    run(inputs), run(OTHERS[name](inputs))
    assert [len(kernel.launches) for kernel in on_card] == [2]


def dispatches(monkeypatch):
    counted, run = [], type(launcher.decode_prep_kernel).run
    monkeypatch.setattr(type(launcher.decode_prep_kernel), "run", lambda *a, **k: counted.append(1) or run(*a, **k))
    return counted


def test_triton_second_launch_of_a_variant_skips_the_dispatch(on_card, monkeypatch):
    inputs, counted = operands(), dispatches(monkeypatch)
    run = launch_of(inputs)
    run(inputs), run(inputs), run(inputs)
    assert len(counted) == 1
    assert len(on_card[0].launches) == 3


@pytest.mark.parametrize("what", ["release", "device"])
def test_triton_launch_goes_through_the_dispatch_where_its_own_launcher_is_not_known(on_card, monkeypatch, what):
    inputs, counted = operands(), dispatches(monkeypatch)
    run = launch_of(inputs)
    if what == "release":
        monkeypatch.setattr(launcher.triton, "__version__", "4.0.0")
        run(inputs)
    else:
        run(inputs)
        run._compiled = {key: moved(direct) for key, direct in run._compiled.items()}
    run(inputs)
    assert len(counted) == 2
    assert len(on_card[0].launches) == 2


def test_triton_release_without_the_parts_of_a_direct_launch_keeps_the_kernel(monkeypatch):
    """The back end takes a module that cannot be imported for no Triton at all."""
    spec = importlib.util.spec_from_file_location("launcher_of_another_release", launcher.__file__)
    other = importlib.util.module_from_spec(spec)
    monkeypatch.delattr(launcher.triton, "knobs")
    monkeypatch.delattr(sys.modules["triton.compiler"], "CompiledKernel")
    monkeypatch.setattr(launcher.triton, "__version__", "4.0.0")
    spec.loader.exec_module(other)
    assert other.Direct.of(object(), 1, ()) is None


def moved(direct):
    """A launcher of a kernel that was loaded to another device."""
    direct._device = 1
    return direct


def test_triton_hooks_of_a_profiler_see_each_launch(on_card, monkeypatch):
    inputs = operands()
    run = launch_of(inputs)
    run(inputs), run(inputs)
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    assert [given[1] for given in on_card[0].launches] == [hooks, hooks]
