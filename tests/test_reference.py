"""The pages of docs/reference/ are generated from the code, and links within the documents lead
somewhere.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpage
from jaxpage.errors import UnsupportedError
from jaxpage.models.registry import FAMILIES, OTHER_NAMES, load_family
from tests.support.notebooks import as_page, as_text, executed
from tests.support.published_models import ENTRIES, NOT_THERE
from tests.support.reference import pages, python_page
from tests.support.reference_models import TESTS
from tests.support.settings_files import flags_module, keywords
from tests.support.sweeps import few

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_reference_is_what_the_code_says(request):
    for name, text in pages().items():
        path = ROOT / "docs" / "reference" / name
        if request.config.getoption("--write-reference"):
            path.write_text(text)
        assert path.read_text() == text, (
            f"{name} is old: pytest tests/test_reference.py --write-reference"
        )


def test_the_readme_has_the_number_of_architectures(request):
    path = ROOT / "README.md"
    text, count = re.subn(r"\d+ architectures", f"{len(FAMILIES)} architectures", path.read_text())
    if request.config.getoption("--write-reference"):
        path.write_text(text)
    assert count == 1 and path.read_text() == text, (
        "it is old: pytest tests/test_reference.py --write-reference"
    )


def test_the_page_of_python_lists_every_name(request):
    path = ROOT / "docs" / "reference" / "python.md"
    if request.config.getoption("--write-reference"):
        path.write_text(python_page(path.read_text()))
    assert path.read_text() == python_page(path.read_text()), (
        "it is old: pytest tests/test_reference.py --write-reference"
    )
    documented = set(re.findall(r"^\.\. auto\w+:: jaxpage\.(\w+)$", path.read_text(), re.MULTILINE))
    assert documented == {name for name in jaxpage.__all__ if not name.startswith("_")}


def test_flags_and_keywords_are_those_of_the_declared_settings(request):
    """A setting is declared once.

    What reads it without pydantic, or without running it, is written from there.
    """
    flags, typed = (
        ROOT / "jaxpage" / name for name in ("cli/setting_flags.py", "settings/engine_settings.py")
    )
    for path, text in ((flags, flags_module()), (typed, keywords(typed.read_text()))):
        if request.config.getoption("--write-reference"):
            path.write_text(text)
            subprocess.run([sys.executable, "-m", "ruff", "format", "-q", path], check=True)
        # The lines may be broken in other places, which is the formatter's affair.
        assert ast.dump(ast.parse(path.read_text())) == ast.dump(ast.parse(text)), (
            f"{path.name} is old: pytest tests/test_reference.py --write-reference"
        )


def test_the_tests_of_the_page_of_models_exist():
    for name in (name for names in TESTS.values() for name in names):
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), name


def test_published_models_have_architectures_that_load_and_each_of_them_has_one():
    entries = [entry for group in ENTRIES.values() for entry in group]
    kinds = {OTHER_NAMES.get(kind, kind) for _, _, kind, _ in entries}
    assert kinds == set(FAMILIES)
    for other, name in OTHER_NAMES.items():
        assert load_family({"architectures": [other]}) is load_family({"architectures": [name]})
    names = [name for name, *_ in (*entries, *NOT_THERE)]
    assert len(set(names)) == len(names)
    for _, kind, _ in NOT_THERE:
        with pytest.raises(UnsupportedError):
            load_family({"architectures": [kind]})


@pytest.mark.parametrize(
    ("name", "page"),
    few(
        [("walkthrough.ipynb", "walkthrough.md"), ("weights.ipynb", "tutorials/weights.md")],
        [("walkthrough.ipynb", "walkthrough.md")],
    ),
)
def test_a_notebook_prints_what_it_shows(name, page, request):
    """Its assertions hold, and the notebook and the page have what its cells print."""
    path = ROOT / "examples" / name
    notebook = executed(path)
    for file, text in ((path, as_text(notebook)), (ROOT / "docs" / page, as_page(notebook, name))):
        if request.config.getoption("--write-reference"):
            file.write_text(text)
        assert file.read_text() == text, (
            f"{file.name} is old: pytest tests/test_reference.py --write-reference"
        )


def test_every_setting_and_parameter_is_explained():
    for name, column in (("settings.md", 2), ("sampling-parameters.md", 3)):
        rows = [
            line[2:-2].split(" | ") for line in pages()[name].splitlines() if line.startswith("| `")
        ]
        silent = [row[0] for row in rows if not row[column].strip()]
        assert rows and not silent, f"{name}: {', '.join(silent)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"", text):
        link = next(filter(None, target))
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target_path = path if not file else (path.parent / file)
        assert target_path.exists(), f"{path.name} links to {link}"
        if anchor and target_path.suffix == ".md":
            assert anchor in anchors(target_path), f"{path.name} links to {link}"


def anchors(path: Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    names = set()
    for line in path.read_text().splitlines():
        if heading := re.match(r"#+ (.*)", line):
            text = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading[1]).lower())
            names.add(text.replace(" ", "-"))
    return names
