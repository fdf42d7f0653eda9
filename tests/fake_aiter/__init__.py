"""The fake AITER for the tests; the demo uses it too: vllm_aiter_mla/sandbox/fake_aiter."""
