"""The closing marker of reasoning comes after so many tokens, whatever the model would say and
however its engine runs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import SamplingParams
from jaxpage.chat_forms import ChatFormat, grammar_of
from jaxpage.chat_forms.forms import HERMES, ReasoningForm
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.decoding import SamplingStrategy, json_rule, thinking
from jaxpage.decoding import sampling as sampling_module
from jaxpage.decoding.grammars import matcher_of, source_of, tokenizer_of
from jaxpage.engine.thinking import budget_of, for_prompt
from jaxpage.replay import replaying
from jaxpage.serving.wire.exchange import open_chat, open_completion
from jaxpage.settings.sampling_params import THINK_MARKERS
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.scripted import (
    DRAFTING,
    Guesses,
    Scripted,
    draft_with,
    mixed_up,
    without_drafts,
)
from tests.support.sweeps import examples
from tests.support.tokenizers import write_tokenizer
from tests.support.wire import VOCAB_SIZE, context
from tests.support.wire import tokenizer as wire_tokenizer

pytestmark = pytest.mark.usefixtures("largest_shapes")

VOCAB: Any = LLAMA["vocab_size"]
SPECIAL = ("<|end|>", "<think>", "</think>")
# Of letters, with pieces that the tokenizer of the tests has: the marker has several spellings.
LETTERS = ("", "(abdogcat)", False)
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)
    return write_tokenizer(path, SPECIAL, TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, speculative_config=DRAFTING) as llm:
        without_drafts(llm)
        yield llm
        invariants(llm)


# The rule, as the guide has it, in the plainest form: a function of all tokens so far.


def force_by_hand(
    texts: list[str], num_tokens: int, markers: tuple[str, str, bool], *, is_open: bool
) -> str | None:
    """Returns the text that must come next, where the budget is used up; None where anything may
    come.
    """
    opened, closed, again = markers
    used, inside, text, tail = 0, is_open, "", ""
    for index in range(len(texts) + 1):
        if inside and not tail and used >= num_tokens:
            length = next(n for n in range(len(closed), -1, -1) if text.endswith(closed[:n]))
            tail = closed if closed in SPECIAL else closed[length:]
        if index == len(texts):
            return tail or None
        text += texts[index]
        if tail:
            assert tail.startswith(texts[index])
            tail = tail[len(texts[index]) :]
            if tail:
                continue
            inside, text = False, ""
            if not again:
                return None
        elif inside:
            used += 1
            if closed in text:
                inside, text = False, ""
                if not again:
                    return None
        else:
            begun = text if again else text.lstrip()
            if opened in begun if again else begun.startswith(opened):
                inside, text = True, text.partition(opened)[2]
            elif not again and not opened.startswith(begun):
                return None
    raise AssertionError


MARKERS = st.sampled_from(
    [
        LETTERS,
        ("(", ")", False),
        ("aa", "aab", False),
        ("ab", "aa", True),
        ("<think>", "</think>", False),
        ("<think>", "</think>", True),
    ]
)


@examples(60)
@given(
    markers=MARKERS,
    num_tokens=st.integers(0, 5),
    prompt=st.sampled_from(["", "a", "ab", "(", "<think>", "aa\n"]),
    data=st.data(),
)
def test_a_place_is_what_all_tokens_say(tokenizer, markers, num_tokens, prompt, data):
    """It is compared token by token, with the tokens that are forced and such as come near the
    markers.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    budget = for_prompt(budget_of(tokenizer, VOCAB, num_tokens, markers), ids)
    is_open = prompt.rstrip().endswith(markers[0])
    assert budget.is_open is is_open
    names = sorted({*"ab()< /", "ab", "aa", "dog", "cat", "(", ")", "<think>", "</think>", "\n"})
    known = {name: tokenizer(name, add_special_tokens=False)["input_ids"] for name in names}
    pieces = {name: each[0] for name, each in known.items() if len(each) == 1}
    place = thinking.start(budget)
    texts: list[str] = []
    for _ in range(16):
        forced = force_by_hand(texts, num_tokens, markers, is_open=is_open)
        assert bool(place.forced) is (forced is not None), texts
        if forced:
            written = tokenizer.decode(list(place.forced))
            assert written == forced
            text = tokenizer.decode([place.forced[0]])
            token_id = place.forced[0]
            assert thinking.may_force(budget, place, 0)
        else:
            text = data.draw(st.sampled_from(sorted(pieces)))
            token_id = pieces[text]
        texts.append(text)
        place = thinking.follow(budget, place, token_id)


