"""Which parameter works with which feature: found out anew, and the same as what the package and its documents say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.support import support_matrix
from tests.support.engines import invariants
from tests.support.matrix import (
    FEATURES,
    ON_DEVICES,
    YES,
    Engines,
    beam_cases,
    cell,
    markdown,
    sampling_cases,
)

ROOT = Path(__file__).parent.parent
FIELDS = [
    field.name for kind in (SamplingParams, BeamSearchParams) for field in dataclasses.fields(kind)
]
PARAMETERS = list(dict.fromkeys(FIELDS))


@pytest.fixture(scope="module")
def engines():
    engines = Engines()
    yield engines
    for llm in engines._llms.values():
        invariants(llm)
    engines.close()


@pytest.fixture(scope="module")
def found(engines, request):
    """Filled cell by cell; written at the end if that is asked for."""
    matrix = {name: {} for name in PARAMETERS}
    yield matrix
    if request.config.getoption("--write-support-matrix"):
        for name, cells in matrix.items():
            # tests/on_four_devices.py checks this column; a new parameter is taken to be honoured.
            cells[ON_DEVICES] = support_matrix().get(name, {}).get(ON_DEVICES, YES)
        assert all(len(cells) == len(FEATURES) for cells in matrix.values()), (
            "some cells failed: nothing is written"
        )
        (ROOT / "jaxpage" / "support_matrix.json").write_text(json.dumps(matrix, indent=1) + "\n")
        (ROOT / "docs" / "reference" / "support-matrix.md").write_text(markdown(matrix))


def test_every_parameter_has_a_row(engines):
    llm = engines.llm()
    assert {*sampling_cases(llm), *beam_cases(llm)} == set(PARAMETERS)
    assert set(support_matrix()) == set(PARAMETERS)


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature != ON_DEVICES])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_cell_is_what_the_package_says(name, feature, engines, found, request):
    found[name][feature] = status = cell(engines, name, feature)
    if not request.config.getoption("--write-support-matrix"):
        assert status == support_matrix()[name][feature]


def test_the_document_is_made_of_it():
    assert (ROOT / "docs" / "reference" / "support-matrix.md").read_text() == markdown(
        support_matrix()
    )
