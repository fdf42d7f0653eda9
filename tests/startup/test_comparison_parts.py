"""Each part of the start-up self-check: a table of planted kernels against the parts that notice them, without a hole.

Each plant is wrong in one place only. Switching off a part of the check hides the plants of its column, and no other.
"""

from dataclasses import dataclass, replace
from sys import maxsize

import pytest
import torch

from tests.sandbox.simulated_aiter import ROCM, install, op
from tests.support import worker
from tests.support.made_up_clock import Named
from tests.support.opcalls import layer_of
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.triton import launcher
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import checks, comparison

FP8 = torch.float8_e4m3fn
SHAPE = LayerShape(4, 16, FP8, FP8, 16, False, latent=128, rope=8)
ONE, MANY = 1, 41  # rows up to and from which the planted back end runs its other kernels


def flip(part):
    """Change the fourth lowest bit of each byte of a part, in place: eight steps or more, and never into NaN."""
    part.view(torch.uint8).bitwise_xor_(8)


def rows(inputs):
    return inputs.kv_cache.flatten(0, 1)


def storage(inputs):
    return bytes_of(inputs.kv_cache)


def bytes_of(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def free_slots(inputs):
    return [slot for slot in range(rows(inputs).shape[0]) if slot not in inputs.slot_mapping]


def overflows_to_nan(part):
    """Write e4m3's NaN where the largest value stands, in place; indexing is not implemented for fp8 itself."""
    stored = part.view(torch.uint8)
    stored[stored & 0x7F == 0x7E] = 0x7F


def is_large(inputs):
    return launcher._reach(inputs.kv_cache) >= 1 << 31


def written(inputs):
    return inputs.slot_mapping[inputs.slot_mapping >= 0]


def last_row(inputs):
    """The last KV row that was written, a view."""
    return rows(inputs)[int(written(inputs)[-1])]


def nope(inputs, tensor):
    return tensor[..., : inputs.latent_dim]


def rope(inputs, tensor):
    return tensor[..., inputs.latent_dim :]


@dataclass(frozen=True)
class Plant:
    """What is wrong, and the parts of the check without any one of which nobody would notice."""

    change: object  # takes the operands and the result, after the reference has run
    hidden_by: frozenset
    when: object = lambda inputs: True


def plant(change, *hidden_by, when=lambda inputs: True):
    return Plant(change, frozenset(hidden_by), when)


def has_rows(inputs):
    return bool(written(inputs).numel())


PLANTS = {
    "q nope": plant(lambda i, q: flip(nope(i, q)), "q nope"),
    "q rope": plant(lambda i, q: flip(rope(i, q)), "q rope"),
    "kv nope": plant(lambda i, q: flip(nope(i, last_row(i))), "kv nope", when=has_rows),
    "kv rope": plant(lambda i, q: flip(rope(i, last_row(i))), "kv rope", when=has_rows),
    "one head": plant(lambda i, q: flip(nope(i, q[:, 1])), "q nope"),
    "one block of the latent": plant(lambda i, q: flip(nope(i, q)[..., -8:]), "q nope"),
    "the last token": plant(lambda i, q: flip(nope(i, q[-1])), "q nope"),
    "one element of a KV row": plant(lambda i, q: flip(last_row(i)[5:6]), "kv nope", when=has_rows),
    "a byte before the cache": plant(lambda i, q: flip(storage(i)[:1]), "stray bytes"),
    "a byte behind the cache": plant(lambda i, q: flip(storage(i)[-1:]), "stray bytes"),
    "a byte before the query": plant(lambda i, q: flip(bytes_of(q)[:1]), "stray bytes"),
    "a byte behind the query": plant(lambda i, q: flip(bytes_of(q)[-1:]), "stray bytes"),
    "a byte between rows": plant(lambda i, q: flip(rows(i)[free_slots(i)[0], 3:4]), "stray bytes"),
    "a byte after the rows": plant(lambda i, q: flip(rows(i)[free_slots(i)[-1], -1:]), "stray bytes"),
    "the row of slot -1": plant(lambda i, q: flip(storage(i).view(-1, i.kv_cache.shape[-1])[i.kv_cache.shape[1] - 1]),
                                "stray bytes", when=lambda i: -1 in i.slot_mapping),
    "a second row for each slot": plant(lambda i, q: flip(rows(i)[free_slots(i)[0]]), "stray bytes", when=has_rows),
    "GPT-J": plant(lambda i, q: flip(rope(i, q)), "q rope", "GPT-J", when=lambda i: not i.is_neox),
    "NeoX": plant(lambda i, q: flip(rope(i, q)), "q rope", "NeoX", when=lambda i: i.is_neox),
    "caches above 2 GiB": plant(lambda i, q: flip(nope(i, q)), "q nope", "large", when=is_large),
    "caches below 2 GiB": plant(lambda i, q: flip(nope(i, q)), "q nope", "small", when=lambda i: not is_large(i)),
    "the kernel of many rows": plant(lambda i, q: flip(nope(i, q)), "q nope", "each kernel",
                                     when=lambda i: i.num_tokens >= MANY),
    "the KV row of the kernel of one row": plant(lambda i, q: flip(nope(i, last_row(i))), "kv nope", "each kernel",
                                                 when=lambda i: i.num_tokens == ONE and has_rows(i)),
    "overflow in q": plant(lambda i, q: overflows_to_nan(rope(i, q)), "q rope", "overflow"),
    "overflow in the absorbed q": plant(lambda i, q: overflows_to_nan(nope(i, q)), "q nope", "overflow"),
    "overflow in the KV row": plant(lambda i, q: change_first(i), "kv nope", "overflow", when=has_rows),
}  # fmt: skip


def change_first(inputs):
    """The first row is the one that overflows."""
    slot = int(inputs.slot_mapping[0])
    if slot >= 0:
        overflows_to_nan(nope(inputs, rows(inputs)[slot]))


class Planted(ReferenceBackend):
    """The reference with three kernels and two pointer variants, wrong where the plant says; ``ran`` counts that."""

    name, trusted, caches = "planted", False, (False, True)

    def __init__(self, planted):
        super().__init__(reference.TRITON)
        self.planted, self.ran = planted, 0

    def tried_counts(self, inputs):
        return (ONE, MANY)

    def bind(self, inputs):
        bound = super().bind(inputs)
        kernel = "one" if inputs.num_tokens == ONE else "many" if inputs.num_tokens >= MANY else "few"
        return bound if isinstance(bound, str) else Binding(self._run, kernel, reference.TRITON)

    def _run(self, inputs):
        query = reference.prepare(inputs, reference.TRITON)
        if self.planted.when(inputs):
            self.planted.change(inputs, inputs.real_heads(query))
            self.ran += 1
        return query


def switch_off(monkeypatch, part):
    """Leave one part of the check out."""
    if part in comparison.PARTS:
        # Not by ``delitem``, which puts the part back in the last place.
        monkeypatch.setattr(comparison, "PARTS", {name: of for name, of in comparison.PARTS.items() if name != part})
    elif part == "stray bytes":
        monkeypatch.setattr(comparison, "count_stray_bytes", lambda actual, before: 0)
    elif part in ("GPT-J", "NeoX"):
        monkeypatch.setattr(comparison, "ROTARY_STYLES", (part == "GPT-J",))
    elif part in ("small", "large"):
        monkeypatch.setattr(Planted, "caches", (part == "small",))
    elif part == "each kernel":
        monkeypatch.setattr(Planted, "tried_counts", lambda self, inputs: ())
    else:
        assert part == "overflow"
        monkeypatch.setattr(comparison, "_overflow_first_row", lambda inputs: None)


SWITCHES = (*comparison.PARTS, "stray bytes", "GPT-J", "NeoX", "small", "large", "each kernel", "overflow")


def check(backend):
    return checks.check_kernel("planted", backend, SHAPE, (), maxsize)


def test_comparison_parts_without_a_plant_the_kernel_passes():
    assert check(Planted(plant(lambda i, q: None))).has_passed


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLANTS)
def test_comparison_parts_mutation_each_plant_is_noticed_and_named_by_its_part(name):
    backend = Planted(PLANTS[name])
    found = check(backend)
    assert backend.ran, "the planted bug never ran"
    assert not found.has_passed
    hidden_by = PLANTS[name].hidden_by
    assert found.failed_parts == tuple(part for part in SWITCHES if part in hidden_by and part in SWITCHES[:5])