def test_every_part_of_a_marker_has_tokens_for_the_rest(tokenizer):
    for markers in (LETTERS, ("", "(ä)", False), ("", "so:", False)):
        budget = budget_of(tokenizer, VOCAB, 1, markers)
        text = markers[1].encode()
        for there, ending in enumerate(budget.endings):
            expected = text[there:]
            if expected[0] & 0xC0 == 0x80:
                expected = text  # the rest begins within a character
            assert b"".join(map(budget.bytes_of, ending)) == expected
    (special,) = set(budget_of(tokenizer, VOCAB, 1, THINK_MARKERS).endings)
    assert special == tuple(tokenizer("</think>", add_special_tokens=False)["input_ids"])
    budget = budget_of(tokenizer, VOCAB, 1, ("", "</think><think>ab", False))
    whole = budget.endings[0]
    begun = {len("</think>"): 1, len("</think><think>"): 2}
    assert len(whole) == 3 and budget.endings == tuple(
        whole[begun.get(there, 0) :] for there in range(len(budget.close))
    )
    place = thinking.start(for_prompt(budget, []))
    assert thinking.follow(budget, place, whole[0]).forced == whole[1:]
    with pytest.raises(ValueError, match="no tokens that spell"):
        budget_of(tokenizer, VOCAB, 1, ("", "漢", False))


def by_hand(
    llm: Any, prompt: list[int], params: SamplingParams, index: int, markers: Any, num_tokens: int
) -> list[int]:
    """Returns the tokens of one sample.

    They are from an engine that knows no budget and is asked for one token at a time.
    """
    bare = replace(params, thinking_token_budget=None, thinking_markers=None, max_tokens=1)
    spell = functools.partial(llm.tokenizer, add_special_tokens=False)
    tail = llm.tokenizer.decode(prompt).rstrip()
    tokens: list[int] = []
    waiting: list[int] = []
    for _ in range(params.max_tokens or 0):
        if not waiting:
            texts = [llm.tokenizer.decode([each]) for each in tokens]
            remaining = force_by_hand(texts, num_tokens, markers, is_open=tail.endswith(markers[0]))
            waiting = [] if remaining is None else spell(remaining)["input_ids"]
        if waiting:
            tokens.append(waiting.pop(0))
        else:
            output = llm.generate([[*prompt, *tokens]], bare, use_tqdm=False)[0].outputs[index]
            tokens += output.token_ids
    return tokens


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("a dog<think>", {"temperature": 0.0, "thinking_token_budget": 7}),
    "sampled": ("a dog<think>", {"n": 2, "thinking_token_budget": 5}),
    "at once": ("a dog<think>", {"thinking_token_budget": 0}),
    "text": ("a cat", {"thinking_token_budget": 6, "thinking_markers": LETTERS}),
    # The model opens the reasoning by itself, and closes it by itself.
    "often": (
        "a cat",
        {"thinking_token_budget": 9, "thinking_markers": ("a", "b", True), "max_tokens": 40}
        | {"logit_bias": {68: 7.0, 69: 5.0}},
    ),
    "long enough": ("a dog<think>", {"thinking_token_budget": 500}),
}


def params_of(name: str) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 4, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
        | CASES[name][1]
    )


@pytest.fixture(scope="module")
def expected(llm):
    """Returns the tokens of each sample of each case, by hand."""
    tokens = {}
    for name, (text, _) in CASES.items():
        params = params_of(name)
        prompt = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        markers, budget = params.thinking_markers or THINK_MARKERS, params.thinking_token_budget
        tokens[name] = [
            by_hand(llm, prompt, params, index, markers, budget or 0) for index in range(params.n)
        ]
    return tokens


def generate(llm: Any, *neighbours: SamplingParams) -> dict[str, list[list[int]]]:
    """Returns the tokens of each sample of each case, all at once."""
    prompts = [
        llm.tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in CASES.values()
    ]
    prompts += [[5, 6, 7]] * len(neighbours)
    params = [*map(params_of, CASES), *neighbours]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(each.finish_reason == "length" for output in outputs for each in output.outputs)
    names = [*CASES, *(["neighbour"] * len(neighbours))]
    return {
        name: [each.token_ids for each in output.outputs]
        for name, output in zip(names, outputs, strict=True)
    }


