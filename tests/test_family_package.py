"""Families from outside the tree: the example package, found as an installed one is, and the errors
of packages that cannot be used.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from jaxpage.cli.doctor import families_of_packages, report
from jaxpage.errors import UnsupportedError
from jaxpage.models import registry
from jaxpage.models.registry import load_family
from tests.support.executables import when_used

pytest.importorskip("torch", reason="the oracle is transformers on torch")

EXAMPLE = Path(__file__).parents[1] / "examples" / "family_package"


def install(directory, name, architecture, module):
    """Installs a package's metadata on the path, as pip does."""
    metadata = directory / f"{name.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[jaxpage.models]\n{architecture} = {module}\n")


def test_a_package_brings_a_family(monkeypatch, tmp_path):
    """The example is found as an installed package is; its own test compares tokens with
    transformers.
    """
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((architecture, module),) = project["entry-points"]["jaxpage.models"].items()
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    config = {"architectures": [architecture]}
    assert list(families_of_packages()) == ["none are installed"]
    with pytest.raises(UnsupportedError, match="is not one of"):
        load_family(config)
    install(tmp_path, project["name"], architecture, module)
    install(tmp_path, "broken", "Broken", "no_such_module")
    message = f"Broken of broken 0.1.0, {architecture} of jaxpage-cwm 0.1.0"
    assert ("families of packages", message) in list(report())
    example = importlib.import_module("test_cwm")
    with when_used():
        example.test_greedy_tokens_are_those_of_transformers(tmp_path / "model", {"mlp_bias": True})
    assert load_family(config).__name__ == module.partition(":")[2]
    with pytest.raises(
        UnsupportedError, match="'Broken' of the package broken cannot be used: No module named"
    ):
        load_family({"architectures": ["Broken"]})
    registry._registered.clear()
    install(tmp_path, "rival", architecture, module)
    with pytest.raises(
        UnsupportedError, match="several packages have .*: jaxpage-cwm, rival; keep one"
    ):
        load_family(config)
