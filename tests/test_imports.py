"""The rooms, that is the parts of the package: who may import whom, late imports too, and who may import vLLM."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_aiter_mla

ROOT = Path(vllm_aiter_mla.__file__).parent

FIRST = {"settings", "admission", "decode_limit", "fingerprint", "evidence"}
"""Decide on plain values. Importing them imports neither torch nor vLLM."""

ARROWS: dict[str, set[str]] = {
    **{room: set() for room in FIRST},
    "kernels": FIRST,
    "status": FIRST,
    "compat": FIRST,
    "layers": FIRST | {"kernels", "status", "compat"},
    "ops.bodies": FIRST | {"kernels", "status"},
    "ops": FIRST | {"kernels", "status", "compat", "layers", "ops.bodies"},
    "passes": FIRST | {"status", "compat", "layers", "ops"},
    "module": FIRST | {"kernels", "status", "compat", "layers"},
    "measuring": FIRST | {"kernels", "status", "compat", "layers"},
    "worker": FIRST | {"status", "compat", "layers", "measuring", "module", "passes"},
    "gate": FIRST | {"status", "compat", "layers", "passes", "worker"},
    "plugin": {"compat", "gate", "ops", "worker"},
    "verify": FIRST | {"kernels", "ops.bodies"},
    "sandbox": FIRST
    | {"kernels", "status", "compat", "layers", "measuring", "module", "ops.bodies", "ops", "passes"}
    | {"gate", "worker", "plugin", "verify"},
}
ARROWS["commands"] = set(ARROWS)
"""Each may import those named; docs/development.md draws it. Nobody may import ``commands``."""

MAY_IMPORT_VLLM = {"compat", "sandbox"}


def modules() -> list[Path]:
    """Every module of the package but the top ``__init__``, which belongs to no room."""
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(source: str) -> Iterator[str]:
    """Dotted names that a module imports, at its head or late, by statement or by ``import_module("...")``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def room_of(dotted: str) -> str:
    """The room of a module of the package, by its name without the package's: the longest one in the table."""
    parts = dotted.split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in ARROWS), parts[0])


def room_of_file(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def rooms_imported(source: str) -> set[str]:
    """Rooms of the package that ``source`` imports."""
    ours = (name.removeprefix("vllm_aiter_mla.") for name in imported(source) if name.startswith("vllm_aiter_mla."))
    return {room_of(name) for name in ours if not name.startswith("__")}


def strays(room: str, source: str) -> set[str]:
    """Rooms that ``source`` imports and that ``room`` may not know."""
    return rooms_imported(source) - {room} - ARROWS[room]


def imports_vllm(source: str) -> bool:
    return any(name.split(".")[0] == "vllm" for name in imported(source))


def graph() -> dict[str, set[str]]:
    """Room by room what its modules really import."""
    found: dict[str, set[str]] = {room: set() for room in ARROWS}
    for path in modules():
        room = room_of_file(path)
        found[room] |= rooms_imported(path.read_text()) - {room}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    assert strays(room_of_file(path), path.read_text()) == set()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_vllm_is_imported_in_compat_and_the_sandbox_alone(path: Path) -> None:
    if room_of_file(path) not in MAY_IMPORT_VLLM:
        assert not imports_vllm(path.read_text())


def test_no_room_imports_itself_in_a_circle() -> None:
    graphlib.TopologicalSorter(graph()).prepare()


def test_nobody_imports_the_commands() -> None:
    assert not [room for room, known in graph().items() if "commands" in known]


def test_every_room_is_in_the_table_and_every_row_is_a_room() -> None:
    assert {room_of_file(path) for path in modules()} == set(ARROWS)


def test_the_production_path_does_not_know_the_sandbox() -> None:
    known = {room for room, others in graph().items() if "sandbox" in others}
    assert known <= {"commands"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layers", "from vllm_aiter_mla.passes import pipeline"),
        ("kernels", "def late():\n    from vllm_aiter_mla import compat"),
        ("compat", "import vllm_aiter_mla.gate"),
        ("ops.bodies", "from vllm_aiter_mla.ops import adapter"),
        ("verify", "from vllm_aiter_mla.ops import register"),
        ("gate", "import importlib\nimportlib.import_module('vllm_aiter_mla.commands.plan')"),
    ],
)
def test_mutation_an_arrow_the_wrong_way_is_seen(room: str, source: str) -> None:
    assert strays(room, source)


@pytest.mark.mutation
@pytest.mark.parametrize("source", ["import vllm.config", "def late():\n    from vllm import platforms"])
def test_mutation_an_import_of_vllm_is_seen(source: str) -> None:
    assert imports_vllm(source)


@pytest.mark.mutation
def test_mutation_a_circle_of_rooms_is_seen() -> None:
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph() | {"settings": {"gate"}}).prepare()
