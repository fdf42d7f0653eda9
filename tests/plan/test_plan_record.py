"""A plan that vLLM's process makes is the record that ``report`` reads, field by field."""

import pytest

from tests.support import plans
from vllm_aiter_mla import files
from vllm_aiter_mla.commands.plan import model
from vllm_aiter_mla.commands.plan.record import Plan


@pytest.mark.parametrize("arguments", [(), ("--kv-cache-dtype", "fp8", "-tp", "8")], ids=["default", "fp8"])
def test_records_of_real_plans_read_back_as_they_were_made(arguments, tmp_path):
    made, _ = plans.plan_of(plans.ARCH, (), model.find("deepseek-r1"), arguments)
    files.write(tmp_path / "plan.json", made)
    assert files.read(Plan, tmp_path / "plan.json") == made
