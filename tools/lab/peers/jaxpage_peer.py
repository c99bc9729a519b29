"""Runs jaxpage itself: continuous batching over paged memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxpage import LLM, SamplingParams
from tools.lab.peers.task import Prompts, answer, read_task


def main() -> None:
    """Answers the task."""
    task = read_task()
    quantized = {"dtype": "bfloat16", "quantization": task.dtype}
    weights: dict[str, Any] = quantized if task.dtype.startswith("int") else {"dtype": task.dtype}
    llm = LLM(
        task.model,
        **weights,
        max_model_len=task.max_length,
        max_num_seqs=task.max_rows,
        enable_prefix_caching=False,
        **task.mode,
    )

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
            for length in lengths
        ]
        outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    answer(task, f"jax {jax.__version__}", generate)


if __name__ == "__main__":
    main()
