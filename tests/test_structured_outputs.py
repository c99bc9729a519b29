"""Structured outputs: whatever a random model would rather say, what comes out is what was asked
for, or a beginning of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import resource
import signal
import string
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxpage.decoding.constraints as constraints
import jaxpage.decoding.grammar_compiler as compiling
import jaxpage.decoding.grammars as rules
import jaxpage.decoding.mask_budget as budgets
from jaxpage import SamplingParams, cli
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.decoding import Constraint, Grammar, SamplingStrategy
from jaxpage.errors import JaxpageError, UnsupportedError
from jaxpage.replay import replay
from tests.support.engines import (
    LLAMA,
    invariants,
    lone_sample,
    make_llm,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tokenizers import END, write_tokenizer

pytestmark = pytest.mark.usefixtures("compiled_when_used", "decode_as_chunks", "usual_pages")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["é", 'a"b', None, 1.5]}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/pair"},
    },
    "required": ["name", "size", "inner"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"type": "null"}],
            "items": False,
            "minItems": 2,
        }
    },
}
CHOICES = ["yes", "no", 'say "no"', "ab|c.*", "née 😀", "a\\b\n", "abcab"]
REGEX = r"(ab|ba){1,3}( [0-9]{2,4})?(dog|cat)s?"
BALANCED = 'start: "(" start ")" start | "a"\n'
GBNF = 'root ::= pair ("," pair)*\npair ::= [a-c]+ "=" ("10" | "0")\n'


def is_balanced(text):
    """Parses BALANCED without llguidance: start: "(" start ")" start | "a"."""
    expected = 1  # how many `start` and, as -1 on the stack, closing parentheses are due
    stack = [expected]
    for letter in text:
        if not stack:
            return False
        due = stack.pop()
        if due == 1 and letter == "(":
            stack += [1, -1, 1]
        elif (due == 1 and letter != "a") or (due == -1 and letter != ")"):
            return False
    return not stack


def valid_json(schema):
    def check(text):
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return check


KINDS = {
    "json": ({"json": SCHEMA}, valid_json(SCHEMA)),
    "text of a schema": (
        {"json": json.dumps({"enum": [1, "ab", [True]]})},
        valid_json({"enum": [1, "ab", [True]]}),
    ),
    "regex": ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "lark": ({"grammar": BALANCED}, is_balanced),
    "gbnf": ({"grammar": GBNF}, re.compile("[abc]+=(10|0)(,[abc]+=(10|0))*").fullmatch),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA))


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    llm._engine.grammars._refusals.clear()
    yield
    invariants(llm)


def params(kind="json", **changes):
    requested = KINDS[kind][0] if isinstance(kind, str) else kind
    return SamplingParams(
        **{
            "temperature": 1.5,
            "seed": 5,
            "max_tokens": 100,
            "structured_outputs": requested,
            **changes,
        }
    )


def run(llm, prompts, each):
    return [output.outputs for output in llm.generate(prompts, each, use_tqdm=False)]


def bad_outputs(llm, kind, num_seeds, **changes):
    """Returns the texts of so many seeds that are neither valid nor, when cut, what a valid one
    begins with.
    """
    is_valid = KINDS[kind][1]
    longer = {"max_tokens": 200, **changes}
    outputs = run(
        llm, ["a"] * num_seeds, [params(kind, seed=seed, **longer) for seed in range(num_seeds)]
    )
    bad = [
        each for (each,) in outputs if each.finish_reason != "length" and not is_valid(each.text)
    ]
    bad += [each for (each,) in outputs if each.finish_reason not in ("stop", "length")]
    cut = run(
        llm,
        ["a"] * num_seeds,
        [params(kind, seed=seed, **{**changes, "max_tokens": 5}) for seed in range(num_seeds)],
    )
    bad += [
        each
        for (each,), (whole,) in zip(cut, outputs, strict=True)
        if not whole.text.startswith(each.text.rstrip("\ufffd"))
    ]
    return bad, outputs


@pytest.mark.parametrize("kind", few(KINDS, ["json", "regex", "lark", "gbnf"]))
def test_what_a_random_model_says_is_what_was_requested(kind, llm):
    bad, outputs = bad_outputs(llm, kind, 8)
    assert not bad
    finished = [each for (each,) in outputs if each.finish_reason == "stop"]
    assert len(finished) >= 3 and all(
        each.token_ids[-1] == END and each.stop_reason is None for each in finished
    )
    assert len({each.text for each in finished}) >= 2


def test_without_a_grammar_it_says_something_else(llm):
    """The tests above would show nothing if it did not."""
    outputs = run(
        llm, ["a"] * 12, [params(seed=seed, structured_outputs=None) for seed in range(12)]
    )
    for _, is_valid in (KINDS[kind] for kind in ("json", "regex", "choice", "lark", "gbnf")):
        assert not any(is_valid(each.text) for (each,) in outputs)


GREEDY: dict[str, Any] = {"temperature": 0.0}
BIASED = {"logit_bias": {200: 100.0, END: 50.0}}
PENALISED = {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": -2.0}


@pytest.mark.parametrize(
    "changes",
    few(
        [GREEDY, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}, BIASED, PENALISED],
        [GREEDY, BIASED],
    ),
)
def test_beside_what_else_shapes_a_draw(changes, llm):
    bad, outputs = bad_outputs(llm, "regex", 2, **changes)
    assert [each.finish_reason for (each,) in outputs] == ["stop"] * 2
    assert not bad


def shift_bits(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.packbits(np.roll(bits, 1), bitorder="little").view(np.uint32)


def plant(monkeypatch, mistake):
    if mistake == "off by one token":
        mask = SamplingStrategy.mask
        monkeypatch.setattr(
            SamplingStrategy, "mask", lambda self, sequence_id: shift_bits(mask(self, sequence_id))
        )
    if mistake == "of the step before":
        look, first = Constraint._look, Constraint.__init__

        def late(self, admitted):
            before = self.__dict__.get("mask")
            look(self, admitted)
            self.mask = self.mask if before is None else before

        monkeypatch.setattr(Constraint, "_look", late)
        monkeypatch.setattr(Constraint, "__init__", first)
    if mistake == "one state for all":
        monkeypatch.setattr(Grammar, "at_start", lambda self: (self._start, self._first))
        monkeypatch.setattr(Constraint, "copy", lambda self: self)
    if mistake == "ends anywhere":
        look = Constraint._look

        def lenient(self, admitted):
            look(self, admitted)
            self.mask = self.mask | self._ends_V

        monkeypatch.setattr(Constraint, "_look", lenient)
    if mistake == "one place for the samples":
        monkeypatch.setattr(SamplingStrategy, "_constraint", lambda self, _: one_place(self))


def one_place(strategy):
    if strategy.grammar is not None and not strategy._constraint_of:
        strategy._constraint_of[0] = Constraint(strategy.grammar, strategy._request)
    return strategy._constraint_of.get(0)


MISTAKES = ["off by one token", "of the step before", "one state for all", "ends anywhere"]


@pytest.mark.parametrize("mistake", few(MISTAKES, ["off by one token", "one state for all"]))
def test_a_planted_mistake_is_found(mistake, llm, monkeypatch):
    plant(monkeypatch, mistake)
    llm._engine.grammars._cache.clear()
    bad, _ = bad_outputs(llm, "regex", 6)
    llm._engine.grammars._cache.clear()
    assert bad


# Samples, neighbours, and what happens to a request


FOURTH = ("json", "regex", "choice", "lark")


@pytest.mark.parametrize("mistaken", [False, True])
@pytest.mark.parametrize("kind", few(["json", "regex"], ["regex"]))
def test_each_sample_is_the_lone_request_with_its_key(kind, mistaken, llm, monkeypatch):
    single = params(kind, max_tokens=40, logprobs=2)
    lone = [lone_sample(llm, [7, 8, 9], single, index) for index in range(4)]
    assert len({sample.text for sample in lone}) >= 3
    assert all(KINDS[kind][1](sample.text) for sample in lone if sample.finish_reason == "stop")
    if mistaken:
        plant(monkeypatch, "one place for the samples")
    ((*samples,),) = run(llm, [[7, 8, 9]], dataclasses.replace(single, n=4))
    assert (samples == lone) != mistaken


def test_log_probabilities_are_the_models_own(llm, directory):
    """They are those before the mask, as everywhere: the chosen token may be far from the
    likeliest.
    """
    ((sample,),) = run(llm, ["a"], params("json", temperature=0.0, logprobs=2, max_tokens=12))
    ((plain,),) = run(llm, ["a"], params(None, temperature=0.0, logprobs=2, max_tokens=1))
    first = sample.logprobs[0]
    assert first[sample.token_ids[0]].rank > 1
    top = plain.token_ids[0]
    assert first[top] == plain.logprobs[0][top] and top != sample.token_ids[0]


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, 257, length).tolist() for length in (5, 40, 16, 33, 50, 9, 21)]
    kinds = ["json", None, "regex", "choice", None, "gbnf", "json_object"]
    each = [
        params(kind, seed=index, max_tokens=60, logprobs=1, n=2 if index in (0, 4) else 1)
        for index, kind in enumerate(kinds)
    ]
    return prompts, each


@pytest.fixture(scope="module")
def lone(directory, requests):
    with make_llm(directory, enable_prefix_caching=False) as llm:
        return [run(llm, [prompt], each)[0] for prompt, each in zip(*requests, strict=True)]


def test_stop_strings_cut_it_short(llm):
    ((whole,),) = run(llm, ["a"], params("json"))
    ((cut,),) = run(llm, ["a"], params("json", stop=['"size"']))
    assert cut.finish_reason == "stop" and cut.stop_reason == '"size"'
    assert cut.text == whole.text[: whole.text.index('"size"')]


# The masks


def language():
    """Returns all texts of REGEX with fewer digits: what a mask is worked out from without
    llguidance.
    """
    heads = [
        "".join(parts)
        for count in (1, 2, 3)
        for parts in itertools.product(("ab", "ba"), repeat=count)
    ]
    return {
        head + number + animal
        for head in heads
        for number in ("", " 10", " 00")
        for animal in ("dog", "cat", "dogs", "cats")
    }


@pytest.fixture(scope="module")
def grammar_of(directory):
    compiler = compiling.GrammarCompiler(load_tokenizer(directory), LLAMA["vocab_size"])
    yield lambda **requested: compiler.compile(
        SamplingParams(structured_outputs=requested).structured_outputs
    )
    compiler.close()


def request(eos=(END,), **changes):
    return SimpleNamespace(eos_token_ids=frozenset(eos), params=SamplingParams(**changes))


def ids_of_mask(constraint):
    bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
    assert len(bits) == 288 and not bits[257:].any()  # of 9 words; the model has 257 ids
    return set(np.flatnonzero(bits))


def test_masks_are_those_of_brute_force(grammar_of, directory):
    """They agree in every place that can be reached, for every token."""
    texts = language()
    grammar = grammar_of(regex="((ab|ba){1,3})( (10|00))?(dog|cat)s?")
    pieces = [load_tokenizer(directory).decode([token_id]) for token_id in range(128)]
    todo, seen = [()], {""}
    while todo:
        token_ids = todo.pop()
        text, place = (
            "".join(pieces[token_id] for token_id in token_ids),
            Constraint(grammar, request()),
        )
        assert [place.advance(token_id) for token_id in token_ids] == [None] * len(token_ids)
        expected = {
            token_id
            for token_id, piece in enumerate(pieces)
            if token_id != END and any(whole.startswith(text + piece) for whole in texts)
        }
        may_end = text in texts
        actual = ids_of_mask(place)
        assert (END in actual) == may_end
        assert actual - {END} == expected, text
        for token_id in actual - {END}:
            if (longer := text + pieces[token_id]) not in seen:
                seen.add(longer)
                todo.append((*token_ids, token_id))
    assert len(seen) > 300
    assert ids_of_mask(Constraint(grammar, request())) == {
        i for i, piece in enumerate(pieces) if i != END and piece in ("a", "b", "ab", "ba", "abc")
    }


@pytest.mark.parametrize("mistaken", [False, True])
@pytest.mark.parametrize(
    ("requested", "text"),
    [
        ({"choice": ["a<|end|>b"]}, "a<|end|>b"),
        ({"regex": r"a<\|end\|>b/"}, "a<|end|>b/"),
        ({"json": {"const": "<|end|>"}}, '"<|end|>"'),
        (
            {"json": {"enum": ["<|end|>"], "x-guidance": {"whitespace_flexible": False}}},
            '"<|end|>"',
        ),
        ({"grammar": 'start: "a<|end|>b"'}, "a<|end|>b"),
        (
            {"grammar": '%llguidance {"no_forcing": false}\nstart: "a<|end|>b" // the end'},
            "a<|end|>b",
        ),
        ({"grammar": 'root ::= "a<|end|>b"'}, "a<|end|>b"),
    ],
)
def test_text_that_reads_like_a_special_token_is_text(requested, text, mistaken, llm, monkeypatch):
    if mistaken:
        monkeypatch.setattr(rules, "_NO_FORCING", "")
    llm._engine.grammars._cache.clear()
    outcomes = {
        (each.text, each.finish_reason) for each in run(llm, ["a"], params(requested, n=3))[0]
    }
    llm._engine.grammars._cache.clear()
    assert (outcomes == {(text, "stop")}) != mistaken


@pytest.mark.parametrize(("size", "limit", "fails"), [(12, 1500, False), (30, 300, True)])
def test_a_grammar_that_others_filled_is_as_good_as_new(size, limit, fails, directory, monkeypatch):
    """llguidance counts the states that anybody found to the limit of all."""
    monkeypatch.setattr(rules, "MAX_LEXER_STATES", limit)
    letters = [load_tokenizer(directory)(letter)["input_ids"][0] for letter in "ab"]
    tokenizer = rules.tokenizer_of(load_tokenizer(directory).backend_tokenizer.to_str())
    source = rules.source_of("regex", json.dumps(f"[ab]*a[ab]{{{size}}}c"))

    def outcome(grammar, seed):
        rng, constraint = np.random.default_rng(seed), Constraint(grammar, request())
        for number in range(250):
            if (end := constraint.advance(int(rng.choice(letters)))) is not None:
                return number, end
        return ids_of_mask(constraint)

    def fresh():
        return Grammar(*tokenizer, 257, source)

    shared, alone = fresh(), []
    again = Grammar.alone
    monkeypatch.setattr(
        Grammar, "alone", lambda self, ids: alone.append(len(ids)) or again(self, ids)
    )
    outcomes = [outcome(shared, seed) for seed in range(8)]
    assert alone and outcomes == [outcome(fresh(), seed) for seed in range(8)]
    assert all(isinstance(each, tuple) for each in outcomes) == fails


# How it ends


def only(llm, requested, prompt="a", **changes):
    ((sample,),) = run(llm, [prompt], params(requested, **changes))
    return sample


def test_without_an_end_to_draw_it_ends_where_the_grammar_does(llm):
    for changes in ({"ignore_eos": True}, {"allowed_token_ids": range(1, 257)}):
        sample = only(llm, "choice", **changes)
        assert (
            (sample.finish_reason, sample.stop_reason) == ("stop", None)
            and sample.text in CHOICES
            and END not in sample.token_ids
        )
    open_ended = only(llm, {"regex": "[a-z]+"}, ignore_eos=True, max_tokens=30)
    assert open_ended.finish_reason == "length" and re.fullmatch("[a-z]{30,}", open_ended.text)
    exact = only(llm, {"regex": "[a-z]{3}"}, ignore_eos=True, max_tokens=3)
    assert exact.finish_reason == "stop" and len(exact.text) == 3  # rather than "length"


def test_it_ends_where_it_may_if_every_way_on_is_forbidden(llm):
    """`allowed_token_ids` is seen at once; anything else, when nothing is left to draw."""
    yes, bang = ({*llm.tokenizer(text)["input_ids"]} for text in ("yes", "!"))
    either = {"choice": ["yes", "yes!"]}
    for changes in (
        {"allowed_token_ids": sorted(yes)},
        {"bad_words": ["!"], "ignore_eos": True},
        {"bad_words": ["!"], "allowed_token_ids": sorted(yes | bang)},
        {"bad_words": ["!"], "ignore_eos": True, "min_tokens": 3},
        # text that is held back comes out
        {"bad_words": ["!"], "ignore_eos": True, "stop": ["s?"]},
    ):
        sample = only(llm, either, **changes)
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("yes", "stop", None)
    empty = only(llm, {"regex": "(ab)?"}, allowed_token_ids=sorted(yes))
    assert (empty.token_ids, empty.finish_reason) == ([], "stop")


def test_it_fails_where_it_may_not_end_and_every_way_on_is_forbidden(llm):
    yes = llm.tokenizer("yes")["input_ids"]
    inside = only(llm, {"choice": ["yes!"]}, allowed_token_ids=yes)
    assert (
        inside.finish_reason == "error"
        and "no token of allowed_token_ids continues" in inside.stop_reason
    )
    short = only(llm, {"choice": ["yes", "yes!!!"]}, allowed_token_ids=yes, min_tokens=4)
    assert (
        short.finish_reason == "error"
        and "complete after 3 tokens, below min_tokens=4" in short.stop_reason
    )
    for banned in (
        only(llm, {"choice": ["yes!"]}, bad_words=["!"]),
        only(llm, {"choice": ["yes", "yes!!!"]}, bad_words=["!"], ignore_eos=True, min_tokens=4),
    ):
        assert banned.finish_reason == "error" and "leave no token to sample" in banned.stop_reason


def test_stop_ids_are_ends_where_the_grammar_may_end(llm):
    (letter,) = llm.tokenizer("z")["input_ids"]
    sample = only(
        llm, {"regex": "[ab]{2,9}"}, ignore_eos=True, stop_token_ids=[letter], temperature=0.0
    )
    assert (
        re.fullmatch("[ab]{2,9}", sample.text)
        and sample.finish_reason == "stop"
        and sample.stop_reason == letter
    )


def test_an_end_that_is_a_letter_is_none_inside(directory, tmp_path):
    """The end-of-sequence id of the model is text to its tokenizer."""
    (letter,) = load_tokenizer(directory)("b")["input_ids"]
    model = write_tokenizer(
        random_checkpoint(tmp_path / "other", {**LLAMA, "eos_token_id": letter})
    )
    with make_llm(model) as llm:
        ends = {letter, llm.tokenizer.eos_token_id}
        for seed in range(6):
            sample = only(llm, {"regex": "[ab]{4}"}, seed=seed)
            *inside, last = sample.token_ids
            assert last in ends and not ends & set(inside) and sample.finish_reason == "stop"
            assert re.fullmatch("[ab]{4}", sample.text)


def test_min_tokens_beyond_the_grammar_is_an_error(llm):
    sample = only(llm, {"choice": ["dog", "cat"]}, min_tokens=9)
    assert sample.text in ("dog", "cat") and sample.finish_reason == "error"
    assert re.search("complete after [1-3] tokens, below min_tokens=9", sample.stop_reason)
    longer = only(llm, {"regex": "[ab]{1,40}"}, min_tokens=9)
    assert longer.finish_reason == "stop" and len(longer.token_ids) >= 10


def test_a_dead_end_ends_that_request_only(llm):
    """The tokenizer cannot say what follows "ab".

    A neighbour is as it is alone, to the last bit.
    """
    neighbour = params(None, max_tokens=20, logprobs=2)
    alone = run(llm, [[3, 4]], neighbour)
    for requested in ({"regex": "[ab]{2}(\\x01|\u20ac)"}, {"choice": ["aba\u0001", "bab\u0001"]}):
        dead, beside = run(llm, ["a", [3, 4]], [params(requested, n=2), neighbour])
        assert [beside] == alone
        for each in dead:
            assert (
                each.finish_reason == "error"
                and "no token of the model continues the grammar" in each.stop_reason
            )
            assert re.fullmatch("[ab]{2,3}", each.text)


def test_the_first_mask_of_a_grammar_is_computed_once(grammar_of, monkeypatch):
    grammar, computed, admitted = grammar_of(regex="[ab]{2}"), [], Grammar.admit
    monkeypatch.setattr(
        Grammar, "admit", lambda self, matcher: computed.append(1) or admitted(self, matcher)
    )
    first, second = (Constraint(grammar, request()) for _ in range(2))
    assert not computed and not np.shares_memory(first.mask, second.mask)


def test_what_goes_wrong_in_a_grammar_ends_that_request_only(llm, monkeypatch):
    monkeypatch.setattr(rules, "MAX_LEXER_STATES", 200)
    neighbour = params(None, max_tokens=20, logprobs=2)
    alone = run(llm, [[3, 4]], neighbour)
    (sample,), beside = run(
        llm, ["a", [3, 4]], [params({"regex": "b{2}[ab]*a[ab]{90}c"}), neighbour]
    )
    assert [beside] == alone
    assert sample.finish_reason == "error" and sample.stop_reason.startswith(
        "structured_outputs: lexer error"
    )


@pytest.mark.parametrize("limit", [0.1, 1e9])
def test_slow_masks_of_many_sequences_take_a_part_of_a_step(limit, llm, monkeypatch):
    """The processor's time bounds what multiplies by n, whatever makes it slow.

    Nobody else notices.
    """
    neighbour = params(None, max_tokens=20, logprobs=2)
    alone = run(llm, [[3, 4]], neighbour)
    admitted = Grammar.admit

    def slowly(self, matcher):
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        return admitted(self, matcher)

    monkeypatch.setattr(budgets, "SEQUENCE_SECONDS", 0.0)
    monkeypatch.setattr(Grammar, "admit", slowly)
    monkeypatch.setattr(llm._engine._default_strategies.mask_budget, "_request_seconds", limit)
    calls = []
    monkeypatch.setattr(
        Constraint, "advance", lambda *args, f=Constraint.advance: calls.append(1) or f(*args)
    )
    many, beside = run(
        llm, ["a", [3, 4]], [params({"regex": "[ab]{3}"}, n=3, max_tokens=1), neighbour]
    )
    assert [beside] == alone
    errors = [each.stop_reason for each in many if each.finish_reason == "error"]
    if limit == 0.1:
        assert len(calls) == 2 and len(errors) == 1
        assert {error.split(":")[0] for error in errors} == {
            "structured_outputs"
        } and "lower n" in errors[0]
    else:
        assert len(calls) == 3 and not errors


def test_a_limit_of_the_parser_is_no_reason_to_begin_again(grammar_of, monkeypatch):
    """Only the lexer's states are shared with others: a grammar that the parser gives up is not
    compiled for each sequence.
    """
    grammar = grammar_of(json={"type": "object", "properties": {f"p{i}": {} for i in range(100)}})
    monkeypatch.setattr(grammar, "alone", lambda *_: pytest.fail("it begins again"))
    monkeypatch.setattr(constraints, "error_of", lambda matcher: "told")
    constraint = Constraint(grammar, request())

    class Failed:
        """A matcher at the parser's limit."""

        def __getattr__(self, name):
            answers = {
                "is_error": True,
                "get_error": "Parser Error: Current row has 8007 items",
                "consume_token": False,
            }
            return lambda *_: answers[name]

    constraint._matcher = Failed()
    token_id = int(
        np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little"))[0]
    )
    assert constraint.advance(token_id) == ("error", "structured_outputs: told")


