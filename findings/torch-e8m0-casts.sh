#!/usr/bin/env bash
# torch 2.13.0, CPU: float8_e8m0fnu holds the scales of mxfp4 and mxfp8: an exponent, no sign, no zero. A cast drops the
# sign, so -2 becomes 2. `torch.zeros` holds 5.9e-39. `torch.isfinite` calls its NaN finite, where `torch.isnan` calls it
# NaN. A cast goes to the nearest power of two, and from halfway, which is 1.5 times a power, up.
#
# A guess: what a type cannot hold becomes NaN or raises, `zeros` gives zeros, and no value is both NaN and finite.
#
# Seen: casts of seven values, a tensor of zeros, and both questions about NaN.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
cat >"$work/scale.py" <<'PY'
import torch

values = [-2.0, 0.0, 1.25, 1.5, 3.0, 6.0, float("inf")]
print("cast", *(f"{x:g}:{y:g}" for x, y in zip(values, torch.tensor(values).to(torch.float8_e8m0fnu).float().tolist())))
print("zeros", f"{torch.zeros(1, dtype=torch.float8_e8m0fnu).float().item():.2g}")
nan = torch.tensor([float("nan")])
for dtype in (torch.float8_e5m2, torch.float8_e8m0fnu):
    print(str(dtype)[6:], "NaN:", "isnan", torch.isnan(nan.to(dtype)).item(), "isfinite", torch.isfinite(nan.to(dtype)).item())
PY
seen=$("$work/venv/bin/python" "$work/scale.py" 2>/dev/null)
echo "$seen"
[ "$seen" = "cast -2:2 0:5.87747e-39 1.25:1 1.5:2 3:4 6:8 inf:nan
zeros 5.9e-39
float8_e5m2 NaN: isnan True isfinite False
float8_e8m0fnu NaN: isnan True isfinite True" ]
