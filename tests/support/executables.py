"""Says what tests compile: shared by the engines of a process, counted by file, compiled in a fifth
of the time where speed is no subject.

Of an engine that is made `when_used`, what its test does not run is not compiled at all: most tests
run a part of their menu.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from jaxpage.device import executables

# XLA compiles five times as fast, to code that takes two or three times as long: tiny models run
# for less time than they are compiled. One part for each module: fewer memory maps, and two
# processes on two cores have no use for more. An option, what tests set (in XLA_FLAGS, so child
# processes have it too), and what users have.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "xla_backend_optimization_level": (0, 3),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if jax.__version_info__ < (0, 11, 0):  # later ones have no such option
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (False, True)
UNOPTIMIZED_FLAGS = " ".join(
    f"--{name}={str(value).lower()}" for name, (value, _) in _OPTIONS.items()
)
# An executable takes 250 to 430 memory maps or more, and Linux gives a process 65,530.
MAX_MAPS = 35_000
_AS_FOR_USERS = {name: value for name, (_, value) in _OPTIONS.items()}
_COMPILERS = [name for name in vars(executables) if name.startswith("_compile_")]
# No step runs these, so a test that replaces one compiles nothing anew.
_NEVER_TRACED = {
    f"{executables.__name__}.{name}"
    for name in (*_COMPILERS, "compile_ahead", "_workspace_bytes", "Executables.__init__")
} | {f"jaxpage.models.sharding.dividing.ShardedWeight.{name}" for name in ("boxes", "part")}
_REAL_WORKSPACE_BYTES = executables._workspace_bytes
_TRACED = ("jaxpage.device", "jaxpage.layers", "jaxpage.models", "pallas_kernels")
# Of a module and of its classes: the names, and what they stood for.
Namespaces = list[tuple[Mapping[str, object], tuple[object, ...]]]


_made_when_used = 0


@contextlib.contextmanager
def when_used() -> Iterator[None]:
    """Makes new engines compile each executable when it first runs, and not at their start."""
    global _made_when_used
    _made_when_used += 1
    try:
        yield
    finally:
        _made_when_used -= 1


class WhenUsed:
    """An executable that is compiled when it first runs, or is looked into. `stats()` counts it
    with those of the start.
    """

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get: Callable[[], Any] | None = get
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        return self._executable(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name != "_executable":
            return getattr(self._executable, name)
        with self._lock:
            if self._get is not None:
                compilations = executables.watch_compilations()
                before = compilations.count, compilations.num_found
                self._executable = self._get()
                compilations.count, compilations.num_found = before
                self._get = None
        return self._executable


class Counts:
    """Counts executables of one file.

    `requested` are the different ones that its engines run. Unlike `compiled`, they do not depend
    on which files ran before.
    """

    def __init__(self) -> None:
        self.requested: set[object] = set()
        self.engines = self.compiled = 0


class SharedExecutables:
    """Compiles each executable once in a process: it holds neither weights nor pages, so engines of
    the same shapes may share it.

    When the process has more memory maps than `max_maps`, those that were used least recently are
    forgotten.
    """

    def __init__(self, *, max_maps: int = MAX_MAPS) -> None:
        self._max_maps = max_maps
        self._kept: collections.OrderedDict[object, tuple[Any, object]] = collections.OrderedDict()
        self._first_seen: dict[str, dict[str, object]] = {}
        self._as_it_was: dict[str, Namespaces] = {}
        self._lock = threading.Lock()  # an engine compiles its executables in several threads

    @contextlib.contextmanager
    def in_use(self, *, optimized: bool) -> Iterator[Counts]:
        """Lets engines take their executables from here while it is open."""
        counts = Counts()
        build = executables.Executables.__init__

        def counted(self: Any, *arguments: Any, **settings: Any) -> None:
            counts.engines += 1
            build(self, *arguments, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executables.Executables, "__init__", counted)
            if optimized:
                patch.setattr(executables, "compile_ahead", _as_for_users)
            for name in _COMPILERS:
                compile_one = getattr(executables, name)
                patch.setattr(
                    executables,
                    name,
                    functools.partial(self._get, counts, (optimized, name), compile_one),
                )
            patch.setattr(executables, "_workspace_bytes", _workspace_bytes)
            yield counts

    def _get(
        self, counts: Counts, kind: object, compile_one: Callable[..., Any], *arguments: Any
    ) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple(
            (leaf.shape, str(leaf.dtype)) if hasattr(leaf, "dtype") else leaf for leaf in leaves
        )
        changed = dict(self._changed_code())
        key = kind, tree, shapes, frozenset((where, id(value)) for where, value in changed.items())
        find = functools.partial(
            self._find, counts, key, changed, functools.partial(compile_one, *arguments)
        )
        return WhenUsed(find) if _made_when_used else find()

    def _find(
        self,
        counts: Counts,
        key: object,
        changed: dict[str, object],
        compile_one: Callable[[], Any],
    ) -> Any:
        if (now := dict(self._changed_code())) != changed:
            raise RuntimeError(
                f"compiled when used, which is too late: {now.keys() ^ changed.keys()} changed "
                "since the engine was made"
            )
        with self._lock:
            counts.requested.add(key)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            counts.compiled += 1
        executable = compile_one()
        dict(self._changed_code())  # modules that were imported on the way are as they should be
        with self._lock:
            # so that no other object gets the id of one that was changed
            self._kept[key] = executable, changed
            # to count a thousand maps takes 2 ms
            if len(self._kept) % 8 == 0 and _num_maps() > self._max_maps:
                for _ in range(len(self._kept) // 4):
                    self._kept.popitem(last=False)
        return executable

    def _changed_code(self) -> Iterator[tuple[str, object]]:
        """Returns what could be traced and is not what it was when its module was first seen: tests
        plant mistakes, which are nobody else's.
        """
        for name, module in list(sys.modules.items()):
            if not name.startswith(_TRACED) or _is_as(self._as_it_was.get(name), module):
                continue
            now = dict(_members(name, module))
            before = self._first_seen.setdefault(name, now)
            changed = [
                where
                for where in now.keys() | before.keys()
                if now.get(where) is not before.get(where)
            ]
            if not changed:
                self._as_it_was[name] = _namespaces(name, module)
            for where in changed:
                if where not in _NEVER_TRACED:
                    yield where, now.get(where)


def with_compiled_kernels(cache: Path) -> Path:
    """Returns a directory for a cache, which is empty but for the kernels of CPUs.

    A C++ compiler takes 25 seconds of a core for them.
    """
    cache.mkdir(exist_ok=True)
    (cache / "kernels").symlink_to(Path(os.environ["JAXPAGE_CACHE_DIR"]) / "kernels")
    return cache


def _namespaces(name: str, module: ModuleType) -> Namespaces:
    """Returns what a module and its classes hold, to be compared with what they hold later."""
    spaces: list[Mapping[str, object]] = [vars(module)]
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == name:
            spaces.append(vars(value))
    return [(space, tuple(space.values())) for space in spaces]


def _is_as(namespaces: Namespaces | None, module: ModuleType) -> bool:
    """Returns whether a module and its classes hold what they held. Every executable of every
    engine asks, so no name is looked at.
    """
    if namespaces is None or namespaces[0][0] is not vars(module):
        return False
    return all(
        len(space) == len(values) and all(map(operator.is_, tuple(space.values()), values))
        for space, values in namespaces
    )


def _members(name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    for attribute, value in list(vars(module).items()):
        if isinstance(value, ModuleType) and value.__name__ == f"{name}.{attribute}":
            continue  # it appears when the module is imported, and is looked at itself
        yield f"{name}.{attribute}", value
        if isinstance(value, type) and value.__module__ == name:
            for inner, member in vars(value).items():
                if inner != "__annotations__":  # it appears when somebody first asks for it
                    yield f"{name}.{attribute}.{inner}", member


def _workspace_bytes(executable: Any) -> int:
    """Returns `executables._workspace_bytes`; 0 for what is not compiled yet."""
    return 0 if isinstance(executable, WhenUsed) else _REAL_WORKSPACE_BYTES(executable)


def _num_maps() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0  # other systems have no such limit


def _as_for_users(function: Any, *shapes: Any, **_: Any) -> Any:
    """Compiles as for users, whatever XLA_FLAGS says."""
    return function.lower(*shapes).compile(_AS_FOR_USERS)
