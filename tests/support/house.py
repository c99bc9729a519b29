"""The laws of docs/internals/architecture.md, read off the syntax trees: who may import whom, what
never appears, how large things get.

`violations(root)` lists what breaks them as `file:line: what`, so that the test's message is the
place to go to.
"""

from __future__ import annotations

import ast
import bisect
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.sources import (
    DOCUMENTED,
    FIRST_WORDS,
    Function,
    Import,
    Module,
    door_names,
    functions,
    imports,
    imports_by_name,
    read_modules,
    token_lines,
)

# The packages ("rooms") of jaxpage: the layer ("floor") and the side ("wing", of host or device) of
# each, and which others of its layer and below it may import. Modules in no package are of layer 0
# (errors, outputs, shapes) or of the public interface (llm).
GROUND, WEST, EAST, HALL, PUBLIC = "ground", "host", "device", "hall", "public"
ROOMS: dict[str, tuple[int, str, set[str]]] = {
    "settings": (0, GROUND, set()),
    "step": (0, GROUND, {"settings"}),
    "memory": (1, WEST, set()),
    "scheduling": (1, WEST, {"step", "memory"}),
    "decoding": (1, WEST, {"step", "settings"}),
    "chat_forms": (1, WEST, set()),
    "images": (1, WEST, {"step", "settings"}),
    "receipts": (1, WEST, {"step", "settings"}),
    "speculation": (1, WEST, {"step", "settings"}),
    "layers": (1, EAST, set()),
    "models": (1, EAST, {"layers"}),
    "checkpoints": (1, EAST, {"settings", "layers", "models"}),
    "device": (1, EAST, {"settings", "step", "layers", "models"}),
}
_BELOW = set(ROOMS)
ROOMS |= {
    "prefix_store": (2, HALL, {"step", "memory"}),
    "engine": (2, HALL, _BELOW | {"prefix_store"}),
    "assembly": (2, HALL, _BELOW | {"engine"}),
    "replay": (2, HALL, _BELOW | {"engine", "assembly", "prefix_store"}),
}
_BELOW = set(ROOMS)
ROOMS |= {"driver": (3, HALL, _BELOW - {"replay"})}
_BELOW = set(ROOMS)
ROOMS |= {
    "simulation": (4, PUBLIC, _BELOW | {"bench"}),
    "bench": (4, PUBLIC, _BELOW),
    "serving": (4, PUBLIC, _BELOW),
    "integrations": (4, PUBLIC, {"settings"}),
    "cli": (4, PUBLIC, _BELOW | {"bench", "serving", "simulation"}),
}
# Rooms that other rooms enter through their `__init__`, which has a word about each name.
DOORS = {
    "assembly",
    "bench",
    "chat_forms",
    "checkpoints",
    "cli",
    "decoding",
    "device",
    "driver",
    "engine",
    "images",
    "memory",
    "models",
    "prefix_store",
    "receipts",
    "replay",
    "scheduling",
    "serving",
    "simulation",
    "speculation",
}
# Rooms within a room that have a door of their own.
INNER_DOORS = {
    "jaxpage.assembly.planning",
    "jaxpage.checkpoints.drafters",
    "jaxpage.checkpoints.finding",
    "jaxpage.checkpoints.gguf",
    "jaxpage.checkpoints.in_memory",
    "jaxpage.checkpoints.tokenizers",
    "jaxpage.device.drafters",
    "jaxpage.device.hardware",
    "jaxpage.device.inputs",
    "jaxpage.device.pages",
    "jaxpage.device.rows",
    "jaxpage.device.vision",
    "jaxpage.engine.calls",
    "jaxpage.engine.texts",
    "jaxpage.layers",
    "jaxpage.models.config",
    "jaxpage.models.drafters",
    "jaxpage.models.parameters",
    "jaxpage.models.parts",
    "jaxpage.checkpoints.quantization",
    "jaxpage.models.sharding",
    "jaxpage.replay.reading",
}
PUBLIC_MODULES = {"__init__", "__main__", "answer_forms", "async_llm", "llm", "training"}
# The room of the object that a name stands for. Others go one dot through it.
OBJECTS = {
    "built": "assembly",
    "builder": "engine",
    "engine": "engine",
    "llm": "llm",
    "runner": "engine",
    "driver": "driver",
    "scheduler": "scheduling",
    "block_manager": "memory",
    "manager": "memory",
    "speculator": "speculation",
    "executables": "device",
}
# What a record hands over whole (`Built`, `LLM`), and records of settings and sizes, which are
# read: the way through one of them begins there.
HANDED_OVER = {"built", "config", "engine", "menu", "model", "spec", "speculative_config"}
OF_BUILT_INS = {"get", "items", "keys", "startswith", "values"}
# Rooms that may call `Engine.step`. All others have a driver, whose room knows no HTTP, and event
# loops in one module.
STEPPING = {"driver", "replay", "bench"}
UNKNOWN_TO_DRIVER = {"asyncio", "http", "starlette", "uvicorn"}
KNOWN_TO = {"jaxpage.driver.async_driver": {"asyncio"}}

