# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER as a kernel back end.

``op`` finds AITER without importing it, then imports it. ``contract`` says what AITER must never be given, ``route``
which of its kernels will run, ``backend`` calls it. docs/kernels.md has the details.

Nothing is imported here: ``check --only machine`` runs ``op`` on machines without torch.
"""
