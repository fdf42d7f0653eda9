# SPDX-License-Identifier: Apache-2.0
"""Which layers run on the fast path, and why the others do not.

``record`` is the record of one rank, and merges the records of an engine's ranks. ``engine_status`` holds what one
worker knows of its engine, and makes its record. ``status_files`` writes and reads the records of a server. ``line``
makes the status line from them, and ``metrics`` the metrics. ``skips`` keeps the reasons of skipped layers for warm
starts.
"""
