"""Claims about docs/configuration.md: it names every option, check, variable and example, and its formulas."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from tests.support.pages import PAGES
from vllm_aiter_mla import settings
from vllm_aiter_mla.commands.doctor.check import name_of
from vllm_aiter_mla.commands.doctor.command import CHECKS
from vllm_aiter_mla.commands.plan import formulas, model
from vllm_aiter_mla.compat.offline import VARIABLES

PAGE = PAGES["configuration.md"]
NAMES = {
    *settings.PASS_CONFIG_FIELDS,
    *(field.name for field in fields(settings.Settings) if field.name != "debug"),
    *(f"debug.{field.name}" for field in fields(settings.DebugSettings)),
    *settings.KERNELS, *settings.AITER_VIEWS, *settings.STOP_AFTER, *settings.ROUNDINGS,
    *map(name_of, CHECKS), *VARIABLES, *model.examples(),
}  # fmt: skip


def test_every_option_choice_check_variable_and_example_is_documented() -> None:
    assert [name for name in sorted(NAMES) if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize(("e", "w"), [(1, 1), (1, 2), (2, 2)])
def test_the_documented_formulas_are_those_of_the_code(e: int, w: int) -> None:
    sizes = {"T": 64, "N": 16, "P": 128, "R": 64, "L": 512, "e": e, "w": w}
    step = formulas.Step(*sizes.values())
    found = {name: numbers for path in formulas.paths(step).values() for name, *numbers in path}
    table = PAGE.partition("| launch | reads | writes |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines()]
    # "2 T (N + 1) R" is a product.
    products = [[re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", cell) for cell in row] for row in rows]
    assert len(rows) == 7
    assert sorted([eval(product, {}, sizes) for product in row] for row in products) == sorted(found.values())