@pytest.mark.mutation
@pytest.mark.parametrize("part", SWITCHES)
def test_comparison_parts_mutation_a_part_that_is_switched_off_hides_its_plants_and_no_other(monkeypatch, part):
    switch_off(monkeypatch, part)
    hidden = {name for name, planted in PLANTS.items() if check(Planted(planted)).has_passed}
    assert hidden == {name for name, planted in PLANTS.items() if part in planted.hidden_by}
    assert hidden, "a part that no plant needs"


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLANTS)
def test_comparison_parts_mutation_after_each_plant_the_layer_runs_vllms_own_kernels(said, name):
    backend = Planted(PLANTS[name])
    factories = {"triton": lambda card, options: backend, "vllm": lambda card, options: Named("vllm")}
    layer = Layer(layer_of("fp8"), Backends(Settings(enabled=True), Platform("gfx942"), factories))
    worker.check([layer], strict=False)
    assert backend.ran, "the planted bug never ran"
    assert layer.why_skipped().code == "kernel_shape"


@pytest.mark.mutation
@pytest.mark.parametrize("kernel", ["per-head", "opt"])
def test_comparison_parts_mutation_either_kernel_of_aiter_is_noticed(monkeypatch, kernel):
    """Only the KV row is wrong, and only where AITER runs this kernel."""
    with install("gfx942"):
        platform = Platform("gfx942", ROCM)
        backend = AiterBackend(platform)
        shape, ran = LayerShape(4, 16, platform.fp8, platform.fp8, 16, False), []
        inner = AiterBackend._run

        def wrong(self, route, *rest):
            query = inner(self, route, *rest)
            if route.kernel == kernel and has_rows(rest[-1]):
                ran.append(kernel)
                flip(rope(rest[-1], last_row(rest[-1])))
            return query

        monkeypatch.setattr(AiterBackend, "_run", wrong)
        found = checks.check_kernel("aiter", backend, shape, (), maxsize)
        op.forget()
    assert ran
    assert found.failed_parts == ("kv rope",)
    monkeypatch.undo()
    with install("gfx942"):
        assert checks.check_kernel("aiter", AiterBackend(platform), replace(shape), (), maxsize).has_passed
