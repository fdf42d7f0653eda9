# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla report``: one HTML page from the files of other commands. It loads nothing and runs no script.

``page`` reads the files and says what the page shows, ``charts`` draws, ``page.html.j2`` holds the markup and the CSS.
"""
