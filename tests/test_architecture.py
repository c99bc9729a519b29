"""The laws of the house hold in this tree, and each of them is seen to fail on a small tree that
breaks it.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxpage
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.engine_config import EngineConfig
from tests.support import house, names, reach
from tests.support.sources import WHEEL, Module, door_names, imports, read_modules
from tests.support.vague_names import LANGUAGES, foreign_names, place_counters, pronoun_names
from tools import house as house_table
from tools import mutate

ROOT = Path(__file__).parents[1]

# import name -> distribution, where they differ
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "pydantic_core": "pydantic",  # which requires one version of it
}
OPTIONAL = {  # import name -> the one file that may import it
    "torch": "jaxpage/bench/baseline_transformers.py",
    "matplotlib": "jaxpage/bench/memory_plot.py",
    "msgpack": "jaxpage/serving/cache_events/kv_publisher.py",
    "zmq": "jaxpage/serving/cache_events/kv_publisher.py",
    "opentelemetry": "jaxpage/serving/metrics/otlp.py",
    "tunix": "jaxpage/integrations/tunix.py",
    "flash_attn3_jax": "pallas_kernels/sets/fa3.py",
}


def test_the_house_keeps_its_laws() -> None:
    broken = house.violations(ROOT)
    assert not broken, "\n" + "\n".join(broken)


def find_unread(names: set[str], source: str, *, of_self: bool = False) -> set[str]:
    """Returns names that a source does not read, as an attribute (of `self` alone) or a text."""
    read = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if not of_self or (isinstance(node.value, ast.Name) and node.value.id == "self"):
                read.add(node.attr)
        elif isinstance(node, ast.Constant) and not of_self:
            read.add(node.value)
    return names - read


def test_every_setting_is_read() -> None:
    """The module that declares them also checks them, which alone does not honour them."""
    declaring = ROOT / "jaxpage" / "settings" / "engine_config.py"
    generated = {
        ROOT / "jaxpage" / name for name in ("cli/setting_flags.py", "settings/engine_settings.py")
    }
    unread = {*EngineConfig.model_fields, *ServerConfig.model_fields}
    for path in {*(ROOT / "jaxpage").rglob("*.py")} - generated:
        unread = find_unread(unread, path.read_text(encoding="utf-8"), of_self=path == declaring)
    assert unread == set()
    assert find_unread({"seed", "log"}, "config.seed, self.log") == set()
    assert find_unread({"seed", "log"}, "config.seed, self.log", of_self=True) == {"seed"}
    assert find_unread({"seed"}, "config.seed = 3") == {"seed"}


def test_the_page_on_architecture_has_each_room() -> None:
    """Each is once in the picture of the layers, and once in the table, with a sentence."""
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    picture = page.partition("\nlayer 5 ")[2].partition("```")[0]
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [room for room in house.ROOMS if f"{room}/" not in picture] == []
    assert [room for room in house.ROOMS if f"{room}/`" not in table] == []


def test_what_the_mutation_tool_names_is_there() -> None:
    names = " ".join([*mutate.TESTS.values(), *mutate.FIRST_TESTS.values()]).split()
    assert not [name for name in names if not (ROOT / "tests" / f"test_{name}.py").is_file()]
    modules = mutate.modules_under([f"jaxpage/{room}" for room in mutate.TESTS])
    sources = {str(module): (ROOT / module).read_text(encoding="utf-8") for module in modules}
    for start in mutate.FIRST_TESTS:
        assert any(name.startswith(f"jaxpage/{start}") for name in sources), start
    for start, _, part, _ in mutate.EQUIVALENT:
        assert any(name.startswith(start) and part in text for name, text in sources.items()), part


def test_proportions() -> None:
    module_tokens, function_tokens = house.median_sizes(ROOT)
    print(f"median module {module_tokens:.0f} tokens, median function {function_tokens:.0f} tokens")
    assert module_tokens <= 800 and function_tokens <= 70


def test_acts_are_verbs_and_locals_are_nouns() -> None:
    """Few functions are named by a participle, and no local by a pronoun."""
    modules = read_modules(ROOT, WHEEL)
    facts, num_functions = names.participles(modules)
    assert len(facts) <= 0.02 * num_functions, "\n".join(facts)
    wheel_and_tools = [*modules, *read_modules(ROOT, ("tools",))]
    vague, _ = names.pronouns(wheel_and_tools, names.PRONOUNS | names.PARTICLES)
    vague += pronoun_names(wheel_and_tools)
    assert not vague, "\n".join(vague)
    house_modules = [module for module in modules if module.path.startswith("jaxpage/")]
    assert names.shared_classes(house_modules) == []
    for top in ("tools", "tests"):
        modules = read_modules(ROOT, (top,))
        rows = house_table.names(modules)
        assert rows["functions named by a participle, %"] <= 2.5, top
        assert rows["locals named by a pronoun"] == 0, top
        words = house_table.first_words(modules)
        assert not [row for row, count in words.items() if row.endswith('"') and count], top


def test_docstrings_of_helpers_begin_with_a_verb() -> None:
    """A test's docstring is a sentence with any subject."""
    places = names.without_verb(read_modules(ROOT, ("tests",)), tests=False)
    assert not places, "\n".join(places)


