"""The packaged demo that sees: transformers loads it, and it answers questions about drawings as
its card says.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from PIL import Image
from safetensors.flax import load_file

from jaxpage import LLM, SamplingParams, cli
from jaxpage.checkpoints.finding.resolve import DEMO_VISION, resolve_model
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes")

PICTURES = Path(__file__).parents[1] / "examples" / "pictures"
ANSWERS: dict[str, dict[str, str]] = json.loads((PICTURES / "answers.json").read_text())


def open_with_transformers():
    """Returns the model of transformers, and its processor."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(
        DEMO_VISION, dtype=torch.float32, local_files_only=True
    )
    return model.eval(), AutoProcessor.from_pretrained(DEMO_VISION, local_files_only=True)


@pytest.fixture(scope="module")
def transformers_model():
    return open_with_transformers()


def inputs_of(processor, picture, question):
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    return processor(images=[picture], text=text, return_tensors="pt")


def test_it_is_packaged_under_its_name_and_small():
    assert resolve_model("demo-vision") == DEMO_VISION
    files = [path for path in DEMO_VISION.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_500_000
    tensors = load_file(DEMO_VISION / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {jnp.dtype("bfloat16")}
    assert 1_000_000 < sum(value.size for value in tensors.values()) < 3_000_000


def test_a_plan_counts_its_parameters(capsys):
    tensors = load_file(DEMO_VISION / "model.safetensors")
    num_text = sum(value.size for name, value in tensors.items() if "text_model" in name)
    for words, num in (([], sum(value.size for value in tensors.values())), (["0"], num_text)):
        limit = ["--limit-images", *words] if words else []
        assert cli.main(["plan", "demo-vision", *limit]) == 0
        assert f", {num:,} parameters" in capsys.readouterr().out


def test_the_card_has_the_recorded_answers():
    card = (DEMO_VISION / "README.md").read_text()
    for name, answers in ANSWERS.items():
        for question, text in answers.items():
            assert f"| {name} | {question} | {text} |" in card


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "demo-vision",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        use_tqdm=False,
    ) as llm:
        yield llm


def test_jaxpage_answers_the_examples_as_recorded(llm):
    chats, recorded = [], []
    for name, answers in ANSWERS.items():
        for question, text in answers.items():
            picture = {"type": "image", "path": str(PICTURES / name)}
            content = [picture, {"type": "text", "text": question}]
            chats.append([{"role": "user", "content": content}])
            recorded.append(text)
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == recorded


@pytest.mark.parametrize("name", few(ANSWERS, [*ANSWERS][:2]))
def test_transformers_answers_the_examples_as_recorded(transformers_model, name):
    model, processor = transformers_model
    with Image.open(PICTURES / name) as picture:
        for question, text in ANSWERS[name].items():
            inputs = inputs_of(processor, picture, question)
            ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            said = ids[0, inputs["input_ids"].shape[1] :]
            assert processor.tokenizer.decode(said, skip_special_tokens=True) == text
