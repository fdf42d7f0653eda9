"""Who may import whom in the package, late imports too; who may import vLLM, need it or ask a GPU; and no cycle."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_aiter_mla
from tests.support.import_table import ARROWS

ROOT = Path(vllm_aiter_mla.__file__).parent
ASK_A_CARD = {
    "kernels.device": "the one seam",
    "commands.plan.card": "makes up the card of vLLM's own platform, for a plan on a machine without ROCm",
    "commands.compat.rocm_config": "builds vLLM's layers on `meta`, where the card's cache must stay alone",
}
"""Files that may name torch's GPU runtime, and why."""
ON_A_BARE_CARD = ("kernels", "verify", "commands.main", "commands.measure", "commands.tune", "commands.verify")
"""Parts and files that run where torch and Triton are and vLLM is not; ``tests/test_without_vllm.py`` runs them."""
RUNTIME = re.compile(
    r"torch\.(cuda|version|profiler|accelerator|xpu)\b|(.*\.)?(version\.hip|version\.cuda|cuda\.\w+|is_cuda|_cuda_\w+)$"
)
"""Names of a GPU's runtime, of what torch was built for, and of a tensor that lies on a GPU."""


def modules():
    """Every file of the package by its dotted name without the package's, but the top ``__init__``."""
    paths = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(source):
    """Dotted names that a file imports, at its head or late, by statement or by ``import_module("...")``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, name, "") for name in ("attr", "id")
        ):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def ours(source):
    """What ``source`` imports of the package, without the package's name."""
    found = (name.removeprefix("vllm_aiter_mla.") for name in imported(source) if name.startswith("vllm_aiter_mla."))
    return {name for name in found if not name.startswith("__")}


def part_of(dotted):
    """The part that a file belongs to: the longest name in the table."""
    parts = dotted.split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in ARROWS), parts[0])


def strays(part, source):
    """Parts that ``source`` imports and that ``part`` may not know."""
    return {part_of(name) for name in ours(source)} - {part} - ARROWS[part]


def foreign(source):
    """Those of vLLM, the tests and the tools that a file imports."""
    return {name.split(".")[0] for name in imported(source)} & {"vllm", "tests", "tools"}


def names_of(tree):
    """Each name with a dot, and each import, in full where a file has imported what the name begins with."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {alias.asname or alias.name: home + alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield f"{found.get(first, first)}.{rest}"


def keeps_a_card(node):
    """Whether a statement keeps what ``card()`` returned: at the head of a file or a class, or in an object."""
    kept = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else [node]
    kept = [one for one in kept if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)]
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Attribute):
        return False
    return any(ast.unparse(one.value.func).split(".")[-1] == "card" for one in kept)


def looks_at_a_device(node):
    """Whether an expression takes the device of a tensor or of an engine for the answer: is there a card?"""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value) is not None
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
        against = map(ast.unparse, node.comparators)
        return node.left.attr in ("type", "device_type") and "'cpu'" in against
    return False


def past_the_seam(source):
    """Return what a file asks of a GPU's runtime that it should ask ``card()``, and what it keeps of the seam."""
    tree = ast.parse(source)
    found = {name for name in {*names_of(tree), *imported(source)} if RUNTIME.match(name)}
    found |= {name for name in ours(source) if name == "kernels.device.installed"}
    return found | {ast.unparse(one) for one in ast.walk(tree) if keeps_a_card(one) or looks_at_a_device(one)}


def file_graph():
    """What each file imports: the file that defines a name, or the ``__init__`` that exports it."""
    files = modules()
    found = {}
    for name, path in files.items():
        known = {
            max((file for file in files if f"{other}.".startswith(f"{file}.")), key=len, default=name)
            for other in ours(path.read_text())
        }
        found[name] = known - {name}
    return found


@pytest.mark.parametrize("name", modules())
def test_a_file_imports_only_what_its_part_may(name):
    assert strays(part_of(name), modules()[name].read_text()) == set()


@pytest.mark.parametrize("name", modules())
def test_vllm_is_imported_in_compat_only_and_tests_and_tools_nowhere(name):
    known = {"vllm"} if part_of(name) in ("compat", "commands.compat") else set()
    assert foreign(modules()[name].read_text()) <= known