def drafting(llm: Any, texts: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Drafts the texts, right and wrong."""
    shift = llm._engine._num_sequences
    by_id: dict[int, list[int]] = {}
    for name, samples in texts.items():
        prompt = llm.tokenizer(CASES[name][0], add_special_tokens=False)["input_ids"]
        for sample in samples:
            by_id[shift + len(by_id)] = [*prompt, *sample]
    draft_with(llm._engine, Scripted(by_id, mixed_up))
    before = llm.stats()["spec_decode_num_accepted_tokens_total"]
    tokens = generate(llm)
    assert llm.stats()["spec_decode_num_accepted_tokens_total"] > before
    return tokens


def guessing(llm: Any, texts: Any) -> dict[str, list[list[int]]]:
    draft_with(llm._engine, Guesses())
    return generate(llm)


def plainly(llm: Any, texts: Any) -> dict[str, list[list[int]]]:
    without_drafts(llm)
    return generate(llm)


WAYS: dict[str, Callable[..., Any]] = {
    "one at a time": plainly,
    "drafts": drafting,
    "trees": guessing,
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_rule_by_hand(llm, expected, way):
    assert WAYS[way](llm, expected) == expected


def test_the_cases_are_what_they_say(llm, expected):
    (close,) = llm.tokenizer("</think>", add_special_tokens=False)["input_ids"]
    assert [tokens.index(close) for tokens in expected["sampled"]] == [5, 5]
    assert expected["sampled"][0] != expected["sampled"][1]
    assert expected["at once"][0][0] == close and expected["greedy"][0].index(close) == 7
    assert close not in expected["long enough"][0]
    assert "(abdogcat)" in llm.tokenizer.decode(expected["text"][0])
    often = llm.tokenizer.decode(expected["often"][0])
    assert often.count("a") > 1 and often.count("b") > 1, often


def off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = thinking._force_if_spent
    less = lambda budget, place: real(replace(budget, num_tokens=budget.num_tokens + 1), place)  # noqa: E731
    monkeypatch.setattr(thinking, "_force_if_spent", less)


def forgetting_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SamplingStrategy._mask_of_budget
    monkeypatch.setattr(
        SamplingStrategy, "_mask_of_budget", lambda self, each, drafts: real(self, each, ())
    )


def counting_drafts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the first of the tokens of a step alone."""
    real = sampling_module.SamplingStrategy._advance
    seen: dict[int, bool] = {}

    def advance(self: Any, draw: Any) -> Any:
        before = self._place_of.get(draw.sequence_id)
        edits = real(self, draw)
        if seen.get(draw.sequence_id) and before is not None and draw.sequence_id in self._place_of:
            self._place_of[draw.sequence_id] = before
        seen[draw.sequence_id] = draw.drafted
        return edits

    monkeypatch.setattr(sampling_module.SamplingStrategy, "_advance", advance)


@pytest.mark.parametrize("mistake", [off_by_one, forgetting_drafts, counting_drafts_once])
def test_a_mistake_is_seen(llm, expected, monkeypatch, mistake):
    mistake(monkeypatch)
    assert drafting(llm, expected) != expected


def test_steps_of_several_tokens_and_a_replay(directory, expected, tmp_path):
    """A neighbour without a budget takes several at a time again when the others have ended; and
    the log gives all of it again.
    """
    log = tmp_path / "log.jsonl"
    with make_llm(directory, num_scheduler_steps=4, event_log=str(log)) as llm:
        neighbour = SamplingParams(temperature=1.0, seed=9, max_tokens=60, ignore_eos=True)
        together = generate(llm, neighbour)
        alone = llm.generate([[5, 6, 7]], neighbour, use_tqdm=False)
    assert together == {**expected, "neighbour": [alone[0].outputs[0].token_ids]}
    report = replaying.replay(log, progress=False)
    assert report.num_steps > 0 and (report.difference, report.ending) == (None, None)


# Parameters that do not go together


def test_what_cannot_be_forced_is_refused(llm):
    for params in ({"allowed_token_ids": [5, 6]}, {"bad_words": ["</think>"]}):
        with pytest.raises(ValueError, match=r"thinking_token_budget=3 forces '</think>'"):
            llm.generate(["a"], SamplingParams(thinking_token_budget=3, **params), use_tqdm=False)
    with pytest.raises(ValueError, match="no tokens that spell"):
        llm.generate(
            ["a"],
            SamplingParams(thinking_token_budget=3, thinking_markers=("", "漢")),
            use_tqdm=False,
        )


def test_a_grammar_and_the_budget_hold_together(llm):
    """The grammar holds alone where it does not admit the marker."""
    (close,) = llm.tokenizer("</think>", add_special_tokens=False)["input_ids"]
    until = f'start: r <[{close}]> "(" /[a-d]/ ")"\nr: /(.|\\n)*/'
    draft_with(llm._engine, Guesses())
    for budget in (0, 1, 6):
        params = SamplingParams(
            temperature=1.2,
            seed=budget,
            max_tokens=40,
            skip_special_tokens=False,
            thinking_token_budget=budget,
            structured_outputs={"grammar": until},
        )
        output = llm.generate(["a<think>"], params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids.index(close) == budget and output.finish_reason == "stop"
        assert output.text.partition("</think>")[2] in ("(a)", "(b)", "(c)", "(d)")
        words = replace(params, structured_outputs=("regex", '"[ab]{12}"'))
        output = llm.generate(["a<think>"], words, use_tqdm=False)[0].outputs[0]
        assert len(output.text) == 12 and output.finish_reason == "stop"


@pytest.mark.parametrize("space", [("", ""), ("\n", "\n\n"), ("", "\n")])
def test_the_grammar_of_required_calls_takes_the_bare_marker(space):
    """The template has white space before it; what follows the marker is no reasoning any more."""
    close = f"{space[0]}</think>{space[1]}"
    form = ChatFormat(tools=HERMES, reasoning=ReasoningForm("<think>", close))
    grammar = grammar_of(
        form,
        {"f": {"type": "object", "properties": {}}},
        lambda schema: json_rule(json.dumps(schema)),
        several=False,
        is_open=True,
        special_tokens={},
    )
    packaged = wire_tokenizer()
    known, _ = tokenizer_of(packaged.backend_tokenizer.to_str())
    ending = budget_of(packaged, VOCAB_SIZE, 2, THINK_MARKERS).endings[0]
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for thought in ("", "a king", "a king </th"):
        for after, is_right in ((call, True), ("no" + call, False)):
            token_ids = [
                *known.tokenize_str(thought),
                *ending,
                *known.tokenize_str(space[1] + after),
            ]
            matcher = matcher_of(known, source_of("grammar", json.dumps(grammar)))
            taken = matcher.try_consume_tokens(token_ids)
            assert (taken == len(token_ids) and matcher.is_accepting()) is is_right, (
                thought,
                after,
            )


# Requests of clients


def of_chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "a dog"}], **fields}


