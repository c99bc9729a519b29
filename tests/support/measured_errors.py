"""tests/measured_errors.json: how far the logits of each model of the tests were from those of
transformers, when last written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from tests.support.model_configs import MODELS, config_json

PATH = Path(__file__).parents[1] / "measured_errors.json"
TOLERANCE = 1e-4  # of logits in float32, absolute
WRITE = "pytest -n 0 -m '' tests/test_models.py -k logits_are_those_of_transformers --write-errors"


def read() -> dict[str, Any]:
    """Returns the version of transformers, and the greatest difference by the model's name."""
    errors: dict[str, Any] = json.loads(PATH.read_text())
    return errors


def write(errors: dict[str, float]) -> None:
    """Writes those that were measured; what is there of other models stays."""
    there = read()["errors"] if PATH.exists() else {}
    known = {name: errors.get(name, there.get(name)) for name in MODELS}
    rounded = {
        name: float(f"{error:.1e}") for name, error in sorted(known.items()) if error is not None
    }
    text = json.dumps({"transformers": transformers.__version__, "errors": rounded}, indent=1)
    PATH.write_text(text + "\n")


def greatest(errors: dict[str, float], architecture: str) -> str:
    """Returns the greatest one of an architecture, as the page of models shows it.

    Where none was measured it is nothing.
    """
    measured = [
        error
        for name, error in errors.items()
        if config_json(name)["architectures"] == [architecture]
    ]
    return f"{max(measured):.1e}" if measured else ""
