# SPDX-License-Identifier: Apache-2.0
"""The steps ``engine``, ``prefill``, ``decode`` and ``launches``: compare vLLM's engine with the flag off and on.

``steps`` starts one engine per side and compares their answers by the measures of ``distance``. ``child`` drives one
engine in a process of its own. ``record`` is the answer of an engine.
"""
