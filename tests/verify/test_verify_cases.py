"""The cases: what is right passes all of them, on every kind of back end that runs here."""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.sandbox.simulated_aiter import ROCM, install
from tests.support.planted import raising
from tests.support.simulated_aiter import fate
from tests.verify.faults import Changed
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import EXACT, OWN_BMM
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.verify import cases, runner, session
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.layer import Buffers
from vllm_aiter_mla.verify.oracles import ORACLES

LIMIT = 12
NAMES = [case.name for case in cases.cases(LIMIT)]


SLOW = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("bf16", "fp8-weight")]
# The first card's rehearsal and that of ``check`` pass the cases of every variant, too.
WIDE = [pytest.param(variant, marks=[pytest.mark.slow, pytest.mark.wide]) for variant in ("fp8-cache", "fp8-other")]


@pytest.mark.parametrize("variant", ["fp8", *SLOW, *WIDE])
def test_the_reference_passes_every_case(run, backend, variant):
    for name in NAMES:
        result = run(name, backend, variant)
        assert result.status == "passed", (name, result.findings)
        assert result.captures > 0, name
        assert result.checks > 0 or name.startswith("kernel-status"), name


def interpret():
    """Let this process run Triton's kernels on a CPU; Triton must know before it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.sandbox import interpreter

    interpreter.install()
    interpreter.record_launches()
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_interpreted_kernel_passes_with_one_launch():
    pytest.importorskip("triton")
    names = ["fresh-data", "scales-changed", "rows-grow-and-shrink", "kernel-status", "mixed-batch-piecewise"]
    names += ["both-ends-3-drafts", "shared-pool", "larger-than-captured", "padding-is-nan", "padding-is-huge"]
    by_name = {case.name: case for case in cases.cases(8)}
    kinds = {kind.name: kind for kind in cases.variants(False, torch.float8_e4m3fn, quick=False)}
    with ProcessPoolExecutor(1, get_context("spawn"), interpret) as interpreting:
        for variant, name in product(("fp8", "fp8-weight"), names):
            item = cases.Item("triton", by_name[name], kinds[variant], cases.SMALL, 8, soak=8)
            result = interpreting.submit(session.run, item, EagerEngine()).result()
            assert (result.status, result.findings) == ("passed", []), (name, variant)
            assert result.launches["8"].endswith("1 x decode_prep_kernel") == (by_name[name].kind == "kernel")


class OverCodes(ReferenceBackend):
    """A back end whose product over fp8 codes is ``off`` by a share: its own, as AITER's, or inside its launch."""

    name = "over codes"

    def __init__(self, off, inside):
        super().__init__()
        self.off, self.inside, self.bounds = off, inside, OWN_BMM if inside else EXACT

    def multiplied(self, inputs):
        right = inputs.weight.reference(inputs.q_nope)
        return (right.float() * (1 + self.off)).to(right.dtype)

    def absorbed(self, inputs):
        return None if self.inside else self.multiplied(inputs)

    def bind(self, inputs):
        bound = super().bind(inputs)
        return replace(bound, run=lambda given: reference.prepare(given, reference.AITER, self.multiplied(given)))


@pytest.mark.mutation
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("off", "found"), [(0.003, set()), (0.05, {"query-nope"})])
def test_mutation_a_product_over_codes_that_is_off_is_caught_by_its_norm(broken, inside, off, found):
    """A wrong scale is caught; another order of the sums is no fault."""
    assert broken("fresh-data", OverCodes(off, inside), variant="fp8-weight") == found


# The widths that AITER's op is written for; its faster kernel takes four heads or more.
AITERS = cases.Geometry(heads=4, nope=16, rope=64, latent=512, v=16, block_size=8, blocks=3, max_position=509)


def failed_over_the_simulated_aiter():
    """Cases that do not pass at AITER's widths."""
    fnuz, bf16, failed = torch.float8_e4m3fnuz, torch.bfloat16, []
    # The simulated op is Python, so its launches say nothing about AITER's.
    every = [case for case in cases.cases(8) if case.name != "kernel-status"]
    quick = [case for case in every if case.quick or case.name == "both-ends-3-drafts"]
    with install("gfx942"):
        for case, kinds in product(quick, ((fnuz, fnuz), (bf16, bf16), (fnuz, fnuz, False, ("fp8", fnuz)))):
            backend = Backends(Settings(), Platform("gfx942", (7, 0))).get("aiter")
            item = cases.Item("aiter", case, cases.Variant("here", *kinds), AITERS, 8, soak=8)
            result = runner.run_case(item, backend, EagerEngine())
            # AITER's op turns an fp8 overflow into NaN, as its back end says.
            if result.status != "passed" or result.writes_nan != (case.name == "fp8-overflow" and kinds[0] is fnuz):
                failed.append((case.name, kinds, result.reason, result.findings, result.writes_nan))
    return failed


