#!/usr/bin/env bash
# Triton 3.9.0: the variable of `for i in tl.range(first, n)` is a tensor where Triton compiles the kernel, with `.to`
# and `.dtype`. In Triton's own interpreter (TRITON_INTERPRET=1) it is a Python int, also if `first` is a tensor such as
# `tl.program_id(0)`: "'int' object has no attribute 'to'".
#
# A guess: the bounds decide what the variable is, so `i.to(tl.int64)` before a large offset works in both. Only
# `tl.cast(i, tl.int64)` and arithmetic do.
#
# Seen: the kernel compiled for gfx942 without a GPU, and interpreted.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/rows.py" <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def rows(out, n, how: tl.constexpr):
    for row in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        if how == "to":
            at = row.to(tl.int64)
        elif how == "cast":
            at = tl.cast(row, tl.int64)
        else:
            at = row + tl.zeros((), tl.int64)
        tl.store(out + at, 1)


if sys.argv[1] == "compile":
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for how in ("to", "cast", "add"):
        source = ASTSource(rows, {"out": "*i32", "n": "i32", "how": "constexpr"}, {(2,): how})
        print(how, "compiled:", bool(triton.compile(source, target=GPUTarget("hip", "gfx942", 64)).asm["hsaco"]))
else:
    for how in ("to", "cast", "add"):
        out = torch.zeros(6, dtype=torch.int32)
        try:
            rows[(2,)](out, 6, how)
            print(how, "interpreted:", int(out.sum()))
        except Exception as error:
            print(how, "interpreted:", error)
PY
seen=$("$work/venv/bin/python" "$work/rows.py" compile; TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/rows.py" run)
echo "$seen"
[ "$seen" = "to compiled: True
cast compiled: True
add compiled: True
to interpreted: AttributeError(\"'int' object has no attribute 'to'\")
cast interpreted: 6
add interpreted: 6" ]
