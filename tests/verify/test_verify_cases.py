"""The cases: what is right passes all of them, on every kind of back end that runs here."""

import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.verify.verify_support import LIMIT, broken
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import EXACT, OWN_BMM
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.verify import cases, interpreted, runner, setting
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.faults import FAULTS
from vllm_aiter_mla.verify.oracles import ORACLES
from vllm_aiter_mla.verify.subject import subject_of

NAMES = [case.name for case in cases.cases(LIMIT) if case.kind != "compiled"]
# Widths that AITER's op is written for; four heads are the fewest that its faster kernel takes.
AITER = setting.Geometry(heads=4, nope=16, rope=64, latent=512, value=16, block_size=8, blocks=3, max_position=509)


WEIGHTS = ("fp8", "fp8-weight")


@pytest.mark.parametrize("variant", ["fp8", "bf16", "fp8-weight", "fp8-cache", "fp8-other"])
def test_the_reference_passes_every_case(run, subject, variant):
    for name in NAMES:
        result = run(name, subject, variant)
        assert result.status == "passed", (name, result.findings)
        assert result.captures > 0, name
        assert result.checks > 0 or name.startswith("kernel-status"), name


def test_the_op_inside_torch_compile_changes_the_buffers_that_it_is_given(run, subject):
    result = run("compiled-by-inductor", subject)
    assert result.status == "passed", result.findings


@pytest.mark.mutation
def test_mutation_the_op_inside_torch_compile_rotates_copies(run, subject):
    (fault,) = (fault for fault in FAULTS if fault.name == "rotates-copies")
    assert "attention-output" in broken(run("compiled-by-inductor", fault.plant(subject)))


def test_the_interpreted_kernel_passes_with_one_launch():
    pytest.importorskip("triton")
    names = {"fresh-data", "scales-changed", "rows-grow-and-shrink", "kernel-status", "mixed-batch-piecewise"}
    some = [case for case in cases.cases(8) if case.name in names]
    kinds = [one for one in setting.variants("cpu", torch.float8_e4m3fn, quick=False) if one.name in WEIGHTS]
    results = list(interpreted.run(some, kinds, runner.Options(setting.SMALL, 8, soak=interpreted.SOAK)))
    assert {(result.case, result.variant) for result in results} == set(product(names, WEIGHTS))
    assert [result for result in results if result.status != "passed"] == []
    assert results[0].launches == {"8": "1 launch: 1 x decode_prep_kernel"}


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

    def prepare(self, inputs):
        return reference.prepare(inputs, reference.AITER, self.multiplied(inputs))


@pytest.mark.mutation
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("off", "found"), [(0.003, set()), (0.05, {"query-nope"})])
def test_mutation_a_product_over_codes_that_is_off_is_caught_by_its_norm(run, inside, off, found):
    """What a wrong scale costs is caught; what the sums' order costs is none."""
    result = run("fresh-data", subject_of(OverCodes(off, inside)), variant="fp8-weight")
    assert broken(result) == found, result.findings


def test_the_aiter_back_end_passes_over_the_fake(tmp_path):
    """In a process of its own: the fake ends the process where AITER would."""
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from test_verify_cases import over_the_fake\n"
        "print(over_the_fake())\n"
    )
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", code, str(here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


def over_the_fake():
    """Cases that AITER's back end fails, with the fake in AITER's place."""
    from tests.sandbox.simulated_aiter import install
    from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
    from vllm_aiter_mla.kernels.platform import Platform

    torch.set_num_threads(1)
    with install("gfx942"):
        return _failed(lambda: subject_of(AiterBackend(Platform("gfx942", (7, 0)))))


def _failed(load):
    options = runner.Options(AITER, 8, soak=8)
    fnuz = torch.float8_e4m3fnuz
    failed = []
    every = (
        setting.Variant("fp8", fnuz, fnuz),
        setting.Variant("bf16", torch.bfloat16, torch.bfloat16),
        setting.Variant("fp8-weight", fnuz, fnuz, weight=("fp8", fnuz)),
    )
    for variant in every:
        for case in cases.cases(8):
            if case.kind == "compiled" or not case.quick:
                continue
            # The fake is one op of Python: what it launches says nothing of AITER's.
            if case.name == "kernel-status":
                continue
            result = runner.run_case(case, variant, load(), EagerEngine(), options)
            if result.status != "passed":
                failed.append((case.name, variant.name, result.reason, result.findings))
    return failed


