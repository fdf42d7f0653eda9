"""Graph to graph: the matcher, the three passes, and the one InductorPass that vLLM sees.

pipeline         the InductorPass: range gate, match, passes 1 to 3, status of what was rewritten
match            one frozen record per MLA layer, or a reason
kv_update        the node that writes a layer's KV rows
arguments        the arguments of a call by name; one that is not known is refused
probe            evaluates a few nodes on tiny tensors: how the matcher knows that an expression is a RoPE
fx               small graph helpers
rope_kv_cache    pass 1
q_prep_lift      pass 2
aiter_fusion     pass 3
"""