def test_an_exception_on_the_way_to_a_mask_ends_that_request_only(llm, monkeypatch):
    neighbour = params(None, max_tokens=20, logprobs=2)
    alone = run(llm, [[3, 4]], neighbour)
    monkeypatch.setattr(Constraint, "__init__", lambda *_: 1 / 0)
    broken, beside = run(llm, ["a", [3, 4]], [params({"regex": "b{2}"}, n=2), neighbour])
    assert [beside] == alone
    assert [(each.finish_reason, each.token_ids) for each in broken] == [("error", [])] * 2


# What is refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"regex": ""},
            "structured_outputs\\['regex'\\] must be a string that is not empty, got ''",
        ),
        ({"regex": 3}, "got 3"),
        ({"choice": []}, "must be a list that is not empty, got \\[\\]"),
        ({"choice": "yes"}, "must be a list, got 'yes'"),
        (
            {"choice": ["a", ""]},
            "structured_outputs\\['choice'\\]\\[1\\] must be a string that is not empty",
        ),
        ({"choice": ["\ud800"]}, "lone surrogate"),
        ({"json": "{"}, "must be valid JSON, got '{'"),
        ({"json": '{"const": NaN}'}, "must be valid JSON"),
        ({"json": {"const": float("nan")}}, "something that JSON can express"),
        ({"json": [1]}, "must be a JSON schema: an object, or its text, got \\[1\\]"),
        ({"json": True}, "a JSON schema"),
        ({"json": {"a": object()}}, "something that JSON can express"),
        ({"json_object": False}, "must be True, got False"),
        ({"grammar": {}}, "string that is not empty"),
        ({"regex": "a" * 70000}, "at most 65536 characters as JSON \\(70002 are given\\)"),
        ({"json": {"enum": list(range(20000))}}, "at most 65536 characters"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of json, regex, choice"),
        ({}, "exactly one of"),
        ({"banana": 1}, "exactly one of"),
        (({}, "{}"), "exactly one of"),
    ],
)
def test_refused_at_construction(value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=x)"}, "look-around"),
        ({"regex": "(?P<n>a)(?P=n)"}, "invalid regex"),
        ({"regex": "a{0}"}, "it allows only an empty text"),
        ({"regex": "[^\\s\\S]"}, "no token of the model continues"),
        ({"regex": "\\x01"}, "no token of the model continues"),
        ({"regex": "(" * 30000 + "a" + ")" * 30000}, "is refused: "),
        ({"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000}, "too deeply nested"),
        ({"grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000}, "neither Lark nor GBNF"),
        ({"grammar": "start: missing"}, 'line 1, column 8: unknown name: "missing"'),
        ({"json": {"type": "banana"}}, "Invalid type: banana"),
        ({"json": {"not": {"type": "string"}}}, 'not supported: "not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "banana"}}, "Unknown format: banana"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"dependentRequired": {"a": ["b"]}}}, 'not supported: "dependentRequired"'),
        ({"json": {"if": {}, "then": {}}}, 'not supported: "if", "then"'),
        ({"json": {"type": "integer", "minimum": 2**63 - 2}}, "minimum is 9223372036854775806"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "oneOf is supported only"),
        ({"json": {"$ref": "http://somewhere/else"}}, "does not fetch"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        # The first mask is as of any object: the parser's limit is reached after its first brace.
        (
            {
                "json": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
                }
            },
            "max is 2000",
        ),
    ],
)
def test_refused_at_admission(value, message, llm):
    """The message has the parameter, the beginning of its value and a sentence, and nothing of
    llguidance's source.
    """
    requested = re.escape(f"structured_outputs={{'{next(iter(value))}': ")
    with pytest.raises(
        ValueError, match=f"^{requested}.* is refused: .*{message.removeprefix('is refused: ')}"
    ) as refused:
        llm.generate(["a", "b"], [params(None), params(value)], use_tqdm=False)
    assert len(str(refused.value)) < 700 and refused.value.__notes__ == ["This is prompt 1 of 2."]
    said = str(refused.value).rpartition(" is refused: ")[2]
    assert not {"start:", "%json", "%llguidance", "^"} & {*said.split()}, said


def test_without_a_tokenizer(tmp_path):
    with (
        make_llm(random_checkpoint(tmp_path, LLAMA)) as bare,
        pytest.raises(ValueError, match="'regex' needs text, but the model has"),
    ):
        bare.generate([1, 2], params("regex"))


def describe(directory):
    return json.loads(load_tokenizer(directory).backend_tokenizer.to_str())


def compiler_of(description):
    backend = Tokenizer.from_str(json.dumps(description))
    return compiling.GrammarCompiler(
        SimpleNamespace(backend_tokenizer=backend), LLAMA["vocab_size"]
    )


@pytest.mark.parametrize("kind", ["Metaspace", "WordPiece", "none"])
def test_a_tokenizer_that_llguidance_cannot_take(kind, directory):
    description = describe(directory)
    description["decoder"] = {
        "Metaspace": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "always",
            "split": True,
        },
        "WordPiece": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "none": None,
    }[kind]
    with contextlib.closing(compiler_of(description)) as compiler:
        for _ in range(2):
            with pytest.raises(
                UnsupportedError, match="^structured_outputs={'regex': 'ab'} cannot be .*decoder"
            ):
                compiler.compile(("regex", '"ab"'))
            assert compiler._worker is None
        with pytest.raises(UnsupportedError, match="'cd'"):
            compiler.compile(("regex", '"cd"'))
    command = [sys.executable, "-m", "jaxpage.decoding.grammar_worker"]
    worker = subprocess.run(
        command, input=json.dumps(description) + "\n", capture_output=True, text=True, check=True
    )
    assert (worker.stdout, worker.stderr) == ("", "")


@pytest.mark.parametrize(("first", "shift"), [(127, 1), (100, 5), (50, 129)])
def test_ids_that_a_vocabulary_leaves_out_are_no_text(first, shift, directory):
    """The end of the grammar is no other one's id, either."""
    description = describe(directory)
    ids = {piece: i + shift * (i >= first) for piece, i in description["model"]["vocab"].items()}
    description["model"]["vocab"] = ids
    with contextlib.closing(compiler_of(description)) as compiler:
        grammar = compiler.compile(("regex", '"[^x]{2}"'))
    old = compiling.GrammarCompiler(load_tokenizer(directory), LLAMA["vocab_size"])
    with contextlib.closing(old) as compiler:
        expected = ids_of_mask(Constraint(compiler.compile(("regex", '"[^x]{2}"')), request()))
    moved = {i + shift * (i >= first) for i in expected}
    constraint = Constraint(grammar, request())
    assert ids_of_mask(constraint) == moved and max(moved) < 257
    for _ in range(2):
        constraint.advance(ids["a"])
    assert ids_of_mask(constraint) == {END}


def deep(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"json": schema}


def test_nesting_ends_nothing_but_the_request(llm):
    assert only(llm, deep(20)).finish_reason == "stop"
    with pytest.raises(ValueError, match="structured_outputs"):
        only(llm, deep(700))
    with pytest.raises(ValueError, match="structured_outputs"):
        only(llm, {"json": '{"items":' * 6000 + "{}" + "}" * 6000})


# Compiling


# half a minute and 700 MB, whatever llguidance's limits
SLOW = {"json": {"type": "integer", "multipleOf": 1234567}}


@pytest.mark.parametrize("mistaken", [False, True])
def test_others_go_on_while_a_grammar_compiles(mistaken, llm, monkeypatch):
    """It is compiled on the thread that asks; what takes too long is refused."""
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 1.0)
    compiled, steps = llm._engine.compile_grammar, []

    def note_steps():
        steps.append(llm._engine.stats()["engine_steps_total"])

    def holding(params):
        note_steps()
        if mistaken:
            return llm._driver.wait(llm._driver.call(lambda engine: compiled(params)))
        return compiled(params)

    def ask():
        with pytest.raises(ValueError, match="compiling it takes longer than 1 s"):
            llm.generate("a", params(SLOW), use_tqdm=False)
        note_steps()

    stream = llm.stream("a", params(None, max_tokens=200, ignore_eos=True))
    monkeypatch.setattr(llm._engine, "compile_grammar", holding)
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert len(list(stream)) > 3
    assert (steps[1] - steps[0] > 3) != mistaken


def test_memory_is_bounded(llm, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 60)
    monkeypatch.setattr(compiling, "COMPILE_BYTES", 32 << 20)
    with pytest.raises(ValueError, match="takes more than 32 MiB, or crashes"):
        only(llm, SLOW)


def test_who_waits_too_long_gets_an_error(llm, monkeypatch):
    monkeypatch.setattr(compiling, "WAIT_SECONDS", 0.01)
    compiler = llm._engine.grammars
    compiler._cache.clear()
    assert only(llm, "choice").finish_reason == "stop"
    with compiler._compiling:
        assert only(llm, "choice").finish_reason == "stop"  # it is there already
        with pytest.raises(TimeoutError, match="structured_outputs: timed out after 0.01 s"):
            only(llm, {"regex": "xyz"})


ENDLESS = {
    "json": {
        "allOf": [{"type": "integer", "multipleOf": factor} for factor in (7, 11, 13, 17, 19, 23)]
    }
}


def living(group):
    """Returns the processes of a group, by their ids, that have not ended."""
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,pid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    each = [line.split() for line in listed.splitlines()]
    return {
        int(pid) for pgid, pid, state in each if int(pgid) == group and not state.startswith("Z")
    }


def soon(condition, seconds=20):
    """Returns whether it comes to be.

    It takes a moment, and would take for ever if it were wrong.
    """
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(met)


@pytest.fixture
def busy(directory, monkeypatch):
    """Yields a compiler, its worker, which is at an endless grammar, and the outcome for who asked
    for it.
    """
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 300)
    monkeypatch.setattr(compiling, "COMPILE_BYTES", 1 << 40)
    compiler, outcome = compiling.GrammarCompiler(load_tokenizer(directory), 257), []

    def ask():
        try:
            compiler.compile(SamplingParams(structured_outputs=ENDLESS).structured_outputs)
        except BaseException as error:
            outcome.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert soon(
        lambda: compiler._worker is not None and len(living(compiler._worker._process.pid)) == 2
    )
    group = compiler._worker._process.pid
    yield SimpleNamespace(compiler=compiler, asking=asking, group=group, outcome=outcome)
    monkeypatch.undo()
    compiler.close()
    asking.join(20)


