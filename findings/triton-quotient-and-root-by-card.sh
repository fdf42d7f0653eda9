#!/usr/bin/env bash
# Triton 3.9.0: how exact float32 `/` and `tl.sqrt` are depends on the card. On gfx942 and gfx950 `/` is the whole IEEE
# division, the same instructions as `tl.div_rn`. On sm_90 it is div.full, which is not correctly rounded. `tl.sqrt` is
# one instruction without the steps of `tl.sqrt_rn` on each, and on sm_90 it also takes subnormal operands for zero (.ftz).
#
# A guess: both operators are equally exact, and the same on each card. So a kernel that matches PyTorch's quotients to the
# bit on an MI300X does so on an H100, and one that divides exactly takes exact roots too.
#
# Seen: one kernel for each operator, compiled for each card without a GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/divide.py" <<'PY'
import re
import sys
from collections import Counter

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def compute(x, y, out, how: tl.constexpr):
    at = tl.arange(0, 256)
    a, b = tl.load(x + at), tl.load(y + at)
    if how == "/":
        value = a / b
    elif how == "div_rn":
        value = tl.div_rn(a, b)
    elif how == "sqrt":
        value = tl.sqrt(a)
    else:
        value = tl.sqrt_rn(a)
    tl.store(out + at, value)


card = sys.argv[1]
target = GPUTarget("cuda", 90, 32) if card == "sm_90" else GPUTarget("hip", card, 64)
types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "how": "constexpr"}
for how in ("/", "div_rn", "sqrt", "sqrt_rn"):
    made = triton.compile(ASTSource(compute, types, {(3,): how}), target=target).asm
    if card == "sm_90":
        names = set(re.findall(r"(?:div|sqrt)\.[\w.]+", made["ptx"]))
    else:
        names = Counter(re.findall(r"^\s+(v_\w*(?:f32|f32_e32|f32_e64))\s", made["amdgcn"], re.MULTILINE))
        names = [f"{names.total()} with {name}" for name in ("v_div_fixup_f32", "v_sqrt_f32_e32") if names[name]]
    print(f"{card} {how}: {', '.join(names)}")
PY
# A process compiles for one card; the variable only keeps Triton from saying that its default will change.
compile_for() {
    TRITON_CACHE_DIR="$work/cache" TRITON_DEFAULT_FP_FUSION=1 "$work/venv/bin/python" "$work/divide.py" "$1"
}
seen=$(compile_for gfx942; compile_for gfx950; compile_for sm_90)
echo "$seen"
[ "$seen" = "gfx942 /: 11 with v_div_fixup_f32
gfx942 div_rn: 11 with v_div_fixup_f32
gfx942 sqrt: 1 with v_sqrt_f32_e32
gfx942 sqrt_rn: 9 with v_sqrt_f32_e32
gfx950 /: 11 with v_div_fixup_f32
gfx950 div_rn: 11 with v_div_fixup_f32
gfx950 sqrt: 1 with v_sqrt_f32_e32
gfx950 sqrt_rn: 9 with v_sqrt_f32_e32
sm_90 /: div.full.f32
sm_90 div_rn: div.rn.f32
sm_90 sqrt: sqrt.approx.ftz.f32
sm_90 sqrt_rn: sqrt.rn.f32" ]
