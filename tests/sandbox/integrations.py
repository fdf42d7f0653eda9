"""Which integration moves less? ``python -m tests.sandbox.integrations`` prints a table in Markdown, in four minutes.

Six engines over a small random DeepSeek: vLLM as it is today, compiled and in eager mode; the control; the passes; and
the module integration over vLLM's default pieces and in eager mode. Each is compared with today's engine of its mode.
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
from tests.sandbox.spec import Emulation, EngineResult, EngineSpec, PluginOptions, VllmOptions
from vllm_aiter_mla.commands.check.engine import Side

# Without YaRN, whose rotation vLLM's eager mode rounds three times.
_COMPILED = VllmOptions(model={"num_hidden_layers": 2, "yarn": False})
_EAGER = replace(_COMPILED, extra={"enforce_eager": True})


def _engine(side: Side, vllm: VllmOptions, integration: str = "passes") -> EngineSpec:
    plugin, plain = PluginOptions(additional={"integration": integration}), Emulation(linear="aten")
    return EngineSpec(("concurrent", "mixed", "long"), vllm, plugin, plain, side=side, dump_graphs=vllm is _COMPILED)


ENGINES: dict[str, tuple[EngineSpec, str]] = {
    "vLLM today": (_engine("today", _COMPILED), "vLLM today"),
    "control: graph partition, one more range": (_engine("control", _COMPILED), "vLLM today"),
    "passes": (_engine("plugin", _COMPILED), "vLLM today"),
    "module, vLLM's default pieces": (_engine("plugin", _COMPILED, "module"), "vLLM today"),
    "vLLM today, eager": (_engine("today", _EAGER), "vLLM today, eager"),
    "module, eager": (_engine("plugin", _EAGER, "module"), "vLLM today, eager"),
}
"""Each engine, and the one that it is compared with."""
HEADS = ("engine", "tokens as today", "max \\|dlogprob\\|", "kernel calls in the decode graph", "graphs compiled",
         "engine step, us")  # fmt: skip
_CALL = re.compile(r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


def table(results: Mapping[str, EngineResult]) -> list[str]:
    """Return the rows of the table, heads first."""
    rows = [HEADS, ("---",) * len(HEADS)]
    for name, (spec, base) in ENGINES.items():
        result, found = results[name], compare(results[base], results[name]).values()
        equal, tokens = (sum(getattr(one, of) for one in found) for of in ("tokens_equal", "tokens"))
        apart = max(one.max_abs_dlogprob for one in found)
        calls = len(_CALL.findall(result.code.get(decode_range(result), ""))) if spec.dump_graphs else "-"
        graphs = result.compilations if spec.dump_graphs else "-"
        rows.append((name, f"{equal} of {tokens}", f"{apart:.2g}", str(calls), str(graphs), f"{result.step_us:.0f}"))
    return ["| " + " | ".join(row) + " |" for row in rows]


def decode_range(result: EngineResult) -> str:
    """Return the compile range that decode steps run in, as ``code`` names it."""
    start, end = result.ranges[0]
    return f"{start}-{end}"


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
