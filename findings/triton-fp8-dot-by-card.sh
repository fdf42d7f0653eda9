#!/usr/bin/env bash
# Triton 3.9.0: which instructions `tl.dot` over two fp8 blocks becomes depends on the card, on the number of rows, and
# on Hopper also on `max_num_imprecise_acc`. gfx942 and gfx950 multiply fp8 in each case. sm_90 multiplies 16 rows in
# fp16, both operands cast. It multiplies 64 rows in fp8, with sums that Triton calls imprecise; with
# `max_num_imprecise_acc=0` it takes fp16 again. Nothing warns.
#
# A guess: all three cards have fp8 matrix instructions, so a kernel over fp8 weights uses them everywhere, and its time
# on an H100 tells something about its time on an MI300X.
#
# Seen: one kernel, [M, 128] x [128, 64] in the card's e4m3 type, compiled for each card without a GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/multiply.py" <<'PY'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def multiply(a, b, out, M: tl.constexpr, FLOAT32_SUMS: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, 128)
    x, y = tl.load(a + m * 128 + k[None, :]), tl.load(b + k[:, None] * 64 + n)
    if FLOAT32_SUMS:
        product = tl.dot(x, y, max_num_imprecise_acc=0)
    else:
        product = tl.dot(x, y)
    tl.store(out + m * 64 + n, product)


card = sys.argv[1]
target, fp8, listing = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), "*fp8e4b8", "amdgcn"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "*fp8e4nv", "amdgcn"),
    "sm_90": (GPUTarget("cuda", 90, 32), "*fp8e4nv", "ptx"),
}[card]
types = {"a": fp8, "b": fp8, "out": "*fp32", "M": "constexpr", "FLOAT32_SUMS": "constexpr"}
aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
for rows in (16, 64):
    for float32 in (False, True):
        made = triton.compile(ASTSource(multiply, types, {(3,): rows, (4,): float32}, aligned), target=target)
        (name,) = set(re.findall(r"v_mfma\w+|wgmma\.mma_async[\w.]+|mma\.sync[\w.]+", made.asm[listing]))
        print(f"{card}, {rows} rows{', float32 sums' if float32 else ''}: {name}")
PY
# A process compiles for one card; the variable only keeps Triton from saying that its default will change.
compile_for() {
    TRITON_CACHE_DIR="$work/cache" TRITON_DEFAULT_FP_FUSION=1 "$work/venv/bin/python" "$work/multiply.py" "$1"
}
seen=$(compile_for gfx942; compile_for gfx950; compile_for sm_90)
echo "$seen"
[ "$seen" = "gfx942, 16 rows: v_mfma_f32_16x16x32_fp8_fp8
gfx942, 16 rows, float32 sums: v_mfma_f32_16x16x32_fp8_fp8
gfx942, 64 rows: v_mfma_f32_32x32x16_fp8_fp8
gfx942, 64 rows, float32 sums: v_mfma_f32_32x32x16_fp8_fp8
gfx950, 16 rows: v_mfma_f32_16x16x128_f8f6f4
gfx950, 16 rows, float32 sums: v_mfma_f32_16x16x128_f8f6f4
gfx950, 64 rows: v_mfma_f32_32x32x64_f8f6f4
gfx950, 64 rows, float32 sums: v_mfma_f32_32x32x64_f8f6f4
sm_90, 16 rows: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
sm_90, 16 rows, float32 sums: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
sm_90, 64 rows: wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
sm_90, 64 rows, float32 sums: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" ]