@pytest.mark.parametrize("mistaken", [False, True])
def test_the_end_of_a_compiler_ends_all_processes(mistaken, busy, monkeypatch):
    """Nobody waits for the grammar that was being tried."""
    if mistaken:
        monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    closing = threading.Thread(target=busy.compiler.close, daemon=True)
    closing.start()
    assert (
        soon(lambda: not closing.is_alive() and not living(busy.group), 1 if mistaken else 20)
        != mistaken
    )
    assert mistaken or soon(lambda: busy.outcome)


def test_what_is_tried_dies_with_the_worker(busy):
    os.kill(busy.group, signal.SIGKILL)
    assert soon(lambda: not living(busy.group))


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("mistaken", [False, True])
def test_a_forked_program_leaves_the_worker_alone(mistaken, llm, monkeypatch):
    """It ends what it has got at its exit, but the worker is not its own."""
    only(llm, {"regex": "first"})
    worker = llm._engine.grammars._worker
    pid = os.getpid()
    if mistaken:
        monkeypatch.setattr(os, "getpid", lambda: pid)
    child = os.fork()
    if child == 0:
        worker.close()
        os._exit(0)
    ended = soon(lambda: os.waitpid(child, os.WNOHANG)[0])
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (ended and not soon(lambda: not living(worker._process.pid), 0.5)) != mistaken


