"""Structured outputs in llguidance's terms: the text of a grammar, a tokenizer with an end of its own, and matchers within limits.

Imported by the engine and by the process that tries grammars (`jaxpage.decoding.grammar_worker`), which must find the same.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxpage.decoding.json_schemas import enforceable, overlapping
from jaxpage.errors import UnsupportedError

# Of JSON. A model may put one space where JSON allows any; more of it could go on for ever. A
# schema's "x-guidance" wins over it.
WHITESPACE = " "
# What bounds one mask, which is computed between two steps: about a quarter of a second for the
# worst regexes found. llguidance's own limits allow ten times that. No limit bounds what building a
# matcher takes: the process that tries it does.
LEXER_FUEL = 200_000
MAX_LEXER_STATES = 50_000
DEAD_END = "no token of the model continues the grammar"
# Where a grammar leaves one text, llguidance would admit the tokenizer's own spelling of it alone;
# but that may be an added token which it then refuses, since a text never stands for those. Last,
# so that it wins over lines of the user's.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_END = "<|the end of the grammar|>"
_MAX_MESSAGE = 400  # characters
_PARSER_ERROR = "parser error"
_NUM_WALKS, _WALK_TOKENS = 2, 24


def tokenizer_of(tokenizer_json: str) -> tuple[LLTokenizer, int]:
    """A tokenizer and the id of one more token, which a mask holds where the grammar may end: no model has it.

    Which tokens end a text is a matter of the request, not of the tokenizer. Raises UnsupportedError with llguidance's reason.
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
    """Adds the token that ends, and special tokens, which are no text, for the ids that a vocabulary leaves out.

    An added token's number is how many tokens come before it, whatever its "id" says, unless the vocabulary has it too; so it gets them.
    """
    numbered = vocabulary if isinstance(vocabulary, dict) else {}  # a list leaves out none
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
    """What llguidance compiles. The value is JSON, as `SamplingParams` keeps it. Raises ValueError if it is no grammar."""
    if kind == "json":
        return _source_of_schema(value)
    if kind == "json_object":
        return _source_of_schema('{"type": "object"}')
    given = json.loads(value)
    if kind == "regex":
        (grammar,) = json.loads(LLMatcher.grammar_from_regex(given))["grammars"]
        return str(grammar["lark_grammar"]) + _NO_FORCING
    # a terminal: thousands of alternatives of a rule would be as many places to be in
    if kind == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, given)) + _NO_FORCING
    try:
        return any_to_lark(given) + _NO_FORCING
    except (
        Exception
    ) as error:  # the converter of GBNF raises its own, and whatever its recursion leads to
        raise ValueError(f"neither Lark nor GBNF: {error}"[:_MAX_MESSAGE]) from None


def overlap_of(tokenizer: LLTokenizer, schema: str) -> str | None:
    """What is wrong with the names of a schema's properties, if anything: see `overlapping`. It may take long, as any pattern may."""
    for name, pattern in overlapping(schema):
        matcher = matcher_of(
            tokenizer, source_of("json", json.dumps({"type": "string", "pattern": pattern}))
        )
        token_ids = tokenizer.tokenize_str(json.dumps(name, ensure_ascii=False))
        if matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting():
            return f"the property {name!r} is also covered by the pattern {pattern!r} of patternProperties"[
                :_MAX_MESSAGE
            ]
    return None


def _source_of_schema(schema: str) -> str:
    compiled = LLMatcher.grammar_from_json_schema(
        enforceable(schema), {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    )
    (grammar,) = json.loads(compiled)["grammars"]
    return "start: %json " + json.dumps(grammar["json_schema"]) + _NO_FORCING


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Never raises for a grammar: see `problem_of`."""
    limits = LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def problem_of(matcher: LLMatcher, end_id: int) -> str | None:
    """What keeps a new matcher from being used. Computes its first mask, which may take longer than building it, and follows a few
    texts: a grammar may be too large for the parser only behind its first token.
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
    """The parser's error, if it comes to one. The lexer's depend on the text, and are the request's when it comes to them."""
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
    """Returns whether the lexer's limits ended it, not those of the parser, which know nothing of other requests."""
    return matcher.is_error() and not _is_of_parser(matcher)


def error_of(matcher: LLMatcher) -> str:
    """llguidance's message, short, in one line."""
    message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return DEAD_END if message.startswith("NoExtension") else message[:_MAX_MESSAGE]
