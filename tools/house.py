"""Prints measures of the code: sizes, density, doors, first words and names of one tree or several.

    python tools/house.py
    python tools/house.py --tree /path/to/an/older/checkout --json

Each tree is a checkout of this repository. Sizes and density are those of `jaxpage/`, without the
kernels, which may run long; the other rows count the whole wheel, with `pallas_kernels/`, and where
they say so `tools/` or `tests/`. Tokens are those of Python: a docstring is one, comments and the
ends of lines are none. The docstring of each function here says what its rows count.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import json
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any directory

from tests.support.house import max_class_attributes
from tests.support.names import first_word, old_words, participles, pronouns, without_verb
from tests.support.reach import unreached
from tests.support.sources import (
    DOCUMENTED,
    FIRST_WORDS,
    WHEEL,
    Module,
    door_names,
    functions,
    imports,
    read_modules,
    token_lines,
)
from tests.support.vague_names import LANGUAGES, foreign_names

ROOT = Path(__file__).resolve().parents[1]
LONG = 100  # characters
OTHER_LANGUAGES = {".cc", ".h", ".js", ".mjs", ".css", ".html", ".sh"}
# These rooms are vocabulary: every room imports their modules, past any door.
OPEN_ROOMS = {"layers", "settings", "step"}
Table = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a column for each tree, this one last, as a table of Markdown or as JSON."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="another checkout, which gets a column before this one; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args(argv)
    for path in arguments.tree:
        if not (path / "jaxpage").is_dir():
            parser.error(f"--tree {path}: there is no jaxpage/ in it")
    columns = {str(path): measure(path) for path in arguments.tree}
    columns["this tree"] = measure(ROOT)
    print(json.dumps(columns) if arguments.json else markdown(columns))
    return 0


def measure(root: Path) -> Table:
    """Returns the rows of the table for one tree."""
    modules = read_modules(root, WHEEL)
    table: Table = {}
    for top in WHEEL:
        sources = [module.source for module in modules if module.path.startswith(f"{top}/")]
        table[f"{top}: modules"] = len(sources)
        table[f"{top}: lines"] = sum(len(source.splitlines()) for source in sources)
    house = [module for module in modules if module.path.startswith("jaxpage/")]
    table |= sizes(house)
    table |= density(house)
    table["lines over 100 characters in other languages, %"] = long_lines(root)
    table["modules of the wheel that nothing reaches"] = len(unreached(root))
    past = list(imports_past_doors(modules))
    table["imports past doors"] = len(past)
    table["modules that are imported past doors"] = len({target for _, target in past})
    table["file names in two or more folders"] = len(names_in_several_folders(modules))
    doors = [door_names(module) for module in modules if module.path.endswith("__init__.py")]
    table["names of a door: most"] = max(map(len, doors))
    table["class attributes of a model or layer: most"] = max_class_attributes(modules)
    table |= first_words(modules)
    table |= names(modules)
    table["identifiers with words that stand for terms of the field"] = len(old_words(modules))
    for language in LANGUAGES:
        places, _ = foreign_names(root, language)
        table[f"{language}: identifiers with such words, or that are pronouns"] = len(places)
    num_tokens = {"wheel": count_tokens(modules)}
    for top in ("tools", "tests"):
        others = read_modules(root, (top,))
        num_tokens[top] = count_tokens(others)
        rows = density(others) | first_words(others) | names(others)
        chosen = [name for name in rows if name.endswith("%") or name.startswith("docstrings that")]
        table |= {f"{top}: {name}": rows[name] for name in chosen}
        if top == "tests":
            row = "docstrings of helpers that begin with no verb"
            table[f"{top}: {row}"] = len(without_verb(others, tests=False))
    models = [module for module in house if module.path.startswith("jaxpage/models/")]
    num_tokens["jaxpage/models"] = count_tokens(models)
    table |= {f"tokens of {top}": count for top, count in num_tokens.items()}
    table["tokens of tests for one of the wheel"] = round(
        num_tokens["tests"] / num_tokens["wheel"], 2
    )
    return table


def count_tokens(modules: Sequence[Module]) -> int:
    """Returns the tokens of all modules."""
    return sum(len(token_lines(module)) for module in modules)


def long_lines(root: Path) -> float:
    """Returns the share of long lines in C++, JavaScript, style sheets, pages and shell scripts."""
    folders = ("jaxpage", "pallas_kernels", "tools", "tests", "docs/_static", ".ci")
    files = [
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in OTHER_LANGUAGES and "recorded" not in path.parts
    ]
    lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
    filled = [line for line in lines if line.strip()]
    return percent(sum(len(line) > LONG for line in filled), len(filled), digits=2)


def sizes(modules: Sequence[Module]) -> Table:
    """Returns the sizes of modules in tokens, and of functions in lines.

    Modules that have nothing but a docstring are left out.
    """
    module_tokens = sorted(len(token_lines(each)) for each in modules if len(each.tree.body) > 1)
    function_lines = sorted(length for each in modules for _, length in functions(each))
    return {
        "module, tokens: median": statistics.median(module_tokens),
        "module, tokens: 90th percentile": percentile(module_tokens, 0.9),
        "module, tokens: most": module_tokens[-1],
        "function, lines: median": statistics.median(function_lines),
        "function, lines: 90th percentile": percentile(function_lines, 0.9),
        "function, lines: most": function_lines[-1],
    }


def density(modules: Sequence[Module]) -> Table:
    """Returns how full lines are: tokens per line of code, comments, long lines, tuple assignments.

    Docstrings, comments and blank lines do not count as code; the share of long lines is of all
    lines that are not blank. A tuple assignment has a tuple on both sides of `=`; its share is of
    all assignments.
    """
    code = [line for module in modules for line in code_lines(module)]
    num_filled = sum(len(set(code_lines(module))) for module in modules)
    num_comments = sum(
        token.type == tokenize.COMMENT for module in modules for token in module.tokens
    )
    lines = [line for module in modules for line in module.source.splitlines() if line.strip()]
    num_long = sum(len(line) > LONG for line in lines)
    nodes = [node for module in modules for node in module.nodes]
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    num_tuples = sum(is_tuple_assignment(node) for node in assigned)
    return {
        "tokens a line": round(len(code) / max(1, num_filled), 1),
        "lines with comments, % of lines of code": percent(num_comments, num_filled),
        f"lines over {LONG} characters": num_long,
        f"lines over {LONG} characters, %": percent(num_long, len(lines)),
        "tuple assignments": num_tuples,
        "tuple assignments, % of assignments": percent(num_tuples, len(assigned)),
    }


def code_lines(module: Module) -> list[int]:
    """Returns the line of each token of a module, docstrings left out."""
    nodes = [node for node in module.nodes if isinstance(node, DOCUMENTED)]
    docstrings = {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False)}
    return [line for line in token_lines(module) if line not in docstrings]


def is_tuple_assignment(node: ast.Assign) -> bool:
    """Returns whether an assignment sets several names to several expressions at once."""
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def imports_past_doors(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Yields each module of jaxpage with a module of another room that it imports past the door.

    A room is a package of jaxpage; its door is its `__init__`, with its `door_names`. The
    rooms of vocabulary (`OPEN_ROOMS`) have open doors. A package within a room whose `__init__` has
    such names has a door of its own.
    """
    known = {module.name for module in modules}
    packages = (module for module in modules if module.path.endswith("__init__.py"))
    listed = {module.name: door_names(module) for module in packages}
    for module in modules:
        targets = set()
        for item in imports(module, known):
            parts = item.target.split(".")
            if len(parts) < 3 or parts[0] != "jaxpage" or parts[1] in OPEN_ROOMS:
                continue
            room = ".".join(parts[:2])
            is_own = module.name == room or module.name.startswith(f"{room}.")
            is_door = parts[2] in listed.get(room, ()) or listed.get(item.target)
            if not is_own and not is_door:
                targets.add(item.target)
        yield from ((module.name, target) for target in sorted(targets))


