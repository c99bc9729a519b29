"""Times a prompt with a picture beside transformers on torch: SmolVLM-256M's shapes, in float32.

Weights are random, the same on both sides. Each call gets a new picture of random pixels, so that
no cache helps, and both sides resize and cut it by the image processor of transformers. A prompt
ends with its first token. A time is the least of some rounds in which both sides take turns, in
milliseconds. On a machine that others use, compare the seconds of CPU.

    python tools/lab/bench_pictures.py --sides 512,1024

The picture of 512 is one tile; that of 1,024 is four tiles, and the whole once more.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import jaxpage
from jaxpage import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.lab.bench_encoder import time_once

TILE = 512
ROWS = 64  # tokens of a tile
VOCABULARY = 49_280
PROMPT = "<image>What is this?"
TOKENS = [
    *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]


def save_model(directory: Path, side: int, num_layers: int | None) -> Any:
    """Writes a SmolVLM with random weights, and returns the model of transformers.

    Args:
        directory: The directory.
        side: The longest side to which pictures are resized.
        num_layers: The layers of each half, for a quick try; None for those of SmolVLM-256M.
    """
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        Path(jaxpage.__file__).parent / "demo"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.save_pretrained(directory)
    kind = transformers.SmolVLMForConditionalGeneration
    config = kind.config_class(
        text_config={
            **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536},
            **{"num_hidden_layers": num_layers or 30, "num_attention_heads": 9},
            **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": VOCABULARY},
            **{"max_position_embeddings": 8192, "pad_token_id": None},
            **{"bos_token_id": None, "eos_token_id": None},
        },
        vision_config={
            **{"hidden_size": 768, "intermediate_size": 3072, "patch_size": 16},
            **{"num_hidden_layers": num_layers or 12, "num_attention_heads": 12},
            "image_size": TILE,
        },
        scale_factor=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=None,
    )
    torch.manual_seed(7)
    model = kind(config).eval()
    model.save_pretrained(directory)
    settings = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": side},
        "max_image_size": {"longest_edge": TILE},
        "do_image_splitting": side > TILE,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": ROWS}))
    return model


def make_prompt(llm: LLM, pixels: np.ndarray) -> Any:
    """Returns what `generate` makes of a prompt with this picture."""
    prompt = {"prompt": PROMPT, "multi_modal_data": {"image": [pixels]}}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0]


def processor_of(directory: Path) -> Callable[[np.ndarray], dict[str, torch.Tensor]]:
    """Returns a function that makes the arrays of a picture as transformers does."""
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    processor = transformers.SmolVLMImageProcessorPil.from_dict(settings)

    def process(pixels: np.ndarray) -> dict[str, torch.Tensor]:
        arrays = processor([[pixels]], return_tensors="np")
        names = ("pixel_values", "pixel_attention_mask")
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in names}

    return process


@torch.inference_mode()
def time_side(directory: Path, model: Any, side: int, rounds: int) -> None:
    """Prints the rows of the table for pictures of one size."""
    process = processor_of(directory)
    draw = np.random.default_rng(side)

    def picture() -> np.ndarray:
        return draw.integers(0, 256, (side, side, 3), np.uint8)

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 1}
    with LLM(str(directory), enable_prefix_caching=False, verbose=False, **options) as llm:
        pixels = picture()
        output = make_prompt(llm, pixels)
        ids = torch.tensor([output.prompt_token_ids])
        arrays = process(pixels)

        def answer(pixels: np.ndarray) -> int:
            logits = model(input_ids=ids, **process(pixels), logits_to_keep=1).logits
            return int(logits[0, -1].argmax())

        assert output.outputs[0].token_ids == [answer(pixels)], "the first tokens differ"
        ours, theirs = (
            functools.partial(encode, arrays) for encode in (_encoder_of(llm), _features_of(model))
        )
        far = np.abs(ours() - theirs()).max() / np.abs(theirs()).max()
        assert far < 1e-4, f"the encoders differ by {far}"
        name = f"{side} x {side}"
        _print_row(f"{name}, encoder", lambda _: ours(), lambda _: theirs(), picture, rounds)
        prompt = functools.partial(make_prompt, llm)
        _print_row(f"{name}, prompt of {ids.shape[1]}", prompt, answer, picture, rounds)


def _encoder_of(llm: LLM) -> Callable[[dict[str, torch.Tensor]], np.ndarray]:
    """Returns a function that encodes a picture by the engine's executable."""
    pictures: Any = llm._engine.sources and llm._engine.sources.encoder

    def encode(arrays: dict[str, torch.Tensor]) -> np.ndarray:
        as_numpy = {name: array.numpy() for name, array in arrays.items()}
        calls = pictures.family.Model.calls(pictures.spec, as_numpy)
        return np.concatenate([llm._engine.runner.encode(each.size, each.inputs) for each in calls])

    return encode


def _features_of(model: Any) -> Callable[[dict[str, torch.Tensor]], np.ndarray]:
    """Returns a function that encodes a picture by transformers."""

    def encode(arrays: dict[str, torch.Tensor]) -> np.ndarray:
        features = model.model.get_image_features(**arrays).pooler_output
        rows = torch.cat(tuple(features)).numpy()
        return rows.reshape(-1, 1, rows.shape[-1])

    return encode


def _print_row(
    name: str,
    ours: Callable[[Any], Any],
    theirs: Callable[[Any], Any],
    picture: Callable[[], Any],
    rounds: int,
) -> None:
    minimum = np.full((2, 2), np.inf)
    for _ in range(rounds):
        pixels = picture()
        for index, call in enumerate((ours, theirs)):
            minimum[index] = np.minimum(minimum[index], time_once(call, pixels))
    numbers = " | ".join(f"{1e3 * number:.0f}" for number in minimum.ravel())
    ratios = " | ".join(f"{ratio:.2f}" for ratio in minimum[1] / minimum[0])
    print(f"| {name} | {numbers} | {ratios} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", default="512,1024", help="longest sides of pictures, in pixels")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--layers", type=int, help="layers of each half, for a quick try")
    options = parser.parse_args(arguments)
    print("| picture | jaxpage ms | CPU ms | transformers ms | CPU ms | wall | CPU |")
    print("|---|---|---|---|---|---|---|")
    for side in map(int, options.sides.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            model = save_model(Path(directory), side, options.layers)
            time_side(Path(directory), model, side, options.rounds)


if __name__ == "__main__":
    main()
