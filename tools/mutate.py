"""Plants faults in a copy of this repository and reports those that the tests let pass.

    python -m tools.mutate                          # 60 faults, drawn with a fixed seed
    python -m tools.mutate --sample 20 jaxpage/memory/block_pool.py

The faults are those of Cosmic Ray (`pip install '.[mutation]'`): a comparison, an arithmetic or a
boolean operator is replaced, a condition is negated, a number is changed by one, a loop does not
run. Each room gives the same number of faults, 6 or 7 by default. They are drawn independently, and
a large sample of a room begins with the faults of a small one, so that a long sample can run in
parts (`--sample 7 jaxpage/memory`). Each fault is tried with the test files of `FIRST_TESTS`, then
with all test files of its room and with quick ones that import its module or take a name of it
through the room's door, until a test fails that passes without the fault. The exit status is 1 if a
fault survives that is not in `EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.needed import need

ROOT = Path(__file__).resolve().parents[1]
SEED, SAMPLE, TEST_SECONDS = 43, 60, 600.0
PRELOADED = [
    "jax.experimental.pallas",
    "flax.nnx",
    "torch",
    "transformers",
    "hypothesis.stateful",
    "pydantic",
    "httpx",
]
MAX_SECONDS = 15.0  # the longest time of a test file that runs only because it imports the module

# The test files that are to find a fault in a room; the quickest of them run first, with `-x`.
TESTS = {
    "memory": "block_pool block_manager memory_report cache_groups swapping prefix_files prefix_cache scheduler",
    "prefix_store": "prefix_files prefix_cache",
    "scheduling": "policies draft_scheduling scheduler swapping engine parallel_sampling processors",
    "decoding": "json_schemas masks_after_drafts stopping parallel_sampling structured_outputs beam_search sampling",
    "step": "draft_scheduling scheduler stops_in_engine masks_after_drafts speculation_log engine",
    "driver": "driver async_llm engine prefix_cache sleep fuzz_engine",
    "serving/wire": "wire_body wire_in_engine wire_requests wire_openapi wire_answers wire_tools official_clients http_inputs",
    "serving/dialects": "official_clients wire_requests wire_streams wire_openapi",
    "chat_forms": "chat_forms wire_tools",
    "checkpoints": "gguf checkpoints weights_in_memory lora quantization",
}

# The test files that find most faults in modules whose names begin so. They run first, and need not
# be in the room's list.
FIRST_TESTS = {
    "memory/block_": "block_pool block_manager cache_groups",
    "memory/cached_blocks": "block_manager cache_groups prefix_cache",
    "memory/memory_history": "memory_report",
    "scheduling/plan_builder": "draft_scheduling",
    "scheduling/queues": "policies",
    "scheduling/scheduler": "scheduler",
    "decoding/advancing": "stopping scoring",
    "decoding/beam": "beam_search",
    "decoding/constraints": "masks_after_drafts",
    "decoding/grammar_compiler": "structured_outputs",
    "decoding/json_schemas": "json_schemas",
    "decoding/sampling": "stopping",
    "decoding/stop": "stopping",
    "driver/async_driver": "bounded_work",
    "driver/facade": "receipts",
    "step/aborted": "parallel_sampling",
    "step/draft": "acceptance draft_scheduling",
    "step/embedded": "embedded_prompts qwen_vision",
    "step/strategy": "stopping",
    "serving/wire/answering": "wire_answers",
    "serving/wire/chat": "wire_answers chat",
    "serving/wire/request_fields": "wire_requests",
    "serving/wire/score": "scoring",
    "serving/wire/templates": "chat",
    "serving/wire/openapi": "wire_openapi",
    "serving/wire/template_worker": "templates",
    "serving/wire/tools": "wire_tools wire_answers",
    "serving/dialects/messages": "messages_agents",
    "serving/dialects/ollama": "ollama_agents",
    "serving/dialects/responses": "responses_agents",
    "serving/wire/fields": "wire_requests",
    "checkpoints/drafters/eagle": "eagle",
    "checkpoints/gguf": "gguf",
    "checkpoints/lora": "lora",
    "checkpoints/drafters/medusa": "medusa",
    "checkpoints/drafters/mtp": "mtp",
    "checkpoints/tokenizers/text_growth": "text_growth",
    "checkpoints/tokenizers/tokenizer_files": "checkpoints gguf",
    "checkpoints/orbax": "training",
}

# The kinds of faults. The others mostly give a program that cannot run: an operator between types,
# a number in place of None, a decorator removed.
OPERATORS = re.compile(
    r"core/(ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is|Lt_GtE|Gt_LtE)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|FloorDiv_Mul|Mul_FloorDiv|Mod_FloorDiv|RShift_LShift)"
    r"|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|AddNot|NumberReplacer"
    r"|ReplaceUnaryOperator_Delete_Not|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop)"
)

# Faults that change nothing that could be tested. Each entry has the beginning of the module's
# path, the kind, a part of the line without the fault, and the reason.
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "",
        "ReplaceTrueWithFalse",
        ", strict=True",
        "it asserts of zip that the lengths agree, and they do",
    ),
    ("", "ReplaceFalseWithTrue", "progress: bool = False", "it only shows a bar"),
    (
        "jaxpage/memory/block_manager.py",
        "NumberReplacer",
        "return self.groups[0].sequence_ids",
        "all groups have the same sequences, as `check` asserts",
    ),
    (
        "jaxpage/scheduling/scheduler.py",
        "ReplaceComparisonOperator_Gt_GtE",
        "if self.block_manager.num_to_cache(",
        "it saves a call that finds no full block to cache",
    ),
    (
        "jaxpage/scheduling/queues.py",
        "NumberReplacer",
        "return 0, group.admission",
        "all ranks of this queue begin with the same number",
    ),
    (
        "jaxpage/serving/dialects/translating.py",
        "NumberReplacer",
        "    place: int = 0",
        "text has one place, whichever it is",
    ),
)


def main() -> int:
    """Runs the sample and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="FILE",
        help="modules or folders to plant faults in; default: all rooms",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help=f"number of faults; default: {SAMPLE}",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, metavar="N", help=f"seed of the draw; default: {SEED}"
    )
    arguments = parser.parse_args()
    if arguments.sample < 1:
        parser.error(f"--sample must be at least 1, got {arguments.sample}")
    need("cosmic_ray", extra="mutation")
    modules = modules_under(arguments.modules or [f"jaxpage/{room}" for room in TESTS])
    for module in modules:
        if room_of(module) is None or not (ROOT / module).is_file():
            parser.error(
                f"{module} is no module of {', '.join(f'jaxpage/{room}/' for room in TESTS)}"
            )
    with tempfile.TemporaryDirectory(prefix="jaxpage-mutate-") as directory:
        copy_tracked_files(Path(directory))
        os.chdir(directory)
        return try_faults(modules, arguments.sample, arguments.seed)


