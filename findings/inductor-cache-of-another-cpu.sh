#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.compile finds the graph that a machine with AVX-512 left in a shared cache folder, on a
# machine with AVX2 (here: the same one with ATEN_CPU_CAPABILITY=avx2, which Inductor obeys), and gives wrong values.
#
# A guess: the vector unit is part of the cache's key, or else the code found was built for the other unit and runs as
# it is. Neither. The key of the graph's cache leaves the unit out; the C++ source found there steps by the 32 bf16
# values of a 512-bit register, and is compiled again for 256 bits, whose registers hold 16. Each step writes half of its
# values; the rest of the result is memory as it was. Nothing warns.
#
# Seen with 2.13.0+cpu: 0, then 1536 of 3072 values differ ("fxgraph_cache_hit"); with its own folder 0.
# Needs a processor with AVX-512. pip's default index may serve a CUDA build of several GB: PIP_EXTRA_INDEX_URL names
# another one.
set -euo pipefail
grep -q avx512f /proc/cpuinfo || { echo "not shown: this processor has no AVX-512" >&2; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
cat >"$work/double.py" <<'PY'
import torch
from torch._dynamo.utils import counters


def double(x):
    return (x.float() * 2 + 1).bfloat16()


x = torch.arange(3072.0).reshape(64, 48).bfloat16()
wrong = int((torch.compile(double)(x) != double(x)).sum())
found = "hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss"
print(f"cache {found}: {wrong} of {x.numel()} values differ")
PY
double() {
    TORCHINDUCTOR_CACHE_DIR="$work/$1" ATEN_CPU_CAPABILITY="$2" "$work/venv/bin/python" "$work/double.py" 2>/dev/null
}
seen=$(double shared avx512; double shared avx2; double own avx2)
echo "$seen"
[ "$seen" = "cache miss: 0 of 3072 values differ
cache hit: 1536 of 3072 values differ
cache miss: 0 of 3072 values differ" ]
