#!/usr/bin/env bash
# torch 2.13.0, CPU: what lies beyond the largest value becomes that value in float8_e4m3fn, infinity included, and NaN in
# float8_e4m3fnuz. In torch 2.11.0 both become NaN. `torch.tensor` with the type does as the cast does.
#
# A guess: the two e4m3 types, MI355X's and MI300X's, differ in their bias and their largest value, and a cast to them is
# the same operation: so a test on a CPU finds an overflow for both cards or for neither, and in any release of torch.
#
# Seen: casts of float32 and bfloat16 values to both types, and a tensor made of 500, in both releases.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/cast.py" <<'PY'
import torch

print("torch", torch.__version__.partition("+")[0])
for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e4m3fnuz, 240.0)):
    values = [largest, 2 * largest, -1e9, float("inf")]
    casts = [torch.tensor(values, dtype=source).to(dtype).float().tolist() for source in (torch.float32, torch.bfloat16)]
    said = [f"{value:g}" for value in casts[0]] + [f"bfloat16 alike {str(casts[0]) == str(casts[1])}"]
    said.append(f"tensor {torch.tensor([500.0], dtype=dtype).item():g}")
    print(str(dtype)[6:], *said, sep=", ")
PY
seen=""
for release in 2.11.0 2.13.0; do
    python3 -m venv "$work/$release" || exit 3
    "$work/$release/bin/pip" install -q "torch==$release" numpy==2.3.5 || exit 3
    seen+="$("$work/$release/bin/python" "$work/cast.py" 2>/dev/null)"$'\n'
done
echo "$seen"
[ "$seen" = "torch 2.11.0
float8_e4m3fn, 448, nan, nan, nan, bfloat16 alike True, tensor nan
float8_e4m3fnuz, 240, nan, nan, nan, bfloat16 alike True, tensor nan
torch 2.13.0
float8_e4m3fn, 448, 448, -448, 448, bfloat16 alike True, tensor 448
float8_e4m3fnuz, 240, nan, nan, nan, bfloat16 alike True, tensor nan
" ]
