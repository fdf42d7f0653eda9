"""A process that imports this first has no vLLM, as on a bare card: ``pytest -p tests.support.without_vllm``."""

import sys

sys.modules["vllm"] = None  # type: ignore[assignment]  # every import of vLLM raises, and ``find_spec`` finds none