def params_in(exchange: Any) -> Any:
    return exchange.prompts[0].params


@pytest.fixture(scope="module")
def reasoning(tokenizer):
    return context(
        tokenizer=tokenizer, vocab_size=VOCAB, max_model_len=256, reasoning_parser="auto"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 6},
        {"reasoning": {"max_tokens": 6}},
        {"reasoning": {"max_tokens": 6, "enabled": True}},
        {"reasoning": {"max_tokens": 6}, "thinking_token_budget": 6},
        {"thinking": {"type": "enabled", "budget_tokens": 6}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_so_many_tokens_of_reasoning(llm, reasoning, fields, stream):
    body = of_chat(**fields, seed=3, max_tokens=20, ignore_eos=True, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    exchange = open_chat(body, reasoning)
    assert exchange.ignored_fields == ()
    prompt, params = exchange.prompts[0].prompt, params_in(exchange)
    assert params.thinking_token_budget == 6
    if stream:
        outputs = list(llm.stream(prompt, params))
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        chunks = [chunk for output in outputs for chunk in exchange.chunks(0, output)]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        said = {
            name: "".join(delta.get(name) or "" for delta in deltas)
            for name in ("reasoning_content", "content")
        }
        (response,) = exchange.last_chunks()
    else:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        tokens = output.outputs[0].token_ids
        response = exchange.whole([output])
        said = response["choices"][0]["message"]
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    decode = functools.partial(llm.tokenizer.decode, skip_special_tokens=False)
    assert decode(tokens[6:7]) == "</think>"
    assert said["reasoning_content"].strip() == decode(tokens[:6]).strip()
    assert said["content"].strip() == decode(tokens[7:]).strip()


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"thinking_token_budget": 6}, ("thinking_token_budget",)),
        ({"reasoning": {"max_tokens": 6}}, ("reasoning.max_tokens",)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 6}},
            ("thinking.budget_tokens",),  # the template has a switch, so the type has an effect
        ),
    ],
)
def test_a_model_without_reasoning_has_no_budget(fields, ignored):
    exchange = open_chat(of_chat(**fields), context(strict_requests=True))
    assert exchange.ignored_fields == ignored
    assert params_in(exchange).thinking_token_budget is None


def test_a_format_leaves_no_room_for_reasoning(reasoning):
    for held in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
    ):
        exchange = open_chat(of_chat(thinking_token_budget=6, **held), reasoning)
        assert exchange.ignored_fields == ("thinking_token_budget",)
        assert params_in(exchange).thinking_token_budget is None
        body = {"model": "demo", "prompt": "a<think>", "thinking_token_budget": 6, **held}
        assert open_completion(body, reasoning).ignored_fields == ("thinking_token_budget",)
    body = {"model": "demo", "prompt": "a<think>", "thinking_token_budget": 6}
    params = params_in(open_completion(body, reasoning))
    assert (params.thinking_token_budget, params.thinking_markers) == (6, THINK_MARKERS)


def test_what_clients_ask_of_reasoning_besides(reasoning):
    opened: tuple[dict[str, Any], ...] = (
        {"reasoning": {"enabled": True}},
        {"thinking": {"type": "adaptive"}},
        {},
    )
    closed: tuple[dict[str, Any], ...] = (
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"thinking": {"type": "disabled"}},
    )
    for fields in (*opened, *closed):
        exchange = open_chat(of_chat(**fields), reasoning)
        assert exchange.ignored_fields == ()
        assert str(exchange.prompts[0].prompt).endswith("<think>") is (fields in opened)
