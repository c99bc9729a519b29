"""Plants faults in a copy of this repository and reports those that the tests let pass.

    python -m tools.mutate                                        # 60 faults, drawn with a fixed seed
    python -m tools.mutate --sample 20 jaxpage/memory/block_pool.py

The faults are those of Cosmic Ray (`pip install cosmic-ray`): a comparison, an arithmetic or a
boolean operator replaced, a condition negated, a number changed by one, a loop that does not run. Each
room gives the same number of them, drawn by itself: one room alone gives the faults that it gives among
all, so that a long sample can run in parts (`--sample 10 jaxpage/memory` is a sixth of the default).
Each fault is tried with the test files of its room and with quick ones that import its module, the
quickest first, until a test fails. The exit status is 1 if a fault survives that is not in `EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEED, SAMPLE, TEST_SECONDS = 43, 60, 600.0
MOST_SECONDS = 15.0  # that a test file takes which is run only because it imports the module

# The test files that are to find a fault in a room. `tests/conftest.py` runs the quickest first.
TESTS = {
    "memory": "block_pool block_manager memory_report cache_groups swapping prefix_files prefix_cache scheduler",
    "scheduling": "policies draft_scheduling scheduler swapping engine parallel_sampling",
    "decoding": "stopping stops_in_engine parallel_sampling structured_outputs beam_search sampling",
    "step": "draft_scheduling scheduler stops_in_engine masks_behind_drafts speculation_log engine",
    "serving/wire": "wire_body wire_in_engine wire_requests wire_openapi wire_answers wire_tools translated_apis http_inputs",
    "checkpoints": "gguf checkpoints weights_in_memory lora quantization",
}

# More of them, for modules of a room whose names begin so.
MORE_TESTS = {
    "checkpoints/eagle": "eagle",
    "checkpoints/medusa": "medusa",
    "checkpoints/orbax": "training",
    "memory/memory_history": "inspector_state",
    "serving/wire/chat": "chat",
    "serving/wire/score": "scoring",
    "serving/wire/templates": "chat",
}

# Kinds of faults. Those left out mostly give a program that cannot run: an operator between types, a
# number put for None, a decorator removed.
OPERATORS = re.compile(
    r"core/(ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is|Lt_GtE|Gt_LtE)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|FloorDiv_Mul|Mul_FloorDiv|Mod_FloorDiv|RShift_LShift)"
    r"|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|AddNot|NumberReplacer"
    r"|ReplaceUnaryOperator_Delete_Not|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop)"
)

# Faults that change nothing that could be tested: file, a part of the line as it is without the
# fault, and the reason.
EQUIVALENT: tuple[tuple[str, str, str], ...] = ()


def main() -> int:
    """Runs the sample and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="FILE", help="modules or folders to plant faults in; default: all rooms")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help=f"number of faults; default: {SAMPLE}")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"seed of the draw; default: {SEED}")
    arguments = parser.parse_args()
    if arguments.sample < 1:
        parser.error(f"--sample must be at least 1, got {arguments.sample}")
    modules = modules_under(arguments.modules or [f"jaxpage/{room}" for room in TESTS])
    for module in modules:
        if room_of(module) is None or not (ROOT / module).is_file():
            parser.error(f"{module} is no module of {', '.join(f'jaxpage/{room}/' for room in TESTS)}")
    with tempfile.TemporaryDirectory(prefix="jaxpage-mutate-") as directory:
        copy_tracked_files(Path(directory))
        os.chdir(directory)
        return try_faults(modules, arguments.sample, arguments.seed)


def modules_under(names: Sequence[str]) -> list[Path]:
    """Returns modules, relative to the root, from names of modules and of folders."""
    paths = (path for name in names for path in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name]))
    return [path.relative_to(ROOT) for path in paths]


def room_of(module: Path) -> str | None:
    """Returns the room whose tests are to find a fault in a module, or None."""
    return next((room for room in TESTS if module.is_relative_to(Path("jaxpage") / room)), None)


