#!/usr/bin/env bash
# Triton 3.9.0: how `//` and `%` of an integer argument round depends on its value. An argument of 1 becomes a constant of
# the kernel, and constants follow Python: rounded down. Any other value follows C: toward zero. So `(n - 4) // 2` is -2 for
# n = 1, where C's division of -3 gives -1, and `(n - 4) % 4` is 1, where it gives -3.
#
# A guess: the argument's type decides, so one rule holds for every n of a kernel. `tl.constexpr` is not written anywhere.
# `@triton.jit(do_not_specialize=["n"])` gives C's rule to 1 too.
#
# Seen: what the kernels that a launch with n = 1, 2 and 3 would take store, compiled for gfx942 without a GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q --no-deps triton==3.9.0 || exit 3
cat >"$work/divide.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Card:
    """As much of a card as a compilation asks for."""

    def get_current_target(self):
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Out:
    dtype = "int32"

    def data_ptr(self):
        return 0


def divide(out, n):
    tl.store(out, (n - 4) // 2)
    tl.store(out + 1, (n - 4) % 4)


driver.set_active(Card())
for title, kernel in (("as it is", triton.jit(divide)), ("not specialised", triton.jit(divide, do_not_specialize=["n"]))):
    for n in (1, 2, 3):
        lines = kernel.warmup(Out(), n, grid=(1,)).asm["ttir"]
        stored = re.findall(r"tt\.store [^,]+, (%[\w#-]+)", lines)
        made = [re.search(rf"{re.escape(name)} = arith\.(constant -?\d+|\w+)", lines)[1] for name in stored]
        print(f"{title}, n = {n}: {', '.join(made)}")
PY
# The variable only keeps Triton from saying that its default will change.
seen=$(TRITON_CACHE_DIR="$work/cache" TRITON_DEFAULT_FP_FUSION=1 "$work/venv/bin/python" "$work/divide.py")
echo "$seen"
[ "$seen" = "as it is, n = 1: constant -2, constant 1
as it is, n = 2: divsi, remsi
as it is, n = 3: divsi, remsi
not specialised, n = 1: divsi, remsi
not specialised, n = 2: divsi, remsi
not specialised, n = 3: divsi, remsi" ]
