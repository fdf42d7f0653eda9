#!/usr/bin/env bash
# Triton 3.9.0: `cache_modifier=".cg"` (do not keep it in L1) changes a load on gfx942 and gfx950, and not a store. The store
# is the plain instruction, as with ".wb" and without a modifier. ".cs" gives the store the bits that ".cg" gives a load.
# On sm_90 each of them is in the instruction. Nothing warns.
#
# A guess: a modifier that the card has bits for is either set or refused, and means the same for loads and stores. So
# `.cg` on both sides of a copy keeps it out of L1 on an MI300X as on an H100.
#
# Seen: a kernel that copies 256 values, compiled for each card without a GPU; what follows the operands.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/move.py" <<'PY'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(x, out, LOAD: tl.constexpr, STORE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, tl.load(x + at, cache_modifier=LOAD), cache_modifier=STORE)


def bits(load="", store=""):
    """What the load and the store of a copy say beyond their operands."""
    types = {"x": "*fp32", "out": "*fp32", "LOAD": "constexpr", "STORE": "constexpr"}
    made = triton.compile(ASTSource(copy, types, {(2,): load, (3,): store}), target=target).asm
    if card == "sm_90":
        return [re.search(rf"{word}\.global\.?(\w*)\.b32", made["ptx"])[1] or "none" for word in ("ld", "st")]
    lines = [re.search(rf"(?:buffer|global)_{word}_dword .*", made["amdgcn"])[0] for word in ("load", "store")]
    return [" ".join(re.findall(r" (sc0|sc1|nt)\b", line)) or "none" for line in lines]


card = sys.argv[1]
target = GPUTarget("cuda", 90, 32) if card == "sm_90" else GPUTarget("hip", card, 64)
print(f"{card} load", *(f"{name} {bits(load=name)[0]}" for name in (".ca", ".cg", ".cv")), sep=", ")
print(f"{card} store", *(f"{name} {bits(store=name)[1]}" for name in (".wb", ".cg", ".cs", ".wt")), sep=", ")
PY
# A process compiles for one card; the variable only keeps Triton from saying that its default will change.
compile_for() {
    TRITON_CACHE_DIR="$work/cache" TRITON_DEFAULT_FP_FUSION=1 "$work/venv/bin/python" "$work/move.py" "$1"
}
seen=$(compile_for gfx942; compile_for gfx950; compile_for sm_90)
echo "$seen"
[ "$seen" = "gfx942 load, .ca none, .cg sc0 nt, .cv sc0 sc1
gfx942 store, .wb none, .cg none, .cs sc0 nt, .wt sc0 sc1
gfx950 load, .ca none, .cg sc0 nt, .cv sc0 sc1
gfx950 store, .wb none, .cg none, .cs sc0 nt, .wt sc0 sc1
sm_90 load, .ca ca, .cg cg, .cv cv
sm_90 store, .wb wb, .cg cg, .cs cs, .wt wt" ]