def test_identifiers_have_the_words_of_the_field() -> None:
    """No word of `TERMS` is part of a name, and the glossary says what stands in its place."""
    words = names.old_words(read_modules(ROOT, (*WHEEL, "tools", "examples")))
    # Tests have a tool that looks, models that obey, clients that leave, and lists in other orders.
    allowed = ("leave", "look", "looks", "obey", "orders")
    words += names.old_words(read_modules(ROOT, ("tests",)), allowed)
    assert not words, "\n".join(words)
    source = (
        "def f(head_width, MostRows):\n    return asked_for + at_most + most_common + file.tell()"
    )
    planted = Module("jaxpage/a.py", ast.parse(source), source)
    assert len(names.old_words([planted])) == 3
    source = "def _found(own_TD):\n    return OWN.kept + kept_ids + not_found"
    planted = Module("jaxpage/a.py", ast.parse(source), source)
    assert len(pronoun_names([planted])) == 4
    counters = place_counters(read_modules(ROOT, (*WHEEL, "tools", "examples", "tests")))
    assert not counters, "\n".join(counters)
    source = "for place, _ in enumerate(x):\n    [place for place in range(place) for place in x]"
    planted = Module("jaxpage/a.py", ast.parse(source), source)
    assert len(place_counters([planted])) == 2
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert not [word for word in names.TERMS if f"| {word.replace('_', ' ')} |" not in glossary]


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_languages_have_the_words_of_the_field(language: str) -> None:
    """No identifier has a word of `TERMS` or is a pronoun, in files that have a thousand names."""
    places, count = foreign_names(ROOT, language)
    assert not places, "\n".join(places)
    assert count > 1000


def test_identifiers_of_other_languages_are_read(tmp_path: Path) -> None:
    """Comments, texts, patterns, numbers and keys of objects have none; templates have code."""
    (tmp_path / "jaxpage").mkdir()
    (tmp_path / "pallas_kernels").mkdir()
    (tmp_path / "jaxpage" / "a.js").write_text(
        "// own\nconst found = { kept: 1 }; /* rest */ f('most', /own`/u, a.mostBlocks);\n"
        "g(`https://given ${isLeft ? one : wanted} least`);\n"
    )
    (tmp_path / "pallas_kernels" / "a.cc").write_text(
        '#include "own.h"\nint kMost = 0x1p3; rest::Found own_(1);  // kept\n'
    )
    script, count = foreign_names(tmp_path, "JavaScript")
    assert [place.split()[1] for place in script] == ["found", "mostBlocks", "one", "wanted"]
    assert count == 9
    source, count = foreign_names(tmp_path, "C++")
    assert [place.split()[1] for place in source] == ["Found", "kMost", "own_", "rest"]
    assert (source[1], count) == ("pallas_kernels/a.cc: kMost (max, or maximum)", 5)


