#!/usr/bin/env bash
# Triton 3.6.0: `tl.clamp` of a float32 becomes four instructions on gfx942, a minimum and three maxima, two of which
# only make their operands canonical. The card has one instruction for it, v_med3_f32, which Triton 3.7.1 to 3.9.0 use.
#
# A guess: a function named clamp becomes the card's clamp, whatever the release.
#
# Seen: one kernel that clamps 64 values, one in each lane, compiled without a GPU; its instructions on float32 values.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
cat >"$work/clamp.py" <<'PY'
import re
from collections import Counter

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def clamp(x, bound, out):
    at, most = tl.arange(0, 64), tl.load(bound)
    tl.store(out + at, tl.clamp(tl.load(x + at), -most, most))


types = {"x": "*fp32", "bound": "*fp32", "out": "*fp32"}
made = triton.compile(ASTSource(clamp, types, {}), target=GPUTarget("hip", "gfx942", 64), options={"num_warps": 1})
seen = Counter(re.findall(r"^\s+(v_(?:med3|min|max|cmp|cndmask|pk_max|pk_min)\w*)", made.asm["amdgcn"], re.MULTILINE))
print(triton.__version__, " ".join(f"{name}:{count}" for name, count in sorted(seen.items())))
PY
for release in 3.6.0 3.7.1 3.8.0 3.9.0; do
    "$work/venv/bin/pip" install -q --no-deps --target "$work/$release" "triton==$release" || exit 3
    # The variable only keeps Triton from saying that its default will change.
    PYTHONPATH="$work/$release" TRITON_CACHE_DIR="$work/cache-$release" TRITON_DEFAULT_FP_FUSION=1 \
        "$work/venv/bin/python" "$work/clamp.py"
done >"$work/seen"
cat "$work/seen"
[ "$(cat "$work/seen")" = "3.6.0 v_max_f32_e32:1 v_max_f32_e64:2 v_min_f32_e32:1
3.7.1 v_med3_f32:1
3.8.0 v_med3_f32:1
3.9.0 v_med3_f32:1" ]
