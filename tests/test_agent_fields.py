"""Fields of agents and of their clients: how much is thought and said, refusals, and defaults of
Ollama's.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat, show_ollama
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.model_card import short_count
from jaxpage.serving.wire.thinking import EFFORTS, variables_for
from jaxpage.serving.wire.tokenizing import tokenize
from tests.support.wire import context, tokenizer, with_template

USER = {"role": "user", "content": "x"}
# As the templates of gpt-oss, DeepSeek-V3.1, Mistral and Qwen3 have it.
ANY_WORD = '{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}<{{ reasoning_effort }}>'
SWITCH = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}<{{ thinking }}>"
TWO_WORDS = (
    "{% set effort = reasoning_effort | default('none') %}"
    "{% if effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}<{{ effort }}>"
)
QWEN = "<{% if enable_thinking is defined and enable_thinking is false %}False{% else %}True{% endif %}>"
BOTH = "<{{ enable_thinking }} {{ {'low': 1, 'max': 2}[reasoning_effort] }}>"
VERBOSE = "<{{ verbosity }}>"
PLAIN = "{{ messages[0].content }}<>"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER], **fields}


@pytest.mark.parametrize(
    ("template", "fields", "shown", "ignored"),
    [
        *[(ANY_WORD, {"reasoning_effort": word}, word, ()) for word in ("low", "medium", "high")],
        *[(ANY_WORD, {"reasoning_effort": word}, "high", ()) for word in ("xhigh", "max")],
        (ANY_WORD, {"reasoning_effort": "minimal"}, "low", ()),
        (ANY_WORD, {"reasoning_effort": "none"}, "low", ("reasoning_effort",)),
        (ANY_WORD, {}, "medium", ()),
        (SWITCH, {"reasoning_effort": "none"}, "False", ()),
        (SWITCH, {"reasoning_effort": "minimal"}, "True", ()),
        (SWITCH, {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, "False",
         ()),
        (TWO_WORDS, {"reasoning_effort": "none"}, "none", ()),
        (TWO_WORDS, {"reasoning_effort": "low"}, "high", ()),
        (QWEN, {"reasoning_effort": "none"}, "False", ()),
        (QWEN, {"reasoning_effort": "high"}, "True", ()),
        (BOTH, {"reasoning_effort": "minimal"}, "True 1", ()),
        (BOTH, {"reasoning_effort": "xhigh"}, "True 2", ()),
        (PLAIN, {"reasoning_effort": "high"}, "", ("reasoning_effort",)),
        (PLAIN, {"reasoning_effort": None, "verbosity": None}, "", ()),
        (VERBOSE, {"verbosity": "high"}, "high", ()),
        (PLAIN, {"verbosity": "low"}, "", ("verbosity",)),
        (PLAIN, {"verbosity": "medium"}, "", ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_effort_becomes_what_the_template_knows(template, fields, shown, ignored, is_strict):
    known = context(tokenizer=with_template(template), strict_requests=is_strict)
    exchange = open_chat(chat(**fields), known)
    assert str(exchange.prompts[0].prompt).endswith(f"<{shown}>")
    assert exchange.ignored_fields == ignored
    counted = tokenize({"messages": [USER], **fields}, known)
    assert counted.ignored_fields == ignored
    assert counted.body["tokens"] == tokenizer()(exchange.prompts[0].prompt)["input_ids"]


@given(words=st.sets(st.sampled_from(EFFORTS), min_size=1), effort=st.sampled_from(EFFORTS))
def test_a_template_gets_a_word_that_it_compares(words, effort):
    template = f"{{% if reasoning_effort in {sorted(words)} %}}{{% endif %}}"
    values, ignored, _ = variables_for(template, effort, None)
    word = values["reasoning_effort"]
    assert word in words and (word == effort or effort not in words)
    assert (word == "none") <= (effort == "none" or words == {"none"})
    assert bool(ignored) == (effort == "none" and word != "none")


def test_what_is_stored_nowhere_is_reported():
    assert open_chat(chat(store=True), context()).ignored_fields == ("store",)
    assert open_chat(chat(store=False), context(strict_requests=True)).ignored_fields == ()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": "Hm.", "refusal": "No."}, "Hm.\nNo."),
        ({"content": "Hm.", "refusal": None}, "Hm."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}]},
         "Hm.\nNo."),
    ],
)  # fmt: skip
def test_a_refusal_is_what_the_assistant_said(message, text):
    body = chat()
    body["messages"] = [USER, {"role": "assistant", **message}, USER]
    exchange = open_chat(body, context(strict_requests=True))
    assert f"<|assistant|>{text}<|user|>" in str(exchange.prompts[0].prompt)


# Ollama


@pytest.mark.parametrize(
    ("template", "think", "shown", "ignored"),
    [
        *[(ANY_WORD, level, level, ()) for level in ("low", "medium", "high")],
        (ANY_WORD, True, "medium", ()),
        (SWITCH, "low", "True", ()),
        (SWITCH, True, "True", ()),
        (SWITCH, False, "False", ()),
        (QWEN, False, "False", ()),
        (ANY_WORD, False, "low", ("think",)),
        (TWO_WORDS, False, "none", ()),
        (PLAIN, "high", "", ("think",)),
        (PLAIN, False, "", ()),
    ],
)
def test_ollama_thinks_as_much_as_the_request_says(template, think, shown, ignored):
    known = context(tokenizer=with_template(template))
    exchange = open_ollama_chat(chat(think=think), known)
    assert str(exchange.prompts[0].prompt).endswith(f"<{shown}>")
    assert exchange.ignored_fields == ignored


ANY_OF = {"low": 1, "none": 2, "medium": 3, "high": 4}
MANY_WORDS = "<{{ reasoning_effort }}{% set rank = " + str(ANY_OF) + "[reasoning_effort] %}>"


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        (SWITCH, "True", "False"),
        (QWEN, "True", "False"),
        (TWO_WORDS, "high", "none"),
        (MANY_WORDS, "medium", "none"),
        (PLAIN, "", ""),
    ],
)
def test_thinking_is_turned_on_and_off_alike_in_all_dialects(template, on, off):
    served = context(tokenizer=with_template(template), reasoning_parser="think")
    for is_on, shown in ((True, on), (False, off)):
        kind = {"type": "enabled" if is_on else "disabled"}
        exchanges = [
            open_chat(chat(thinking=kind), served),
            open_chat(chat(reasoning={"enabled": is_on}), served),
            open_message({**chat(thinking=kind), "max_tokens": 9}, served),
            open_ollama_chat(chat(think=is_on), served),
        ]
        for exchange in exchanges:
            assert str(exchange.prompts[0].prompt).endswith(f"<{shown}>")
        # A model that always thinks does what is asked for when it is turned on.
        is_named = [bool(exchange.ignored_fields) for exchange in exchanges]
        assert is_named == 4 * [template == PLAIN and not is_on]


def test_a_switch_without_a_form_of_reasoning_has_an_effect():
    """The fields that turn thinking on are named only if nothing comes of them."""
    for template, ignored in ((SWITCH, ()), (PLAIN, ("thinking.type",))):
        served = context(tokenizer=with_template(template))
        assert open_chat(chat(thinking={"type": "enabled"}), served).ignored_fields == ignored


def test_ollama_may_ask_for_thinking_where_a_model_always_does():
    thinks = context(tokenizer=with_template(PLAIN), reasoning_parser="think")
    for think, ignored in ((True, ()), (False, ("think",)), (None, ())):
        exchange = open_ollama_chat(chat(think=think), thinks)
        assert str(exchange.prompts[0].prompt) == "x<>" and exchange.ignored_fields == ignored
    assert "thinking" in show_ollama({"model": "demo"}, thinks).body["capabilities"]
    mute = context(tokenizer=with_template(PLAIN))
    assert "thinking" not in show_ollama({"model": "demo"}, mute).body["capabilities"]
    with pytest.raises(ApiError, match="'demo' does not support thinking") as caught:
        open_ollama_chat(chat(think=True), mute)
    assert (caught.value.status, caught.value.param) == (400, "think")


# https://github.com/ollama/ollama/blob/main/docs/modelfile.md and `DefaultOptions` in its
# api/types.go
DEFAULTS = {
    "num_ctx": 512,
    "num_keep": 4,
    "seed": -1,
    "num_predict": -1,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "tfs_z": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "penalize_newline": True,
    "temperature": 0.8,
    "numa": False,
    "num_batch": 512,
    "num_gpu": -1,
    "main_gpu": 0,
    "low_vram": False,
    "vocab_only": False,
    "logits_all": False,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 0,
}


def test_ollamas_own_defaults_are_taken():
    body = chat(options=DEFAULTS, truncate=True, keep_alive="5m", think=False)
    exchange = open_ollama_chat(body, context(strict_requests=True))
    assert exchange.ignored_fields == ()
    assert exchange.prompts[0].params.temperature == 0.8


@pytest.mark.parametrize(
    ("options", "penalty", "ignored"),
    [
        ({"repeat_last_n": 64}, 1.0, ()),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, 1.1, ("options.repeat_last_n",)),
        ({"repeat_last_n": 64, "presence_penalty": 0.5}, 1.0, ("options.repeat_last_n",)),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, 1.1, ()),
        ({"repeat_last_n": 0, "repeat_penalty": 1.1}, 1.0, ()),
        ({"repeat_penalty": 1.1}, 1.1, ()),
    ],
)
def test_penalties_look_at_the_whole_sequence(options, penalty, ignored):
    exchange = open_ollama_chat(chat(options=options), context())
    assert exchange.prompts[0].params.repetition_penalty == penalty
    assert exchange.ignored_fields == ignored


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, ""), (999, "999"), (362_000_000, "362M"), (8_030_261_248, "8.0B"), (8 * 10**9, "8B"),
     (134_515_008, "134.52M")],
)  # fmt: skip
def test_counts_are_short(number, text):
    assert short_count(number) == text
