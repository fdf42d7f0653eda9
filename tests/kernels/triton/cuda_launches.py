"""Launch the kernel for sm90 into a libcuda that writes launches down; print what reached it.

A process of its own: ``python -m tests.kernels.triton.cuda_launches FOLDER``, where the library is built. Each case is
launched twice by one ``Launch``, through Triton's dispatch and then past it, and the second time with each planted bug.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from tests.support.triton_cases import Case, build
from tools import cuda_driver
from vllm_aiter_mla.kernels import device

FP8 = "float8_e4m3fn"
CASES = [
    Case(tokens=1, heads=16),
    Case(tokens=64, heads=16, weight=FP8, w_major="P"),
    Case(tokens=300, heads=128, cache="bfloat16"),
    Case(tokens=7, heads=8, out_heads=16, is_neox=True),
]
STAND_IN = [CASES[0], Case(tokens=3, heads=5, cache="bfloat16", is_neox=True)]


class Card(device.Device):
    """What the package asks a card, answered as an H100 does."""

    torch_device, rocm, arch = "cpu", None, "sm90"

    def is_there(self):
        return True

    def is_capturing(self):
        return False


def planted(plant):
    """A context in which the launch past the dispatch is wrong."""
    from vllm_aiter_mla.kernels.triton import launcher

    right = launcher.Direct.__call__

    def another_grid(self, given):
        self._programs += 1
        return right(self, given)

    def swapped(self, given):
        q, k_pe = (launcher.decode_prep_kernel.arg_names.index(name) for name in ("q_ptr", "k_pe_ptr"))
        given = list(given)
        given[q], given[k_pe] = given[k_pe], given[q]
        return right(self, tuple(given))

    plants = {"": right, "another grid": another_grid, "swapped pointers": swapped}
    return mock.patch.object(launcher.Direct, "__call__", plants[plant])


def seen(recorder, inputs, plant):
    """What both launches gave the driver, and what they should have given."""
    from vllm_aiter_mla.kernels.triton import launcher, tiles

    kernel, tile = launcher.decode_prep_kernel, tiles.tile_for("sm90", inputs.num_tokens, inputs.num_heads)
    run, before = launcher.Launch(inputs, tile), recorder.launches
    with (
        planted(plant),
        mock.patch.object(type(kernel), "run", autospec=True, side_effect=type(kernel).run) as dispatch,
    ):
        outs, launched = [], []
        for _ in range(2):
            outs.append(run(inputs))
            launched.append(asdict(recorder.last()))
    pointers = {
        "q": inputs.q, "w": inputs.weight.as_npl, "w_scale": inputs.weight.scale, "q_scale": inputs.q_scale,
        "pos": inputs.positions, "cos_sin": inputs.cos_sin_cache, "k_pe": inputs.k_pe, "kv_c": inputs.kv_c,
        "slot": inputs.slot_mapping, "k_scale": inputs.k_scale, "cache": inputs.kv_cache,
    }  # fmt: skip
    addresses = {f"{name}_ptr": tensor.data_ptr() for name, tensor in pointers.items() if tensor is not None}
    programs = launcher.programs(inputs.num_tokens, inputs.num_heads, inputs.latent_dim, tile)
    return {
        "launched": launched,
        "outs": [out.data_ptr() for out in outs],
        "arguments": addresses | {"num_tokens": inputs.num_tokens},
        "grid": sum(programs),
        "threads": 32 * tile.num_warps,
        "launches": recorder.launches - before,
        "dispatches": dispatch.call_count,
    }


def stand_in_seen(recorder, inputs):
    """The launches of ``measure``'s stand-in for vLLM's kernels, but for the product, which is torch's."""
    from vllm_aiter_mla.commands.check.timing.stand_in import StandInBackend

    before = recorder.launches
    out = StandInBackend().prepare(inputs)
    last, rows = asdict(recorder.last()), inputs.num_tokens * inputs.num_heads
    return {"launches": recorder.launches - before, "last": last, "out": out.data_ptr(), "rows": rows}


def main(folder):
    recorder = cuda_driver.install(Path(folder))
    device.installed = Card()
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        inputs, _ = build(case)
        found.append({"case": case.label(), "": seen(recorder, inputs, "")})
    inputs, _ = build(CASES[0])
    for plant in ("another grid", "swapped pointers"):
        found[0][plant] = seen(recorder, inputs, plant)
    stand_in = [stand_in_seen(recorder, build(case)[0]) for case in STAND_IN]
    print(json.dumps({"cases": found, "stand-in": stand_in}))


if __name__ == "__main__":
    main(sys.argv[1])