@pytest.mark.slow
def test_the_aiter_back_end_passes_over_the_simulated_aiter():
    """In a process of its own: the simulated AITER ends the process where AITER would."""
    pytest.importorskip("vllm")  # it calls AITER's products
    assert fate(failed_over_the_simulated_aiter) == "[]"


def test_a_seed_gives_the_same_data_alone_and_among_others(run, backend):
    alone = asdict(run("fresh-data", backend, seed=3)) | {"seconds": 0}
    run("other-slots", backend, seed=3)
    assert asdict(run("fresh-data", backend, seed=3)) | {"seconds": 0} == alone


@pytest.mark.parametrize("limit", [8, 9, 12, 64, 1000, 1024, 8192])
@pytest.mark.parametrize("quick", [True, False])
def test_each_run_calls_a_kernel_with_odd_sizes_and_at_both_sides_of_the_limit(limit, quick):
    every = [case for case in cases.cases(limit) if case.quick or not quick]
    called = {size for case in every if case.kind == "kernel" for size in case.sizes}
    assert called >= {1, 3, limit // 2 | 1, limit - 1, limit}
    assert limit + 1 in {step.size for case in every for step in case.steps if isinstance(step, cases.Eager)}
    assert len(called) < 20 if quick else called >= {*cases.capture_sizes(limit)}


def test_sizes_with_drafts_are_whole_requests_from_one_to_the_limit():
    assert cases.chosen_sizes(1024) == (1, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1023, 1024)
    assert cases.chosen_sizes(12, width=4) == (4, 8, 12)


def test_a_limit_too_small_for_the_cases_is_an_error():
    with pytest.raises(ValueError, match="--limit 4"):
        cases.cases(4)


@pytest.mark.parametrize("limit", [8, 9, 12, 16, 33])
def test_every_case_has_a_name_of_its_own_and_replays_only_what_it_captured(limit):
    every = cases.cases(limit)
    assert len({case.name for case in every}) == len(every)
    for case in every:
        for step in case.steps:
            if isinstance(step, cases.Replay) and not isinstance(step, cases.Eager):
                assert step.size in case.sizes, (case.name, step)


@pytest.mark.mutation
def test_mutation_a_kernel_that_reads_a_plain_weight_along_l_only_is_caught_by_the_other_layout(broken):
    def along_l(run, inputs):
        values = inputs.weight.values
        if values.stride(-1) == 1:
            return run(inputs)
        swapped = values.transpose(1, 2).reshape(values.shape)
        return run(replace(inputs, weight=replace(inputs.weight, values=swapped)))

    assert broken("fresh-data", Changed(along_l), variant="bf16") == {"query-nope"}
    assert broken("fresh-data", Changed(along_l)) == set()


# As a model has them: padded heads, with ours between others or first, and blocks of one token.
SIZES = [
    {"out_heads": 8},
    {"heads": 3, "out_heads": 8},
    {"block_size": 1, "blocks": 24},
    {"block_size": 64, "blocks": 1},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_reference_passes_at_the_sizes_of_a_model(run, backend, sizes):
    for name in ("fresh-data", "both-ends-3-drafts", "mixed-batch-piecewise", "padding-is-nan"):
        assert run(name, backend, sizes=sizes).findings == [], name


def without_the_others(right, inputs):
    return inputs.real_heads(right(inputs)).contiguous()


def heads_first(right, inputs):
    """Our heads are the first ones, where vLLM looks for every fourth one."""
    query = right(inputs)
    heads = without_the_others(right, inputs).view(torch.uint8)
    query.view(torch.uint8).zero_()[:, : inputs.num_heads] = heads
    return query


@pytest.mark.mutation
@pytest.mark.parametrize(("change", "found"), [
    (without_the_others, set()), (heads_first, {"query-nope", "query-rope"}),
])  # fmt: skip
def test_mutation_a_query_with_its_heads_in_other_places_is_caught(broken, change, found):
    """A query without room for the padded heads is right, too: vLLM pads it."""
    assert broken("full-graph-decode", Changed(change), sizes={"out_heads": 8}) == found


def test_float16_activations_pass_and_no_value_is_beyond_their_range(backend):
    limit, names = 8, ("fresh-data", "fp8-overflow", "full-graph-decode", "padding-is-huge")
    kinds = cases.variants(False, torch.float8_e4m3fn, quick=True, act=torch.float16)
    assert [kind.name for kind in kinds] == ["fp8", "bf16"], "as the command line names them, whatever the model"
    assert kinds[1].cache == torch.float16
    by_name = {case.name: case for case in cases.cases(limit, torch.float16)}
    for name, kind in product(names, kinds):
        item = cases.Item("reference", by_name[name], kind, cases.SMALL, limit)
        made = Buffers(item, "cpu")
        assert {made.layers[0].source.q.dtype, made.layers[0].table.dtype, made.layers[0].w_uv.dtype} == {torch.float16}
        result = runner.run_case(item, backend, EagerEngine())
        assert (result.status, result.findings) == ("passed", []), (name, kind.name)


def test_a_back_end_that_declines_is_skipped_with_its_reason(run):
    class Declining(ReferenceBackend):
        def bind(self, inputs):
            return "too small for me"

    result = run("fresh-data", Declining())
    assert result.status == "skipped"
    assert "too small for me" in result.reason


@pytest.mark.parametrize(
    ("limit", "name", "status"),
    [(300, "fresh-data", "passed"), (300, "scales-changed", "skipped"), (300, "rows-grow-and-shrink", "skipped"),
     (512, "piecewise-decode", "skipped")],
)  # fmt: skip
def test_a_case_is_skipped_if_it_calls_the_kernel_with_rows_that_are_declined(fake_gfx942, limit, name, status):
    """AITER's opt kernel takes a bf16 cache from 256 tokens on, and so each size that these cases capture.

    The declined rows are those of a batch without a graph, or the real rows of a piece.
    """
    (case,) = (case for case in cases.cases(limit) if case.name == name)
    assert min(case.sizes) >= 256
    bf16 = cases.variants(False, torch.float8_e4m3fnuz, quick=True)[1]
    backend = AiterBackend(Platform("gfx942", ROCM), opt=True)
    result = runner.run_case(cases.Item("aiter-opt", case, bf16, AITERS, limit), backend, EagerEngine())
    assert (result.status, result.findings) == (status, [])
    assert ("aiter-opt declines T=1" in result.reason) == (status == "skipped"), result.reason


def test_a_back_end_that_raises_is_a_failure_and_no_crash(run):
    (finding,) = run("fresh-data", Changed(raising(ZeroDivisionError("in the kernel")))).findings
    assert finding.oracle == "runs"
    assert "in the kernel" in finding.message


def test_docs_say_how_to_read_every_oracle():
    page = (Path(__file__).parents[2] / "vllm_aiter_mla" / "verify" / "README.md").read_text()
    assert [name for name in ORACLES if f"| `{name}` |" not in page] == []


@pytest.mark.slow
def test_verify_never_imports_vllm():
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from vllm_aiter_mla.commands.check import kernels\n"
        "from vllm_aiter_mla.verify import session, pytest_plugin\n"
        "found = session.Session(backend=('reference',), case=('fresh-data',), variant=('fp8',))\n"
        "list(found.run())\n"
        "print(found.status, [name for name in sys.modules if name.startswith('vllm.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split(maxsplit=1) == ["0", "[]\n"], done.stderr[-2000:]


def test_the_layer_rotates_and_writes_as_vllm_does():
    variant = cases.variants(False, torch.float8_e4m3fn, quick=True)[1]
    buffers = Buffers(cases.Item("reference", cases.cases(8)[0], variant, cases.SMALL, 8), "cpu")
    (layer,) = buffers.layers
    buffers.positions.fill_(7)
    slots = torch.tensor([3, -1, 9])
    (q, k_pe, kv_c), cache = (rows[:3].clone() for rows in layer.source), layer.kv_cache.clone().flatten(0, 1)
    q_pe, before = q[..., cases.SMALL.nope :], layer.source
    rope = layer.rope(buffers.positions[:3])
    k_rotated = layer.rotate(q_pe, k_pe.unsqueeze(1), rope)
    layer.write(kv_c, k_rotated, slots, None, rope)
    assert all(bool((k_rotated[i] != before.k_pe[i]).any()) for i in range(3))
    assert all(bool((q_pe[i] != before.q[i, :, cases.SMALL.nope :]).any()) for i in range(3))
    changed = (layer.kv_cache.flatten(0, 1) != cache).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(layer.kv_cache.flatten(0, 1)[[3, 9]], torch.cat([kv_c, k_rotated[:, 0]], dim=-1)[[0, 2]])
    with pytest.raises(AssertionError, match="one slot per row"):
        layer.write(kv_c, k_rotated, slots[:2], None, rope)
