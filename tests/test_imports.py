"""Who may import whom in the package, late imports too; who may import vLLM; and no cycle, of parts or of files."""

import ast
import graphlib
from pathlib import Path

import pytest

import vllm_aiter_mla
from tests.support.import_table import ARROWS

ROOT = Path(vllm_aiter_mla.__file__).parent


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


@pytest.mark.parametrize("graph", [ARROWS, file_graph()], ids=["parts", "files"])
def test_nothing_imports_itself_in_a_cycle(graph):
    graphlib.TopologicalSorter(graph).prepare()


def test_every_part_is_in_the_table_and_every_row_is_a_part():
    assert {part_of(name) for name in modules()} == set(ARROWS)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("module", "from vllm_aiter_mla.passes import pipeline"),
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
@pytest.mark.parametrize("graph", [ARROWS, file_graph()], ids=["parts", "files"])
def test_mutation_a_cycle_is_seen(graph):
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"settings": {"gate"}}).prepare()
