# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path, and why the rest does not.

``engine_status`` is what one worker knows of its engine, and makes a ``record`` of it. ``status_files`` writes and
reads the records of a server, ``skips`` keeps reasons for warm starts, ``line`` is the status line, and ``gauge`` the
metrics.
"""
