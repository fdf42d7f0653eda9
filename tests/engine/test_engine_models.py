"""Another architecture than DeepSeek's. ``test_engine_models_matrix.py`` has all of them."""

from __future__ import annotations

import pytest

from tests.engine.test_engine_parity import assert_all_engaged, assert_parity


@pytest.mark.wide
@pytest.mark.engine("glm-off", "glm-on")
def test_glm_flash_with_its_wide_heads_and_experts_gives_the_tokens_of_vllm(engines):
    assert_all_engaged(engines("glm-on"))
    assert_parity(engines("glm-off"), engines("glm-on"))
