"""The arrows between the rooms of the package, late imports included: who may know whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_aiter_mla

ROOT = Path(vllm_aiter_mla.__file__).parent
PURE = {"settings", "bucket", "admission", "fingerprint"}
"""Decide on plain values; importing them imports neither torch nor vLLM."""

ARROWS: dict[str, set[str]] = {
    "settings": set(),
    "bucket": set(),
    "admission": set(),
    "fingerprint": set(),
    "kernels": set(),
    "harness": {"kernels"},
    "compat": {"admission", "fingerprint", "settings"},
    "report": PURE | {"compat", "kernels"},
    "runtime": PURE | {"compat", "kernels", "report"},
    "passes": PURE | {"compat", "report", "runtime"},
    "worker": {"compat", "passes", "report", "runtime"},
    "gate": PURE | {"compat", "report", "worker"},
    "plugin": {"compat", "gate", "runtime", "sandbox", "worker"},
    "sandbox": PURE | {"compat", "kernels", "report", "runtime"},
    "commands": PURE | {"compat", "harness", "kernels", "plugin", "report", "sandbox"},
}


def imported(source: str) -> Iterator[str]:
    """Dotted names that a module imports, at its head or late."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def strays(room: str, source: str) -> set[str]:
    """Rooms that ``source`` imports and that ``room`` may not know."""
    ours = (name.split(".")[1] for name in imported(source) if name.startswith("vllm_aiter_mla."))
    return {name for name in ours if name in ARROWS and name != room} - ARROWS[room]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_room_imports_one_that_it_may_not_know(path: Path) -> None:
    if path.parent == ROOT and path.stem == "__init__":
        return
    assert strays(room_of(path), path.read_text()) == set()


def test_nobody_imports_the_commands() -> None:
    assert not [room for room, known in ARROWS.items() if "commands" in known]


@pytest.mark.parametrize("room", ["commands", "kernels", "harness", *sorted(PURE)])
def test_only_some_rooms_import_vllm(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]
    for path in files:
        assert not [name for name in imported(path.read_text()) if name.split(".")[0] == "vllm"], path


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(path) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"}
    assert rooms == set(ARROWS)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("runtime", "from vllm_aiter_mla.passes import pipeline"),
        ("kernels", "def late():\n    from vllm_aiter_mla import compat"),
        ("compat", "import vllm_aiter_mla.gate"),
        ("gate", "def late():\n    from vllm_aiter_mla.commands.plan import model"),
    ],
)
def test_mutation_an_arrow_the_wrong_way_is_seen(room: str, source: str) -> None:
    assert strays(room, source)
