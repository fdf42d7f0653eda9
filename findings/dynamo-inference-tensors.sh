#!/usr/bin/env bash
# torch 2.13.0: torch.compile compiles a function again for a tensor of the same shape, stride and dtype that was made on
# the other side of torch.inference_mode. So a warm-up inside inference mode with tensors that were made before it, such
# as zeros or weights, compiles nothing that a server then runs: its first step compiles once more. A view that is taken
# inside inference mode of a tensor from outside still counts as outside.
#
# A guess: inside inference mode all tensors are alike, so calling a function once with the right shapes warms it up.
#
# Seen: how often the function was compiled after each of five calls, all inside inference mode.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
cat >"$work/calls.py" <<'PY'
import torch

graphs = []


def count(graph, inputs):
    graphs.append(graph)
    return graph.forward


double = torch.compile(lambda x: x * 2, backend=count, dynamic=True)
outside = torch.ones(3, 4)
with torch.inference_mode():
    calls = {
        "made outside": outside, "made inside": torch.ones(3, 4), "made inside, other shape": torch.ones(5, 4),
        "made outside, again": outside, "view of one from outside": outside[1:],
    }
    for name, tensor in calls.items():
        double(tensor)
        print(f"{name}: {len(graphs)}")
PY
seen=$("$work/venv/bin/python" "$work/calls.py" 2>/dev/null)
echo "$seen"
[ "$seen" = "made outside: 1
made inside: 2
made inside, other shape: 2
made outside, again: 2
view of one from outside: 2" ]
