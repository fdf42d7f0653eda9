"""Capture/replay regression: graphs captured and replayed under everything serving does to them, against the reference.

``vllm-aiter-mla verify`` runs it on the user's own machine. It imports torch, never vLLM.

| module | what |
|---|---|
| ``setting`` | sizes, dtypes and capture sizes of a run |
| ``world`` | the buffers that serving keeps between steps, and how a step fills them |
| ``attention`` | a reference decode attention, and the path of mixed batches |
| ``subject`` | what is under test: a back end inside the op and the attention op, and the programs made of them |
| ``tape``, ``engines``, ``graphs`` | capture and replay: a tape of ATen calls anywhere, CUDA and HIP graphs on a GPU |
| ``cases``, ``oracles``, ``runner`` | what happens, what is checked, and the loop that joins them |
| ``dot``, ``census``, ``devices`` | the kernels of a captured graph, and the card they ran on |
| ``faults``, ``selftest`` | planted faults, each caught by a named case |
| ``backends``, ``interpreted``, ``session`` | which back ends are here, and a whole run |
| ``report``, ``terminal``, ``pytest_plugin`` | JSON, JUnit XML, a table, and pytest |

This file imports nothing: the command line asks for names long before it needs torch.
"""
