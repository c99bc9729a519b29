"""Tests with many cases: a few always run, all of them in a sweep or in a nightly run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest

USUAL_EXAMPLES = 40  # of hypothesis, in the usual profile of tests/conftest.py


def few(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Returns parameters of a test: those that are kept, as they are, and the others marked
    `sweep`.

    Each of `kept` must be a case.
    """
    cases = list(cases)
    if missing := [case for case in chosen if case not in cases]:
        raise ValueError(f"no such cases: {missing}; there are {cases}")
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)
        for case in cases
    ]


def examples(number: int, **options: Any) -> hypothesis.settings:
    """Returns hypothesis' settings for so many examples in the usual run, and for a dozen times as
    many in a nightly one.
    """
    factor = hypothesis.settings.default.max_examples / USUAL_EXAMPLES
    return hypothesis.settings(max_examples=int(number * factor), **options)
