# SPDX-License-Identifier: Apache-2.0
"""The tiles that `check --only timing --tune` has timed on a card, in one file for each card and release of Triton.

A compute partition of a card is a card of its own: it has fewer units, and may have the name of the whole card.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.decided import Spans
from vllm_aiter_mla.kernels.absorb import P_MAJOR
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.triton.tiles import TUNED_SCHEMA, allowed

SHIPPED = Path(__file__).parent / "tuned"
"""Files that users have sent; the machine's own comes first."""


@dataclass(frozen=True)
class TunedTiles:
    """What was fastest on one card with one release of Triton.

    Raises:
        ValueError: the spans of a call do not follow one another from 1 token on.
    """

    card: str  # its name, as torch has it
    triton: str  # the release
    units: int  # compute units of the card
    chosen: dict[str, Spans]  # by ``key_of``: the tiles, as far as was timed
    us: dict[str, dict[int, dict[str, float]]]  # median microseconds by ``key_of``, token count and tile
    evidence: files.Stamp = files.stamp_field(TUNED_SCHEMA)

    def __post_init__(self) -> None:
        for spans in self.chosen.values():
            follows = all(before.last + 1 == after.first for before, after in pairwise(spans))
            if not spans or spans[0].first != 1 or not follows or any(span.first > span.last for span in spans):
                raise ValueError("the spans do not follow one another from 1 token on")


def key_of(inputs: DecodeInputs) -> str:
    """Return what a choice of tiles belongs to, in words: heads of a rank, widths and types, as tuning knows them."""
    weight = " ".join(str(part) for part in inputs.weight.key if part != P_MAJOR)  # timed for one layout only
    widths = f"widths {inputs.nope_dim}+{inputs.rope_dim} and {inputs.latent_dim}"
    types = f"{inputs.q.dtype}, {weight} weight, {inputs.out_dtype} query, {inputs.kv_cache.dtype} cache"
    return f"{inputs.num_heads} heads, {widths}, {types}".replace("torch.", "")


def path_of(folder: Path, card: str, triton: str, units: int) -> Path:
    """Return the file for a card and a release of Triton."""
    return folder / f"tuned-{re.sub(r'[^A-Za-z0-9.+]+', '-', f'{card} {units} triton {triton}')}.json"


def load(folders: Sequence[Path], card: str, triton: str, units: int, arch: str) -> tuple[Mapping[str, Spans], str]:
    """Return the chosen tiles by ``key_of`` of the first folder that has the file, and what was left out and why.

    The machine's own folder comes first. ``card``, ``triton`` and ``units`` are as in ``TunedTiles``.
    """
    for path in (path_of(folder, card, triton, units) for folder in folders):
        try:
            found = files.read_record(TunedTiles, path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return {}, str(error)
        if (found.card, found.triton, found.units) != (card, triton, units):
            theirs = f"{found.card}, {found.units} units, with Triton {found.triton}"
            return {}, f"{path}: for {theirs}; this is {card}, {units} units, with {triton}"
        known = allowed(arch)
        tiles = ((key, span.kernel) for key, spans in found.chosen.items() for span in spans)
        strange = {key: label for key, label in tiles if label not in known}
        why = "".join(f"{path}: {key}: {label} is no tile of this kernel" for key, label in [*strange.items()][:1])
        return {key: spans for key, spans in found.chosen.items() if key not in strange}, why
    others = ", ".join(sorted(path.name for path in folders[0].glob("tuned-*.json")))
    return {}, f"{others}: for another card or Triton; this is {card}, {units} units, with {triton}" if others else ""
