# SPDX-License-Identifier: Apache-2.0
"""The parts of a page: summaries on the first screen, and sections of titled blocks with tables, charts and lines."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check.record import STATUSES
from vllm_aiter_mla.commands.report.charts import DrawChart
from vllm_aiter_mla.status.record import RankRecord

PLAN = "Plan"
"""The section of plans. Nothing in it ran, and the page says so."""
SECTIONS = ("Serving", "Check", PLAN, "Status", "Timing", "Kernels")
"""The sections in their order on the page."""

NOTHING_RAN, LOOKED_UP, ON_CPU, ON_EMULATOR = "planned", "looked up", "passed on a CPU", "passed on an emulator"
OUTCOMES = {status: traits.tone for status, traits in STATUSES.items()} | {
    "engaged": "good", "partly": "mind", NOTHING_RAN: "none", LOOKED_UP: "none", ON_CPU: "none", ON_EMULATOR: "none",
    "engaged on a CPU": "none", "ended": "none", "compared": "none",
}  # fmt: skip
"""The CSS class of each outcome, for its colour. The page shows the word with the colour."""
NO_CARD = "none: nothing here ran on a GPU"


@dataclass(frozen=True)
class PageInput:
    """An input file."""

    name: str  # on the page; unique
    folder: Path
    ranks: Sequence[RankRecord] = ()  # for a status file, the records of its engine's ranks among the inputs


@dataclass(frozen=True)
class InputSummary:
    """The summary of one input on the first screen."""

    outcome: str  # one of ``OUTCOMES``
    title: str  # what was done, and with which model
    card: str
    meaning: str
    skipped: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # in addition to those of the stamp
    run: str = ""  # the server; its ranks share a summary


@dataclass
class Block:
    """A table, with the chart and the lines above it."""

    columns: tuple[str, ...]
    chart: Markup
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # what went wrong


class Page:
    """The summaries, and the blocks by section and title."""

    def __init__(self) -> None:
        self.summaries: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        self.sections: dict[str, dict[str, Block]] = {section: {} for section in SECTIONS}

    def add_summary(self, page_input: PageInput, summary: InputSummary, evidence: files.Stamp) -> None:
        """Add a summary to the first screen. The ranks of a server share one summary, which has the facts of each."""
        versions = {"vLLM": evidence.vllm, "AITER": evidence.aiter, **summary.versions, "plugin": evidence.plugin}
        facts = {
            "Input": page_input.name,
            "Card": summary.card,
            "When": f"{evidence.time.replace('T', ' ').replace('+00:00', ' UTC')} on {evidence.host}",
            "Versions": ", ".join(f"{name} {value or 'not installed'}" for name, value in versions.items()),
            "Skipped": "; ".join(summary.skipped) or "nothing",
            "Means": summary.meaning,
        }
        shared_facts = self.summaries.setdefault(
            (summary.outcome, summary.title, summary.run or page_input.name), defaultdict(list)
        )
        for name, fact in facts.items():
            shared_facts[name] += [fact] * (fact not in shared_facts[name])

    def add_block(
        self,
        page_input: PageInput,
        section: str,
        title: str,
        columns: Sequence[str] = (),
        rows: Iterable[Sequence[Any]] = (),
        chart: DrawChart = lambda title: "",
        notes: Iterable[str] = (),
        alarms: Iterable[str] = (),
    ) -> None:
        """Add a block. If there is a block with the same title and table, add the new notes and alarms to it.

        The ranks of an engine often have equal blocks. A table whose first column is the input takes the rows of all
        inputs. If the table differs otherwise, the input's name is added to the title. ``rows`` have one cell per
        column, and a list in a cell is folded. ``chart`` draws SVG for a title.
        """
        blocks, new_rows, columns = self.sections[section], [*map(tuple, rows)], tuple(columns)
        has_rows_of_all_inputs = columns[:1] == ("input",)
        while (
            not has_rows_of_all_inputs
            and title in blocks
            and (blocks[title].columns, blocks[title].rows) != (columns, new_rows)
        ):
            title += f" ({page_input.name})"
        if is_new := title not in blocks:
            blocks[title] = Block(columns, Markup(chart(title)))
        block = blocks[title]
        block.rows += new_rows if is_new or has_rows_of_all_inputs else []
        block.notes += [note for note in dict.fromkeys(notes) if note not in block.notes]
        block.alarms += alarms
