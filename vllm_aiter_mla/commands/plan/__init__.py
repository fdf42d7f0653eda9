# SPDX-License-Identifier: Apache-2.0
"""The step ``plan``: what would engage, from a model's config and the options of ``vllm serve``.

Nothing here needs a GPU, weights or a network. In the order in which they run:

- ``model`` finds the config.
- ``ask`` starts a process of its own, in which ``child`` makes a plan for each set of options.
- ``answer`` asks vLLM what it decides, over a ``card`` that is made up where vLLM finds none.
- ``build`` decides what would engage and why not: it asks admission for every reason, ``kernels`` for the back ends,
  and ``formulas`` of the package ``kernels`` for bytes and launches.
- ``issues`` adds the known faults of what runs beside the plugin.
- ``record`` is what comes out, and what is written to JSON; ``printout`` shows it as text.
"""
