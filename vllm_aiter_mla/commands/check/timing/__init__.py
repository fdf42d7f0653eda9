# SPDX-License-Identifier: Apache-2.0
"""The step ``timing``: time AITER's kernels, ours and vLLM's own on this machine's GPU, as start-up does.

``step`` decides how the step ends. ``child`` checks and times the kernels in a process of its own, because AITER's
checks end a process by an abort. ``tune`` does the same for the tiles of the Triton kernel. ``rivals`` and ``stand_in``
hold the kernels that are timed and never serve. ``record`` is the JSON, and ``printout`` prints it.
"""
