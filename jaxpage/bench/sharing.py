"""KV memory that is saved by sharing, in parallel sampling and in beam search: the paper's figure 15, measured on an engine.

The saving is blocks saved by sharing / blocks without sharing, summed up over the steps. Requests have the lengths of a dataset. Prompts
are what the model itself has written: how much beams share depends on how sure the model is of what follows, and it is unsure of noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.bench.report import environment
from jaxpage.bench.workloads import DATASETS, WorkItem, make_workload
from jaxpage.checkpoints import read_config, resolve_model
from jaxpage.errors import JaxpageError
from jaxpage.tables import aligned

WIDTHS = (2, 4, 6)
PAPER = {  # percent; of ShareGPT the text gives only the ends
    ("alpaca", "parallel sampling"): "6.1 / 8.5 / 9.8",
    ("alpaca", "beam search"): "37.6 / 53.1 / 55.2",
    ("sharegpt", "parallel sampling"): "16.2 to 30.5",
    ("sharegpt", "beam search"): "44.3 to 66.3",
}


@dataclass(frozen=True)
class Saving:
    """One column of the figure."""

    method: str
    width: int  # samples, or beams
    saved_by_sharing: float  # 0 to 1
    peak_blocks: int


def measure(llm: LLM, workload: Sequence[WorkItem], method: str, width: int, *, progress: bool = False) -> Saving:
    """Runs the workload with every request asking for `width` sequences."""
    params: list[SamplingParams | BeamSearchParams] = []
    for seed, item in enumerate(workload):
        length = item.num_output_tokens
        if method == "beam search":
            params.append(BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
        else:
            params.append(SamplingParams(n=width, max_tokens=length, ignore_eos=True, seed=seed))
    llm.memory_report(reset=True)
    llm.generate([list(item.prompt_token_ids) for item in workload], params, use_tqdm=progress)
    report = llm.memory_report()
    return Saving(method, width, report.saved_by_sharing, report.peak_blocks)


def written_prompts(llm: LLM, workload: Sequence[WorkItem]) -> list[WorkItem]:
    """The workload with prompts of the same lengths that the model has written, each behind its own first token."""
    params = [
        SamplingParams(max_tokens=max(1, len(item.prompt_token_ids) - 1), ignore_eos=True, seed=seed)
        for seed, item in enumerate(workload)
    ]
    first = [[item.prompt_token_ids[0]] for item in workload]
    outputs = llm.generate(first, params, use_tqdm=False)
    return [
        WorkItem((start[0], *output.outputs[0].token_ids)[: len(item.prompt_token_ids)], item.num_output_tokens)
        for item, start, output in zip(workload, first, outputs, strict=True)
    ]


def table_of(savings: Sequence[Saving], dataset: str) -> str:
    rows = [["saved by sharing", *map(str, WIDTHS), "the paper (%)"]]
    for method in dict.fromkeys(saving.method for saving in savings):
        shares = [f"{saving.saved_by_sharing:.1%}" for saving in savings if saving.method == method]
        rows.append([method, *shares, PAPER.get((dataset, method), "")])
    return "\n".join(aligned(rows, num_words=1))


def main(words: Sequence[str] | None = None) -> None:
    """Prints a table and, as the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="reproduce_paper", description=__doc__)
    parser.add_argument("figure", choices=["figure15"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dataset", choices=DATASETS, default="alpaca", help="lengths; default: alpaca")
    parser.add_argument("--num-prompts", type=int, default=32, help="default: 32")
    parser.add_argument("--block-size", type=int, default=16, help="default: 16, as in the paper")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if arguments.num_prompts < 1:
        parser.error("--num-prompts must be at least 1")
    try:
        # Without prefix caching, so that what is saved is saved within requests.
        llm = LLM(
            arguments.model, block_size=arguments.block_size, enable_prefix_caching=False, max_num_seqs=4 * max(WIDTHS)
        )
    except (JaxpageError, ValueError) as error:
        parser.error(str(error))
    with llm:
        longest = llm.memory.max_model_len
        workload = make_workload(
            arguments.dataset,
            arguments.num_prompts,
            seed=arguments.seed,
            vocab_size=read_config(resolve_model(arguments.model))["vocab_size"],
            max_input=longest // 2,
            max_output=longest // 2,
        )
        workload = written_prompts(llm, workload)
        cases = [(method, width) for method in ("parallel sampling", "beam search") for width in WIDTHS]
        savings = [measure(llm, workload, method, width) for method, width in tqdm(cases, desc="Measuring")]
    print(table_of(savings, arguments.dataset))
    results = [asdict(saving) for saving in savings]
    print(json.dumps({**vars(arguments), "results": results, "environment": environment()}, allow_nan=False))
