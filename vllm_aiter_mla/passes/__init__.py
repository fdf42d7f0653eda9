"""Graph to graph: the matcher, the three passes, and the one Inductor pass that vLLM sees.

pipeline       the Inductor pass: compile range, match, admission, passes 1 to 3
match          one record per MLA layer, or a reason to skip it
rope_probe     recognises a RoPE by evaluating a few nodes on tiny tensors
chain          the three passes, one function each
fx             small graph helpers
"""
