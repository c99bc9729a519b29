"""Times an encoder beside transformers on torch, which pools likewise: the same texts in turns.

A time is the least of some rounds, in milliseconds for all texts, tokenization included. On a
machine that others use, compare the seconds of CPU: these are of all threads of the process.

    python tools/lab/bench_encoder.py --model minilm --counts 1,32,256 --tokens 20,200

`--peers transformers,sentence-transformers,fastembed` compares with all three, where they are
installed. fastembed takes the graph of the same weights in ONNX from `--onnx DIRECTORY`.

    python tools/lab/bench_encoder.py --nearest "A child is afraid of the dark."

prints the ten sentences of a small corpus that are nearest, and fails if a peer has other ones.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from jaxpage import LLM

NUM_NEAREST = 10
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


def encoder_of_fastembed(directory: str, graph: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Returns the function of fastembed that embeds, with as many threads as there are cores."""
    library = importlib.import_module("fastembed")  # which the extras do not have
    description = importlib.import_module("fastembed.common.model_description")
    width = AutoModel.from_pretrained(directory).config.hidden_size
    library.TextEmbedding.add_custom_model(
        model="lab/encoder",
        pooling=description.PoolingType.MEAN,
        normalization=True,
        sources=description.ModelSource(hf="lab/encoder"),
        dim=width,
        model_file="model.onnx",
    )
    model = library.TextEmbedding(
        "lab/encoder", specific_model_path=graph, threads=len(os.sched_getaffinity(0))
    )
    return lambda texts: np.stack(list(model.embed(list(texts), batch_size=BATCH)))


def time_once(call: Callable[[Any], Any], argument: Any) -> np.ndarray:
    """Returns the seconds of wall and of CPU that a call takes."""
    began = time.perf_counter(), time.process_time()
    call(argument)
    return np.array([time.perf_counter() - began[0], time.process_time() - began[1]])


def print_nearest(
    llm: LLM, peers: dict[str, Callable[[Sequence[str]], np.ndarray]], query: str
) -> None:
    """Prints the nearest sentences of a corpus, whose vectors have length 1.

    Raises:
        AssertionError: A peer has others, or another order.
    """
    sentences = sorted(set(re.findall(r"[A-Z][^.!?\"]{20,}[.!?]", TEXT.read_text())))
    makers = {"jaxpage": lambda texts: np.asarray(llm.embed(texts, use_tqdm=False)), **peers}
    scores = {}
    for name, embed in makers.items():
        first, *vectors = embed([query, *sentences])
        scores[name] = np.stack(vectors) @ first
    rankings = {name: np.argsort(-array)[:NUM_NEAREST].tolist() for name, array in scores.items()}
    assert all(order == rankings["jaxpage"] for order in rankings.values()), rankings
    print(f"of {len(sentences)} sentences:\n\n| {' | '.join(scores)} | sentence |")
    print("|---" * (1 + len(scores)) + "|")
    for index in rankings["jaxpage"]:
        numbers = [f"{array[index]:.6f}" for array in scores.values()]
        print(f"| {' | '.join(numbers)} | {' '.join(sentences[index].split())} |")


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
        "--peers",
        default="transformers",
        help="transformers, sentence-transformers, fastembed; default: transformers",
    )
    parser.add_argument("--onnx", help="directory of the graph for fastembed")
    parser.add_argument("--nearest", metavar="QUERY", help="print the nearest sentences instead")
    arguments = parser.parse_args()
    makers = {
        "transformers": transformers_encoder,
        "sentence-transformers": sentence_encoder,
        "fastembed": lambda directory: encoder_of_fastembed(directory, arguments.onnx),
    }
    with LLM(arguments.model, use_tqdm=False, verbose=False) as llm:
        directory = str(llm._model.directory)
        peers = {name: makers[name](directory) for name in arguments.peers.split(",")}
        if arguments.nearest:
            print_nearest(llm, peers, arguments.nearest)
            return
        columns = [f"{name} ms | CPU ms | wall | CPU" for name in peers]
        print(f"| texts | tokens | jaxpage ms | CPU ms | {' | '.join(columns)} |")
        print("|---" * (4 + 4 * len(peers)) + "|")
        for num_tokens in map(int, arguments.tokens.split(",")):
            for count in map(int, arguments.counts.split(",")):
                texts = make_texts(llm.get_tokenizer(), count, num_tokens)
                shown = compare(llm, peers, texts, arguments.rounds)
                print(f"| {count} | {num_tokens} | {shown} |", flush=True)


def compare(
    llm: LLM,
    peers: dict[str, Callable[[Sequence[str]], np.ndarray]],
    texts: Sequence[str],
    rounds: int,
) -> str:
    """Returns the numbers of a row: the times, and for peers how many times as fast we are."""

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.asarray(llm.embed(texts, use_tqdm=False))

    vectors = embed(texts)
    for name, peer in peers.items():
        far = np.abs(vectors - peer(texts)).max()
        assert far < 1e-5, f"the vectors differ from those of {name} by {far}"
    minimum = {name: np.full(2, np.inf) for name in ("jaxpage", *peers)}
    for _ in range(rounds):
        for name, call in {"jaxpage": embed, **peers}.items():
            minimum[name] = np.minimum(minimum[name], time_once(call, texts))
    numbers = [f"{1e3 * number:.1f}" for number in minimum["jaxpage"]]
    for name in peers:
        numbers += [f"{1e3 * number:.1f}" for number in minimum[name]]
        numbers += [f"{ratio:.2f}" for ratio in minimum[name] / minimum["jaxpage"]]
    return " | ".join(numbers)


if __name__ == "__main__":
    main()