# Parts of tools/ that import more than the front doors, because they time or replace a part that
# has none.
LABORATORIES = (
    "tools.lab.bench_experts",
    "tools.lab.bench_sampler",
    "tools.lab.bench_scheduler",
    "tools.lab.bench_swap",
    "tools.lab.paper",
    "tools.lab.scheduler_lab",
    "tools.step_shapes",
    "tools.lab.step_times",
    "tools.lab.walks",
)

JAX = {"jax", "jaxlib", "flax", "orbax", "optax", "pallas_kernels"}
KERNEL_IMPORTS = {"jax", "jaxlib", "numpy", "jaxtyping", "pallas_kernels", "flash_attn3_jax"}
KERNEL_LAB = "tools.lab.kernel_lab"
SERIALISERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("jinja2", "Environment"),
    ("jinja2", "Template"),
    ("os", "system"),
}
BANNED_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}  # with the value True

# Where modules multiply: everywhere else they call `matmul`.
MATMULS = {
    "jaxpage/layers/matmul.py",
    "jaxpage/layers/norms.py",
    "jaxpage/layers/picture_attention.py",  # it multiplies by no weights
}
MATMUL_CALLS = {"einsum", "dot", "matmul", "dot_general", "tensordot", "vdot", "inner"}

MAX_MODULE_TOKENS = 3000  # of Python, docstrings counting as one: explaining more must cost nothing
MAX_FUNCTION_LINES = 70
MAX_DOOR_NAMES = 20
MAX_FIELDS = 20  # of a record; in `models` and `layers` with those that it inherits
MAX_CLASS_ATTRIBUTES = 15  # of a class of `models` and `layers`, with those that it inherits
MAX_ARGUMENTS = 10  # of a function, by position or by name, `self` and `cls` left out
# Records and functions that users or other programs write, flat as they do -> why they are so wide.
PUBLIC_FACES: dict[tuple[str, str], str] = {
    ("jaxpage/settings/engine_config.py", "EngineConfig"): "a setting is a flag and a keyword",
    ("jaxpage/settings/engine_settings.py", "EngineSettings"): "the same keywords, with types",
    ("jaxpage/settings/sampling_params.py", "SamplingParams"): "its keywords are vLLM's",
    ("jaxpage/serving/settings/server_config.py", "ServerConfig"): "a setting is a flag",
    ("jaxpage/integrations/trl.py", "generate"): "TRL calls it with the arguments of its client",
}
MAX_HEADER_LINES = 15  # of imports, in a module of `models`, which are pages; doors are none
MAX_COLUMNS = 100
# The files of other languages, by their endings. What they include from elsewhere is not there.
FOREIGN = (("jaxpage", ("js",)), ("docs", ("js",)), ("pallas_kernels", ("cc", "h")))

# The seam through which a layer's `AttentionOptions`, a record of `pallas_kernels`, go whole to the
# kernels.
ATTENTION_SEAM = "jaxpage/layers/context.py"
# of what layers take from a step without being given it
TRACE_SCOPE = "jaxpage/layers/trace_scope.py"

