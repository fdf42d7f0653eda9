"""Measure AITER's per-head and opt kernels on this card and print from how many tokens on opt is the faster one.

    python tools/aiter_crossover.py --heads 16 --kv fp8

Both write the same bytes to the same slots (a bf16 cache on gfx942 apart, see docs/aiter.md); which one runs follows
from the view the cache is handed over in. The plugin's default does not rest on speed, because nobody has measured it:
run this, set additional_config.aiter_mla.aiter_view to what its last line says, and pass the figures on. Needs an
MI300X or MI355X with AITER; exits with 2 anywhere else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.aiter.module import AiterUnavailableError
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.selfcheck import self_check
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 255)  # the per-head kernel ends at 255
LAUNCHES, REPEATS = 64, 21

Row = tuple[int, float, float]  # tokens, per-head microseconds, opt microseconds


def crossover(rows: Sequence[Row]) -> int | None:
    """The smallest measured token count from which opt is faster at every larger one too, or None."""
    found = None
    for tokens, per_head, opt in sorted(rows, reverse=True):
        if opt >= per_head:
            break
        found = tokens
    return found


def verdict(rows: Sequence[Row]) -> str:
    """One line that says what to set."""
    at = crossover(rows)
    if at is None:
        return "per-head is the faster one up to 255 tokens: aiter_view=per-head"
    if at == min(tokens for tokens, _, _ in rows):
        return "opt is the faster one throughout: aiter_view=opt"
    return f"opt is the faster one from {at} tokens on: aiter_view={at}"


def microseconds(launch: Callable[[], object]) -> float:
    """Median time of one launch in a replayed graph of ``LAUNCHES`` of them."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times)


class Recording:
    """AITER's op, remembering the arguments of its last call, so that the launch can be repeated without the BMM."""

    def __init__(self, op: Callable[..., None]) -> None:
        self.op = op
        self.arguments: tuple = ()

    def __call__(self, *arguments: object) -> None:
        """Launch and remember."""
        self.arguments = arguments
        self.op(*arguments)

    def again(self) -> None:
        """Launch with the same arguments."""
        self.op(*self.arguments)


def measure(shape: LayerShape, tokens: int) -> Row:
    """Time both kernels for one batch size."""
    times = []
    for view in ("per-head", "opt"):
        backend = AiterBackend(detect_platform(), view=view)
        recording = backend._op = Recording(backend._op)
        inputs = synthetic_inputs(shape, tokens)
        if backend.kernel_of(inputs) != view:
            raise SystemExit(f"{tokens} tokens cannot run on the {view} kernel: {backend.refuse(inputs)}")
        backend.prepare(inputs)
        times.append(microseconds(recording.again))
    return tokens, times[0], times[1]


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="query heads per rank (at least 4)")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8", help="type of cache and query")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a cache block (default 16)")
    options = parser.parse_args(argv)
    for name, value, low, high in (("--heads", options.heads, 4, 1024), ("--block-size", options.block_size, 1, 65536)):
        if not low <= value <= high:
            parser.error(f"{name} {value}: between {low} and {high} expected")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = read(argv)
    platform = detect_platform()
    if platform.arch not in ARCHITECTURES:
        print(f"not measured: this needs an MI300X or MI355X, and this machine is {platform.arch}", file=sys.stderr)
        return 2
    stored = platform.fp8 if options.kv == "fp8" else torch.bfloat16
    shape = LayerShape(options.heads, 128, stored, stored, options.block_size, False, device="cuda")
    try:
        checks = [self_check(AiterBackend(platform, view=view), shape) for view in ("per-head", "opt")]
    except AiterUnavailableError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 2
    print("\n".join(check.message for check in checks))
    if not all(check.ok for check in checks):
        return 1
    print(f"{platform.arch}, ROCm {platform.rocm}, {options.heads} heads, {options.kv}, block {options.block_size}")
    print("tokens  per-head us     opt us")
    rows = [measure(shape, tokens) for tokens in TOKENS]
    for tokens, per_head, opt in rows:
        print(f"{tokens:6d} {per_head:12.2f} {opt:10.2f}")
    print(verdict(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
