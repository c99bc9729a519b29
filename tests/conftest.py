"""Settings that hold for every test: CPU, no network, a compile cache of one's own, the same hypothesis examples on every run.

The variables are set here, at import, because jax and transformers read them when they are first imported.
"""

from __future__ import annotations

import collections
import functools
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path


def _private_directory() -> str:
    """Where compiled executables are kept between runs. They are code, so the directory is its user's alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "jaxpage" / "tests"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError:
        return tempfile.mkdtemp(prefix="jaxpage-tests-")
    return str(directory)


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _private_directory())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Of torch, the oracle: with two threads on a busy machine a tiny model takes twenty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell ignores it in what it runs in the background, and tests raise it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _variable in [name for name in os.environ if name.startswith("JAXPAGE_")]:
    del os.environ[_variable]  # a developer's own settings change no test

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))

# The shapes in signatures are checked while jax traces, so it costs nothing per step. Only here: users pay nothing.
# Not in pallas_kernels: its functions check their arguments themselves, and take numpy arrays as well.
jaxtyping.install_import_hook(["jaxpage.layers", "jaxpage.models", "jaxpage.device"], "beartype.beartype")

from jaxpage.device import executables  # noqa: E402, behind the hook

# XLA compiles five times as fast, to code that takes two or three times as long: tiny models run for less time than they are compiled.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@pytest.fixture(scope="module", autouse=True)
def _compilation(request):
    """Modules that are marked `optimized`, whose subject is bits, test the code that users run.

    Engines of one process share what is compiled for the same shapes and options: an executable holds neither weights nor pages.
    """
    optimized = bool(request.node.get_closest_marker("optimized") or request.config.getoption("--optimized"))
    with pytest.MonkeyPatch.context() as patch:
        if not optimized:
            patch.setattr(executables, "_compiled", _unoptimized)
        for name, function in _COMPILERS.items():
            patch.setattr(executables, name, functools.partial(_shared, optimized, name, function))
        yield


_COMPILERS = {name: getattr(executables, name) for name in vars(executables) if name.startswith("_compile_")}
_EXECUTABLES: collections.OrderedDict[object, tuple[object, object]] = collections.OrderedDict()
MOST_EXECUTABLES = 64  # an executable of XLA on CPU takes some 400 memory maps, of which Linux gives a process 65,530
_TRACED = ("jaxpage.device", "jaxpage.layers", "jaxpage.models", "pallas_kernels")


def _shared(optimized, name, compile_one, *arguments):
    leaves, tree = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, str(leaf.dtype)) if hasattr(leaf, "dtype") else leaf for leaf in leaves)
    code = tuple(_code())  # kept, so that no other object gets the id of one of them
    key = optimized, name, tree, shapes, tuple(map(id, code))
    if key in _EXECUTABLES:
        _EXECUTABLES.move_to_end(key)
    else:
        _EXECUTABLES[key] = compile_one(*arguments), code
        if len(_EXECUTABLES) > MOST_EXECUTABLES:
            _EXECUTABLES.popitem(last=False)
    return _EXECUTABLES[key][0]


def _code():
    """All that could be traced: tests plant mistakes in it, and an executable with one is nobody else's."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_TRACED):
            for value in list(vars(module).values()):
                yield value
                if isinstance(value, type) and value.__module__ == name:
                    yield from vars(value).values()


def _unoptimized(function, *shapes):
    return function.lower(*shapes).compile(UNOPTIMIZED)


@pytest.fixture(scope="module", autouse=True)
def _settled():
    """What is there before a module stays there. The collector would look through a million objects of jax and torch again and again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--optimized", action="store_true", help="all engines are compiled as for users: see the mark of this name"
    )
    parser.addoption("--write-reference", action="store_true", help="write the pages of docs/reference/ anew")
    parser.addoption(
        "--write-support-matrix",
        action="store_true",
        help="write docs/reference/support-matrix.md and jaxpage/support_matrix.json anew",
    )
