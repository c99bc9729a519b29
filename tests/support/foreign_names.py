"""Finds identifiers of C++ and JavaScript that do not say what they are, as `names.py` does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.names import EXEMPT, PRONOUNS, TERMS, snake_case, words_pattern

# The sources in C++ and JavaScript: the endings of their files, and their folders.
LANGUAGES = {
    "C++": ((".cc", ".h"), ("pallas_kernels",)),
    "JavaScript": ((".js", ".mjs"), ("jaxpage", "docs", "tests")),
}
# What has no identifiers in C++ and JavaScript: templates but for their braces, comments, includes,
# texts, patterns and numbers.
_NO_NAMES = re.compile(
    r"(?P<template>`(?:\\.|[^`\\])*`)"
    r"|//[^\n]*|/\*.*?\*/|^ *#include[^\n]*"
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    r"|(?:(?<=[(=,:!&|?{;\[] )|(?<=[(=,:!&|?{;\[]))/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/\w*"
    r"|\b\d[\w.']*",
    re.DOTALL | re.MULTILINE,
)
_BRACES = re.compile(r"\$\{((?:[^{}]|\{[^{}]*\})*)\}")
# A key of an object, which is followed by a colon, may be a field of a file or of an answer.
_NAME = re.compile(r"[A-Za-z_]\w*+(?!:(?!:))")


def foreign_names(root: Path, language: str) -> tuple[list[str], int]:
    """Returns the identifiers of a language of `LANGUAGES` that have a word of `TERMS`, or are a
    pronoun, and the number of all.

    A name counts once for each file.
    """
    endings, folders = LANGUAGES[language]
    pattern = words_pattern(())
    places = []
    count = 0
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*")))
    for path in (path for path in paths if path.suffix in endings):
        names = sorted(set(foreign_identifiers(path.read_text(encoding="utf-8"))))
        count += len(names)
        for name in names:
            snake = snake_case(name).strip("_").removeprefix("k_")
            match = pattern.search(EXEMPT.sub("", snake))
            if match or snake in PRONOUNS:
                term = TERMS[match[1]] if match else "what it is"
                places.append(f"{path.relative_to(root)}: {name} ({term})")
    return places, count


def foreign_identifiers(source: str) -> list[str]:
    """Returns the identifiers of a source in C++ or JavaScript, keywords among them."""
    return _NAME.findall(_NO_NAMES.sub(_code_of_braces, source))


def _code_of_braces(match: re.Match[str]) -> str:
    """Returns what a template computes; nothing of what is no template."""
    braces = _BRACES.findall(match["template"] or "")
    return " ".join(["", *(_NO_NAMES.sub(_code_of_braces, code) for code in braces), ""])
