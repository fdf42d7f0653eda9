"""The compiled kernel, executed: every byte is the reference's, and bugs planted in its assembly are caught.

A quick subset; ``python -m tools.gfx9 --arch NAME`` runs every variant.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import numpy as np

from tests.tools.gfx9.gfx9_planted import PLANTED, SCALED
from tools.gfx9.matrix import unpack
from tools.gfx9.parse import instruction
from tools.gfx9.vector import _dpp_lanes

pytestmark = pytest.mark.slow
ARCHS = ("gfx942", "gfx950")
# The first stands where firmware enters that does not load arguments; the arguments of another are waited for again.
# The third stands beside the division of the scale, on the path that no wave takes.
WAITS_NOT_NEEDED = 3
# The rule of the model that a bug breaks; another bug may show in the bytes alone.
RULES = {"dropped barrier, first": "LDS", "dropped barrier, last": "LDS", "wrong bound of the rows": "not one to read"}


def ask(arch, *options):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.tools.gfx9.gfx9_worker", arch, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers():
    return {arch: ask(arch) for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_gfx9_executed_variants_equal_the_reference_to_the_byte(answers, arch):
    """By both entries, and with an overflow, which saturates, in each pairing."""
    launches = answers[arch]["launches"]
    assert [(row["label"], row["different"]) for row in launches if row["different"]] == []
    assert {row["block_size"] for row in launches} == {1, 16, 64}
    assert any("mxfp4" in row["label"] for row in launches) == (arch == "gfx950")
    assert (answers[arch]["without_preload"], answers[arch]["overflow"]) == (0, [0, 0])


@pytest.mark.mutation("I14")
@pytest.mark.parametrize("arch", ARCHS)
def test_gfx9_mutation_overflow_that_is_not_saturated_is_caught(answers, arch):
    assert all(found.endswith("bytes") for found in answers[arch]["not_saturated"]), answers[arch]["not_saturated"]


@pytest.mark.mutation
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PLANTED)
def test_gfx9_mutation_planted_in_the_assembly_is_caught(answers, arch, name):
    found = answers[arch]["planted"][name]
    assert RULES.get(name, "") in found
    assert found != "not caught"
    assert not found.startswith("not modelled"), "a bug that the model refuses says nothing of what it executes"


def reached(moves):
    """[64, 64], by lane: whose values its maximum includes after ``moves``, if a maximum follows each of them.

    A move from the register that it writes continues the one before it, ahead of the maximum.
    """
    steps = []
    for i in moves:
        lanes = _dpp_lanes(i) if i.modifiers else np.arange(64)
        if i.operands[0] == i.operands[1]:
            steps[-1] = steps[-1][lanes]
        else:
            steps.append(lanes)
    lanes = np.eye(64, dtype=bool)
    for step in steps:
        lanes = lanes | lanes[step]
    return lanes


def assert_moves_are_caught(launch):
    """Each move between lanes that is left out gives other bytes, unless the same lanes are reached without it."""
    moves = [(instruction(line), found) for line, found in launch["moves"]]
    # The rows of a tile are reduced by the same moves, one after another or in turn.
    kinds = list({tuple(i.modifiers.items()): i for i, _ in moves if i.encoding == "dpp"}.values())
    assert launch["different"] == 0
    for i, found in moves:
        left = [replace(k, modifiers={}) if k.modifiers == i.modifiers else k for k in kinds]
        needed = i.encoding != "dpp" or (reached(left) != reached(kinds)).any()
        assert found.endswith("bytes") if needed else found == "not caught", (launch["label"], i.text, found)


@pytest.mark.mutation
@pytest.mark.parametrize("arch", ARCHS)
def test_gfx9_mutation_of_a_move_between_lanes_is_caught_if_a_lane_needs_it(answers, arch):
    """A row's maximum over fp8 weights: of 5 moves within 16 lanes one is not needed."""
    launches = answers[arch]["reduced"]
    for launch in launches:
        assert_moves_are_caught(launch)
        assert [found for _, found in launch["moves"]].count("not caught") == 1
    assert [len(launch["moves"]) for launch in launches] == [5, 5, 6]


@pytest.mark.wide
@pytest.mark.mutation
@pytest.mark.parametrize("arch", ARCHS)
def test_gfx9_mutation_of_every_move_of_every_tile_is_caught_if_a_lane_needs_it(arch):
    launches = ask(arch, "--every-move")
    assert len(launches) > 10
    for launch in launches:
        assert_moves_are_caught(launch)


@pytest.mark.mutation
@pytest.mark.parametrize("name", [*SCALED, "op_sel_hi of a scale", "scales of other lanes"])
def test_gfx9_mutation_planted_over_mxfp4_weights_is_caught(answers, name):
    """The last one is a bug of the model, the others are bugs in the assembly."""
    found = answers["gfx950"]["planted"][name]
    assert ("formats than fp4" in found) if name in ("cbsz", "blgp") else found.endswith("bytes")


@pytest.mark.parametrize(("at", "side"), [(0, 16), (1, 32)])
def test_gfx9_lane_of_a_scale_is_where_the_compiler_puts_it(answers, at, side):
    # Triton's layout: where each bit of a lane's number leads, in rows and in blocks of 32 values.
    lane = np.arange(64)
    held = unpack(np.broadcast_to(lane[:, None], (4, 64, 8)), side)
    layouts = answers["gfx950"]["scale_layouts"][at]
    assert len(layouts) == 2
    for bits in layouts:
        row, block = (lane[:, None] >> np.arange(6) & 1) @ np.array(bits).T[:, :, None]
        assert (held[row.ravel()[:, None], 32 * block.ravel()[:, None] + np.arange(32)] == lane[:, None]).all()


@pytest.mark.mutation
@pytest.mark.parametrize("at", [0, 1], ids=["bfloat16", "fp8"])
def test_gfx9_mutation_of_each_step_that_rounds_to_bfloat16_is_caught(answers, at):
    """Each SDWA word, where values tie; each subtraction on the way to fp8."""
    found = answers["gfx942"]["roundings"][at]
    assert found
    assert all(one.endswith("bytes") for one in found), found


@pytest.mark.mutation
def test_gfx9_mutation_every_needed_wait_is_missed(answers):
    found = answers["gfx942"]["waits"]
    assert len(found) > 20
    assert not [one for one in found if one.startswith("not modelled")]
    assert found.count("not caught") == WAITS_NOT_NEEDED
    assert found[0] == "not caught"


@pytest.mark.parametrize("arch", ARCHS)
def test_gfx9_assembly_of_another_code_object_is_refused(answers, arch):
    assert "assembled again it gives other bytes" in answers[arch]["other_code_object"]