def fail_without_vllm(names):
    """Import each file of the package in one process that has no vLLM; return the names that fail."""
    code = (
        "import importlib, json, sys, tests.support.without_vllm\nfailed = []\nfor name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(f'vllm_aiter_mla.{name}')\n"
        "    except ModuleNotFoundError:\n        failed.append(name)\nprint(json.dumps(failed))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_what_runs_on_a_bare_card_is_imported_without_vllm():
    names = [name for name in modules() if any(f"{name}.".startswith(f"{part}.") for part in ON_A_BARE_CARD)]
    assert len(names) > 30
    assert fail_without_vllm(names) == []


@pytest.mark.mutation
def test_mutation_a_file_that_needs_vllm_is_seen():
    assert fail_without_vllm(["kernels", "compat.inductor"]) == ["compat.inductor"]


@pytest.mark.parametrize("name", sorted(set(modules()) - set(ASK_A_CARD)))
def test_a_card_is_asked_through_the_seam_only(name):
    assert past_the_seam(modules()[name].read_text()) == set()


def test_each_file_that_may_ask_a_card_does():
    assert all(past_the_seam(modules()[name].read_text()) for name in ASK_A_CARD)


@pytest.mark.parametrize("graph", [ARROWS, file_graph()], ids=["parts", "files"])
def test_nothing_imports_itself_in_a_cycle(graph):
    graphlib.TopologicalSorter(graph).prepare()


def test_every_part_is_in_the_table_and_every_row_is_a_part():
    assert {part_of(name) for name in modules()} == set(ARROWS)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("serving", "from vllm_aiter_mla.passes import pipeline"),
        ("kernels", "def late():\n    from vllm_aiter_mla import compat"),
        ("compat", "import vllm_aiter_mla.gate"),
        ("verify", "from vllm_aiter_mla.compat import config"),
        ("gate", "import importlib\nimportlib.import_module('vllm_aiter_mla.commands.plan')"),
    ],
)
def test_mutation_an_arrow_the_wrong_way_is_seen(part, source):
    assert strays(part, source)


@pytest.mark.mutation
@pytest.mark.parametrize("source", ["import vllm.config", "def late():\n    from vllm import platforms"])
def test_mutation_an_import_of_vllm_is_seen(source):
    assert foreign(source) == {"vllm"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    "source",
    [
        "import torch\nhas_gpu = torch.cuda.is_available()",
        "def late():\n    from torch.cuda import is_available",
        "def late():\n    import torch as t\n    return t.cuda.synchronize()",
        "from torch import cuda as runtime\nruntime.synchronize()",
        "import torch\nis_rocm = torch.version.hip is not None",
        "from torch.version import hip",
        "def late(found):\n    return found.version.hip",
        "def late(found):\n    return found.cuda.is_available()",
        "def late():\n    from torch.profiler import profile",
        "import importlib\nimportlib.import_module('torch.cuda')",
        "import torch\ntorch.accelerator.synchronize()",
        "import torch\ntorch._C._cuda_clearCublasWorkspaces()",
        "def late(tensor):\n    return tensor.is_cuda",
        "def late(tensor):\n    return tensor.device.type == 'cuda'",
        "def late(tensor):\n    return tensor.device.type != 'cpu'",
        "def late(config):\n    return config.device_config.device_type != 'cpu'",
        "import torch\nhome = torch.device('cuda:0')",
        "from vllm_aiter_mla.kernels.device import installed",
        "from vllm_aiter_mla.kernels.device import card\nhere = card()",
        "from vllm_aiter_mla.kernels import device\nclass Engine:\n    card = device.card()",
        "class Engine:\n    def __init__(self):\n        self.card = card()",
    ],
)
def test_mutation_a_question_past_the_seam_is_seen(source):
    assert past_the_seam(source)


@pytest.mark.mutation
@pytest.mark.parametrize("graph", [ARROWS, file_graph()], ids=["parts", "files"])
def test_mutation_a_cycle_is_seen(graph):
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"settings": {"gate"}}).prepare()
