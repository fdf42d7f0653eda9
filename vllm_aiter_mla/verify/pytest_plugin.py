# SPDX-License-Identifier: Apache-2.0
"""The cases of ``verify`` as pytest items: ``pytest -p vllm_aiter_mla.verify.pytest_plugin --aiter-mla-verify``.

Selection, JUnit XML and other reports are pytest's own. Without the option it collects nothing and imports no torch.
"""

from typing import Any

import pytest

OPTION = "--aiter-mla-verify"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("aiter-mla", "capture/replay verification of vllm-aiter-mla")
    group.addoption(OPTION, action="store_true", help="also run the capture/replay cases of vllm-aiter-mla")
    group.addoption("--aiter-mla-quick", action="store_true", help="fewer variants, short long runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one item per back end, case and variant, before ``-k`` selects among them."""
    if not config.getoption(OPTION):
        return
    from vllm_aiter_mla.verify.session import Session

    quick = config.getoption("--aiter-mla-quick")
    run = Session(quick=quick, again=("--quick",) * quick)

    def add(name: str, **kwargs: Any) -> None:
        items.append(VerifyItem.from_parent(session, name=name, nodeid=f"aiter-mla-verify::{name}", **kwargs))

    for item in run.items:
        add(f"{item.backend}-{item.case.name}[{item.variant.name}]", item=item, run=run)
    for name, why in run.missing.items():
        add(name, why=why)


class VerifyItem(pytest.Item):
    """One case of one back end, or the reason why a back end is missing. It belongs to no file."""

    def __init__(self, item: Any = None, run: Any = None, why: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.item, self.run, self.why = item, run, why

    def runtest(self) -> None:
        """Run the case. If it fails, the text of the failure says what broke."""
        if self.item is None:
            pytest.skip(self.why)
        from vllm_aiter_mla.verify.session import run

        result = run(self.item, self.run.engine)
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status == "failed":
            lines = [f"{f.oracle}: {f.message} (at {f.step})" for f in result.findings]
            pytest.fail("\n".join([*lines, self.run.command(result)]), pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return what pytest prints as the item's place."""
        return "vllm_aiter_mla.verify", None, self.name
