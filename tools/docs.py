"""Write docs/generated/: the commands' help, the ledger, patches, reasons to skip, and JSON fields.

    python tools/docs.py [--check]

The texts come from the typer app, ``tools/counting/ledger.py``, ``reasons.json``, AITER's ``LIMITS``,
``schemas.json``, and the docstrings of ``compat/patches.py`` and of the machine's checks. They are the same on every
machine. With --check nothing is written: exit status 1 if a page is not up to date.
"""

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, guarded
from tools.counting import ledger

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "generated"
FIRST = "Written by `make docs`, that is `python tools/docs.py`. Do not edit it."
WIDTH = 100
FIELDS = ("Symptom", "Upstream", "Remove when")
FILES = """The JSON files and their fields

Every file carries the stamp `evidence`: its schema and version, the versions of plugin, vLLM and AITER, the time in
UTC, and the host. The schema's version grows when a field goes or changes its meaning, and stays when one is added. A
file is written in one step, with the umask's mode. A link in its place is replaced and never followed. Names with RUN
or KEY are under `$VLLM_CACHE_ROOT/aiter_mla`. You may delete them while no server runs: metrics and `status` read them.

While they live, a front end holds `lock-status-RUN`, an engine's worker `lock-status-RUN-ENGINE_ID-DP_INDEX-RANK`, and
a process in a first call `lock-first-call-...`. Without that lock, a first call counts as ended. Whether a server
without its lock lives is not known: its metrics stay, and `status` exits with 3."""
LEVELS = {
    "engine": "Of the whole engine, and some of one layer too",
    "layer": "Of one layer, from its attention module",
    "graph": "Of one layer, from what its graph computes",
    "kernel": "Of one layer, from the kernels that could run it",
}
LEDGER = """The ledger: what one attention layer costs in each kind of batch

Each cell is `launches / allocations / bytes`, counted on a CPU: four rows, 16 heads, gfx950, 16-bit weights, kernel
`aiter`; with decode attention and value projection, unlike the plan's table. `off` and `on` are the flag over vLLM's
default options; `fused` adds graph partition, and so vLLM's own RoPE + KV fusion. A full graph allocates nothing, and
changes no other figure. [The rules](../evidence.md)."""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    tables = f"{LEDGER}\n\n{ledger.render(ledger.count_all())}"
    made = {"commands": commands(), "files": fields(), "ledger": tables, "patches": patches()}
    return {f"{name}.md": f"{FIRST}\n\n# {text}\n" for name, text in (made | {"reasons": reasons()}).items()}


def commands() -> str:
    """Return the help text of each command in a code block, and what the step machine looks at."""
    from typer.testing import CliRunner

    from vllm_aiter_mla.commands.machine import CHECKS, check_name
    from vllm_aiter_mla.commands.main import app

    parts, program = ["The commands"], "vllm-aiter-mla"
    for words in [], *([command.name] for command in app.registered_commands):
        said = CliRunner().invoke(app, [*words, "--help"], prog_name=program, terminal_width=WIDTH).output
        lines = [line.rstrip() for line in said.strip().splitlines()]
        parts += [f"## `{' '.join([program, *words])}`", "\n".join(["```text", *lines, "```"])]
    rows = [f"| `{check_name(check)}` | {first_line(check.__doc__)} |" for check in CHECKS]
    parts += ["## What the step machine looks at", "\n".join(["| check | |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def first_line(docstring: str | None) -> str:
    """Return a docstring's first line, as Markdown."""
    return (docstring or "").splitlines()[0].replace("``", "`")


def patches() -> str:
    """Return for each patch its name, what it does, and the labelled lines of its docstring."""
    from vllm_aiter_mla.compat import patches as module

    own = [one for _, one in inspect.getmembers(module, inspect.isfunction) if f"{FIELDS[0]}:" in (one.__doc__ or "")]
    own.sort(key=lambda one: one.__code__.co_firstlineno)
    failed = "If one fails, the engine is skipped; for `pass_config`, only that spelling of the options."
    parts = ["Patches of vLLM", f"From the docstrings of `vllm_aiter_mla/compat/patches.py`. {failed}"]
    for name, one in zip(module.PATCHES, own, strict=True):
        text = inspect.cleandoc(one.__doc__ or "").replace("``", "`")
        parts += [f"## `{name}`", f"`{one.__name__}`: {text.splitlines()[0]}"]
        parts += ["\n".join(f"- {line}" for line in re.findall(rf"^(?:{'|'.join(FIELDS)}): .+$", text, re.MULTILINE))]
    return "\n\n".join(parts)


def reasons() -> str:
    """Return a table of codes for each level, and one of the limits of AITER's kernels."""
    from vllm_aiter_mla import admission
    from vllm_aiter_mla.kernels.aiter.contract import LIMITS

    rule = "|---|---|---|"
    parts = ["The codes of skipped engines and layers", "[Troubleshooting](../troubleshooting.md) has the log lines."]
    for level, title in LEVELS.items():
        rows = [
            f"| `{code}` | {cause} | {remedy} |" for code, (cause, remedy) in admission.CODES_BY_LEVEL[level].items()
        ]
        parts += [f"## {title}", "\n".join(["| code | cause | remedy |", rule, *rows])]
    limits = [f"| `{name}` | {' | '.join(text.split('; ', 1))} |" for name, text in LIMITS.items()]
    parts += ["## Checks of AITER's kernels", "\n".join(["| check | why | remedy |", rule, *limits])]
    return "\n\n".join(parts)


def fields() -> str:
    """Return for each schema its version, who writes it, and a table of its fields."""
    from vllm_aiter_mla import files

    parts = [FILES]
    for name, schema in files.schemas().items():
        rows = [
            f"| {', '.join(f'`{one}`' for one in key.split(', '))} | {text} |" for key, text in schema["fields"].items()
        ]
        parts += [f"## `{name}` {schema['version']}", f"Written by {schema['written']}."]
        parts += ["\n".join(["| field | meaning |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def run(argv: Sequence[str]) -> int:
    """Write the pages, or name those that are not up to date."""
    parser = Parser(__doc__, "docs.py [--check]")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, wrong = parser.parse_args(argv).check, False
    for path, text in ((FOLDER / name, text) for name, text in pages().items()):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        wrong = check
        print(f"{path.name}: {'not up to date, run: make docs' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(guarded("docs", run))
