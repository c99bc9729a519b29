"""Times an encoder beside transformers on torch, which pools likewise: the same texts in turns.

A time is the least of some rounds, in milliseconds for all texts, tokenization included. On a
machine that others use, compare the seconds of CPU: these are of all threads of the process.

    python tools/lab/bench_encoder.py --model minilm --counts 1,32,256 --tokens 20,200

With sentence-transformers installed, `--peer sentence-transformers` compares with it.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from jaxpage import LLM

BATCH = 32  # texts that torch computes together, as sentence-transformers does
TEXT = Path(__file__).parents[2] / "jaxpage" / "bench" / "tales.txt"


def make_texts(tokenizer: Any, count: int, num_tokens: int) -> list[str]:
    """Returns texts that have so many tokens, the two special ones included."""
    words = TEXT.read_text().split()
    texts = []
    for index in range(count):
        first = 37 * index % (len(words) - num_tokens)
        text = " ".join(words[first : first + num_tokens])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        texts.append(tokenizer.decode(ids[: num_tokens - 2]))
    return texts


def transformers_encoder(directory: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Returns a function that embeds by the mean of all tokens, longest texts first."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            inputs = tokenizer(
                [texts[place] for place in places],
                padding=True,
                truncation=True,
                return_tensors="pt",
            )
            states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            pooled = (states * mask).sum(1) / mask.sum(1)
            pooled = torch.nn.functional.normalize(pooled).numpy()
            for place, vector in zip(places, pooled, strict=True):
                vectors[place] = vector
        return np.stack(vectors)

    return embed


def sentence_encoder(directory: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Returns the function of sentence-transformers that embeds."""
    library = importlib.import_module("sentence_transformers")  # which the extras do not have
    model = library.SentenceTransformer(directory, device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def time_once(embed: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]) -> np.ndarray:
    """Returns the seconds of wall and of CPU that a call takes."""
    began = time.perf_counter(), time.process_time()
    embed(texts)
    return np.array([time.perf_counter() - began[0], time.process_time() - began[1]])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm", help="directory or name; default: minilm")
    parser.add_argument("--counts", default="1,32,256", help="numbers of texts")
    parser.add_argument("--tokens", default="20,200", help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--peer", choices=("transformers", "sentence-transformers"), default="transformers"
    )
    arguments = parser.parse_args()
    makers = {"transformers": transformers_encoder, "sentence-transformers": sentence_encoder}
    with LLM(arguments.model, use_tqdm=False, verbose=False) as llm:
        directory = str(llm._model.directory)
        peer = makers[arguments.peer](directory)
        runs = {"jaxpage": lambda texts: llm.embed(texts, use_tqdm=False), arguments.peer: peer}
        print(
            f"| texts | tokens | jaxpage ms | CPU ms | {arguments.peer} ms | CPU ms | wall | CPU |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for num_tokens in map(int, arguments.tokens.split(",")):
            for count in map(int, arguments.counts.split(",")):
                texts = make_texts(llm.get_tokenizer(), count, num_tokens)
                far = np.abs(runs["jaxpage"](texts) - peer(texts)).max()
                assert far < 1e-5, f"the vectors differ by {far}"
                taken = {name: np.full(2, np.inf) for name in runs}
                for _ in range(arguments.rounds):
                    for name, embed in runs.items():
                        taken[name] = np.minimum(taken[name], time_once(embed, texts))
                ours, theirs = (1e3 * each for each in taken.values())
                ratios = theirs / ours
                numbers = [*ours, *theirs]
                shown = " | ".join(f"{number:.1f}" for number in numbers)
                print(
                    f"| {count} | {num_tokens} | {shown} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
