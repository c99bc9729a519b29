"""Settings that hold for every test: CPU, no network, a compile cache of one's own, the same
hypothesis examples on every run.

The variables are set here, at import, because jax and transformers read them when they are first
imported.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path


def _private_directory() -> str:
    """Returns the directory in which compiled executables are kept between runs.

    They are code, so the directory is its user's alone.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "jaxpage" / "tests"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError:
        return tempfile.mkdtemp(prefix="jaxpage-tests-")
    return str(directory)


_DIRECTORY = _private_directory()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _DIRECTORY)
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
os.environ["JAXPAGE_CACHE_DIR"] = _DIRECTORY

import hypothesis  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "deterministic",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
)
hypothesis.settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
# For tools/mutate.py, which asks only whether a test fails: to shrink what it finds takes minutes.
hypothesis.settings.register_profile(
    "planted",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    report_multiple_bugs=False,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))

# The shapes in signatures are checked while jax traces, with --check-shapes. The hook makes tracing
# take twice as long, even where it is told to check nothing, so it is installed for that flag
# alone. Not in pallas_kernels: its functions check their arguments themselves, and take numpy
# arrays as well.
_CHECKED = (
    "TESTS_CHECK_SHAPES"  # for the processes of pytest-xdist, which have another command line
)
if "--check-shapes" in sys.argv or _CHECKED in os.environ:
    os.environ[_CHECKED] = "1"
    jaxtyping.install_import_hook(
        ["jaxpage.layers", "jaxpage.models", "jaxpage.device"], "beartype.beartype"
    )

from tests.support import durations  # noqa: E402
from tests.support.executables import UNOPTIMIZED_FLAGS, SharedExecutables, when_used  # noqa: E402

_EXECUTABLES = SharedExecutables()
_DURATIONS = durations.read()
_FOUND: dict[str, durations.Record] = {}  # of this process, or of all when they have ended


@pytest.fixture(scope="module", autouse=True)
def _compilation(request):
    """Compiles as users do for modules that are marked `optimized`, whose subject is bits."""
    optimized = request.node.get_closest_marker("optimized") is not None
    stopwatch = durations.Stopwatch()
    with _EXECUTABLES.in_use(optimized=optimized) as counts:
        yield
    name = durations.name_of(request.node.path)
    _FOUND[name] = stopwatch.record(counts)
    usual = "not sweep" in request.config.getoption("markexpr") and not request.config.getoption(
        "--write-durations"
    )
    usual = usual and not request.config.getoption("--optimized") and durations.is_of_this_python()
    if usual and (problem := durations.over_budget(name, len(counts.requested), _DURATIONS)):
        pytest.fail(problem, pytrace=False)


@pytest.fixture(scope="module")
def compiled_when_used():
    """Makes engines compile a shape when it is used.

    Those of `make_llm` do so by themselves.
    """
    with when_used():
        yield


@pytest.fixture(scope="module")
def largest_shapes():
    """Gives engines the shapes for the most rows alone, as `make_llm` does if asked.

    It is for files to which the choice among shapes is no subject.
    """
    from jaxpage.assembly.planning import engine_spec
    from tests.support.engines import make_short_menu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_spec, "make_menu", make_short_menu)
        yield


@pytest.fixture
def decodes_in_chunks(largest_shapes):
    """Does as `decoding_in_chunks` for tests of models whose steps are no subject."""
    from tests.support.engines import decoding_in_chunks

    with decoding_in_chunks():
        yield


@pytest.fixture(scope="module")
def decode_as_chunks():
    """Does as `decoding_in_chunks` for the engines of a whole file, and of its other fixtures."""
    from tests.support.engines import decoding_in_chunks

    with decoding_in_chunks():
        yield


@pytest.fixture(scope="module")
def usual_pages():
    """Gives engines that a replay builds the pages of those of `make_llm`.

    So they run the same executables.
    """
    from jaxpage.assembly.planning import engine_spec
    from tests.support.engines import roomy_page_shapes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_spec, "page_shapes", roomy_page_shapes)
        yield


@pytest.fixture
def by_hand(llm):
    """Lets the calls of `llm` take the engine's steps themselves: what nobody waits for stands
    still.
    """
    from tests.support.engines import steps_by_hand

    with steps_by_hand(llm):
        yield


@pytest.fixture(scope="module", autouse=True)
def _settled():
    """Keeps what is there before a module from the collector, which would look through a million
    objects of jax and torch again and again.
    """
    gc.collect()
    gc.freeze()
    # tracing makes many objects; a twelfth of its time went into looking for cycles
    gc.set_threshold(50_000, 20, 20)


def pytest_configure(config):
    """Sets XLA's flags before it reads them, for oracles and child processes too."""
    if not config.getoption("--optimized") and UNOPTIMIZED_FLAGS not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        os.environ["XLA_FLAGS"] = f"{UNOPTIMIZED_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    if config.getoption("--check-shapes") and _CHECKED not in os.environ:
        raise pytest.UsageError("--check-shapes is read on the command line alone")


def pytest_itemcollected(item):
    """Lets `-k seed_oss` select the cases of that family, which have dashes in their names."""
    item.extra_keyword_matches.add(item.name.replace("-", "_"))


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first, so that no process is left alone with one at the end.

    With `-x` the quickest come first, because the first failure ends the run.
    """
    quickest_first = config.getoption("maxfail") == 1
    items.sort(
        key=lambda item: _DURATIONS.get(durations.name_of(item.path), {"seconds": 0.0})["seconds"],
        reverse=not quickest_first,
    )


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["durations"] = _FOUND
    elif session.config.getoption("--write-durations") and _FOUND:
        durations.write(_FOUND)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node, error):
    _FOUND.update(getattr(node, "workeroutput", {}).get("durations", {}))


def pytest_addoption(parser):
    parser.addoption(
        "--optimized",
        action="store_true",
        help="everything is compiled as for users: see the mark of this name",
    )
    parser.addoption(
        "--check-shapes",
        action="store_true",
        help="the shapes in signatures are checked while jax traces",
    )
    parser.addoption(
        "--write-reference", action="store_true", help="write the pages of docs/reference/ anew"
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write tests/durations.json anew, for the files that run",
    )
    parser.addoption(
        "--write-errors",
        action="store_true",
        help="write tests/measured_errors.json anew, for the models that are compared",
    )
    parser.addoption(
        "--write-support-matrix",
        action="store_true",
        help="write docs/reference/support-matrix.md and jaxpage/support_matrix.json anew",
    )
