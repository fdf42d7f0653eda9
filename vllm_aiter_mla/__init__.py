# SPDX-License-Identifier: Apache-2.0
"""vllm-aiter-mla: fused decode-side query preparation and KV-cache write for MLA models on ROCm.

Importing this package imports neither torch nor vLLM.
"""

__version__ = "0.2.0"