# (file, module imported inside a function) -> why it is lazy. `*` stands for the whole file.
LAZY_IMPORTS: dict[tuple[str, str], str] = {
    (
        "jaxpage/checkpoints/conversion.py",
        "jaxpage.checkpoints.tokenizers.gguf_tokenizer",
    ): "transformers takes a second to import, and directories are converted without it",
    (
        "jaxpage/checkpoints/tokenizers/stored_tokenizers.py",
        "jaxpage.checkpoints.tokenizers.tokenizer_files",
    ): "transformers takes a second to import, and stored tokenizers need none of it",
    (
        "jaxpage/assembly/planning/drafting.py",
        "jaxpage.assembly.planning.drafters",
    ): "the files of all kinds of drafters take long to import, and most engines have none",
    ("jaxpage/checkpoints/gguf/types.py", "gguf"): "a model in another format needs none of it",
    (
        "jaxpage/checkpoints/orbax_files.py",
        "orbax.checkpoint",
    ): "costs seconds, and most runs load safetensors",
    (
        "jaxpage/checkpoints/finding/resolve.py",
        "huggingface_hub",
    ): "a local model needs no HTTP client",
    (
        "pallas_kernels/sets/tpu.py",
        "jax.experimental.pallas.ops.tpu.ragged_paged_attention",
    ): "it brings Pallas for TPUs, and most machines have none",
    (
        "jaxpage/decoding/grammar_compiler.py",
        "*",
    ): "llguidance is imported for the first grammar, and most texts have none",
    (
        "jaxpage/settings/from_vllm.py",
        "tomllib",
    ): "the table is read for names that jaxpage does not have",
    ("jaxpage/cli/chat.py", "*"): "a pipe needs no line editor, and a wrong flag no jax",
    ("jaxpage/cli/conversation.py", "jaxpage.images"): "a text needs no Pillow",
    (
        "jaxpage/cli/commands.py",
        "*",
    ): "each command imports what it needs: checking a configuration needs no jax",
    (
        "jaxpage/cli/generate.py",
        "jaxpage.checkpoints.finding",
    ): "wrong flags and an empty prompt are refused before jax is imported",
    (
        "jaxpage/cli/verify.py",
        "jaxpage.checkpoints.finding",
    ): "what is no receipt is refused before jax is imported",
    (
        "jaxpage/images/processor.py",
        "*",
    ): "Pillow and the image processors are imported for the first picture, and texts need neither",
    (
        "jaxpage/engine/calls/prompts.py",
        "jinja2",
    ): "only chats have templates, which transformers renders",
    (
        "jaxpage/cli/generate.py",
        "jaxpage.cli.wrapping",
    ): "only a terminal has columns, and a pipe needs no table of characters",
    ("jaxpage/cli/doctor.py", "*"): "doctor reports what cannot be imported",
    (
        "jaxpage/cli/resolving.py",
        "*",
    ): "an engine is imported when the configuration is known to be right",
    (
        "jaxpage/bench/throughput.py",
        "jaxpage.bench.baseline_transformers",
    ): "the baseline needs torch, the rest does not",
    (
        "pallas_kernels/sets/triton.py",
        "*",
    ): "Pallas takes a quarter of a second to import, and a CPU needs none",
    (
        "pallas_kernels/sets/mosaic.py",
        "*",
    ): "Pallas' Mosaic backend takes a quarter of a second to import, and a CPU needs none",
    (
        "pallas_kernels/sets/fa3.py",
        "flash_attn3_jax",
    ): "the library comes with an extra, and is for one kind of GPU",
    (
        "jaxpage/bench/serving/serve.py",
        "jaxpage.bench.serving.serve_plot",
    ): "the picture needs matplotlib, the rest does not",
    (
        "jaxpage/bench/throughput.py",
        "jaxpage.bench.memory_plot",
    ): "the picture needs matplotlib, the rest does not",
    (
        "jaxpage/bench/studies/speculation.py",
        "jaxpage.bench.studies.speculation_plot",
    ): "the picture needs matplotlib, the rest does not",
    (
        "tools/lab/paper/main.py",
        "tools.lab.paper.plots",
    ): "the pictures need matplotlib, and without it the program says so",
    (
        "jaxpage/serving/startup.py",
        "jaxpage.serving.cache_events.kv_publisher",
    ): "pyzmq and msgpack come with an extra",
    (
        "jaxpage/serving/metrics/tracing.py",
        "jaxpage.serving.metrics.otlp",
    ): "OpenTelemetry comes with an extra",
    ("tools/fuzz_checkpoints.py", "*"): "what jax reads when it is imported is set first",
    ("tools/fuzz_engine.py", "*"): "what jax reads when it is imported is set first",
    ("tools/mutate.py", "*"): "Cosmic Ray comes with an extra, and --help needs none",
    (
        "tools/lab/peers/report.py",
        "matplotlib.figure",
    ): "the chart needs matplotlib, the rest does not",
}
# Files that import modules by name.
DYNAMIC_IMPORTS: dict[str, str] = {
    "jaxpage/__init__.py": "import jaxpage touches no device: its names are imported when first used",
    "jaxpage/lazy.py": "a part that asks for one name of a room does not load the others",
    "jaxpage/cli/parsing.py": "--help and wrong flags answer before pydantic, jax and transformers are imported",
    "jaxpage/models/registry.py": "a family's file is imported when a checkpoint names it",
    "tools/lab/bench_encoder.py": "sentence-transformers is compared with where it is installed",
}


