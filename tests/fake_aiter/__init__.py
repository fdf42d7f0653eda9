"""Test-side door to the fake AITER, whose implementation the demo shares: vllm_aiter_mla/sandbox/fake_aiter."""
