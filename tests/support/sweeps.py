"""Tests with many cases: a few of them are run always, all of them in a sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test: those that are kept, as they are, and the others marked `sweep`. Each of `kept` must be a case."""
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"no such cases: {missing}; there are {cases}")
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)
        for case in cases
    ]