def test_the_process_that_tries_grammars_may_die(llm, monkeypatch):
    """It is started again; not for ever."""
    only(llm, {"regex": "alive"})
    llm._engine.grammars._worker._process.kill()
    assert only(llm, {"regex": "alive again"}).text == "alive again"
    tried, num_tried = compiling._Worker.try_grammar, []

    def kill_first(self, *requested):
        num_tried.append(1)
        self._process.kill()
        return tried(self, *requested)

    monkeypatch.setattr(compiling._Worker, "try_grammar", kill_first)
    with pytest.raises(JaxpageError, match="the process that tries grammars has ended"):
        only(llm, {"regex": "dead"})
    assert len(num_tried) == 2


def test_a_worker_that_does_not_answer_is_not_asked_twice(llm, monkeypatch):
    only(llm, {"regex": "running"})
    os.kill((stopped := llm._engine.grammars._worker._process).pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "COMPILE_SECONDS", 0.1)
        patch.setattr("jaxpage.worker_process._GRACE_SECONDS", 0.1)
        with pytest.raises(JaxpageError, match="does not answer"):
            only(llm, {"regex": "stopped"})
    assert not living(stopped.pid) and llm._engine.grammars._worker is None


@pytest.mark.parametrize("mistaken", [False, True])
def test_no_worker_outlives_a_shutdown(mistaken, busy, monkeypatch):
    """It answers neither who waits for its answer nor who waits after that one."""
    if mistaken:
        monkeypatch.setattr(compiling.GrammarCompiler, "_check_open", lambda self: None)
        monkeypatch.setattr(compiling, "COMPILE_SECONDS", 1)
    waiting, outcome = [], []

    def ask():
        try:
            outcome.append(busy.compiler.compile(("regex", '"behind"')))
        except BaseException as error:
            outcome.append(error)

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    busy.compiler.close()
    busy.asking.join(60)
    waiting.join(60)
    said = [str(error) for error in (*busy.outcome, *outcome)]
    assert (busy.compiler._worker is None and said == ["This LLM was shut down"] * 2) != mistaken
    busy.compiler._end_worker()


