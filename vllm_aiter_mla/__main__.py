# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_aiter_mla`` is the command ``vllm-aiter-mla``."""

from vllm_aiter_mla.commands.main import main

if __name__ == "__main__":
    main()
