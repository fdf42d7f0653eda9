# SPDX-License-Identifier: Apache-2.0
"""What a captured graph launches, read from its DOT dump, and whether that is what the formulas say.

Launches are counted in three ways, because none sees every step. On a CPU ``engine.Recording`` counts what reaches
torch's dispatcher, which does not see the kernels of a card. On a card the nodes of a graph are read, because torch's
profiler loses launches of a replayed graph on some releases of ROCm (ROCm/legacy-rocm-build#6102). vLLM keeps no graph
whose nodes can be read, so ``Device.count_kernels`` profiles a step of its engine.

CUDA's verbose dump and HIP's plain dump both put what matters into a label:

==============  ====================================================================================
CUDA, verbose   ``{KERNEL\\n| {ID | 0 (topoId: 3) | name\\<\\<\\<1,128,0\\>\\>\\>}\\n| ...}``
HIP, plain      ``0\\nname\\n`` in an octagon for a kernel, else ``3\\nMEMCPY\\n(DtoD,64)`` and similar
==============  ====================================================================================

On NVIDIA torch writes the dump. On AMD ``hip_python`` does.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_aiter_mla.kernels import formulas
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.verify import hip_python

# Nodes that order other nodes and do nothing.
BARRIERS = frozenset({"EMPTY", "EVENT_RECORD", "EVENT_WAIT", "EVENTRECORD", "EVENTWAIT"})
# A label holds newlines and escaped signs, and no plain quotation mark.
_NODE = re.compile(r'^\s*"[^"]+"\s*\[((?:[^"\]]|"(?:[^"\\]|\\.)*")*)\]', re.MULTILINE)
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_CUDA_KERNEL = re.compile(r"\{\s*ID\s*\|\s*\d+[^|]*\|\s*(.+?)(?:\\<|\})", re.DOTALL)
_KIND = re.compile(r"[A-Z][A-Z_]*")
_MAPS = Path("/proc/self/maps")
# How many kinds of launches one line names; a fused step has one or two.
NAMED = 6
_ANY_SIZE = formulas.StepSize(1, 1, 1, 1, 1, 1)  # which launches there are does not depend on it


class DumpError(RuntimeError):
    """There is no dump of the graph, or it cannot be read; the message is one sentence that says why."""


def graph_dot(graph: Any) -> str:
    """Return the DOT text of a graph that ``Device.capture`` returned, on either vendor.

    Raises:
        DumpError: there is no dump.
    """
    text = card().dot(graph)
    if text is None:
        return hip_dot(graph.raw_cuda_graph())
    if not text:
        raise DumpError("torch wrote no DOT dump of the graph")
    return text


def hip_dot(graph: int) -> str:
    """Return the plain DOT text of a graph, given the address that ``CUDAGraph.raw_cuda_graph()`` returns.

    Not the verbose text: HIP prints a verbose label into a fixed buffer, whatever the length of the kernel's name
    (500 bytes in ROCm/clr, later 4096: hip_graph_internal.hpp, GraphKernelNode::GetLabel). Not ``hipGraphGetNodes``:
    hip-python passes an uninitialised capacity to it (6.4, 7.2, 10.0).

    Raises:
        DumpError: HIP fails, sees no GPU, or this process holds a second HIP runtime that may own the graph.
    """
    _hip_call("hipGetDeviceCount")  # loads the library, before the copies are counted
    check_one_runtime()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        _hip_call("hipGraphDebugDotPrint", graph, str(path).encode(), 0)
        return path.read_text(errors="replace")


def _hip_call(name: str, *arguments: Any) -> None:
    """Call hip-python. Raises DumpError."""
    calls = hip_python.find()
    if isinstance(calls, str):
        raise DumpError(f"{calls}; {hip_python.install(card().rocm)}")
    try:
        result = getattr(calls, name)(*arguments)
    except Exception as error:  # RuntimeError without the library; a release with other arguments may raise anything
        raise DumpError(f"hip-python {hip_python.version()} cannot call {name}: {first_line(error)}") from None
    code = result[0] if isinstance(result, tuple) else result
    if int(code) != 0:
        raise DumpError(f"{name} says {getattr(code, 'name', code)}")


def check_one_runtime(maps: Path = _MAPS) -> None:
    """Check that this process has loaded only one copy of libamdhip64.

    A graph belongs to the copy that made it. Handing it to another copy would crash the process.

    Raises:
        DumpError: there are two copies.
    """
    paths = {line.split()[-1] for line in maps.read_text(errors="replace").splitlines() if "libamdhip64" in line}
    if len(paths) > 1:
        raise DumpError(f"two HIP runtimes are loaded, torch's and hip-python's: {', '.join(sorted(paths))}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def of_dot(text: str) -> tuple[str, ...]:
    """Return what the graph of a dump launches: names of kernels ("?" without one), kinds of other work.

    Nodes of an unknown kind count. Nodes that only order others do not.

    Raises:
        DumpError: no ``digraph``, or one without a node. An empty list would look like a graph without work.
    """
    if "digraph" not in text:
        raise DumpError(f"no DOT text: it starts with {text[:40]!r}")
    nodes = [_node(dict(_ATTRIBUTE.findall(attributes))) for attributes in _NODE.findall(text)]
    if not nodes:
        raise DumpError("the DOT text has no node: the graph is empty, or its format is new")
    return tuple((name or "?") if kind == "KERNEL" else kind for kind, name in nodes if kind not in BARRIERS)


def _node(attributes: dict[str, str]) -> tuple[str, str]:
    """Return a node's kind, and its name if it is a kernel."""
    label = attributes.get("label", "")
    if label.lstrip().startswith("{"):
        kind, kernel = _KIND.match(label.lstrip("{ \n\r\t")), _CUDA_KERNEL.search(label)
        return kind[0] if kind else "UNKNOWN", kernel[1].strip() if kernel else ""
    what = [*(line.strip() for line in label.splitlines() if line.strip()), "", ""][1]
    if attributes.get("shape") == "octagon":
        return "KERNEL", what
    kind = _KIND.match(what)
    return kind[0] if kind else "UNKNOWN", ""


