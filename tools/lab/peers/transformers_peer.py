"""Runs Hugging Face transformers in static batches of 16.

A batch is padded on the left, and is as long as its longest output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from tools.lab.peers.task import Prompts, answer, read_task

BATCH = 16


def main() -> None:
    """Answers the task."""
    task = read_task()
    torch.set_num_threads(task.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype)
    ).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def batch(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        width, max_length = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        token_ids = model.generate(
            ids, attention_mask=mask, max_new_tokens=max_length, min_new_tokens=max_length
        )[:, width:]
        return [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        size = BATCH if len(set(lengths)) > 1 else len(prompts)
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), size):
            outputs += batch(prompts[first : first + size], lengths[first : first + size])
        return outputs

    answer(task, f"transformers {transformers.__version__}, torch {torch.__version__}", generate)


if __name__ == "__main__":
    main()
