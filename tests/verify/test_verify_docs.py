"""docs/verify.md names what there is."""

from pathlib import Path

from vllm_aiter_mla.verify.faults import FAULTS
from vllm_aiter_mla.verify.oracles import ORACLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "verify.md").read_text()


def test_every_planted_fault_stands_in_the_page_with_its_case_and_oracle():
    for fault in FAULTS:
        assert f"| {fault.name} | {fault.case} | {fault.oracle} |" in PAGE


def test_the_page_says_how_to_read_every_oracle():
    for name in ORACLES:
        assert f"| `{name}` |" in PAGE
