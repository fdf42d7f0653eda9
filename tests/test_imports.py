"""Imports: who may ask a GPU, who runs without vLLM, no cycle, and what the contracts of pyproject.toml catch."""

import ast
import functools
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import vllm_aiter_mla

ROOT = Path(vllm_aiter_mla.__file__).parent
ASK_A_CARD = {
    "kernels.device": "the one seam",
    "commands.plan.simulated_card": "makes up the card of vLLM's own platform, for a plan on a machine without ROCm",
    "commands.compat.rocm_config": "builds vLLM's layers on `meta`, where the card's cache must stay alone",
}
"""Files that may name torch's GPU runtime, and why."""
ON_A_BARE_CARD = (
    "kernels",
    "verify",
    "commands.main",
    "commands.check.kernels",
    "commands.check.timing",
)
"""Parts and files that run where torch and Triton are and vLLM is not; ``tests/test_without_vllm.py`` runs them."""
RUNTIME = re.compile(
    r"torch\.(cuda|version|profiler|accelerator|xpu)\b|(.*\.)?(version\.hip|version\.cuda|cuda\.\w+|is_cuda|_cuda_\w+)$"
    r"|vllm_aiter_mla\.kernels\.device\.installed$"
)
"""Names of a GPU's runtime, of what torch was built for, of a tensor on a GPU, and of the installed device."""
OTHERS = ("vllm", "tests", "tools")
BY_NAME = re.compile(rf"(import_module|__import__)\(\s*[a-zA-Z]?['\"]({'|'.join(OTHERS)})")
"""An import that is no statement: a contract does not see it."""
LATE = {
    "plugin": "the gate and a worker's engine, where a server needs them",
    "commands.main": "the commands, of which contracts know",
}
"""Files that may import by name, and what."""
FORBIDDEN = (
    "gate -> commands.main", "compat -> gate", "serving -> passes", "kernels -> compat", "settings -> admission",
    "engine -> verify", "engine -> gate", "verify -> passes", "passes -> engine", "gate -> startup",
    "status -> kernels", "files -> settings", "serving -> vllm", "kernels -> tests", "commands -> tools",
    "plugin -> serving", "__main__ -> plugin", "verify -> compat", "verify -> status",
    "commands.compat -> commands.main", "commands.compat -> verify",
)  # fmt: skip
"""Imports that a contract forbids, at least one for each."""


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
    return found | {ast.unparse(one) for one in ast.walk(tree) if keeps_a_card(one) or looks_at_a_device(one)}


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


def test_a_card_is_asked_through_the_seam_only():
    found = {name: past_the_seam(path.read_text()) for name, path in modules().items()}
    assert {name: asked for name, asked in found.items() if asked and name not in ASK_A_CARD} == {}
    assert all(found[name] for name in ASK_A_CARD), "a file that may ask does not"


def test_what_a_contract_is_about_is_imported_by_statements():
    assert {name for name, path in modules().items() if BY_NAME.search(path.read_text())} == set(LATE)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "line",
    [
        "importlib.import_module('vllm_aiter_mla.commands.plan')", 'import_module(f"vllm_aiter_mla.{name}")',
        "__import__('vllm')", 'import_module(\n    f"tests.{name}"\n)',
    ],
)  # fmt: skip
def test_mutation_an_import_by_name_is_seen(line):
    assert BY_NAME.search(line)


@pytest.mark.mutation
def test_mutation_a_forbidden_import_is_seen(tmp_path):
    package = tmp_path / ROOT.name
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    for arrow in FORBIDDEN:
        part, name = arrow.split(" -> ")
        place = package / part.replace(".", "/")
        with (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).open("a") as file:
            file.write(f"\ndef late():\n    import {name if name in OTHERS else f'{ROOT.name}.{name}'}\n")
    (package / "unheard_of.py").touch()
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT.parent / "pyproject.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    said = done.stdout.replace(f"{ROOT.name}.", "")
    assert (done.returncode, "0 kept" in said, said.count("- unheard_of")) == (1, True, 2), done
    assert [arrow for arrow in FORBIDDEN if f"{arrow} (" not in said] == []


def test_no_file_imports_itself_in_a_cycle():
    found = grimp.build_graph(ROOT.name, cache_dir=None)
    graph = {name: found.find_modules_directly_imported_by(name) for name in found.modules}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"vllm_aiter_mla.settings": {"vllm_aiter_mla.gate"}}).prepare()


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


@functools.cache
def defined_in(path):
    """Names that a file defines or imports at its top level, also under a condition."""
    names, statements = set(), [*ast.parse(path.read_text()).body]
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            parts = ("body", "orelse", "handlers", "finalbody")
            statements += [one for part in parts for one in getattr(statement, part, ())]
        elif isinstance(statement, ast.ExceptHandler):
            statements += statement.body
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        else:
            names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names


def missing_names(source):
    """Names of this package that a file imports, inside functions too, and that are not there."""
    root = ROOT.parent
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(ROOT.name):
            continue
        folder = root.joinpath(*node.module.split("."))
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        for alias in node.names:
            is_file = folder.joinpath(alias.name).is_dir() or folder.joinpath(f"{alias.name}.py").exists()
            if not is_file and alias.name not in (defined_in(path) if path.exists() else ()):
                yield f"{node.module}.{alias.name}"


def test_every_name_that_is_imported_of_the_package_is_there():
    """An import inside a function fails when it runs, and some of them run on a card alone."""
    places = [path for name in ("tests", "tools", ROOT.name) for path in (ROOT.parent / name).rglob("*.py")]
    assert [(str(path), name) for path in places for name in missing_names(path.read_text())] == []


@pytest.mark.mutation
@pytest.mark.parametrize("line", ["from vllm_aiter_mla.commands.check import tune", "from vllm_aiter_mla.x import y"])
def test_mutation_an_import_of_what_is_not_there_is_seen(line):
    assert [*missing_names(f"def section():\n    {line}\n")] == [".".join(line.split()[1::2])]
