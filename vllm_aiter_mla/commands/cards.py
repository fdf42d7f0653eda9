# SPDX-License-Identifier: Apache-2.0
"""AMD's cards: their architectures and product names."""

from enum import StrEnum


class CardName(StrEnum):
    """The cards that a plan can be made for, each by its architecture or by its product name."""

    architecture: str

    def __new__(cls, name: str, architecture: str) -> "CardName":
        """Make a member whose value is ``name``."""
        member = str.__new__(cls, name)
        member._value_, member.architecture = name, architecture
        return member

    gfx942 = "gfx942", "gfx942"
    gfx950 = "gfx950", "gfx950"
    mi300x = "mi300x", "gfx942"
    mi325x = "mi325x", "gfx942"
    mi350p = "mi350p", "gfx950"
    mi350x = "mi350x", "gfx950"
    mi355x = "mi355x", "gfx950"


ARCHITECTURES = tuple(dict.fromkeys(card.architecture for card in CardName))


def product_names(architecture: str) -> str:
    """Return the product names of an architecture's cards, such as "MI300X, MI325X"."""
    names = (card.value for card in CardName if card.architecture == architecture)
    return ", ".join(name.upper() for name in names if name != architecture)
