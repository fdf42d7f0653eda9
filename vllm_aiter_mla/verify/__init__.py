# SPDX-License-Identifier: Apache-2.0
"""Capture and replay regression: everything that serving does to a captured graph, compared with the reference.

``vllm-aiter-mla verify`` runs it on the user's machine. It runs the plugin's own op bodies over plain tensors, and
imports vLLM only on an AMD card, for its product over fp8 weights. Start with ``cases`` (what happens), then
``runner`` (one case) and ``oracles`` (what must hold).

This file imports nothing: the command line needs these names long before it needs torch.
"""

PASSED, FAILED, NOTHING = 0, 1, 3  # exit statuses
