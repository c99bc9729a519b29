"""Finds names that do not say what they are, in C++ and JavaScript too; `names.py` has the words."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path

from tests.support.names import PRONOUNS, TERMS, snake_case, words_in
from tests.support.sources import Module

_SHAPE = re.compile(r"(?:_[A-Z0-9]+)+$")
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


def pronoun_names(modules: Sequence[Module]) -> list[str]:
    """Returns the identifiers that are nothing but a pronoun, before the letters of a shape."""
    places = []
    for module in modules:
        for token in module.tokens:
            word = token.string if token.string.isupper() else _SHAPE.sub("", token.string)
            if token.type == tokenize.NAME and word.strip("_").lower() in PRONOUNS:
                places.append(f"{module.path}:{token.start[0]}: {token.string}")
    return places


def place_counters(modules: Sequence[Module]) -> list[str]:
    """Returns the counters of `enumerate` and `range` that are called a place, not an index."""
    places = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
                called = ast.unparse(node.iter.func)
                target = node.target
                if called == "enumerate" and isinstance(target, ast.Tuple):
                    target = target.elts[0]
                name = target.id if isinstance(target, ast.Name) else ""
                if called in ("enumerate", "range") and name in ("place", "places"):
                    places.append(f"{module.path}:{target.lineno}: {name} (index)")
    return places


def foreign_names(root: Path, language: str) -> tuple[list[str], int]:
    """Returns the identifiers of a language of `LANGUAGES` that have a word of `TERMS`, or are a
    pronoun, and the number of all.

    A name counts once for each file.
    """
    endings, folders = LANGUAGES[language]
    places = []
    count = 0
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*")))
    for path in (path for path in paths if path.suffix in endings):
        names = sorted(set(foreign_identifiers(path.read_text(encoding="utf-8"))))
        count += len(names)
        for name in names:
            snake = snake_case(name).strip("_").removeprefix("k_")
            words = words_in(snake)
            if words or snake in PRONOUNS:
                term = TERMS[words[0]] if words else "what it is"
                places.append(f"{path.relative_to(root)}: {name} ({term})")
    return places, count


def foreign_identifiers(source: str) -> list[str]:
    """Returns the identifiers of a source in C++ or JavaScript, keywords among them."""
    return _NAME.findall(_NO_NAMES.sub(_code_of_braces, source))


def _code_of_braces(match: re.Match[str]) -> str:
    """Returns what a template computes; nothing of what is no template."""
    braces = _BRACES.findall(match["template"] or "")
    return " ".join(["", *(_NO_NAMES.sub(_code_of_braces, code) for code in braces), ""])
