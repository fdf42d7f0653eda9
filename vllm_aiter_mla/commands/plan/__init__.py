# SPDX-License-Identifier: Apache-2.0
"""The step ``plan``: what would engage, from a model's config and the options of ``vllm serve``.

``model`` finds the config and starts a process of its own, in which ``build`` makes the plan: it asks vLLM
(``answer``), admission for every reason and the back ends (``kernels``), and counts bytes and launches
(``formulas``). ``printout`` prints the plan. Nothing here needs a GPU, weights or a network.
"""
