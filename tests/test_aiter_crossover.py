"""The crossover tool: honest without a card, and right about the figures it would print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).parent.parent / "tools" / "aiter_crossover.py"


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("aiter_crossover")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_card_it_says_not_measured_and_exits_2() -> None:
    run = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("not measured: this needs an MI300X or MI355X, and this machine is cpu")
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "0"], "--heads 0: between 4 and 1024 expected"),
        (["--heads", "-16"], "--heads -16: between 4 and 1024 expected"),
        (["--block-size", "0"], "--block-size 0: between 1 and 65536 expected"),
    ],
)
def test_a_wrong_option_is_named_before_a_card_is_looked_for(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "at", "says"),
    [
        ([(1, 2.0, 3.0), (64, 5.0, 4.0), (255, 9.0, 6.0)], 64, "from 64 tokens on: aiter_view=64"),
        ([(1, 2.0, 3.0), (64, 3.0, 4.0)], None, "up to 255 tokens: aiter_view=per-head"),
        ([(1, 3.0, 2.0), (64, 4.0, 3.0)], 1, "opt is the faster one throughout: aiter_view=opt"),
        ([(1, 3.0, 2.0), (32, 3.0, 4.0), (64, 5.0, 4.0)], 64, "from 64 tokens on: aiter_view=64"),
    ],
)
def test_the_crossover_holds_for_every_larger_batch(tool, rows, at, says) -> None:
    assert tool.crossover(rows) == at
    assert says in tool.verdict(rows)
