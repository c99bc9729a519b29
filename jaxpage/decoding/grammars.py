"""Translates structured outputs for llguidance: grammars, tokenizers, and matchers with limits.

The engine and the process that tries grammars (`jaxpage.decoding.grammar_worker`) both import it,
because they must come to the same result.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxpage.decoding.grammar_errors import sentence_of
from jaxpage.decoding.json_schemas import enforceable, overlapping
from jaxpage.errors import UnsupportedError

# A model may write at most one space where JSON allows white space; without a bound it could write
# spaces for ever. A schema's "x-guidance" overrides this.
WHITESPACE = " "
# These bound the time of one mask, which is computed between two steps, to about a quarter of a
# second for the worst regexes found. llguidance's own limits allow ten times that. No limit bounds
# the time of building a matcher; the process that tries grammars does that.
LEXER_FUEL = 200_000
MAX_LEXER_STATES = 50_000
DEAD_END = "no token of the model continues the grammar"
# If only one text can follow, llguidance would admit only the tokenizer's own spelling of it. That
# spelling may be an added token, which llguidance then refuses, because added tokens are no text to
# it. This line comes last, so that it overrides lines in the user's grammar.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_END = "<|the end of the grammar|>"
_RULES = re.compile(r"%json\s*")
_MAX_MESSAGE = 400  # characters
_PARSER_ERROR = "parser error"
_NUM_WALKS = 2
_WALK_TOKENS = 24


def tokenizer_of(tokenizer_json: str) -> tuple[LLTokenizer, int]:
    """Returns llguidance's tokenizer, and the id of one more token that marks the end of a grammar.

    No model has that token; a mask holds it where the grammar may end. The request, not the
    tokenizer, decides which tokens end a text.

    Raises:
        UnsupportedError: llguidance cannot take the tokenizer.
    """
    try:
        description = json.loads(tokenizer_json)
        end_id = _with_end(
            description["model"]["vocab"], description.setdefault("added_tokens", [])
        )
        return LLTokenizer(json.dumps(description), eos_token=end_id), end_id
    except Exception as error:
        raise UnsupportedError(
            f"the tokenizer of this model is not supported by llguidance: {error}"[:_MAX_MESSAGE]
        ) from None


def _with_end(vocabulary: dict[str, int] | list[Any], added: list[dict[str, Any]]) -> int:
    """Adds the end token to a vocabulary, and returns its id.

    Ids that the vocabulary leaves out get special tokens, which have no text. They are needed
    because llguidance numbers an added token by the count of tokens before it and ignores its "id",
    unless the vocabulary has the token too.
    """
    numbered = vocabulary if isinstance(vocabulary, dict) else {}  # a list has no gaps
    token_ids = set(numbered.values() or range(len(vocabulary)))
    end_id: int = 1 + max(*token_ids, *(token["id"] for token in added))
    names = {token["id"]: token["content"] for token in added}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id in [*(sorted(set(range(end_id)) - token_ids) if numbered else ()), end_id]:
        name = names.get(token_id) or (_END if token_id == end_id else f"<|no token {token_id}|>")
        numbered.setdefault(name, token_id)
        if token_id not in names:
            added.append({"id": token_id, "content": name, "special": True, **plain})
    return end_id


def source_of(kind: str, value: str) -> str:
    """Returns the grammar in llguidance's language.

    Args:
        kind: The kind of the structured output, such as "json" or "regex".
        value: Its value as JSON, as `SamplingParams` keeps it.

    Raises:
        ValueError: The value is no grammar of this kind.
    """
    if kind == "json":
        return _source_of_schema(value)
    if kind == "json_object":
        return _source_of_schema('{"type": "object"}')
    schema = json.loads(value)
    if kind == "regex":
        (grammar,) = json.loads(LLMatcher.grammar_from_regex(schema))["grammars"]
        return str(grammar["lark_grammar"]) + _NO_FORCING
    # Use a terminal: thousands of alternatives in a rule would give the parser as many states.
    if kind == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, schema)) + _NO_FORCING
    try:
        return any_to_lark(schema) + _NO_FORCING
    except Exception as error:  # the GBNF converter raises many kinds of errors
        raise ValueError(f"neither Lark nor GBNF: {error}"[:_MAX_MESSAGE]) from None


def overlap_of(tokenizer: LLTokenizer, schema: str) -> str | None:
    """Returns the problem of a schema whose property names match a pattern, or None.

    See `overlapping`. It may take long, as any pattern may.
    """
    for name, pattern in overlapping(schema):
        matcher = matcher_of(
            tokenizer, source_of("json", json.dumps({"type": "string", "pattern": pattern}))
        )
        token_ids = tokenizer.tokenize_str(json.dumps(name, ensure_ascii=False))
        if matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting():
            return (
                f"the property {name!r} is also covered by the pattern {pattern!r} of "
                "patternProperties"[:_MAX_MESSAGE]
            )
    return None


def _source_of_schema(schema: str) -> str:
    return f"start: {json_rule(schema)}{_NO_FORCING}"


def json_rule(schema: str) -> str:
    """Returns the right side of a rule in llguidance's language, for texts that keep to a schema.

    Raises:
        ValueError: llguidance could not enforce a keyword, which the message names.
    """
    compiled = LLMatcher.grammar_from_json_schema(
        enforceable(schema), {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    )
    (grammar,) = json.loads(compiled)["grammars"]
    return "%json " + json.dumps(grammar["json_schema"])


def schemas_in(kind: str, value: str) -> Iterator[str]:
    """Yields the JSON schemas of a structured output; see `source_of`."""
    if kind == "json":
        yield value
    elif kind == "grammar":
        source = json.loads(value)
        for match in _RULES.finditer(source):
            try:
                schema, _ = json.JSONDecoder().raw_decode(source, match.end())
            except ValueError:
                continue
            if isinstance(schema, dict):
                yield json.dumps(schema)


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher at the start of a grammar; it never raises, see `problem_of`."""
    limits = LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def problem_of(matcher: LLMatcher, end_id: int) -> str | None:
    """Returns the reason why a new matcher cannot be used, or None.

    It computes the first mask, which may take longer than building the matcher. Then it follows a
    few random texts, because a grammar may be too large for the parser only after its first token.
    """
    words = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return error_of(matcher)
    if warnings := matcher.get_grammar_warnings():
        return "; ".join(warnings)[:_MAX_MESSAGE]
    if int.from_bytes(words, "little") & ~(1 << end_id):
        return next(
            filter(
                None,
                (
                    _problem_on_a_walk(matcher.deep_copy(), end_id, seed)
                    for seed in range(_NUM_WALKS)
                ),
            ),
            None,
        )
    return "it allows only an empty text" if matcher.is_accepting() else DEAD_END


def _problem_on_a_walk(matcher: LLMatcher, end_id: int, seed: int) -> str | None:
    """Returns the parser's error if a random text leads to one, else None.

    Errors of the lexer depend on the text; they end the request that comes to them.
    """
    choice = random.Random(seed)
    for _ in range(_WALK_TOKENS):
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        token_ids = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        token_ids = token_ids[token_ids != end_id]
        if matcher.is_error() or not len(token_ids):
            break
        matcher.consume_token(int(token_ids[choice.randrange(len(token_ids))]))
    return error_of(matcher) if matcher.is_error() and _is_of_parser(matcher) else None


def _is_of_parser(matcher: LLMatcher) -> bool:
    return matcher.get_error().lower().startswith(_PARSER_ERROR)


def is_out_of_states(matcher: LLMatcher) -> bool:
    """Returns whether a limit of the lexer ended the matcher.

    Only the lexer's states are shared with other requests; the parser's are not.
    """
    return matcher.is_error() and not _is_of_parser(matcher)


def error_of(matcher: LLMatcher) -> str:
    """Returns what llguidance says is wrong, in one sentence of bounded length."""
    message = sentence_of(matcher.get_error())
    return DEAD_END if message.startswith("NoExtension") else message[:_MAX_MESSAGE]
