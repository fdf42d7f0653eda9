#!/usr/bin/env bash
# torch 2.13.0: a function of torch.compile that is called inside a TorchDispatchMode (a profiler, a recorder, a counter of
# operations) runs op by op there, and from then on everywhere: outside the mode, with other shapes, and if it is handed
# to torch.compile once more. Only torch._dynamo.reset() ends that. Nothing is printed. Results in bfloat16 change: op by
# op each operation rounds, compiled once.
#
# A guess: a mode is active for its `with` block, and what is not compiled inside it is compiled after it.
#
# Seen: one function, which graphs Dynamo counts, and whether the result has the roundings of torch's own ops.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 setuptools==81.0.0 || exit 3
cat >"$work/mode.py" <<'PY'
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def scaled(x):
    return (x * 3 + 1) * 7 + x


def say(when, function, x):
    as_ops = torch.equal(function(x), scaled(x))
    print(f"{when}: {counters['stats'].get('unique_graphs', 0)} graphs, {'each operation' if as_ops else 'once'}")


torch.manual_seed(0)
x, longer = torch.randn(64).bfloat16(), torch.randn(96).bfloat16()
compiled = torch.compile(scaled)
with Nothing():
    compiled(x)
say("after a call in a mode", compiled, x)
say("another shape", compiled, longer)
say("compiled again", torch.compile(scaled), x)
torch._dynamo.reset()
say("after a reset", torch.compile(scaled), x)
PY
seen=$(TORCHINDUCTOR_CACHE_DIR="$work/cache" "$work/venv/bin/python" -W error::UserWarning "$work/mode.py" 2>&1)
echo "$seen"
[ "$seen" = "after a call in a mode: 0 graphs, each operation
another shape: 0 graphs, each operation
compiled again: 0 graphs, each operation
after a reset: 1 graphs, once" ]
