# SPDX-License-Identifier: Apache-2.0
"""The command line, which ``main`` reads. Each part imports what it needs only when it runs.

- ``check``, ``status`` and ``report`` are the commands.
- ``machine`` and ``plan`` do the work of two steps of ``check``, and know nothing of it. The work of its other steps is
  in folders below it. ``check.steps`` has the table of all steps, and says where each lives.
- ``process`` runs a function in another process, and ``compat`` asks vLLM. ``outputs`` writes files and text.
  ``serve_options`` knows the names of vLLM's options, ``cards`` those of AMD's cards.
"""