def test_a_seed_gives_the_same_data_alone_and_among_others(run, subject):
    alone = asdict(run("fresh-data", subject, seed=3)) | {"seconds": 0}
    run("other-slots", subject, seed=3)
    assert asdict(run("fresh-data", subject, seed=3)) | {"seconds": 0} == alone


def test_capture_sizes_hold_both_ends_of_the_decode_limit():
    assert setting.capture_sizes(12) == (1, 2, 4, 8, 12)
    assert setting.capture_sizes(16) == (1, 2, 4, 8, 16)
    assert setting.capture_sizes(12, width=4) == (4, 8, 12)
    with pytest.raises(ValueError, match="no request"):
        setting.capture_sizes(3, width=4)


def test_cases_have_names_of_their_own_and_say_what_serving_does():
    every = cases.cases(LIMIT)
    assert len({case.name for case in every}) == len(every)
    assert all(case.serving for case in every)
    with pytest.raises(ValueError, match="at least 8"):
        cases.cases(4)


@pytest.mark.parametrize("limit", [8, 9, 12, 16, 33])
def test_every_case_replays_only_what_it_captured(limit):
    for case in cases.cases(limit):
        for step in case.steps:
            if isinstance(step, cases.Replay | cases.Soak):
                assert step.size in case.sizes, (case.name, step)


def test_a_back_end_that_declines_is_skipped_with_its_reason(run, subject):
    class Declining(ReferenceBackend):
        def bind(self, inputs):
            return "too small for me"

    for case in ("fresh-data", "compiled-by-inductor"):
        result = run(case, subject_of(Declining()))
        assert result.status == "skipped"
        assert "too small for me" in result.reason


def test_a_back_end_that_raises_is_a_failure_and_no_crash(run, subject):
    def prepare(inputs):
        raise ZeroDivisionError("in the kernel")

    result = run("fresh-data", replace(subject, prepare=prepare))
    assert broken(result) == {"runs"}
    assert "in the kernel" in result.findings[0].message
    assert broken(result) <= set(ORACLES)


def test_verify_never_imports_vllm():
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from vllm_aiter_mla.verify import session, terminal, inductor, graphs, selftest\n"
        "found = session.Session(session.Request(backend=('reference',), only=('fresh-data',), variant=('fp8',)))\n"
        "list(found.run())\n"
        "print(found.status, [name for name in sys.modules if name.startswith('vllm.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split(maxsplit=1) == ["0", "[]\n"], done.stderr[-2000:]


def test_the_layer_rotates_and_writes_as_the_kernel_of_vllm_does():
    variant = setting.variants("cpu", torch.float8_e4m3fn, quick=True)[1]
    buffers = Buffers(setting.SMALL, variant, 4, 1, 1, "cpu", 0)
    (layer,) = buffers.layers
    buffers.positions.fill_(7)
    slots = torch.tensor([3, -1, 9])
    (q, k_pe, kv_c), cache = (rows[:3].clone() for rows in layer.source), layer.kv_cache.clone().flatten(0, 1)
    given = (kv_c, buffers.positions[:3], buffers.table)
    q_pe, before = q[..., setting.SMALL.nope :], layer.source
    layer.rope_and_write(q_pe, k_pe, *given, slots, layer.k_scale, variant.is_neox)
    assert [bool((k_pe[i] != before.k_pe[i]).any()) for i in range(3)] == [True, False, True]
    assert all(bool((q_pe[i] != before.q[i, :, setting.SMALL.nope :]).any()) for i in range(3))
    changed = (layer.kv_cache.flatten(0, 1) != cache).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(layer.kv_cache.flatten(0, 1)[[3, 9]], torch.cat([kv_c, k_pe], dim=-1)[[0, 2]])
    with pytest.raises(AssertionError, match="one slot per row"):
        layer.rope_and_write(q_pe, k_pe, *given, slots[:2], layer.k_scale, variant.is_neox)
