#!/usr/bin/env bash
# torch 2.13.0, CPU: Inductor drops an explicit rounding. `x.to(torch.bfloat16).to(torch.float32)` gives back x unrounded in
# every value, and so does a trip through float16; one through float8_e4m3fn is kept. A function that returns a bfloat16
# tensor and the same tensor as float32 returns two that differ everywhere.
#
# A guess: a cast that the author wrote is an operation like any other, so compiled code rounds where eager code does, and
# `b.float()` equals `b`. Only `emulate_precision_casts=True` keeps it; the back ends eager and aot_eager do too.
#
# Seen: 1000 random values; how many differ from eager, and how many of the two returned tensors from each other.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
cat >"$work/round.py" <<'PY'
import torch


def there_and_back(x, dtype):
    return x.to(dtype).to(torch.float32)


def both(x):
    rounded = x.to(torch.bfloat16)
    return rounded, rounded.to(torch.float32)


torch.manual_seed(0)
x = torch.randn(1000)
for how in ({"backend": "aot_eager"}, {}, {"options": {"emulate_precision_casts": True}}):
    said = []
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        compiled = torch.compile(there_and_back, **how)(x, dtype)
        said.append(f"{str(dtype)[6:]} {int((compiled != there_and_back(x, dtype)).sum())}")
    rounded, again = torch.compile(both, **how)(x)
    print(how or "default", *said, f"both {int((rounded.float() != again).sum())}", sep=", ")
PY
seen=$(TORCHINDUCTOR_CACHE_DIR="$work/cache" "$work/venv/bin/python" "$work/round.py" 2>/dev/null)
echo "$seen"
[ "$seen" = "{'backend': 'aot_eager'}, bfloat16 0, float16 0, float8_e4m3fn 0, both 0
default, bfloat16 1000, float16 1000, float8_e4m3fn 0, both 1000
{'options': {'emulate_precision_casts': True}}, bfloat16 0, float16 0, float8_e4m3fn 0, both 0" ]
