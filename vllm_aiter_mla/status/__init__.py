# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path, and why the rest does not.

``record`` is the record of one rank, and merges those of an engine's ranks. ``engine_status`` holds what one worker
knows of its engine, and makes its record. ``status_files`` writes and reads the records of a server. ``line`` makes the
status line of them, and ``metrics`` the metrics. ``skips`` keeps the reasons of skipped layers for warm starts.
"""
