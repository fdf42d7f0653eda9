"""Capture/replay regression: graphs captured and replayed under everything serving does to them, against the reference.

``vllm-aiter-mla verify`` runs it on the user's own machine. It runs the plugin's own op bodies (``ops.bodies``) over
plain tensors; it imports torch, never vLLM.

| module | what |
|---|---|
| ``setting`` | sizes, dtypes and capture sizes of a run |
| ``buffers`` | the buffers that serving keeps between steps, and how a step fills them |
| ``layer`` | a layer of plain tensors in the place of vLLM's |
| ``subject`` | what is under test: a back end inside the op bodies, and the steps made of them |
| ``engine``, ``recording`` | capture and replay anywhere: recorded ATen calls are repeated |
| ``graphs`` | capture and replay on a GPU: CUDA and HIP graphs |
| ``cases``, ``oracles``, ``runner``, ``inductor`` | what happens, what is checked, and the loop that joins them |
| ``launches``, ``devices`` | what a captured graph launches, and the card it ran on |
| ``faults``, ``selftest`` | planted faults, each caught by a named case |
| ``backends``, ``interpreted``, ``session`` | which back ends are here, and a whole run |
| ``terminal``, ``pytest_plugin`` | a run on the terminal, and inside pytest |

This file imports nothing: the command line asks for names long before it needs torch.
"""
