"""Which integration moves less? ``python -m tests.sandbox.integrations`` prints a table in Markdown, in four minutes.

Six engines over a small random DeepSeek, flag off and on: over vLLM's default options and the module, over graph
partition and the passes, and in eager mode, where the module is the only integration.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.sandbox import engine
from tests.sandbox.compare import compare
from tests.sandbox.spec import Emulation, EngineResult, EngineSpec, VllmOptions, by_passes, flag_off

# Without YaRN, whose rotation vLLM's eager mode rounds three times.
_DEFAULT = EngineSpec(
    ("concurrent", "mixed", "long"), VllmOptions(model={"num_hidden_layers": 2, "yarn": False}),
    emulation=Emulation(linear="aten"), dump_graphs=True,
)  # fmt: skip
_EAGER = replace(_DEFAULT, vllm=replace(_DEFAULT.vllm, extra={"enforce_eager": True}), dump_graphs=False)

ENGINES: dict[str, tuple[EngineSpec, str]] = {
    f"{options}, flag {side}": (spec, f"{options}, flag off")
    for options, on in (
        ("default options", _DEFAULT), ("graph partition", by_passes(_DEFAULT)), ("eager mode", _EAGER)
    )
    for side, spec in (("off", flag_off(on)), ("on", on))
}  # fmt: skip
"""Each engine, and the one that it is compared with."""
HEADS = ("engine", "tokens as with the flag off", "max \\|dlogprob\\|", "kernel calls in the decode graph",
         "graphs compiled", "engine step, us")  # fmt: skip
_CALL = re.compile(r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


def table(results: Mapping[str, EngineResult]) -> list[str]:
    """Return the rows of the table, heads first."""
    rows = [HEADS, ("---",) * len(HEADS)]
    for name, (spec, base) in ENGINES.items():
        result, found = results[name], compare(results[base], results[name]).values()
        equal, tokens = (sum(getattr(one, of) for one in found) for of in ("tokens_equal", "tokens"))
        apart = max(one.max_abs_dlogprob for one in found)
        calls = len(_CALL.findall(result.code.get(result.decode_range(), ""))) if spec.dump_graphs else "-"
        graphs = result.compilations if spec.dump_graphs else "-"
        rows.append((name, f"{equal} of {tokens}", f"{apart:.2g}", str(calls), str(graphs), f"{result.step_us:.0f}"))
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> int:
    """Run the engines one after the other, so that none slows another one's steps, and print the table."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as folder:
        for name, (spec, _) in ENGINES.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            results[name] = engine.run(spec, inductor=Path(folder))
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