def names_in_several_folders(modules: Sequence[Module]) -> list[str]:
    """Returns the names that files of several folders have, `__init__` and `__main__` left out."""
    names = Counter(Path(module.path).stem for module in modules)
    return [name for name, count in names.items() if count > 1 and not name.startswith("__")]


def first_words(modules: Sequence[Module]) -> Table:
    """Returns how many docstrings begin with words that no sentence of the house begins with."""
    counts: Counter[str] = Counter()
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, DOCUMENTED) or not (text := ast.get_docstring(node)):
                continue
            counts["all"] += 1
            counts[first_word(text)] += first_word(text) in FIRST_WORDS
    rows: Table = {"docstrings": counts["all"]}
    rows |= {f'docstrings that begin with "{word}"': counts[word] for word in FIRST_WORDS}
    rows["docstrings of functions that begin with no verb"] = len(without_verb(modules))
    return rows


def names(modules: Sequence[Module]) -> Table:
    """Returns how many functions and locals have names that do not say what they are.

    A function that is named by a participle looks like a fact; properties and listeners are
    counted with the others. A local counts once for each function that binds it.
    """
    facts, num_functions = participles(modules)
    vague, num_locals = pronouns(modules)
    return {
        "functions named by a participle": len(facts),
        "functions named by a participle, %": percent(len(facts), num_functions),
        "locals named by a pronoun": len(vague),
        "locals named by a pronoun, %": percent(len(vague), num_locals),
    }


def percent(count: int, total: int, digits: int = 1) -> float:
    """Returns a count in percent of a total; 0 of nothing."""
    return round(100 * count / max(1, total), digits)


def percentile(ordered: Sequence[int], share: float) -> int:
    """Returns the least of the ordered numbers that at least this share of them do not exceed."""
    expected = share * len(ordered)
    places = range(1, len(ordered) + 1)
    return ordered[bisect.bisect_left(places, expected)]


def markdown(columns: Mapping[str, Table]) -> str:
    """Returns the columns as a table of Markdown, a row for each measure."""
    names = list(columns)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in columns[names[-1]]:
        values = " | ".join(f"{columns[name][row]:,g}" for name in names)
        lines.append(f"| {row} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
