"""Measures the KV memory that parallel sampling and beam search save by sharing, on an engine.

This is the paper's figure 15. The saving is blocks saved by sharing / blocks without sharing,
summed over the steps and not over time, so that every run gives the same numbers. Requests have the
lengths of a dataset. The model itself has written the prompts: how much beams share depends on how
sure the model is of what follows, and it is unsure after noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.bench.workloads import WorkItem

WIDTHS = (2, 4, 6)


@dataclass(frozen=True)
class Saving:
    """Holds one column of the figure."""

    method: str
    width: int  # the number of samples, or of beams
    saved_by_sharing: float  # 0 to 1
    peak_blocks: int


def measure(llm: LLM, workload: Sequence[WorkItem], method: str, width: int) -> Saving:
    """Runs the workload with every request asking for `width` sequences."""
    params: list[SamplingParams | BeamSearchParams] = []
    for seed, item in enumerate(workload):
        length = item.num_output_tokens
        if method == "beam search":
            params.append(BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
        else:
            params.append(SamplingParams(n=width, max_tokens=length, ignore_eos=True, seed=seed))
    llm.memory_report(reset=True)
    llm.generate([list(item.prompt_token_ids) for item in workload], params, use_tqdm=False)
    report = llm.memory_report()
    splits = [sample.split for sample in report.samples]
    saved = sum(split.saved_blocks for split in splits) / sum(
        split.unshared_blocks for split in splits
    )
    return Saving(method, width, saved, report.peak_blocks)


def write_prompts(llm: LLM, workload: Sequence[WorkItem]) -> list[WorkItem]:
    """Returns the workload with prompts that the model has written.

    Each prompt has the length and the first token of the old one.
    """
    params = [
        SamplingParams(
            max_tokens=max(1, len(item.prompt_token_ids) - 1), ignore_eos=True, seed=seed
        )
        for seed, item in enumerate(workload)
    ]
    first = [[item.prompt_token_ids[0]] for item in workload]
    outputs = llm.generate(first, params, use_tqdm=False)
    return [
        WorkItem(
            (start[0], *output.outputs[0].token_ids)[: len(item.prompt_token_ids)],
            item.num_output_tokens,
        )
        for item, start, output in zip(workload, first, outputs, strict=True)
    ]