def copy_tracked_files(directory: Path) -> None:
    """Copies what git knows of this repository, changes included: faults are planted in the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def drawn(modules: Sequence[Path], number: int, seed: int) -> list[Any]:
    """Returns a sample of the faults that can be planted in the modules, in the order of the files."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB

    database = WorkDB("faults.sqlite", WorkDB.Mode.create)
    init(modules, database, {})
    items = [item.mutations[0] for item in database.work_items]
    database.close()
    possible = sorted(
        (fault for fault in items if OPERATORS.fullmatch(fault.operator_name) and is_in_a_function(fault)),
        key=lambda fault: (str(fault.module_path), fault.start_pos, fault.operator_name, fault.occurrence),
    )
    rooms = [room for room in TESTS if any(room_of(module) == room for module in modules)]
    chosen = []
    for index, room in enumerate(rooms):
        share = (number + index) // len(rooms)
        inside = [fault for fault in possible if room_of(fault.module_path) == room]
        random.Random(f"{seed} {room}").shuffle(inside)
        chosen += list(itertools.islice(filter(is_a_program, inside), share))
    print(f"{len(chosen)} of {len(possible)} faults in {len(modules)} modules, seed {seed}", flush=True)
    return sorted(chosen, key=possible.index)


def is_a_program(fault: Any) -> bool:
    """Returns whether Python can compile the module with a fault: the `*` of a signature is no product."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = Path(fault.module_path).read_text(encoding="utf-8")
    try:
        compile(mutate_code(source, get_operator(fault.operator_name)(), fault.occurrence), "", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def is_in_a_function(fault: Any) -> bool:
    """Returns whether a fault is in a function or a class; elsewhere are constants and names of types."""
    return fault.definition_name is not None


def try_faults(modules: Sequence[Path], number: int, seed: int) -> int:
    """Plants the faults one after the other, prints a line for each, and returns the exit status."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    survived = []
    for fault in drawn(modules, number, seed):
        line = line_of(fault)
        command = test_command(fault.module_path)
        result = mutate_and_test([fault], command, TEST_SECONDS)
        reason = reason_for(fault, line)
        lives = result.test_outcome == TestOutcome.SURVIVED
        outcome = f"equivalent ({reason})" if reason else "SURVIVED" if lives else "found"
        where = f"{fault.module_path}:{fault.start_pos[0]}"
        print(f"{outcome:<10} {where} {fault.operator_name.removeprefix('core/')}: {line.strip()}", flush=True)
        if lives and not reason:
            survived.append(result.diff)
    print("\n".join(("", *survived, f"{len(survived)} survived")))
    return 1 if survived else 0


def line_of(fault: Any) -> str:
    """Returns the source line of a fault."""
    lines: list[str] = Path(fault.module_path).read_text(encoding="utf-8").splitlines()
    return lines[fault.start_pos[0] - 1]


def reason_for(fault: Any, line: str) -> str:
    """Returns why a fault changes nothing that could be tested; "" if it does."""
    known: Iterable[str] = (
        reason for file, part, reason in EQUIVALENT if file == str(fault.module_path) and part in line
    )
    return next(iter(known), "")


def test_command(module: Path) -> str:
    """Returns the command that runs the tests for a module in the copy until one fails."""
    files = [f"tests/test_{name}.py" for name in names_of_tests(module)]
    program = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    variables = [f"PYTHONPATH={path}", "JAX_PLATFORMS=cpu", "HYPOTHESIS_PROFILE=planted"]
    return shlex.join(["env", *variables, *program, *files])


def names_of_tests(module: Path) -> list[str]:
    """Returns the names of the test files that are to find a fault in a module."""
    room = room_of(module)
    assert room is not None
    names = TESTS[room].split()
    name = module.relative_to("jaxpage").as_posix()
    names += [more for start, files in MORE_TESTS.items() if name.startswith(start) for more in files.split()]
    package = ".".join(module.parent.parts)
    imports = re.compile(rf"{re.escape(package)}(\.{module.stem}\b| import [^\n]*\b{module.stem}\b)")
    for file, record in json.loads(Path("tests/durations.json").read_text())["files"].items():
        path = Path("tests", file)
        if record["seconds"] <= MOST_SECONDS and path.is_file() and imports.search(path.read_text(encoding="utf-8")):
            names.append(path.stem.removeprefix("test_"))
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
