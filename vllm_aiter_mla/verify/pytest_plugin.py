"""``pytest --aiter-mla-verify``: the cases of ``verify`` as pytest items, in any project's run.

Selection, JUnit XML and the like are pytest's own. Without the option nothing is collected and nothing of torch is
imported.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

OPTION = "--aiter-mla-verify"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("aiter-mla", "capture/replay verification of vllm-aiter-mla")
    group.addoption(OPTION, action="store_true", help="also run the capture/replay cases of vllm-aiter-mla")
    group.addoption("--aiter-mla-seed", type=int, default=0, help="seed of the cases' data")
    group.addoption("--aiter-mla-quick", action="store_true", help="fewer variants, short long runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one item per back end, case and variant, before ``-k`` selects among them."""
    if not config.getoption(OPTION):
        return
    from vllm_aiter_mla.verify import session as verify

    request = verify.Request(seed=config.getoption("--aiter-mla-seed"), quick=config.getoption("--aiter-mla-quick"))
    engine = verify.engine_here()
    jobs, missing = verify.plan(request, engine)
    parent = _Verify.from_parent(session, name="aiter-mla-verify", nodeid="aiter-mla-verify")
    for job in jobs:
        for variant, case in itertools.product(job.variants, job.cases):
            one = dataclasses.replace(job, cases=(case,), variants=(variant,))
            name = f"{job.backend}-{case.name}[{variant.name}]"
            items.append(VerifyItem.from_parent(parent, name=name, job=one, engine=engine, request=request))
    items += [VerifyItem.from_parent(parent, name=name, why=why) for name, why in missing.items()]


class _Verify(pytest.Collector):
    """The parent of the items; they belong to no file."""

    def collect(self) -> list[Any]:
        """The items are added by the hook."""
        return []


class VerifyItem(pytest.Item):
    """One case of one back end, or the reason why a back end is missing."""

    def __init__(
        self, *, job: Any = None, engine: Any = None, request: Any = None, why: str = "", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.job, self.engine, self.request, self.why = job, engine, request, why

    def runtest(self) -> None:
        """Run the case; what broke is the failure's text."""
        if self.job is None:
            pytest.skip(self.why)
        from vllm_aiter_mla.verify import session as verify

        for result in verify.run_job(self.job, self.engine):
            if result.status == "skipped":
                pytest.skip(result.reason)
            if result.status == "failed":
                lines = [f"{f.oracle}: {f.message} (at {f.step})" for f in result.findings]
                pytest.fail("\n".join([*lines, verify.command(result, self.request)]), pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where pytest says the item is."""
        return "vllm_aiter_mla.verify", None, self.name
