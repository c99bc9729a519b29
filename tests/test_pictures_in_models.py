"""Whole models that take pictures, in engines: the logarithms of probabilities are those of
transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxpage import SamplingParams
from jaxpage.models import load_family
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture
from tests.support.engines import make_llm
from tests.support.sweeps import few
from tests.test_vision_towers import GEMMA3, GEMMA4, IDEFICS3, MISTRAL3, Tower, build, pictures

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
TOLERANCE = 1e-4
IMAGE_ID, BREAK_ID = 59, 58
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=8)


def with_text(tower: Tower, *, token_field: str = "image_token_id", **text: Any) -> Tower:
    """Returns the model with other fields of its text model, and the id of placeholders."""
    text_config = {**tower.config["text_config"], "num_hidden_layers": 3, **text}
    config = {**tower.config, "text_config": text_config, token_field: IMAGE_ID}
    return dataclasses.replace(tower, config=config)


_WINDOWS: dict[str, Any] = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA3 = with_text(GEMMA3, token_field="image_token_index", query_pre_attn_scalar=12, **_WINDOWS)
_GEMMA4: dict[str, Any] = {
    **{**_WINDOWS, "global_head_dim": 16, "vocab_size_per_layer_input": 60, "pad_token_id": 7},
    # What pictures' tokens see in the first layer, the others see; the last one must be full.
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
# For each model, how many placeholders stand next to each other; 0 for all of a picture.
MODELS = {
    "idefics3": (with_text(IDEFICS3), 9),
    "mistral3": (with_text(MISTRAL3, token_field="image_token_index"), 5),
    "gemma3": (_GEMMA3, 0),
    "gemma4-inputs": (with_text(GEMMA4, **_GEMMA4, hidden_size_per_layer_input=8), 0),
    "gemma4-both-ways": (
        with_text(GEMMA4, **_GEMMA4, use_bidirectional_attention="vision"),
        0,
    ),
    "gemma4": (
        with_text(
            GEMMA4,
            **_GEMMA4,
            hidden_size_per_layer_input=8,
            use_bidirectional_attention="vision",
        ),
        0,
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the directory of a model, the model of transformers and its processor."""
    made: dict[str, Any] = {}

    def save(name: str) -> Any:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            model, processor = build(MODELS[name][0])
            model.save_pretrained(directory)
            vocabulary = {f"t{index}": index for index in range(60)}
            tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
            transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
                directory
            )
            made[name] = directory, model, processor
        return made[name]

    return save


def lay_out(
    keys: Sequence[bytes], counts: Sequence[int], run: int, *, is_whole: bool
) -> tuple[list[int], tuple[EmbeddedSpan, ...]]:
    """Returns a prompt with pictures of so many rows, and where these are."""
    token_ids, spans = [1, 2, 3], []
    for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
        for offset in range(0, count, run or count):
            length = min(run or count, count - offset)
            spans.append(EmbeddedSpan(len(token_ids), length, key, offset, is_whole))
            token_ids += [IMAGE_ID] * length + [BREAK_ID]
        token_ids += [4 + number, 5]
    return token_ids, tuple(spans)


def embed(
    name: str, checkpoints: Any, sizes: Sequence[tuple[int, int]]
) -> tuple[list[int], Any, Any]:
    """Returns a prompt with pictures of these sizes, what the engine takes, and the processor's
    arrays.
    """
    _, model, processor = checkpoints(name)
    config = {**model.config.to_dict(), "architectures": [MODELS[name][0].architecture]}
    family: Any = load_family(config)
    spec = family.Vision.Spec.from_config(config)
    processed = [dict(processor(images=[each], return_tensors="np")) for each in pictures(sizes)]
    counts = [
        sum(call.num_rows for call in family.Vision.Model.calls(spec, arrays))
        for arrays in processed
    ]
    is_whole = getattr(spec, "num_whole", 0) > 0
    keys = [hashlib.sha256(each["pixel_values"].tobytes()).digest() for each in processed]
    token_ids, spans = lay_out(keys, counts, MODELS[name][1], is_whole=is_whole)
    parts = zip(keys, processed, counts, strict=True)
    sources = {key: Picture(arrays, count) for key, arrays, count in parts}
    return token_ids, EmbeddedPrompt(spans, sources), processed


def oracle_logprobs(
    model: Any, token_ids: Sequence[int], processed: Sequence[Mapping[str, Any]]
) -> np.ndarray:
    """Returns what transformers gives for each token, the pictures one by one."""
    of_picture = {tower.architecture: tower.features for tower, _ in MODELS.values()}
    architecture = type(model).__name__
    features: Any = []
    for arrays in processed:
        tensors = {key: torch.from_numpy(np.asarray(each)) for key, each in arrays.items()}
        with torch.no_grad():
            features += list(of_picture[architecture](model, tensors))
    if architecture.startswith("Gemma3"):
        features = torch.cat([each[None] for each in features])
    image = transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=features)
    ids = torch.tensor([list(token_ids)])
    kinds = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}
    options = {
        field: (ids == IMAGE_ID).long()
        for family, field in kinds.items()
        if architecture.startswith(family)
    }
    with torch.no_grad():
        outputs = model(input_ids=ids, mm_encoder_outputs={"image": image}, **options)
    logprobs: np.ndarray = torch.log_softmax(outputs.logits[0].double(), dim=-1).numpy()
    return logprobs


# Gemma 3 and a SmolVLM, which is an Idefics3, are in tests/test_seeing_engines.py.
@pytest.mark.parametrize("name", few(MODELS, ["mistral3", "gemma4"]))
def test_logprobs_are_those_of_transformers(name: str, checkpoints: Any) -> None:
    """A prompt has two pictures, and tokens follow it."""
    directory, model, _ = checkpoints(name)
    token_ids, embedded, processed = embed(name, checkpoints, ((23, 23), (31, 100)))
    with make_llm(directory, max_num_batched_tokens=280) as llm:
        engine = llm._engine
        reporter = engine.add("a", engine.prepare(None, token_ids, PARAMS, embedded))
        while engine.has_unfinished:
            engine.step()
    output: Any = reporter.whole().outputs[0]
    assert len(output.logprobs) == PARAMS.max_tokens
    # A placeholder among the tokens would stand for a picture in transformers.
    drawn = list(itertools.takewhile(lambda each: each != IMAGE_ID, output.token_ids))
    expected = oracle_logprobs(model, [*token_ids, *drawn], processed)[len(token_ids) - 1 :]
    worst = max(
        abs(entry.logprob - expected[step, token_id])
        for step, entries in enumerate(output.logprobs[: len(drawn) + 1])
        for token_id, entry in entries.items()
    )
    print(f"{name}: {worst:.1e}")
    assert worst < TOLERANCE
