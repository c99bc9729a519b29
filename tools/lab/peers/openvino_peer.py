"""Runs OpenVINO GenAI with continuous batching.

It reads weights of a GGUF file, and keeps keys and values in eight bits, as is its default on a
CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from tools.lab.peers.gguf_file import gguf_of
from tools.lab.peers.task import Prompts, answer, read_task

KV_GIB = 2  # room for keys and values


def main() -> None:
    """Answers the task."""
    task = read_task()
    config = json.loads((Path(task.model) / "config.json").read_text())
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.max_num_seqs = task.max_rows
    scheduler.enable_prefix_caching = False
    with gguf_of(Path(task.model), config, task.dtype) as path:
        properties = {"INFERENCE_NUM_THREADS": task.threads}
        pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [_greedy(length) for length in lengths])
        return [list(result.m_generation_ids[0]) for result in results]

    answer(task, f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}", generate)


def _greedy(length: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = length
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    main()
