"""The packaged demo model: it fits its size, speaks fluently enough to be recognised, and carries
the tests that need text.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage
from jaxpage import LLM, BeamSearchParams, SamplingParams
from tests.support.engines import invariants
from tests.support.running import SMALL
from tests.support.wire import CHATML

DEMO = Path(jaxpage.__file__).parent / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
TOOL = {
    "type": "function",
    "function": {"name": "meet", "description": "Somebody", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def llm(compiled_when_used, largest_shapes):
    with LLM(**SMALL, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    yield
    invariants(llm)


def complete(llm, prompt, params):
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_size_and_card():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 13_000_000
    card = (DEMO / "README.md").read_text()
    for word in ("licence", "nats per token", "held out", "Jane Austen", "steps"):
        assert word.lower() in card.lower()
    manifest = json.loads((DEMO / "corpus_manifest.json").read_text())
    assert "sha256" in json.dumps(manifest)


def test_it_speaks_from_the_prompt_of_the_readme(llm):
    """Most of what it says are words of its tokenizer's own language: no run of letters longer than
    words are, few fragments.
    """
    text = complete(
        llm, "Once upon a time", SamplingParams(temperature=0.7, seed=1, max_tokens=150)
    ).text
    words = text.split()
    assert len(words) > 60 and max(map(len, words)) < 25
    common = {
        "the",
        "and",
        "a",
        "to",
        "of",
        "was",
        "in",
        "he",
        "she",
        "it",
        "that",
        "they",
        "her",
        "his",
        "said",
        "for",
    }
    assert sum(word.strip('.,"').lower() in common for word in words) / len(words) > 0.25


def test_tokens_are_those_of_transformers(llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True)
    for prompt in ("Once upon a time", "It was a dark night, and", "{"):
        ids = torch.tensor([llm.tokenizer(prompt)["input_ids"]])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            do_sample=False,
            pad_token_id=0,
        )
        assert complete(llm, prompt, GREEDY).token_ids == expected[0, ids.shape[1] :].tolist()


def test_the_loss_on_held_out_text_is_what_a_trained_model_has(llm):
    """It is far below a uniform guess over the vocabulary, for a text by a person."""
    text = (
        "It was late in the evening when the carriage stopped before the door, and she went up to "
        "her room without a word."
    )
    ids = llm.tokenizer(text)["input_ids"]
    total = 0.0
    for index in range(1, len(ids)):
        output = complete(
            llm, ids[:index], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        )
        entry = output.logprobs[0].get(ids[index])
        total -= entry.logprob if entry else -9.0
    assert total / (len(ids) - 1) < 5.5 < np.log(len(llm.tokenizer))


def test_text_is_the_tokenizers_own_decoding(llm):
    for seed in range(4):
        params = SamplingParams(temperature=1.3, seed=seed, max_tokens=60, ignore_eos=True)
        output = complete(llm, "Once upon a time", params)
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_a_prompt_that_ends_in_a_replacement_character_stays_out_of_the_text(llm):
    output = complete(llm, "The word is \ufffd", GREEDY)
    assert "word is" not in output.text
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_stop_strings_cut_exactly_and_never_leak_into_a_stream(llm):
    free = complete(llm, "Once upon a time", GREEDY)
    for start, length in ((3, 1), (10, 4), (17, 9), (25, 2)):
        stop = free.text[start : start + length]
        params = SamplingParams(temperature=0.0, max_tokens=48, stop=[stop, "never said"])
        place = free.text.index(stop)
        ended = complete(llm, "Once upon a time", params)
        assert (ended.text, ended.finish_reason, ended.stop_reason) == (
            free.text[:place],
            "stop",
            stop,
        )
        pieces = [chunk.outputs[0].text for chunk in llm.stream("Once upon a time", params)]
        assert "".join(pieces) == free.text[:place]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=48, stop=stop, include_stop_str_in_output=True
    )
    assert (
        complete(llm, "Once upon a time", greedy).text
        == free.text[: free.text.index(stop) + len(stop)]
    )


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Tell me a tale."}]
    prompt = llm.chat_prompt(messages)
    assert "Tell me a tale." in prompt["prompt"]
    assert (
        prompt["prompt_token_ids"]
        == llm.tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"]
    )
    assert (
        llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs
        == llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs
    )
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_tools_and_variables_reach_the_template(llm, monkeypatch):
    """They are rendered as by transformers; what the template does not know is refused."""
    messages, tools = [{"role": "user", "content": "Hello"}], [TOOL]
    with pytest.raises(ValueError, match="chat template has no tools, enable_thinking"):
        llm.chat(messages, GREEDY, tools=tools, chat_template_kwargs={"enable_thinking": True})
    for wrong, text in (
        ({"content": "Hello"}, "a message needs a 'role'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "image_url must be a data URL",
        ),
        ({"role": "user", "content": 5}, "content must be a string"),
    ):
        with pytest.raises(ValueError, match=text):
            llm.chat([wrong], GREEDY)
    with pytest.raises(ValueError, match="chat_template_kwargs cannot have add_generation_prompt"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"add_generation_prompt": False})
    parts = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("Hel", "lo")]}
    ]
    assert llm.chat_prompt(parts) == llm.chat_prompt([{"role": "user", "content": "Hel\nlo"}])
    monkeypatch.setattr(llm.tokenizer, "chat_template", CHATML)
    prompt = llm.chat_prompt(messages, tools, {"enable_thinking": True})
    assert prompt["prompt"] == "[meet]<|user|>Hello<|assistant|><think>\n"
    (chatted,) = llm.chat(
        messages, GREEDY, False, tools=tools, chat_template_kwargs={"enable_thinking": True}
    )
    assert chatted.prompt_token_ids == prompt["prompt_token_ids"]


def test_small_things_that_scripts_ask_for(llm):
    assert repr(llm).startswith(
        "LLM(model='demo', dtype='float32', max_model_len="
    ) and "device=" in repr(llm)
    token_ids = llm.get_tokenizer()("Once upon a time")["input_ids"]
    for form in (list, tuple, np.array, jnp.array):
        assert llm.detokenize(form(token_ids)) == "Once upon a time"
    for wrong in ("Once", None, 5, [1.0], [True], np.array([[1]]), np.array(1)):
        with pytest.raises(
            TypeError,
            match="token_ids must be a list of integers, or an array of them with one axis",
        ):
            llm.detokenize(wrong)
    for wrong in (-1, 2048, 2**80):
        with pytest.raises(
            ValueError, match=f"token_ids has {wrong}, but the model's token ids are 0 to 2047"
        ):
            llm.detokenize([5, wrong])
    beams = BeamSearchParams(2, max_tokens=4)
    assert (
        llm.beam_search("Once", beams, False)[0].outputs
        == llm.generate("Once", beams, use_tqdm=False)[0].outputs
    )
    with pytest.raises(TypeError, match="params must be BeamSearchParams, not SamplingParams"):
        llm.beam_search("Once", GREEDY)


def test_prompts_with_a_lone_surrogate_are_refused(llm):
    with pytest.raises(ValueError, match="invalid Unicode at character 2"):
        llm.generate("ab\ud800", GREEDY)


def test_defaults_come_from_generation_config(llm):
    requested = json.loads((DEMO / "generation_config.json").read_text())
    params = llm.default_sampling_params(max_tokens=7)
    assert params.max_tokens == 7
    assert params.temperature == pytest.approx(requested.get("temperature", 1.0))
