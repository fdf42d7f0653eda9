"""Answer prompts with DeepSeek-R1 on eight MI300X or MI355X, with the plugin on and no server.

export VLLM_ROCM_USE_AITER=1
export VLLM_ROCM_USE_AITER_CUSTOM_AR=0      # only MI300X and MI325X: aiter#4888, see docs/operate.md
python examples/offline.py "Why is the sky blue?"
"""

import sys

from vllm import LLM, SamplingParams

# The recipe of serve.yaml. The flag is in `additional_config`, because a script that has not loaded vLLM's plugins yet
# cannot name the plugin's field of `pass_config`.
ARGUMENTS = {
    "model": "deepseek-ai/DeepSeek-R1",
    "tensor_parallel_size": 8,
    "kv_cache_dtype": "fp8",
    "trust_remote_code": True,
    "additional_config": {"aiter_mla": {"enabled": True}},
}


def main(prompts: list[str]) -> None:
    """Print the model's answer to each prompt."""
    llm = LLM(**ARGUMENTS)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for answer in llm.chat(chats, SamplingParams(max_tokens=512)):
        print(answer.outputs[0].text)


# vLLM's workers are new processes that import this file again: they must not start an engine each.
if __name__ == "__main__":
    main(sys.argv[1:] or ["Why is the sky blue?"])
