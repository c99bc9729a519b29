"""Says in one sentence what llguidance says in several lines.

llguidance quotes its own source, into which a schema or a regex was put, and names its places and
its options:

    at 1(8): failed to compile JSON schema: regex parse error:
        (a
        ^
    error: unclosed group                           invalid regex "(a": unclosed group
    1 | start: %json {"pattern": "(a", ...}
                ^
"""

from __future__ import annotations

import re

_QUOTE = re.compile(r"\s*(?:\d+ \|.*|\^+)\s*")
# Each pattern, and what is said in its place. The first two come from what jaxpage wrote itself, so
# that their places say nothing.
_SAID = (
    (re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: "), ""),
    (re.compile(r"^at \d+\(\d+\): (?=invalid regex)"), ""),
    (re.compile(r"^(?:at )?(\d+)\((\d+)\): "), r"line \1, column \2: "),
    (
        re.compile(r"^invalid regex (\".*\") \(in regex\): regex parse error: .* error: "),
        r"invalid regex \1: ",
    ),
    (re.compile(r"regex parse error: (.*) error: "), r'invalid regex "\1": '),
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"keywords that are not supported: \1"),
    (
        re.compile(r"Resource '(.*)' is not present in a registry .*"),
        r"$ref leads to '\1', and jaxpage does not fetch schemas",
    ),
    (
        re.compile(r"oneOf constraints are not supported\..*"),
        "oneOf is supported only where its schemas exclude each other; anyOf admits any of them",
    ),
)


def sentence_of(message: str) -> str:
    """Returns a message of llguidance in one line, without its quotations of its own source."""
    lines = message.replace("<non-verbose/>", "").splitlines()
    sentence = " ".join(" ".join(line for line in lines if not _QUOTE.fullmatch(line)).split())
    for pattern, instead in _SAID:
        sentence = pattern.sub(instead, sentence)
    return sentence