def test_doors_give_the_names_that_they_list() -> None:
    """Those that are loaded at first use are there, too."""
    doors = house.INNER_DOORS | {f"jaxpage.{room}" for room in house.DOORS}
    names = {
        module.name: door_names(module)
        for module in read_modules(ROOT, WHEEL)
        if module.name in doors
    }
    assert names.keys() == doors and "Executables" in names["jaxpage.device"]
    for door, listed in names.items():
        room = importlib.import_module(door)
        assert set(listed) <= {*dir(room), *getattr(room, "__all__", ())}, door
        assert not [name for name in listed if getattr(room, name, None) is None]
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            room.nothing  # noqa: B018


def test_scripts_find_the_modules_beside_them() -> None:
    """`python tools/NAME.py` runs from any directory, where jaxpage is installed and `tools` is
    not.
    """
    importing = []
    for parents, folder in ((1, ROOT / "tools"), (2, ROOT / "tools" / "lab")):
        insertion = f"\nsys.path.insert(0, str(Path(__file__).resolve().parents[{parents}]))"
        for path in folder.glob("*.py"):
            before, importer, _ = path.read_text().partition("\nfrom tools.")
            if importer and "__main__" in path.read_text():
                importing.append(path.name)
                assert insertion in before, path
    assert {"gpu_slot.py", "soak.py"} <= {*importing}


def test_the_laboratory_is_apart() -> None:
    """The wheel has nothing of it, `pytest` does not run its tests, and `.ci/nightly` does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["hatch"]["build"]["targets"]["wheel"]["packages"] == [*WHEEL]
    assert "tests/lab" in project["pytest"]["ini_options"]["norecursedirs"]
    assert re.search(
        r'/pytest" .* tests/lab \|\|\s+status=1$', (ROOT / ".ci/nightly").read_text(), re.M
    )


def test_reasons_are_given_for_files_that_exist() -> None:
    paths = {path for path, _ in (*house.LAZY_IMPORTS, *house.PUBLIC_FACES)}
    paths |= set(house.DYNAMIC_IMPORTS)
    assert not [path for path in sorted(paths) if not (ROOT / path).is_file()]


def test_what_may_be_wide_is_wide() -> None:
    """An entry of `PUBLIC_FACES` that is no longer needed is taken out."""
    wide = {
        (module.path, name) for module in read_modules(ROOT) for _, name, _ in house.widths(module)
    }
    assert wide == house.PUBLIC_FACES.keys()


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in project["dependencies"]}
    for name, where in house.third_party(ROOT).items():
        if name in OPTIONAL:
            assert where.startswith(OPTIONAL[name]), (
                f"{where}: {name} is optional, and imported there"
            )
        else:
            assert DISTRIBUTIONS.get(name, name) in declared, (
                f"{where}: {name} is not among the dependencies"
            )


def test_versions_agree() -> None:
    """The version is written once, and its changes are dated."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert re.search(
        rf"^## \[{jaxpage.__version__}\] - \d{{4}}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.M,
    )


