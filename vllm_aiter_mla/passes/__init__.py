# SPDX-License-Identifier: Apache-2.0
"""Graph to graph: the matcher, the three passes, and the one Inductor pass that vLLM sees.

pipeline       the Inductor pass: compile range, match, admission, passes 1 to 3
match          one record per MLA layer, or a reason to skip it
rope_probe     recognises a RoPE by evaluating a few nodes on tiny tensors
rope_kv        pass 1
q_prep_lift    pass 2
aiter_fusion   pass 3
fx             small graph helpers
"""
