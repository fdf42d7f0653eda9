# SPDX-License-Identifier: Apache-2.0
"""Every use of vLLM's code. Importing this package imports no vLLM; ``patches`` holds what is changed in vLLM."""
