"""The matrix of parameters and features: found out anew, and the same as what the package and its
documents say.
"""

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
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("largest_shapes")

ROOT = Path(__file__).parent.parent
# The packaged model has no experts: see tests/test_routed_experts.py.
FIELDS = [
    field.name
    for kind in (SamplingParams, BeamSearchParams)
    for field in dataclasses.fields(kind)
    if field.name != "return_routed_experts"
]
PARAMETERS = list(dict.fromkeys(FIELDS))
# What these change, tests/test_requests_among_others.py, tests/test_speculation.py,
# tests/test_structured_outputs.py and the fuzzer find
# for all parameters together.
SWEPT = ("n > 1", "structured", "prefix cache", "preemption", "chunked", "speculation")
OF_THIS_PROCESS = [feature for feature in FEATURES if feature != ON_DEVICES]


@pytest.fixture(scope="module")
def engines():
    engines = Engines()
    yield engines
    for llm in engines._llms.values():
        invariants(llm)
    engines.close()


@pytest.fixture(scope="module")
def table(engines, request):
    """Is filled cell by cell; written at the end if that is asked for."""
    matrix = {name: {} for name in PARAMETERS}
    yield matrix
    if request.config.getoption("--write-support-matrix"):
        # Cells that did not run stay as they are. Of a new parameter some are taken to be honoured:
        # tests/on_four_devices.py and sweeps check them.
        of_new = dict.fromkeys((ON_DEVICES, *SWEPT), YES)
        for name, cells in matrix.items():
            row = support_matrix().get(name, of_new) | cells
            matrix[name] = {feature: row.get(feature) for feature in FEATURES}
        assert all(all(cells.values()) for cells in matrix.values()), (
            "some cells failed or did not run: nothing is written"
        )
        (ROOT / "jaxpage" / "support_matrix.json").write_text(json.dumps(matrix, indent=1) + "\n")
        (ROOT / "docs" / "reference" / "support-matrix.md").write_text(markdown(matrix))


def test_every_parameter_has_a_row(engines):
    llm = engines.llm()
    assert {*sampling_cases(llm), *beam_cases(llm)} == set(PARAMETERS)
    assert set(support_matrix()) == set(PARAMETERS)


@pytest.mark.parametrize("feature", few(OF_THIS_PROCESS, {*OF_THIS_PROCESS} - {*SWEPT}))
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_cell_is_what_the_package_says(name, feature, engines, table, request):
    table[name][feature] = None  # it stays None if the cell fails
    table[name][feature] = status = cell(engines, name, feature)
    if not request.config.getoption("--write-support-matrix"):
        assert status == support_matrix()[name][feature]


def test_the_document_is_made_of_it():
    assert (ROOT / "docs" / "reference" / "support-matrix.md").read_text() == markdown(
        support_matrix()
    )
