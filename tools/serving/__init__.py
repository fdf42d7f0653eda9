"""What `serve_bench.py` and `accuracy.py` share: two servers that differ in the plugin's flag, and figures of both.

options    the command line that both tools have, checked before a server starts
sides      the two lists of server options: flag off and flag on
sweep      `vllm bench sweep serve` over both sides in turn, and what it saved
launch     its server command: one side's server
proof      its benchmark command: proves that the server is what its side is called, then becomes the client
asking     the client of `accuracy.py`: lm-eval; that of `serve_bench.py` is `vllm bench serve`
small      the small random model with a tokenizer, and its environment on a CPU
bench      points and table of `serve_bench.py`
questions  the task and the tables of `accuracy.py`
figures    means, standard errors, ratios, McNemar's test
page       Markdown
"""
