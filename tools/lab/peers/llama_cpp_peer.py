"""Runs llama.cpp, by llama-cpp-python.

All sequences are in one batch, but prompts and decodes are apart, which is the best way for it on a
CPU.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tools.lab.peers.gguf_file import gguf_of
from tools.lab.peers.task import Prompts, Task, answer, read_task

BATCH = 512  # the most tokens of a call


def main() -> None:
    """Answers the task."""
    task = read_task()
    config = json.loads((Path(task.model) / "config.json").read_text())
    model = _load(task, config)
    context: Any = None
    num_sequences = 0

    def prepare(expected: int) -> None:
        """Makes a context for this number of sequences, unless it is that of the last run."""
        nonlocal context, num_sequences
        if expected == num_sequences:
            return
        if context is not None:
            llama_cpp.llama_free(context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = expected * (task.max_length + 256), expected
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = task.threads
        params.kv_unified = task.mode["kv_unified"]
        params.flash_attn_type = int(task.mode["flash_attention"])
        context, num_sequences = llama_cpp.llama_init_from_model(model, params), expected

    vocab_size = config["vocab_size"]
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Computes at most BATCH tokens, and returns the most likely next tokens.

        A token is (token id, position, sequence, whether it draws); only those that draw have a
        result.
        """
        batch.n_tokens = len(tokens)
        for index, (token_id, position, sequence, draws) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token_id, position, draws
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        drawn = [index for index, token in enumerate(tokens) if token[3]]
        logits = (llama_cpp.llama_get_logits_ith(context, place) for place in drawn)
        return [int(np.ctypeslib.as_array(each, (vocab_size,)).argmax()) for each in logits]

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        prepare(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        stream = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        drawn: list[int] = []
        for first in range(0, len(stream), BATCH):
            drawn += run(stream[first : first + BATCH])
        outputs = [[token_id] for token_id in drawn]
        while going := [
            index for index, output in enumerate(outputs) if len(output) < lengths[index]
        ]:
            places = [len(prompts[index]) + len(outputs[index]) - 1 for index in going]
            step = [
                (outputs[index][-1], place, index, True)
                for index, place in zip(going, places, strict=True)
            ]
            for index, token_id in zip(going, run(step), strict=True):
                outputs[index].append(token_id)
        return outputs

    answer(task, f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}", generate)


def _load(task: Task, config: dict[str, Any]) -> Any:  # a pointer of ctypes
    with gguf_of(Path(task.model), config, task.dtype) as path:
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        # Version 0.3.36 ends by a signal where it multiplies Q8_0 by AMX, which is one of its extra
        # buffer types.
        loading.use_extra_bufts = task.dtype != "int8"
        return llama_cpp.llama_model_load_from_file(path.encode(), loading)


if __name__ == "__main__":
    main()