def place(module_name: str) -> tuple[int, str]:
    """Returns the (floor, wing) of a module of jaxpage, of `tools` or of `pallas_kernels`.

    The floor is -1 when the house has no such room.
    """
    top, _, inner = module_name.partition(".")
    if top == "tools":
        return 5, "tools"
    if top == "pallas_kernels":
        return 0, "kernels"
    room = room_of(module_name)
    if room in PUBLIC_MODULES:
        return 4, PUBLIC
    if room in ROOMS:
        return ROOMS[room][:2]
    return (0, GROUND) if "." not in inner else (-1, room)


def room_of(module_name: str) -> str:
    return module_name.partition(".")[2].partition(".")[0] or "__init__"


def violations(root: Path) -> list[str]:
    """Returns everything in `root` that breaks a law, as `file:line: what`."""
    modules = read_modules(root)
    known = {module.name for module in modules} | {module.package for module in modules}
    broken: list[str] = []
    for module in modules:
        broken += _house(module)
        for item in imports(module, known):
            broken += [f"{module.path}:{item.line}: {text}" for text in _import_laws(module, item)]
            broken += [f"{module.path}:{item.line}: {text}" for text in _door_laws(module, item)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _never(module)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _fragments(module)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _matmuls(module)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _steps(module)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _chains(module)]
        broken += [f"{module.path}:{line}: {text}" for line, text in _sizes(module)]
        broken += [
            f"{module.path}:{line}: {name} {text}"
            for line, name, text in widths(module)
            if (module.path, name) not in PUBLIC_FACES
        ]
        broken += [f"{module.path}:1: {text}" for text in _header(module)]
    broken += _records(modules)
    broken += _circles([module for module in modules if place(module.name)[0] < 5])
    return [*broken, *_foreign_comments(root)]


