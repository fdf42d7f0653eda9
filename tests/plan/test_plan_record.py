"""A plan that vLLM's process makes is the record that ``report`` reads, field by field."""

import json
from pathlib import Path

import pytest

from tests.support import plans
from vllm_aiter_mla import files
from vllm_aiter_mla.commands.plan.record import Plan


@pytest.mark.parametrize("arguments", [(), ("--kv-cache-dtype", "fp8", "-tp", "8")], ids=["default", "fp8"])
def test_records_of_real_plans_hold_every_field(arguments):
    made = json.loads(json.dumps(plans.planned("deepseek-r1", *arguments)))
    found = json.loads(files.text_of(files.part(Plan, Path("plan"), made)))
    assert {name: value for name, value in found.items() if name in made} | {"decision": made["decision"]} == made
    assert found.keys() - made.keys() <= {files.KEY, "added"}