def run_python(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_jaxpage_touches_no_device() -> None:
    heavy = "{'jax', 'jaxlib', 'flax', 'transformers', 'orbax', 'pydantic'}"
    assert run_python(f"import jaxpage, sys; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_host_side_runs_without_jax() -> None:
    names = [
        module.name
        for module in read_modules(ROOT)
        if house.place(module.name)[1] in ("host", "ground") and module.name.startswith("jaxpage.")
    ]
    assert len(names) > 10
    program = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    program += "from jaxpage.settings.engine_config import EngineConfig\nEngineConfig(attention_backend='scan')\n"
    program += "print(sorted({'jax', 'jaxlib', 'flax', 'pallas_kernels'} & set(sys.modules)))"
    assert run_python(program) == "[]"


def test_jaxpage_names_no_kernel_set() -> None:
    """A set is added in `pallas_kernels` alone. "cpu" and "tpu" are platforms, too."""
    modules = read_modules(ROOT)
    names = {
        Path(module.path).stem
        for module in modules
        if module.path.startswith("pallas_kernels/sets/")
    } - {"cpu", "tpu"}
    assert {"reference", "triton"} <= names
    named = [
        f"{module.path}:{node.lineno}: {node.value}"
        for module in modules
        for node in module.nodes
        if module.path.startswith("jaxpage/")
        and isinstance(node, ast.Constant)
        and node.value in names
    ]
    assert named == []


def test_serving_names_no_dialect() -> None:
    """An API is added in `serving/dialects` alone; the rest of the server takes the registered
    ones.
    """
    room = "jaxpage/serving/dialects/"
    modules = [module for module in read_modules(ROOT) if module.path.startswith("jaxpage/serving")]
    dialects = {
        Path(module.path).stem
        for module in modules
        if module.path.startswith(room) and "\nDIALECT = " in module.source
    }
    assert {"messages", "ollama", "openai", "responses"} <= dialects
    doors = {"jaxpage.serving.dialects.dialect", "jaxpage.serving.dialects.registry"}
    for module in modules:
        if not module.path.startswith(room):
            inside = {
                item.target for item in imports(module, set()) if "serving.dialects" in item.target
            }
            assert inside <= doors, module.path
            assert not re.search("ollama|anthropic|/api/", module.source, re.I), module.path


def test_every_module_of_the_wheel_is_reached() -> None:
    """A module that only tools or tests import is theirs: it belongs into tools/ or tests/support/."""
    unreached = reach.unreached(ROOT)
    assert not unreached, "no public name, command or entry point leads to: " + ", ".join(unreached)


def test_public_modules_are_those_that_the_documentation_names() -> None:
    pages = {name: (ROOT / page).read_text(encoding="utf-8") for name, page in reach.PUBLIC.items()}
    assert [name for name, text in pages.items() if name not in text] == []


def test_a_module_that_nothing_reaches_is_named(tmp_path: Path) -> None:
    """Each of the others is reached in a way of its own."""
    files = {
        "pyproject.toml": '[project.scripts]\na = "jaxpage.script:main"\n'
        '[project.entry-points."group"]\nb = "jaxpage.entry"\n',
        "jaxpage/__init__.py": 'HOMES = {"LLM": "jaxpage.lazy"}',
        "jaxpage/__main__.py": "",
        "jaxpage/script.py": "def main():\n    from jaxpage.room import inside",
        "jaxpage/entry.py": "",
        "jaxpage/lazy.py": "from .room.relative import x",
        "jaxpage/room/__init__.py": "",
        "jaxpage/room/inside.py": "import jaxpage.models.registry",
        "jaxpage/room/relative.py": "",
        "jaxpage/models/__init__.py": "",
        "jaxpage/models/registry.py": 'NAMES = ["llama"]\nimport_module(f"jaxpage.models.{name}")',
        "jaxpage/models/llama.py": "",
        "jaxpage/models/mamba.py": "from jaxpage.room import laboratory",
        "jaxpage/room/laboratory.py": "",
        "tools/program.py": "import jaxpage.models.mamba",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reach.unreached(tmp_path) == ["jaxpage.models.mamba", "jaxpage.room.laboratory"]


def test_the_table_of_the_house_counts_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = """\"\"\"What steps.\"\"\"
from jaxpage.memory import BlockPool
from jaxpage.memory.block_pool import BlockPool
from jaxpage.step.plan import StepPlan

x, y = 1, 2

def run(a):
    \"\"\"Whether it runs.\"\"\"
    return a

def stopped(own):
    \"\"\"Returns nothing.\"\"\"
"""
    files = {
        "pyproject.toml": "[project]\n",
        "jaxpage/__init__.py": '"""The engine."""\nimport jaxpage.engine\n',
        "jaxpage/engine.py": engine + "# " + 99 * "-" + "\n",
        "jaxpage/memory/__init__.py": '"""Of blocks."""\n__all__ = ["BlockPool"]\n',
        "jaxpage/memory/block_pool.py": '"""Blocks."""\n',
        "jaxpage/memory/forgotten.py": '"""Blocks."""\nz = 1\n',
        "pallas_kernels/__init__.py": "",
        "pallas_kernels/block_pool.py": "import pallas_kernels",
        "tools/script.py": "def started():\n    one = 1  # a comment\n    return one\n",
        "tests/test_pool.py": '"""What holds."""\n'
        + "assert "
        + "not " * 25
        + "x\n"
        + 'def test_it():\n    """A block is free."""\ndef pool():\n    """A pool."""\n',
        "docs/_static/site.css": f"a {{}}\n\n{'b' * 101} {{}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    table = house_table.measure(tmp_path)
    assert (table["jaxpage: modules"], table["jaxpage: lines"]) == (5, 21)
    # One of the five modules is a docstring alone; the others have 4, 5, 6 and 46 tokens.
    assert table["module, tokens: median"] == 5.5 and table["module, tokens: most"] == 46
    assert table["function, lines: median"] == 2.5 and table["function, lines: most"] == 3
    # Ten lines of code have 4, 6 + 8 + 8 + 7 + 6 + 2 + 6, 5 and 3 tokens.
    assert table["tokens a line"] == 5.5
    assert (table["lines over 100 characters"], table["lines over 100 characters, %"]) == (1, 5.6)
    assert (table["tuple assignments"], table["tuple assignments, % of assignments"]) == (1, 33.3)
    assert table["modules of the wheel that nothing reaches"] == 2
    assert table["imports past doors"] == 1, (
        "a name in __all__ and the plan of a step go by the door"
    )
    assert table["file names in two or more folders"] == 1, "block_pool"
    words = [table[f'docstrings that begin with "{word}"'] for word in house_table.FIRST_WORDS]
    assert words == [1, 1, 1, 0, 0] and table["docstrings"] == 7
    assert table["lines with comments, % of lines of code"] == 10
    assert table["lines over 100 characters in other languages, %"] == 50
    assert table["tools: functions named by a participle, %"] == 100
    assert table["tools: locals named by a pronoun, %"] == 100
    assert table['tests: docstrings that begin with "What"'] == 1
    assert table["tests: lines over 100 characters, %"] == 16.7
    assert table["tests: docstrings of helpers that begin with no verb"] == 1
    assert (table["tokens of tools"], table["tokens of tests"]) == (10, 40)
    assert table["docstrings of functions that begin with no verb"] == 1
    assert table["functions named by a participle"] == 1
    assert table["functions named by a participle, %"] == 50
    assert table["locals named by a pronoun"] == 1
    assert table["locals named by a pronoun, %"] == 50
    assert house_table.percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert house_table.markdown({"a": {"lines": 12345}, "b": {"lines": 0.5}}).endswith(
        "| lines | 12,345 | 0.5 |"
    )
    with pytest.raises(SystemExit):
        house_table.main(["--tree", str(tmp_path / "jaxpage")])
    assert "there is no jaxpage/ in it" in capsys.readouterr().err


PLANTED = [
    ("jaxpage/ui/a.js", "let a = 1;\n// Of a block.", 'a comment begins with "Of"'),
    ("jaxpage/ui/a.js", "/** the blocks that are free. */", "is a sentence"),
    ("jaxpage/ui/a.js", "/**\n * Returns the blocks\n * that are free\n */", "is a sentence"),
    ("pallas_kernels/a.cc", "// As `tile`.", 'a comment begins with "As"'),
    ("pallas_kernels/a.h", "int a;" + 100 * " " + "int b;", "has 112 characters; 100 are enough"),
    (
        "jaxpage/llm.py",
        'def f():\n    """Of a request."""',
        'a docstring begins with "Of"',
    ),
    ("jaxpage/memory/a.py", "import jax", "the host side never imports jax"),
    ("jaxpage/memory/a.py", "from flax import nnx", "the host side never imports flax"),
    ("jaxpage/step/request.py", "import jax.numpy as jnp", "the host side never imports jax"),
    (
        "jaxpage/memory/a.py",
        "from jaxpage.device import b",
        "the host side imports jaxpage.device.b of the device side",
    ),
    (
        "jaxpage/models/a.py",
        "from jaxpage.memory.c import D",
        "the device side imports jaxpage.memory.c of the host side",
    ),
    (
        "jaxpage/models/a.py",
        "from ..memory import c",
        "the device side imports jaxpage.memory.c of the host side",
    ),
    (
        "jaxpage/scheduling/a.py",
        "import jaxpage.engine.engine",
        "layer 1 imports jaxpage.engine.engine of layer 2",
    ),
    (
        "jaxpage/scheduling/a.py",
        "from jaxpage.decoding import b",
        "scheduling/ does not import decoding/",
    ),
    (
        "jaxpage/decoding/a.py",
        "import jaxpage.scheduling.b",
        "decoding/ does not import scheduling/",
    ),
    (
        "jaxpage/step/a.py",
        "from jaxpage.speculation import b",
        "layer 0 imports jaxpage.speculation of layer 1",
    ),
    ("jaxpage/engine/a.py", "from jaxpage.replay import b", "engine/ does not import replay/"),
    ("jaxpage/engine/a.py", "from jaxpage.assembly import b", "engine/ does not import assembly/"),
    (
        "jaxpage/prefix_store/a.py",
        "import jaxpage.engine.engine",
        "prefix_store/ does not import engine/",
    ),
    (
        "jaxpage/prefix_store/a.py",
        "import jaxpage.assembly",
        "prefix_store/ does not import assembly/",
    ),
    ("jaxpage/cli/a.py", "from jaxpage.assembly.b import c", "enters assembly/ past its door"),
    ("jaxpage/layers/a.py", "from jaxpage.models import b", "layers/ does not import models/"),
    ("jaxpage/serving/a.py", "from jaxpage.cli import b", "serving/ does not import cli/"),
    ("jaxpage/engine/a.py", "from jaxpage import LLM", "layer 2 imports jaxpage of layer 4"),
    (
        "jaxpage/errors.py",
        "from jaxpage.memory.c import D",
        "layer 0 imports jaxpage.memory.c of layer 1",
    ),
    ("jaxpage/llm.py", "import tools.serve", "layer 4 imports tools.serve of layer 5"),
    ("jaxpage/llm.py", "import pallas_kernels", "only jaxpage/device/ binds pallas_kernels"),
    (
        "jaxpage/layers/a.py",
        "from pallas_kernels import write_kv",
        "only jaxpage/device/ binds pallas_kernels",
    ),
    (
        "jaxpage/layers/a.py",
        "from contextvars import ContextVar",
        "layers read one context variable",
    ),
    (
        "jaxpage/engine/a.py",
        "from jaxpage.driver import Driver",
        "layer 2 imports jaxpage.driver of layer 3",
    ),
    ("jaxpage/llm.py", "from jaxpage.driver.turns import Turns", "enters driver/ past its door"),
    (
        "jaxpage/driver/a.py",
        "import asyncio",
        "the driver knows no HTTP, and event loops in async_driver alone, but imports asyncio",
    ),
    (
        "jaxpage/serving/a.py",
        "def f(self):\n    self.engine.step()",
        "calls Engine.step: only a driver does",
    ),
    (
        "jaxpage/serving/a.py",
        "def f(driver):\n    driver.engine.scheduler.running",
        "reaches through engine/: driver.engine.scheduler.running",
    ),
    (
        "jaxpage/serving/a.py",
        "def f(engine):\n    x = engine.scheduler\n    return x.block_manager",
        "reaches through engine/: engine.scheduler.block_manager, by a local",
    ),
    (
        "jaxpage/serving/a.py",
        "def f(self):\n    if pool := self._built.memory:\n        return pool.num_blocks",
        "reaches through assembly/: self._built.memory.num_blocks, by a local",
    ),
    (
        "pallas_kernels/a.py",
        "from jaxpage import shapes",
        "pallas_kernels stands alone, but imports jaxpage",
    ),
    ("pallas_kernels/a.py", "import flax", "pallas_kernels stands alone, but imports flax"),
    ("tools/a.py", "from jaxpage.engine.engine import Engine", "tools import the front door only"),
    (
        "tools/lab/kernel_lab/a.py",
        "import jaxpage.shapes",
        "tools.lab.kernel_lab runs where jaxpage is not installed",
    ),
    (
        "tools/lab/kernel_lab/a.py",
        "from tools import b",
        "tools.lab.kernel_lab runs where jaxpage is not installed",
    ),
    ("jaxpage/engine/a.py", "def f():\n    import json", "imports json inside a function"),
    (
        "jaxpage/engine/a.py",
        "class A:\n    def f(self):\n        from os import path",
        "imports os inside a function",
    ),
    ("jaxpage/engine/a.py", "import importlib\nimportlib.import_module('x')", "imports by name"),
    ("jaxpage/engine/a.py", "import pickle", "imports pickle"),
    ("jaxpage/engine/a.py", "from cloudpickle import dumps", "imports cloudpickle"),
    ("jaxpage/engine/a.py", "eval('1')", "calls eval()"),
    ("jaxpage/engine/a.py", "exec('1')", "calls exec()"),
    ("jaxpage/engine/a.py", "import torch\ntorch.load('x')", "uses torch.load"),
    ("jaxpage/engine/a.py", "import yaml\nyaml.load('x', yaml.SafeLoader)", "uses yaml.load"),
    ("jaxpage/engine/a.py", "from jinja2 import Environment", "uses jinja2.Environment"),
    ("jaxpage/engine/a.py", "import jinja2\njinja2.Environment()", "uses jinja2.Environment"),
    ("jaxpage/engine/a.py", "f(trust_remote_code=True)", "trust_remote_code=True"),
    ("jaxpage/engine/a.py", "f(allow_pickle=True)", "allow_pickle=True"),
    (
        "jaxpage/models/a.py",
        "y = jnp.einsum('TI,OI->TO', x, w)",
        "multiplies: layers.matmul.matmul does that",
    ),
    ("jaxpage/layers/a.py", "y = x @ w", "multiplies: layers.matmul.matmul does that"),
    ("jaxpage/attic/a.py", "x = 1", "no package of ROOMS: jaxpage/attic/"),
    ("jaxpage/engine/a.py", "from jaxpage.memory.c import D", "enters memory/ past its door"),
    ("jaxpage/engine/a.py", "from jaxpage.memory import c", "enters memory/ past its door"),
    ("jaxpage/engine/a.py", "from jaxpage.device import b", "enters device/ past its door"),
    (
        "jaxpage/checkpoints/a.py",
        "from jaxpage.models.parameters.replacing import NAME",
        "enters models/ past its door",
    ),
    (
        "jaxpage/models/parameters/__init__.py",
        '__all__ = ["lives", "Dies"]',
        "the door has no comment that says what Dies is",
    ),
    (
        "jaxpage/scheduling/__init__.py",
        '__all__ = ["lives", "Dies"]',
        "the door has no comment that says what Dies is",
    ),
    (
        "jaxpage/memory/__init__.py",
        "from jaxpage.memory.c import (\n    Dies,\n    Grows,  # says that it grows\n)",
        "the door has no comment that says what Dies is",
    ),
    (
        "jaxpage/memory/__init__.py",
        "\n".join(f"from jaxpage.memory.c import lives{index}  # lives" for index in range(21)),
        "the door has 21 names; 20 are enough",
    ),
    (
        "jaxpage/memory/inner/__init__.py",
        "\n".join(f"from jaxpage.memory.c import lives{index}  # lives" for index in range(21)),
        "the door has 21 names; 20 are enough",
    ),
    (
        "jaxpage/engine/engine.py",
        "from typing import TYPE_CHECKING\nfrom jaxpage.memory import D\n"
        "if TYPE_CHECKING:\n    import jaxpage.engine.other",
        "imports in a circle: jaxpage.engine.engine -> jaxpage.engine.other -> ",
    ),
    ("jaxpage/engine/a.py", "x = 1\n" * 1001, "has 3004 tokens; 3000 are enough"),
    ("jaxpage/engine/a.py", "def f():\n" + "    x = 1\n" * 70, "f has 71 lines; 70 are enough"),
    (
        "jaxpage/engine/a.py",
        "class A:\n" + "".join(f"    f{index}: int\n" for index in range(21)),
        "A has 21 fields; 20 are enough for a record",
    ),
    (
        "jaxpage/engine/a.py",
        "class A:\n    def f(self, a, b, c, d, e, f, /, g, h, i, *, j, k):\n        pass",
        "f has 11 arguments; 10 are enough for a function",
    ),
    (
        "jaxpage/models/a.py",
        "from typing import TYPE_CHECKING\n"
        + "import math\n" * 13
        + "if TYPE_CHECKING:\n    import re",
        "has 16 lines of imports; 15 are enough for a page",
    ),
    (
        "jaxpage/layers/a.py",
        "def f(a, b, c, d, e, *, f, g, h, i, j, k):\n    return a",
        "f has 11 arguments; 10 are enough",
    ),
    (
        "jaxpage/models/a.py",
        "class A:\n"
        + "".join(f"    a{index}: int\n" for index in range(11))
        + "class B(A):\n    kind: ClassVar[str]\n"
        + "".join(f"    b{index}: int\n" for index in range(10)),
        "B has 21 fields; 20 are enough",
    ),
    (
        "jaxpage/models/a.py",
        "class A:\n    make: ClassVar[Callable[..., int]] = staticmethod(len)\n    size: int\n"
        + "".join(f"    a{index}: ClassVar[int]\n" for index in range(8))
        + "class B(A):\n    make = staticmethod(sum)\n"
        + "".join(f"    b{index} = 1\n" for index in range(8)),
        "B has 16 class attributes; 15 are enough",
    ),
]


@pytest.mark.parametrize(
    ("path", "code", "message"), PLANTED, ids=[message[:40] for *_, message in PLANTED]
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, code: str, message: str) -> None:
    good = {
        "jaxpage/memory/c.py": "D = 1",
        "jaxpage/device/b.py": "import jax",
        "jaxpage/engine/engine.py": "x = 1",
        "jaxpage/engine/other.py": "import jaxpage.engine.engine",
    }
    for name, text in {**good, path: code}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        opening = '"""Holds what lives here."""\n' if name.endswith(".py") else ""
        (tmp_path / name).write_text(f"{opening}{text}\n")
    broken = house.violations(tmp_path)
    assert re.match(rf"{re.escape(path)}:\d+: .*{re.escape(message)}", broken[0]), broken
    assert all(line.startswith(path) for line in broken), "only the planted file is wrong"


def test_a_module_without_a_docstring_is_found(tmp_path: Path) -> None:
    (tmp_path / "jaxpage").mkdir()
    (tmp_path / "jaxpage" / "a.py").write_text("x = 1\n")
    assert house.violations(tmp_path) == [
        "jaxpage/a.py:1: a module says in its docstring what lives here"
    ]


def test_what_the_laws_allow_is_not_reported(tmp_path: Path) -> None:
    files = {
        "jaxpage/llm.py": "from jaxpage.engine import Engine",
        "jaxpage/engine/engine.py": "import jax\nfrom jaxpage.memory import D\nfrom jaxpage.device import B",
        "jaxpage/memory/__init__.py": "from jaxpage.memory.c import lives  # lives",
        "jaxpage/memory/c.py": "import numpy\nfrom jaxpage.errors import CapacityError",
        "jaxpage/device/b.py": "import jax\nimport pallas_kernels",
        "jaxpage/models/parameters/__init__.py": '__all__ = ["lives"]  # lives',
        "jaxpage/models/parameters/replacing.py": "x = 1",
        "jaxpage/checkpoints/a.py": "from jaxpage.models.parameters import lives",
        "jaxpage/layers/context.py": "from pallas_kernels import AttentionOptions",
        "jaxpage/layers/trace_scope.py": "from contextvars import ContextVar",
        "jaxpage/errors.py": "import os",
        "jaxpage/cli/commands.py": "def generate():\n    import jaxpage.llm",
        "jaxpage/driver/__init__.py": "from jaxpage.driver.turns import Turns  # takes turns",
        "jaxpage/driver/turns.py": "def turn(engine):\n    engine.step()\n    engine.names.get(1)",
        "jaxpage/async_llm.py": "import asyncio\nfrom jaxpage.driver import Turns",
        "jaxpage/driver/async_driver.py": "import asyncio",
        "pallas_kernels/a.py": "import jax, numpy, jaxtyping, math",
        "tools/lab/paper/orca.py": "from jaxpage.memory import c",
        "jaxpage/ui/a.js": "/** Returns a block, or\n * null. */\nf(); // of a pool",
        "pallas_kernels/a.h": "// Multiplies.\n//\n// In parts: see `a`.\nint a;  // of b",
        "tools/bench.py": "import torch\nfrom jaxpage import LLM\nimport pallas_kernels\nmodel.eval()\nre.compile('x')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        opening = '"""Holds what lives here."""\n' if name.endswith(".py") else ""
        (tmp_path / name).write_text(f"{opening}{text}\n")
    assert house.violations(tmp_path) == []
