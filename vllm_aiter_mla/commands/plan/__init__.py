# SPDX-License-Identifier: Apache-2.0
"""The step ``plan``: what would engage, from a model's config and the options of ``vllm serve``.

``model`` finds the config and starts a process of its own, in which ``build`` makes the plan: it asks vLLM
(``answer``), admission for every reason and the back ends (``kernels``), and counts bytes and launches
(``formulas``). ``printout`` prints the plan. Nothing here needs a GPU, weights or a network.
"""

from enum import StrEnum


class Arch(StrEnum):
    """Cards a plan can be made for, by architecture or by the name that is sold."""

    gfx942 = "gfx942"
    gfx950 = "gfx950"
    mi300x = "mi300x"
    mi325x = "mi325x"
    mi350p = "mi350p"
    mi350x = "mi350x"
    mi355x = "mi355x"

    @property
    def architecture(self) -> str:
        """gfx942 or gfx950."""
        return SOLD_AS.get(self.value, self.value)


SOLD_AS = {"mi300x": "gfx942", "mi325x": "gfx942", "mi350p": "gfx950", "mi350x": "gfx950", "mi355x": "gfx950"}
