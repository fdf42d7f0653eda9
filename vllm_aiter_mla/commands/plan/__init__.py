# SPDX-License-Identifier: Apache-2.0
"""The step ``plan``: which layers would engage, from a model's config and the options of ``vllm serve``.

The step needs no GPU, no weights and no network. Its modules, in the order in which they run:

- ``config_source`` finds the config.
- ``planner`` starts a process, in which ``child`` makes a plan for each set of options.
- ``vllm_facts`` collects facts from vLLM. ``simulated_card`` simulates an AMD card if vLLM finds none.
- ``build`` makes the record. The reasons come from admission, the kernels from ``kernels`` and the back ends, bytes
  and launches from ``vllm_aiter_mla.kernels.formulas``.
- ``issues`` adds the known issues of other code in the server.
- ``record`` has the classes that are written to JSON; ``printout`` shows a plan as text.
"""
