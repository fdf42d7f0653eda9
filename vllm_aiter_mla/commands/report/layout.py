"""Places for the boxes of a layered graph: inputs above their readers, few crossings, no overlap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from vllm_aiter_mla.commands.report.layers import Box

ROW, HEIGHT, GAP, MARGIN = 62.0, 36.0, 14.0, 8.0
CHARACTER, PADDING = 6.7, 18.0
# An edge that passes a row keeps a lane of this width free.
LANE = 8.0
SWEEPS = 12


@dataclass(slots=True)
class Spot:
    """Where a box, or an edge's lane through a row, is: centre ``x``, row from the top, width; ``y`` of its middle."""

    x: float
    row: int
    width: float

    @property
    def y(self) -> float:
        """Middle of the row, in pixels."""
        return MARGIN + HEIGHT / 2 + self.row * ROW


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that has a place.

    Attributes:
        spots: by box key, and by lane name for edges that span rows.
        edges: each as the names of the spots it passes, from the source to the reader.
        width: of the drawing in pixels; likewise ``height``.
    """

    spots: dict[str, Spot]
    edges: list[list[str]]
    width: float
    height: float


def place(boxes: dict[str, Box]) -> Drawing:
    """Lay boxes out; ``boxes`` is in topological order."""
    rows = _rows(boxes)
    spots = {key: Spot(0.0, rows[key], width_of(box)) for key, box in boxes.items()}
    edges = [_lanes(source, key, spots) for key, box in boxes.items() for source in box.inputs if source in boxes]
    grid: list[list[str]] = [[] for _ in range(max(rows.values(), default=0) + 1)]
    for name, spot in spots.items():
        grid[spot.row].append(name)
    above, below = _neighbours(edges)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in grid if down else reversed(grid):
            _spread(row, spots, above if down else below)
    left = min((s.x - s.width / 2 for s in spots.values()), default=0.0)
    for spot in spots.values():
        spot.x += MARGIN - left
    width = max((s.x + s.width / 2 for s in spots.values()), default=0.0) + MARGIN
    return Drawing(spots, edges, width, 2 * MARGIN + HEIGHT + (len(grid) - 1) * ROW)


def width_of(box: Box) -> float:
    """Of a box that holds its label and note."""
    return max(len(box.label), len(box.note)) * CHARACTER + PADDING


def _rows(boxes: dict[str, Box]) -> dict[str, int]:
    """Row from the top: as close to the readers as possible, so that edges are short."""
    to_end = dict.fromkeys(boxes, 0)
    for key in reversed(list(boxes)):
        for source in boxes[key].inputs:
            if source in to_end:
                to_end[source] = max(to_end[source], to_end[key] + 1)
    depth = max(to_end.values(), default=0)
    return {key: depth - distance for key, distance in to_end.items()}


def _lanes(source: str, reader: str, spots: dict[str, Spot]) -> list[str]:
    path = [source]
    for row in range(spots[source].row + 1, spots[reader].row):
        # One lane per source and row: edges of one source to several readers run together.
        name = f"{source}|{row}"
        spots.setdefault(name, Spot(0.0, row, LANE))
        path.append(name)
    return [*path, reader]


def _neighbours(edges: list[list[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for path in edges:
        for upper, lower in pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _spread(row: list[str], spots: dict[str, Spot], near: dict[str, list[str]]) -> None:
    """Order a row by where its neighbours are, and put each as near to them as the others let it."""
    wish = {
        name: sum(spots[n].x for n in near[name]) / len(near[name]) if near.get(name) else spots[name].x for name in row
    }
    row.sort(key=lambda name: wish[name])
    edge = float("-inf")
    for name in row:
        half = spots[name].width / 2
        spots[name].x = max(wish[name], edge + half + GAP)
        edge = spots[name].x + half
    # Pushing moved everything to the right; give back the mean of it.
    shift = sum(spots[name].x - wish[name] for name in row) / max(len(row), 1)
    for name in row:
        spots[name].x -= shift