def test_of_a_program_with_many_open_files(llm):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip(f"no more than {limits[1]} files may be open here")
    llm._engine.grammars._end_worker()
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2000), limits[1]))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert only(llm, {"regex": "behind them"}).text == "behind them"


def test_grammars_are_kept_within_bounds(llm, monkeypatch):
    """The last used stay; an equal grammar is compiled once."""
    monkeypatch.setattr(compiling, "CACHED_GRAMMARS", 3)
    compiler = llm._engine.grammars
    tried = []
    real = compiling._Worker.try_grammar
    monkeypatch.setattr(
        compiling._Worker,
        "try_grammar",
        lambda self, *requested: tried.append(requested[1]) or real(self, *requested),
    )
    for letter in "pqrpstp":
        only(llm, {"regex": f"{letter}{{2}}"}, max_tokens=4)
    assert tried == [f'"{letter}{{2}}"' for letter in "pqrst"] and len(compiler._cache) == 3
    monkeypatch.setattr(compiling, "CACHED_BYTES", 0)
    assert only(llm, {"regex": "unkept"}).text == "unkept" and not compiler._cache


def test_refusals_are_kept_for_a_while(llm, monkeypatch):
    compiler, real, tried = llm._engine.grammars, compiling._Worker.try_grammar, []
    monkeypatch.setattr(
        compiling._Worker,
        "try_grammar",
        lambda self, *requested: tried.append(requested[1]) or real(self, *requested),
    )
    monkeypatch.setattr(compiling, "CACHED_GRAMMARS", 2)
    messages = set()

    def ask(pattern):
        with pytest.raises(ValueError, match="unclosed group") as error:
            only(llm, {"regex": pattern})
        messages.add(str(error.value))

    for pattern in ("(", "(", "(a", "(", "(b", "(b", "("):
        ask(pattern)
    assert [json.loads(pattern) for pattern in tried] == ["(", "(a", "(b", "("] and len(
        messages
    ) == 3
    assert len(compiler._refusals) == 2
    monkeypatch.setattr(compiling, "REFUSED_SECONDS", 0.0)
    ask("(")
    assert len(tried) == 5


