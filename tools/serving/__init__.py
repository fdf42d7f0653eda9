"""What `serve_bench.py` and `accuracy.py` share: two servers that differ in the plugin's flag, and figures of both.

errors     a wrong option (exit status 2) and a run that gives no table (1)
options    the command line that both tools have, checked before a server starts
arms       the two option lists: off and on
server     start a server, wait for it, stop it; look at one that runs
small      the small random model with a tokenizer, and its environment on a CPU
engaged    proof that the on-arm is on, and the off-arm off
schedule   which arm is visited when, and with which seeds
session    one comparison: schedule, servers and proofs together
bench      the client of `serve_bench.py`; `client` is its process
questions  the client of `accuracy.py`; `asking` is its process
figures    means, standard errors, ratios, McNemar's test
page       Markdown
progress   lines on stderr
"""
