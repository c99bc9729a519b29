"""Runs the same requests through static batches of transformers' `generate`, as a baseline.

It needs torch; no other module here does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from jaxpage.bench.results import Measurement
from jaxpage.bench.workloads import WorkItem
from jaxpage.checkpoints.gguf import is_gguf

DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def run_baseline(
    directory: Path, workload: Sequence[WorkItem], *, batch_size: int, dtype: str
) -> Measurement:
    """Runs batches in the order of the requests; each ends with its longest output.

    Args:
        directory: The directory of the checkpoint, or a GGUF file.
        workload: The requests.
        batch_size: The requests of a batch.
        dtype: The type of the weights; "auto" is float32.
    """
    start = time.perf_counter()
    place = {"gguf_file": directory.name} if is_gguf(directory) else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory.parent if place else directory,
        dtype=DTYPES[dtype],
        local_files_only=True,
        trust_remote_code=False,
        **place,
    ).eval()
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=0
    )  # without an end-of-sequence id, only the lengths end a sequence
    loaded = time.perf_counter()
    # Two tokens each take a prompt step and a decode step.
    _generate(model, [WorkItem(item.prompt_token_ids, 2) for item in workload[:2]])
    warmed = time.perf_counter()
    outputs: list[list[int]] = []
    with tqdm(total=len(workload), desc="transformers", unit="request") as bar:
        for first in range(0, len(workload), batch_size):
            batch = workload[first : first + batch_size]
            outputs += _generate(model, batch)
            bar.update(len(batch))
    duration = time.perf_counter() - warmed
    return Measurement.of(
        f"transformers x {batch_size}",
        workload,
        outputs,
        duration=duration,
        load_seconds=loaded - start,
        compile_seconds=0.0,
        warmup_seconds=warmed - loaded,
        details={"torch": torch.__version__, "torch_threads": torch.get_num_threads()},
    )


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _generate(model: Any, batch: Sequence[WorkItem]) -> list[list[int]]:
    """Runs one static batch, padded on the left.

    Every request gets the tokens it asked for, cut from the longest output.
    """
    width = max(len(item.prompt_token_ids) for item in batch)
    token_ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, item in enumerate(batch):
        token_ids[row, width - len(item.prompt_token_ids) :] = torch.tensor(item.prompt_token_ids)
        mask[row, width - len(item.prompt_token_ids) :] = 1
    num_tokens = max(item.num_output_tokens for item in batch)
    result = model.generate(input_ids=token_ids, attention_mask=mask, max_new_tokens=num_tokens)
    return [
        result[row, width : width + item.num_output_tokens].tolist()
        for row, item in enumerate(batch)
    ]