def modules_under(names: Sequence[str]) -> list[Path]:
    """Returns modules, relative to the root, from names of modules and of folders."""
    paths = (
        path for name in names for path in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name])
    )
    return [path.relative_to(ROOT) for path in paths]


def room_of(module: Path) -> str | None:
    """Returns the room whose tests are to find a fault in a module, or None."""
    return next((room for room in TESTS if module.is_relative_to(Path("jaxpage") / room)), None)


def copy_tracked_files(directory: Path) -> None:
    """Copies the files that git tracks, with their changes; faults are planted in the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def possible(modules: Sequence[Path]) -> Iterator[Any]:
    """Yields the faults that can be planted in the modules.

    They are those of `cosmic-ray init`, for the kinds in `OPERATORS` and inside of functions and
    classes.
    """
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.ast.ast_query import ASTQuery
    from cosmic_ray.plugins import get_operator, operator_names
    from cosmic_ray.work_item import MutationSpec

    operators = {
        name: get_operator(name)() for name in sorted(operator_names()) if OPERATORS.fullmatch(name)
    }
    for module in sorted(modules):
        nodes = list(ast_nodes(get_ast_from_path(module)))
        for name, operator in operators.items():
            places = ((node, *ends) for node in nodes for ends in operator.mutation_positions(node))
            for occurrence, (node, start, end) in enumerate(places):
                definition = ASTQuery(node).get_definition_name()
                if definition is not None:  # elsewhere are constants and names of types
                    yield MutationSpec(module, name, occurrence, start, end, {}, definition)


def draw_faults(modules: Sequence[Path], number: int, seed: int) -> list[Any]:
    """Returns a sample of the faults that can be planted, in the order of the files."""
    faults = sorted(
        possible(modules),
        key=lambda fault: (
            str(fault.module_path),
            fault.start_pos,
            fault.operator_name,
            fault.occurrence,
        ),
    )
    rooms = [room for room in TESTS if any(room_of(module) == room for module in modules)]
    chosen = []
    for index, room in enumerate(rooms):
        share = (number + index) // len(rooms)
        inside = [fault for fault in faults if room_of(fault.module_path) == room]
        random.Random(f"{seed} {room}").shuffle(inside)
        chosen += list(itertools.islice(filter(is_a_program, inside), share))
    print(
        f"{len(chosen)} of {len(faults)} faults in {len(modules)} modules, seed {seed}", flush=True
    )
    return sorted(chosen, key=faults.index)


def is_a_program(fault: Any) -> bool:
    """Returns whether Python can read the module with a fault.

    The `*` of a signature, for instance, is no product.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = Path(fault.module_path).read_text(encoding="utf-8")
    try:
        ast.parse(mutate_code(source, get_operator(fault.operator_name)(), fault.occurrence))
    except SyntaxError:
        return False
    return True


