# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path, and why the rest does not.

``engine_status`` holds what one worker knows of its engine, and makes the worker's ``record``. ``status_files`` writes
and reads the records of a server. ``line`` makes the status line of them, and ``gauge`` the metrics. ``skips`` keeps
the reasons of skipped layers for warm starts.
"""
