# SPDX-License-Identifier: Apache-2.0
"""The steps ``engine``, ``prefill``, ``decode`` and ``launches``: vLLM's engine with the flag off and on, compared.

``steps`` starts one engine per side and compares what they answer, by the measures of ``distance``. ``child`` drives
one engine in a process of its own. ``record`` is what an engine answers.
"""
