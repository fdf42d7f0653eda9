# SPDX-License-Identifier: Apache-2.0
"""vLLM for the commands: its options and variables, layers without weights, and an engine in this process."""
