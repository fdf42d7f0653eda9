#!/usr/bin/env bash
# Triton 3.9.0: a kernel whose mask joins the comparison of a loaded number and that of a block compiles for gfx942.
# Triton's own interpreter (TRITON_INTERPRET=1) refuses it: "mask has unsupported dtype".
#
# A guess: the interpreter runs what compiles. But it keeps a comparison of a scalar as another numpy type than bool,
# `&` keeps that type, and its masked load and store take bool only. Each comparison by itself is fine as a mask.
#
# Seen: one kernel, compiled for gfx942 without a GPU, and interpreted twice: with the block's comparison (eight values
# written), and with both (ValueError).
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/store.py" <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def store(out, count, both: tl.constexpr):
    at = tl.arange(0, 16)
    mask = at < 8
    if both:
        mask = (tl.load(count) > 0) & mask
    tl.store(out + at, 1, mask=mask)


if sys.argv[1] == "compile":
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"out": "*i32", "count": "*i32", "both": "constexpr"}
    made = triton.compile(ASTSource(store, types, {(2,): True}), target=GPUTarget("hip", "gfx942", 64))
    print("compiled:", "global_store" in made.asm["amdgcn"] or "buffer_store" in made.asm["amdgcn"])
else:
    for both in (False, True):
        out = torch.zeros(16, dtype=torch.int32)
        try:
            store[(1,)](out, torch.ones(1, dtype=torch.int32), both)
            print("interpreted:", int(out.sum()))
        except Exception as error:
            print("interpreted:", error)
PY
seen=$("$work/venv/bin/python" "$work/store.py" compile; TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/store.py" run)
echo "$seen"
[ "$seen" = "compiled: True
interpreted: 8
interpreted: ValueError('mask has unsupported dtype')" ]
