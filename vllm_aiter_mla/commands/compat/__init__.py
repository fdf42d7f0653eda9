# SPDX-License-Identifier: Apache-2.0
"""What only the commands ask of vLLM: its options and variables, layers without weights, an engine of their own."""