def try_faults(modules: Sequence[Path], number: int, seed: int) -> int:
    """Plants the faults one by one, prints a line for each, and returns the exit status."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    run_tests = Tests()
    survived = []
    for fault in draw_faults(modules, number, seed):
        line = line_of(fault)
        where = f"{fault.module_path}:{fault.start_pos[0]}"
        described = f"{where} {fault.operator_name.removeprefix('core/')}: {line.strip()}"
        if reason := reason_for(fault, line):
            print(f"equivalent {described}\n{'':<10} {reason}", flush=True)
            continue
        files = files_of_tests(fault.module_path)
        with use_mutation(
            fault.module_path, get_operator(fault.operator_name)(), fault.occurrence
        ) as versions:
            failed = next(filter(None, map(run_tests, files)), "")
        if failed and not run_tests.passes(failed):
            print(f"{failed} fails without a fault, too")
            return 2
        print(f"{'found' if failed else 'SURVIVED':<10} {described}\n{'':<10} {failed}", flush=True)
        if not failed:
            before, after = (text.splitlines() for text in versions)
            survived.append("\n".join(difflib.unified_diff(before, after, where, lineterm="", n=1)))
    print("\n".join(("", *survived, f"{len(survived)} survived")))
    return 1 if survived else 0


class Tests:
    """Runs tests in the copy, each time in a new process that has no module of the copy yet.

    The processes are forked from one that has imported what the tests need of other packages. This
    import takes longer than it takes to find most faults.
    """

    def __init__(self) -> None:
        os.environ.update(
            JAX_PLATFORMS="cpu",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            HYPOTHESIS_PROFILE="planted",
        )
        os.environ.update(
            PYTHONPATH=os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        )
        sys.path[:] = [
            str(Path.cwd()),
            *(path for path in sys.path if Path(path).resolve() != ROOT),
        ]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._passes: dict[str, bool] = {}

    def __call__(self, names: Sequence[str]) -> str:
        """Runs test files or single tests; returns the first test that fails, "" if none does."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=run_pytest, args=(sender, names))
        process.start()
        sender.close()
        failed = names[0]  # the test of a process that ends or hangs without a message
        if receiver.poll(TEST_SECONDS):
            with contextlib.suppress(EOFError):
                failed = receiver.recv()
        process.join(2)
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with everything that the tests started
        process.join()
        return failed

    def passes(self, test: str) -> bool:
        """Returns whether a test passes without a fault."""
        if test not in self._passes:
            self._passes[test] = not self([test])
        return self._passes[test]


def run_pytest(sender: Connection, names: Sequence[str]) -> None:
    """Runs tests until one fails, and sends its name; "" if none fails.

    It runs in a process of its own.
    """
    import pytest

    os.setsid()
    failed: list[str] = []

    class Failures:
        """Notes the tests that fail, and the files that cannot be collected."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            failed.extend([report.nodeid] if report.failed else [])

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            failed.extend([report.nodeid] if report.failed else [])

    with open("output.txt", "w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        options = [
            "-q",
            "-x",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        options += ["-k", "not planted and not mistake"]  # these tests plant faults of their own
        status = pytest.main([*options, *names], plugins=[Failures()])
    sender.send("" if status == 0 else failed[0] if failed else names[0])


def line_of(fault: Any) -> str:
    """Returns the source line of a fault."""
    lines: list[str] = Path(fault.module_path).read_text(encoding="utf-8").splitlines()
    return lines[fault.start_pos[0] - 1]


def reason_for(fault: Any, line: str) -> str:
    """Returns why a fault changes nothing that could be tested; "" if it changes something."""
    name, kind = str(fault.module_path), fault.operator_name.removeprefix("core/")
    known: Iterable[str] = (
        reason
        for start, fault_kind, part, reason in EQUIVALENT
        if name.startswith(start) and kind == fault_kind and part in line
    )
    return next(iter(known), "")


def files_of_tests(module: Path) -> list[list[str]]:
    """Returns the test files that are to find a fault in a module: the first ones, and the rest."""
    room = room_of(module)
    assert room is not None
    name = module.relative_to("jaxpage").as_posix()
    first = " ".join(
        files for start, files in FIRST_TESTS.items() if name.startswith(start)
    ).split()
    package = re.escape(".".join(module.parent.parts))
    tree = ast.parse(module.read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = "|".join([module.stem, *defined])
    imports = re.compile(rf"{package}(\.{module.stem}\b| import (\([^)]*|[^\n]*)\b({names})\b)")
    others = TESTS[room].split()
    for file, record in json.loads(Path("tests/durations.json").read_text())["files"].items():
        path = Path("tests", file)
        if (
            record["seconds"] <= MAX_SECONDS
            and path.is_file()
            and path.parent.name == "tests"  # the laboratory's find no more than the others
            and imports.search(path.read_text(encoding="utf-8"))
        ):
            others.append(path.stem.removeprefix("test_"))
    parts = first, [other for other in dict.fromkeys(others) if other not in first]
    return [[f"tests/test_{each}.py" for each in part] for part in parts if part]


if __name__ == "__main__":
    sys.exit(main())
