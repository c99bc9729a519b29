"""Compares a server's answers to lm-eval (`--log_samples`) with transformers on torch.

    python tools/lab/lm_eval/compare.py out/demo jaxpage/demo

The guide is docs/guides/serving.md, "lm-eval". Status 1 if a log likelihood is off by more than
1e-3, or if a text is wrongly called greedy or not greedy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install torch transformers") from None

TOLERANCE = 1e-3


def main(samples: str, model_directory: str) -> int:
    """Prints the differences and returns the exit status."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    differences, num_wrong = [], 0
    for context, text, logprob, is_greedy in read_answers(Path(samples)):
        before = tokenizer(context)["input_ids"] or [tokenizer.eos_token_id]
        token_ids = tokenizer(context + text)["input_ids"][len(before) if context else 0 :]
        expected, greedy = likelihood(model, before, token_ids)
        differences.append(abs(logprob - expected))
        num_wrong += is_greedy is not None and is_greedy != greedy
    print(
        f"{len(differences)} texts, largest difference {max(differences):.1e}, {num_wrong} wrongly called greedy or not"
    )
    return int(num_wrong > 0 or max(differences) > TOLERANCE)


def read_answers(directory: Path) -> Iterator[tuple[str, str, float, bool | None]]:
    """Yields context, text, its log likelihood, and whether it is greedy decoding's text.

    A whole page has no context, and None in the last place.
    """
    for file in directory.glob("samples_jaxpage_*.jsonl"):
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            if "page" in sample["doc"]:
                yield "", sample["doc"]["page"], float(sample["filtered_resps"][0]), None
            elif len(sample["filtered_resps"]) > 1:
                for argument, (logprob, is_greedy) in zip(
                    sample["arguments"].values(), sample["filtered_resps"], strict=True
                ):
                    yield (
                        argument["arg_0"],
                        argument["arg_1"],
                        float(logprob),
                        str(is_greedy) == "True",
                    )


@torch.no_grad()
def likelihood(model: Any, before: list[int], token_ids: list[int]) -> tuple[float, bool]:
    """Returns the log likelihood of these tokens, and whether all of them are greedy."""
    logprobs = model(torch.tensor([before + token_ids])).logits[0].log_softmax(-1)
    rows = logprobs[len(before) - 1 : -1]
    chosen = rows[torch.arange(len(token_ids)), token_ids]
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(token_ids)).all())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