def _circles(modules: Sequence[Module]) -> list[str]:
    """Returns a circle of modules that import each other, or nothing.

    Imports under TYPE_CHECKING count, for a reader follows them. An import inside a function does
    not: it has a reason of its own (LAZY_IMPORTS). The front door gives other modules its version
    alone, so it is left out.
    """
    paths = {module.name: module.path for module in modules if module.name != "jaxpage"}
    graph = {
        module.name: {
            item.target
            for item in imports(module, set(paths))
            if not item.in_function and item.target in paths and item.target != module.name
        }
        for module in modules
        if module.name in paths
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        first, *others = error.args[1][::-1]
        return [f"{paths[first]}:1: imports in a circle: {' -> '.join((first, *others))}"]
    return []


def _foreign_comments(root: Path) -> Iterator[str]:
    """Yields comments of C++ and JavaScript that are no sentences, and long lines."""
    for top, kinds in FOREIGN:
        for path in sorted(path for kind in kinds for path in (root / top).rglob(f"*.{kind}")):
            lines = path.read_text(encoding="utf-8").splitlines()
            name = path.relative_to(root)
            for line, text in enumerate(lines, start=1):
                if len(text) > MAX_COLUMNS:
                    yield f"{name}:{line}: has {len(text)} characters; {MAX_COLUMNS} are enough"
            for line, text in _comment_blocks(lines):
                word = text.split(maxsplit=1)[0]
                if word.rstrip(",:") in FIRST_WORDS:
                    yield f'{name}:{line}: a comment begins with "{word}": say what does what'
                elif not re.match(r"[A-Z`\"\d(<]", text) or not re.search(r"[.:!?]\W?$", text):
                    yield f"{name}:{line}: a comment of its own lines is a sentence, with its end"


def _comment_blocks(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the comments that have lines of their own: the first line, and the text of all."""
    block: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        match = re.match(r"\s*(?://+|/\*+|\*/|\*(?!\w))(.*?)(?:\*/)?\s*$", line)
        if match and not (block and line.lstrip().startswith("/**")):
            block.append(match[1].strip())
            continue
        if text := " ".join(filter(None, block)):
            yield number - len(block), text
        block = [match[1].strip()] if match else []


def _house(module: Module) -> list[str]:
    broken = []
    if place(module.name)[0] < 0:
        broken.append(f"{module.path}:1: no package of ROOMS: jaxpage/{place(module.name)[1]}/")
    if not ast.get_docstring(module.tree):
        broken.append(f"{module.path}:1: a module says in its docstring what lives here")
    elif module.path.endswith("/__init__.py") and module.name.startswith("jaxpage."):
        broken += [f"{module.path}:1: {text}" for text in _door(module)]
    return broken


def _door(module: Module) -> Iterator[str]:
    """Yields what is wrong with a door: each name has a word about it, and they are few."""
    names = door_names(module)
    lines = module.source.splitlines()
    for name, line in sorted(names.items()):
        if "#" not in lines[line - 1]:
            yield f"the door has no comment that says what {name} is"
    if len(names) > MAX_DOOR_NAMES:
        yield f"the door has {len(names)} names; {MAX_DOOR_NAMES} are enough"


def _door_laws(module: Module, item: Import) -> Iterator[str]:
    """Yields what is wrong with an import of a room's inside from outside."""
    room = room_of(item.target)
    is_inside = item.target.startswith(f"jaxpage.{room}.") and item.target not in INNER_DOORS
    is_free = module.name.startswith(LABORATORIES) or room == room_of(module.name)
    if room in DOORS and is_inside and not is_free:
        yield f"enters {room}/ past its door: what others may take is in jaxpage.{room}"


def _import_laws(module: Module, item: Import) -> Iterator[str]:
    floor, wing = place(module.name)
    room = room_of(module.name)
    top = item.target.partition(".")[0]
    if item.in_function and not (
        {(module.path, item.target), (module.path, "*")} & set(LAZY_IMPORTS)
    ):
        yield f"imports {item.target} inside a function, and LAZY_IMPORTS gives no reason for it"
    if top in SERIALISERS:
        yield f"imports {top}: no code-carrying serialiser in the product"
    if wing == "kernels" and top not in KERNEL_IMPORTS and top not in sys.stdlib_module_names:
        yield f"pallas_kernels stands alone, but imports {item.target}"
    if (
        module.name.startswith(KERNEL_LAB)
        and top in ("jaxpage", "tools")
        and not item.target.startswith(KERNEL_LAB)
    ):
        yield f"{KERNEL_LAB} runs where jaxpage is not installed, but imports {item.target}"
    if wing in (WEST, GROUND) and top in JAX:
        yield f"the host side never imports {top}"
    may_bind = wing in ("kernels", "tools") or module.name.startswith("jaxpage.device")
    if (
        top == "contextvars"
        and room_of(module.name) in ("layers", "models")
        and module.path != TRACE_SCOPE
    ):
        yield f"layers read one context variable, that of {TRACE_SCOPE}"
    if top == "pallas_kernels" and not may_bind and module.path != ATTENTION_SEAM:
        yield "only jaxpage/device/ binds pallas_kernels"
    if top in UNKNOWN_TO_DRIVER - KNOWN_TO.get(module.name, set()) and room == "driver":
        yield (
            "the driver knows no HTTP, and event loops in async_driver alone, but imports "
            f"{item.target}"
        )
    if top in ("jaxpage", "tools"):
        yield from _floor_laws(module.name, item.target, floor, wing)


def _floor_laws(importer: str, target: str, floor: int, wing: str) -> Iterator[str]:
    target_floor, target_wing = place(target)
    if target_floor > floor:
        yield f"layer {floor} imports {target} of layer {target_floor}: imports go down only"
    elif {wing, target_wing} == {WEST, EAST}:
        yield f"the {wing} side imports {target} of the {target_wing} side"
    elif wing == "tools":
        open_to_it = target_wing in (PUBLIC, "tools") or importer.startswith(LABORATORIES)
        if not open_to_it:
            yield f"tools import the front door only, not {target}"
    else:
        room, other = room_of(importer), room_of(target)
        if room != other and room in ROOMS and other in ROOMS and other not in ROOMS[room][2]:
            yield f"{room}/ does not import {other}/"


def _fragments(module: Module) -> Iterator[tuple[int, str]]:
    """Yields docstrings whose subject is in another line."""
    for node in module.nodes:
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            word = text.split(maxsplit=1)[0]
            if word in FIRST_WORDS:
                line = getattr(node, "lineno", 1)
                yield line, f'a docstring begins with "{word}": say who does what'


def _never(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield node.lineno, f"calls {node.func.id}()"
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called == "import_module" and module.path not in DYNAMIC_IMPORTS:
                yield node.lineno, "imports by name, and DYNAMIC_IMPORTS gives no reason for it"
            for keyword in node.keywords:
                if keyword.arg in BANNED_KEYWORDS and getattr(keyword.value, "value", None) is True:
                    yield node.lineno, f"{keyword.arg}=True"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in BANNED_ATTRIBUTES:
                yield node.lineno, f"uses {node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module, alias.name) in BANNED_ATTRIBUTES:
                    yield node.lineno, f"uses {node.module}.{alias.name}"


def _matmuls(module: Module) -> Iterator[tuple[int, str]]:
    """Yields products outside of the one place that multiplies by weights.

    So one place has to know of a new kind of weight.
    """
    if not module.name.startswith(("jaxpage.layers", "jaxpage.models")) or module.path in MATMULS:
        return
    for node in module.nodes:
        called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if called in MATMUL_CALLS or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        ):
            yield (
                node.lineno,
                "multiplies: layers.matmul.matmul does that, and knows the kinds of weights",
            )


def _steps(module: Module) -> Iterator[tuple[int, str]]:
    """Yields calls of `Engine.step` outside of a driver.

    One thread takes the steps of an engine, so that nothing else meets it in the middle of one.
    """
    if not module.name.startswith("jaxpage.") or room_of(module.name) in STEPPING:
        return
    for node in module.nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "step"
        ):
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name.endswith("engine"):
                yield node.lineno, "calls Engine.step: only a driver does"


def _chains(module: Module) -> Iterator[tuple[int, str]]:
    """Yields the places that reach an object through an object of another room.

    They do so at once (`engine.scheduler.running`), or by a local that stands for the first part.
    """
    if not module.name.startswith("jaxpage."):
        return
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and (room := _room_after(module, node.value)):
            if node.attr not in OF_BUILT_INS:
                yield node.lineno, f"reaches through {room}/: {ast.unparse(node)}"
        elif isinstance(node, Function):
            yield from _chains_by_locals(module, node)


def _chains_by_locals(module: Module, function: Function) -> Iterator[tuple[int, str]]:
    aliases = {}
    nodes = list(ast.walk(function))
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and (room := _room_after(module, node.value)):
                text = ast.unparse(node.value)
                aliases |= {
                    target.id: (room, text) for target in targets if isinstance(target, ast.Name)
                }
    for node in nodes if aliases else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            room, text = aliases.get(node.value.id, ("", ""))
            if room and node.attr not in OF_BUILT_INS:
                yield node.lineno, f"reaches through {room}/: {text}.{node.attr}, by a local"


def _room_after(module: Module, node: ast.expr) -> str:
    """Returns the other room whose object an attribute belongs to, or an empty text."""
    if not isinstance(node, ast.Attribute) or node.attr in HANDED_OVER:
        return ""
    owner = node.value
    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    room = OBJECTS.get(name.lstrip("_"), "")
    return "" if room == room_of(module.name) else room


def _sizes(module: Module) -> Iterator[tuple[int, str]]:
    if module.name.startswith("pallas_kernels"):  # a kernel may run long
        return
    # Reading the tokens takes long, and few modules have so many words and signs.
    if (
        len(re.findall(r"\w+|[^\w\s]", module.source)) > MAX_MODULE_TOKENS
        and (num_tokens := len(token_lines(module))) > MAX_MODULE_TOKENS
    ):
        yield 1, f"has {num_tokens} tokens; {MAX_MODULE_TOKENS} are enough for a module"
    for node, length in functions(module):
        docstring = node.body[0] if ast.get_docstring(node) else None
        code = length - (
            docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
        )
        if code > MAX_FUNCTION_LINES:
            yield (
                node.lineno,
                f"{node.name} has {code} lines; {MAX_FUNCTION_LINES} are enough for a function",
            )


def widths(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yields records of too many fields and functions of too many arguments, with their names.

    Functions of `pallas_kernels` take what kernels take.
    """
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            number = sum(
                isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation)
                for field in node.body
            )
            maximum, what = MAX_FIELDS, "fields; {} are enough for a record"
        elif isinstance(node, Function) and module.name.startswith("jaxpage."):
            names = [
                argument.arg
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            number = len(names) - (names[:1] in (["self"], ["cls"]))
            maximum, what = MAX_ARGUMENTS, "arguments; {} are enough for a function"
        else:
            continue
        if number > maximum:
            yield node.lineno, node.name, f"has {number} {what.format(maximum)}"


def _header(module: Module) -> Iterator[str]:
    """Yields that a page has too many lines of imports, those for type checkers among them."""
    if not module.name.startswith("jaxpage.models.") or module.path.endswith("__init__.py"):
        return
    num_lines = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in module.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    )
    if num_lines > MAX_HEADER_LINES:
        yield f"has {num_lines} lines of imports; {MAX_HEADER_LINES} are enough for a page"


def _has_records(module: Module) -> bool:
    return module.name.startswith(("jaxpage.models", "jaxpage.layers"))


def _records(modules: Sequence[Module]) -> Iterator[str]:
    """Yields the classes of models and layers that have too many fields or class attributes."""
    for what, maximum, members in (
        ("fields", MAX_FIELDS, _fields),
        ("class attributes", MAX_CLASS_ATTRIBUTES, _class_attributes),
    ):
        for place, name, count in _count_members(modules, members):
            if count > maximum:
                yield f"{place}: {name} has {count} {what}; {maximum} are enough"


def max_class_attributes(modules: Sequence[Module]) -> int:
    """Returns the number of class attributes of the class of models and layers that has most."""
    counts = [count for _, _, count in _count_members(modules, _class_attributes)]
    return max(counts, default=0)


def _count_members(
    modules: Sequence[Module], members: Callable[[ast.ClassDef], set[str]]
) -> Iterator[tuple[str, str, int]]:
    """Yields the place and the name of each class, and its number of members, inherited ones too."""
    classes = {
        node.name: (module.path, node)
        for module in modules
        if _has_records(module)
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }

    def members_of(name: str) -> set[str]:
        if name not in classes:
            return set()
        node = classes[name][1]
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
        return members(node).union(*map(members_of, bases))

    for name, (path, node) in classes.items():
        yield f"{path}:{node.lineno}", name, len(members_of(name))


def _fields(node: ast.ClassDef) -> set[str]:
    """Returns the fields that a class declares."""
    return {
        ast.unparse(each.target)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
    }


def _class_attributes(node: ast.ClassDef) -> set[str]:
    """Returns the attributes that a class sets or declares for itself, functions left out."""
    attributes: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.Assign) and "staticmethod(" not in ast.unparse(each.value):
            attributes.update(map(ast.unparse, each.targets))
        elif isinstance(each, ast.AnnAssign):
            kind = ast.unparse(each.annotation)
            if "ClassVar" in kind and "Callable" not in kind:
                attributes.add(ast.unparse(each.target))
    return attributes


def median_sizes(root: Path) -> tuple[float, float]:
    """Returns the median numbers of tokens of modules that are more than a docstring, and of
    functions.
    """
    module_tokens, function_tokens = [], []
    for module in read_modules(root):
        lines = token_lines(module)
        if len(module.tree.body) > 1:
            module_tokens.append(len(lines))
        for node, length in functions(module):
            first = bisect.bisect_left(lines, node.lineno)
            function_tokens.append(bisect.bisect_left(lines, node.lineno + length) - first)
    return statistics.median(module_tokens), statistics.median(function_tokens)


def third_party(root: Path) -> dict[str, str]:
    """Returns packages that the product imports, neither its own nor Python's, each with one place
    where.
    """
    packages: dict[str, str] = {}
    modules = [module for module in read_modules(root) if place(module.name)[0] < 5]
    for module in modules:
        for item in imports(module, set()):
            top = item.target.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("jaxpage", "pallas_kernels"):
                packages.setdefault(top, f"{module.path}:{item.line}")
        for name, line in imports_by_name(module):
            if not name.startswith("jaxpage"):
                packages.setdefault(name.partition(".")[0], f"{module.path}:{line}")
    return packages
