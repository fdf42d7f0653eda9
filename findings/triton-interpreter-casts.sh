#!/usr/bin/env bash
# Triton 3.9.0: a cast in Triton's own interpreter (TRITON_INTERPRET=1) gives other values than torch's cast and than a
# card's instruction. Beyond the largest value of an fp8 type it wraps around: 500 becomes 256 in float8e4nv, and
# infinity a finite number. A tie goes up and not to even, so 17 becomes 18. A cast to bfloat16 cuts the low bits off.
#
# A guess: the interpreter computes what the kernel would, so a test that runs through it checks the rounding too.
#
# Seen: one kernel that casts float32 values, interpreted, beside torch's cast of the same values. torch turns an overflow
# into the largest value of float8_e4m3fn, and into NaN in float8_e4m3fnuz; the interpreter does neither. Compiled for
# gfx942 and gfx950 the cast is an instruction of the card.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/cast.py" <<'PY'
import re
import sys

import torch
import triton
import triton.language as tl

VALUES = {
    torch.float8_e4m3fn: [17.0, 19.0, 440.0, 500.0, 1000.0, float("inf")],
    torch.float8_e4m3fnuz: [17.0, 19.0, 236.0, 300.0, 1000.0, float("inf")],
    torch.bfloat16: [447.0, 257.0, 1.0],
}


@triton.jit
def cast(given, out, COUNT: tl.constexpr):
    at = tl.arange(0, 8)
    values = tl.load(given + at, mask=at < COUNT, other=0.0)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < COUNT)


if sys.argv[1] == "run":
    for dtype, values in VALUES.items():
        given = torch.tensor(values)
        out = torch.zeros(len(values), dtype=dtype)
        cast[(1,)](given, out, len(values))
        print(str(dtype)[6:], *(f"{x:g}:{y:g}" for x, y in zip(values, out.tolist())))
        print("  torch", *(f"{x:g}:{y:g}" for x, y in zip(values, given.to(dtype).tolist())))
else:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for arch, fp8 in (("gfx942", "fp8e4b8"), ("gfx950", "fp8e4nv")):
        types = {"given": "*fp32", "out": f"*{fp8}", "COUNT": "constexpr"}
        made = triton.compile(ASTSource(cast, types, {(2,): 8}), target=GPUTarget("hip", arch, 64))
        print(arch, fp8, *sorted(set(re.findall(r"v_cvt_\w+", made.asm["amdgcn"]))))
PY
compiled() { TRITON_CACHE_DIR="$work/cache" TRITON_DEFAULT_FP_FUSION=1 "$work/venv/bin/python" "$work/cast.py" compile; }
seen=$(TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/cast.py" run 2>/dev/null; compiled 2>/dev/null)
echo "$seen"
[ "$seen" = "float8_e4m3fn 17:18 19:20 440:448 500:256 1000:256 inf:256
  torch 17:16 19:20 440:448 500:448 1000:448 inf:448
float8_e4m3fnuz 17:18 19:20 236:240 300:144 1000:128 inf:128
  torch 17:16 19:20 236:240 300:nan 1000:nan inf:nan
bfloat16 447:446 257:256 1:1
  torch 447:448 257:256 1:1
gfx942 fp8e4b8 v_cvt_pk_fp8_f32
gfx950 fp8e4nv v_cvt_scalef32_pk_fp8_f32" ]
