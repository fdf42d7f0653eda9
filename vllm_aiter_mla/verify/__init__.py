# SPDX-License-Identifier: Apache-2.0
"""Capture and replay regression: everything that serving does to a captured graph, compared with the reference.

README.md is the page of the step ``kernels`` of ``check``. Start with ``cases`` (what happens), then ``runner`` (one
case) and ``oracles`` (what must hold).

This file imports nothing: the command line needs these names long before it needs torch.
"""

PASSED, FAILED, NOTHING = 0, 1, 3  # exit statuses
