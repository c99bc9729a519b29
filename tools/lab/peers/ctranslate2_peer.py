"""Runs CTranslate2 in batches of up to 32 requests.

Requests with the longest outputs come first, which is the best order for it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import tokenizers
import transformers

from tools.lab.peers.task import Prompts, answer, read_task

BATCH = 32


def main() -> None:
    """Answers the task."""
    task = read_task()
    with tempfile.TemporaryDirectory() as directory:
        source, converted = Path(directory) / "source", Path(directory) / "converted"
        _with_tokenizer(Path(task.model), source)
        ctranslate2.converters.TransformersConverter(str(source)).convert(
            str(converted), quantization=task.dtype
        )
        generator = ctranslate2.Generator(
            str(converted), compute_type=task.dtype, inter_threads=1, intra_threads=task.threads
        )

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: -lengths[index])
        size = BATCH if len(set(lengths)) > 1 else len(prompts)
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            results = generator.generate_batch(
                [[f"t{token_id}" for token_id in prompts[index]] for index in batch],
                max_length=lengths[batch[0]],
                min_length=lengths[batch[0]],
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            for index, result in zip(batch, results, strict=True):
                outputs[index] = result.sequences_ids[0][: lengths[index]]
        return outputs

    answer(task, f"CTranslate2 {ctranslate2.__version__}", generate)


def _with_tokenizer(model: Path, directory: Path) -> None:
    """Links the model, with names for its token ids as the vocabulary.

    The converter asks for a tokenizer, and takes tokens as text.
    """
    directory.mkdir()
    for path in model.iterdir():
        if not path.name.startswith(("tokenizer", "special_tokens")):
            (directory / path.name).symlink_to(path.absolute())
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel(
        {f"t{token_id}": token_id for token_id in range(size)}, unk_token="t0"
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="t0", bos_token="t1", eos_token="t2"
    )
    fast.save_pretrained(directory)


if __name__ == "__main__":
    main()