# Logs and the command line


def test_a_log_is_replayed_with_its_masks(directory, tmp_path, requests, lone):
    path = tmp_path / "log"
    prompts, each = requests
    dead = params({"regex": "[ab]{2}\\x01"}, n=2)
    with make_llm(directory, event_log=str(path)) as llm:
        assert run(llm, [*prompts, "a"], [*each, dead])[:-1] == lone
        only(llm, "choice", ignore_eos=True)
        only(llm, {"choice": ["yes", "yes!"]}, ignore_eos=True, bad_words=["!"])
    report = replay(path, progress=False)
    assert report.difference is None and report.ending is None and report.num_tokens > 100
    results = [
        record
        for record in map(json.loads, path.read_text().splitlines())
        if record["event"] == "result"
    ]
    # of the last one; at a dead end nothing is drawn
    assert sum(record["tokens"].count(-2) for record in results) == 1


def test_grammars_of_every_printable_character(grammar_of, directory):
    """Choices are taken literally."""
    tokenizer = load_tokenizer(directory)
    for character in string.printable[:-3]:
        choice = [f"a{character}", f"b{character}{character}"]
        constraint = Constraint(grammar_of(choice=choice), request())
        for token_id in tokenizer.backend_tokenizer.encode(choice[1]).ids:
            if tokenizer.decode([token_id]) and not {"\r"} & set(character):
                assert token_id in ids_of_mask(constraint), character
                constraint.advance(token_id)


def test_on_the_command_line(directory, capsys):
    small = (
        "--max-num-seqs 4 --max-num-batched-tokens 64 --num-blocks 129 --max-model-len 256 "
        "--preemption-mode recompute"
    )
    command = ["generate", "a", "--model", str(directory), *small.split(), "--structured-outputs"]
    assert cli.main([*command, '{"choice": ["dog"]}']) == 0 and capsys.readouterr().out == "dog\n"
    assert (
        cli.main([*command, '{"regex": ""}']) == 2
        and "structured_outputs['regex'] must be" in capsys.readouterr().err
    )
