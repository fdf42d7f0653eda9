"""Claims about docs/configuration.md: it names every option, check, variable and example, and its formulas."""

from __future__ import annotations

from dataclasses import fields

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


def test_the_documented_formulas_are_those_of_the_code() -> None:
    t, n, p, r, lat = 64, 16, 128, 64, 512
    for e, w in ((1, 1), (1, 2), (2, 2)):
        step = formulas.Step(t, n, p, r, lat, e, w)
        found = {
            launch.name: (launch.read, launch.written) for path in formulas.PATHS.values() for launch in path(step)
        }
        query, row, index = t * n * (lat + r), t * (lat + r), t * (2 * r + 16)
        # The table's rows, typed again.
        expected = {
            "RoPE of q_pe and k_pe": (2 * t * (n + 1) * r + t * (2 * r + 8), 2 * t * (n + 1) * r),
            "KV-cache write": (2 * row + 8 * t, e * row),
            "RoPE + KV-cache write": (2 * t * n * r + 2 * row + index, 2 * t * (n + 1) * r + e * row),
            "absorb BMM": (w * n * p * lat + 2 * t * n * p, 2 * t * n * lat),
            "concat" if e == 2 else "concat + quantisation": (2 * query, e * query),
            "AITER: RoPE, KV write, query": (2 * query + 2 * row + index, e * t * (n + 1) * (lat + r)),
            "Triton: absorb BMM, RoPE, KV write, query": (
                w * n * p * lat + 2 * t * n * (p + r) + 2 * row + index,
                e * t * (n + 1) * (lat + r),
            ),
        }
        assert found == expected
