"""The stub in the place of vLLM's compiled ops declares what they declare: `make test-torch` traces with it."""

import pytest
import torch
from vllm import _custom_ops  # noqa: F401  vLLM's library defines its ops first; a name cannot be defined twice
from vllm.platforms import current_platform

current_platform.import_kernels()

from tests.support.compiled_ops import SCHEMAS  # noqa: E402


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_a_stubbed_op_has_the_arguments_of_the_compiled_one(schema):
    real = getattr(torch.ops._C, schema.partition("(")[0]).default._schema
    assert torch._C.parse_schema(f"_C::{schema}") == real