def in_words(names: Sequence[str]) -> str:
    """Return one line: "2 launches: 1 x Cijk_..., 1 x fuse_qk_rope...". Names end after 60 characters."""
    counted = Counter(name if len(name) <= 60 else f"{name[:57]}..." for name in names).most_common()
    words = [f"{count} x {name}" for name, count in counted[:NAMED]]
    if len(counted) > NAMED:
        words.append(f"{len(counted) - NAMED} other kinds")
    return f"{len(names)} launch{'es' * (len(names) != 1)}: {', '.join(words)}"


# The narrow patterns come first, because a kernel's name may hold "gemm" among its template arguments.
KERNELS: dict[str, tuple[str, int]] = {
    formulas.AITER: (r"rope.*(cache|concat|cat)", 1),
    formulas.TRITON: (r"decode_prep_kernel", 1),
    # The reduction of a split-K product may follow the product.
    formulas.ABSORB: (
        r"gemm|bmm|matmul|cijk|tensile|hipblaslt|cublas|nvjet|cutlass|xmma|splitk|postgsu|dot_kernel", 2,
    ),
}  # fmt: skip
"""By launch of the formulas: a pattern of its kernels' names, and how many kernels it may be."""


def violation(backend: str, names: Sequence[str], layers: int, budget: int | None = None) -> str | None:
    """Return why ``layers`` calls of the back end must not launch ``names``, or None.

    The formulas say what a call launches. A back end that is not there has ``budget`` launches per call, if given.
    """
    planned = {launch.name for launch in formulas.paths(_ANY_SIZE).get(backend.partition("-")[0], ())}
    if not planned and budget is None:
        return None
    kinds = [(what, pattern, 1, most) for what, (pattern, most) in KERNELS.items() if what in planned]
    kinds = [*(kinds or [("launch", "", 0, budget or 0)]), ("other launch", "", 0, 0)]
    counted = Counter(next(kind for kind in kinds if re.search(kind[1], name, re.IGNORECASE)) for name in names)
    for kind in kinds:
        what, _, least, most = kind
        if not least * layers <= counted[kind] <= most * layers:
            wanted = f"{least} to {most} per layer expected"
            return f"{what}: {wanted}, {counted[kind]} found in {layers} layer(s); {in_words(names)}"
    return None
