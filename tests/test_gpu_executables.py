"""Executables for GPUs as files, and the choices of XLA's autotuning: compiled for GPUs that are
not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jaxpage.device import autotuning, executables, stored_executables
from jaxpage.device.autotuning import autotuning_options, choices_of
from jaxpage.device.executables import Executables
from jaxpage.device.hardware import gpu_versions as versions
from jaxpage.device.hardware import traced_code
from jaxpage.device.hardware.backends import Backend, attention_sets
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.pages.kv_pages import LayerPages
from jaxpage.device.stored_executables import StoredExecutable, StoredExecutables
from jaxpage.device.waiting import Waiting
from pallas_kernels.compat import DescribedGPU, describe_gpu
from pallas_kernels.sets import fa3
from tools.lab.kernel_lab.inspection import compile_for, deviceless, unavailable
from tools.lab.kernel_lab.inspection.deviceless import describe_mesh

reason = unavailable()
needs_plugin = pytest.mark.skipif(reason is not None, reason=str(reason))

X = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
W = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
CARD = DescribedGPU("NVIDIA H100 80GB HBM3", "9.0")
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def multiply(**options: Any) -> Any:
    return compile_for(jax.jit(jnp.matmul), X, W, options=options)


def device(gpu: str = "h200") -> jax.Device:
    return describe_mesh(gpu).devices.flat[0]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Makes a directory of the user's own, as in a process that was given none."""
    monkeypatch.setattr(autotuning, "own_cache_directory", lambda: tmp_path)
    autotuning._options.cache_clear()
    yield tmp_path
    autotuning._options.cache_clear()


# What was chosen


GEMM = """(f32[8,8]{1,0}, s8[64]{0}) custom-call(%p, %p), custom_call_target="__cublas$lt$matmul", \
backend_config={"operation_queue_id":"NUMBER","gemm_backend_config":{"selected_algorithm":"3"}}, sharding={replicated}"""
EMITTER = '"native_emitter_backend_config":{"type":"NATIVE_EMITTER_TYPE_INVALID","unroll_factor":0}'
HLO = f"""
%inside (a: f32[8,16]) -> f32[8,8] {{
  ROOT %dot.7 = f32[8,8]{{1,0}} dot(%a, %a), metadata={{op_name="m"}}, backend_config={{"sizes":["16"]}}
}}
ENTRY %main (p: f32[8,16]) -> f32[8,8] {{
  %call.1 = bf16[2]{{0}} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", backend_config={{name = "cutoffs"}}
  %loop = f32[8]{{0}} fusion(%p), kind=kLoop, backend_config={{"operation_queue_id":"0","reification_cost":[],{EMITTER}}}
  %gemm.2 = {GEMM.replace("NUMBER", "0")}
  ROOT %gemm.3 = {GEMM.replace("NUMBER", "4")}
}}
"""


class Program:
    def __init__(self, text: str) -> None:
        self.as_text = lambda: text


def test_tiles_and_algorithms_are_choices_and_queues_are_none():
    assert choices_of(Program(HLO)) == (
        '2 (f32[8,8]{1,0}, s8[64]{0}) custom-call {"gemm_backend_config": '
        '{"selected_algorithm": "3"}}\n'
        '1 f32[8,8]{1,0} dot {"sizes": ["16"]}\n'
    )


@needs_plugin
def test_another_choice_has_another_text():
    text = choices_of(multiply())
    assert text == choices_of(multiply()) and "output_tiles" in text
    assert "selected_algorithm" in choices_of(multiply(**WITHOUT_TRITON))


def autotuning_of(
    entries: dict[Any, Any], device: Any = CARD, **from_files: StoredExecutable
) -> str | None:
    """Returns the hash of a table of executables."""
    table = object.__new__(Executables)
    table._mesh = SimpleNamespace(first=device)
    loading = {
        key: Waiting(functools.partial(table._load, key, each)) for key, each in from_files.items()
    }
    table._table, table._choices = entries | loading, {}
    return table.autotuning


def test_the_hash_is_that_of_the_choices_for_all_executables():
    other = Program(HLO.replace('"3"', '"4"'))
    hashes = [
        autotuning_of({bucket: first, "copy 0": second})
        for bucket in (Bucket(2, 2, 1), Bucket(4, 4, 1))
        for first, second in ((Program(HLO), other), (other, Program(HLO)), (other, other))
    ]
    assert len(set(hashes)) == len(hashes) and all(len(each) == 64 for each in hashes)
    waiting = {Bucket(2, 2, 1): Waiting(lambda: Program(HLO))}
    from_file = SimpleNamespace(load=lambda: None, choices=choices_of(other))
    assert autotuning_of(waiting, **{"copy 0": from_file}) == hashes[0]
    assert autotuning_of({"copy 0": None}, jax.devices()[0]) is None


def test_the_hash_has_the_new_choices_of_a_file_that_does_not_load(tmp_path):
    """It is compiled again, and the choices in the file are of no executable that runs."""
    other = Program(HLO.replace('"3"', '"4"'))
    trees = jax.tree.structure(((), {})), jax.tree.structure(None)
    stored = StoredExecutable(
        tmp_path / "damaged",
        memoryview(b"x"),
        0,
        "old",
        trees,
        [CARD],
        functools.partial(lambda: other),
    )
    assert autotuning_of({}, **{"copy 0": stored}) == autotuning_of({"copy 0": other})


@needs_plugin
def test_choices_are_read_from_a_directory_for_this_card_and_these_libraries(cache, monkeypatch):
    options = autotuning_options(device())
    directory = Path(options[autotuning.DIRECTORY_OPTION])
    assert directory.parent == cache / "autotuning" and directory.stat().st_mode & 0o077 == 0
    assert options[autotuning.MODE_OPTION] == "AUTOTUNE_CACHE_MODE_UPDATE"
    multiply(**options)  # XLA knows the options
    assert autotuning_options(device("h100")) != options
    autotuning._options.cache_clear()
    monkeypatch.setattr(os, "access", lambda *_: False)
    read_only = {**options, autotuning.MODE_OPTION: "AUTOTUNE_CACHE_MODE_READ"}
    assert autotuning_options(device()) == read_only
    monkeypatch.setenv("XLA_FLAGS", f"--{autotuning.DIRECTORY_OPTION}=elsewhere")
    assert autotuning_options(device()) == {}


@needs_plugin
def test_without_a_directory_of_our_own_nothing_is_said_to_xla(cache, monkeypatch):
    (cache / "autotuning").touch()  # so that no directory can be made
    assert autotuning_options(device()) == {}
    monkeypatch.setattr(autotuning, "own_cache_directory", lambda: None)
    assert autotuning_options(device()) == {}


def test_a_cpu_and_a_gpu_that_is_only_described_are_not_tuned(cache):
    assert autotuning_options(jax.devices()[0]) == {}
    assert autotuning_options(CARD) == {}
    assert not [*cache.iterdir()]


def test_the_options_reach_xla(monkeypatch):
    monkeypatch.setattr(executables, "autotuning_options", lambda _: {"xla_no_such_option": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        executables.compile_ahead(jax.jit(jnp.sin), X)


# Files


@needs_plugin
def test_a_file_has_the_executable_and_its_choices(tmp_path):
    stored = StoredExecutables(tmp_path, [device()])
    compile_one = functools.partial(multiply)
    compiled = stored.get(compile_one, (0, 0), 0)
    (path,) = tmp_path.iterdir()
    executable = stored.get(compile_one, (0, 0), 0)
    assert isinstance(executable, StoredExecutable) and stored.num_found == 1
    assert executable.choices == choices_of(compiled) != ""
    assert executable.workspace_bytes == compiled.memory_analysis().temp_size_in_bytes
    assert compiled.runtime_executable().serialize() in path.read_bytes()


def find_foreign_file(directory: Path) -> tuple[Path, Any]:
    """Returns a whole file that has an executable for a GPU, and what a CPU finds there."""
    compile_one = functools.partial(lambda: jax.jit(jnp.sin).lower(1.0).compile())
    stored = StoredExecutables(directory, jax.devices())
    stored.get(compile_one, (0,), 0)
    (path,) = directory.iterdir()
    trees = jax.tree.structure(((0, 0), {})), jax.tree.structure(0)
    stored_executables._write(path, multiply(), trees, "")
    loaded = stored.get(compile_one, (0,), 0)
    return path, loaded


@needs_plugin
def test_what_does_not_load_is_compiled_again(tmp_path, caplog):
    """A CPU finds whole files with an executable for a GPU, as after a wrong name."""
    path, loaded = find_foreign_file(tmp_path)
    assert isinstance(loaded, StoredExecutable)
    assert loaded.load()(1.0) == jnp.sin(1.0)
    logger = stored_executables.logger.name
    (said,) = (record.getMessage() for record in caplog.records if record.name == logger)
    assert said.startswith(f"{path} is compiled again: ") and not path.exists()


@needs_plugin
def test_what_does_not_load_in_a_directory_that_cannot_be_written_is_compiled_again(
    tmp_path, monkeypatch
):
    """The file stays, and no request ends."""
    _, loaded = find_foreign_file(tmp_path)

    def refuse(self: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    assert loaded.load()(1.0) == jnp.sin(1.0)


@needs_plugin
@pytest.mark.parametrize(
    "name",
    [
        *("card", "number", "driver of XLA", "driver", "cublas", "package", "jaxlib"),
        *("code", "XLA_FLAGS", "devices"),
    ],
)
def test_a_name_depends_on_everything_around(name, monkeypatch):
    def surroundings(*devices: Any) -> str:
        return stored_executables._surroundings.__wrapped__(devices)

    before = surroundings(device())
    assert before == surroundings(device())
    devices = [device()]
    match name:
        case "card":
            devices = [device("h100")]
        case "number":
            devices *= 2
        case "driver of XLA":
            devices = [other_driver()]
        case "driver":
            monkeypatch.setattr(versions, "DRIVER", Path(__file__))
        case "cublas":
            monkeypatch.setattr(versions.cuda_versions, "cublas_get_version", lambda: 130200)
        case "package":
            monkeypatch.setattr(versions, "package_version", lambda package: "0")
        case "jaxlib":
            monkeypatch.setattr("importlib.metadata.version", lambda package: "0")
        case "code":
            monkeypatch.setattr(stored_executables, "hash_traced_code", lambda: "0")
        case "XLA_FLAGS":
            monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        case "devices":
            monkeypatch.setattr(jax, "devices", lambda: [*devices, *devices])
    assert surroundings(*devices) != before


def other_driver() -> jax.Device:
    """Describes an H200 with a driver of another version, as XLA is told of it."""
    config = Path(deviceless.__file__).with_name("h200.textproto").read_text()
    other = config.replace('driver_version: "13.0.0"', 'driver_version: "13.1.0"')
    assert other != config
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=other
    ).devices[0]


def test_a_processor_is_no_part_of_the_name_of_a_gpu(monkeypatch):
    monkeypatch.setattr(stored_executables, "gpu_versions", lambda devices: ["a card"])
    monkeypatch.setattr(stored_executables, "processor_lines", lambda: ["a processor"])
    named = {
        platform: stored_executables._surroundings.__wrapped__(
            (dataclasses.replace(DescribedGPU("", ""), platform=platform),)
        )
        for platform in ("cpu", "gpu")
    }
    assert "a processor" in named["cpu"] and "a card" not in named["cpu"]
    assert "a card" in named["gpu"] and "a processor" not in named["gpu"]


def test_a_table_of_measured_tiles_is_part_of_the_code(tmp_path, monkeypatch):
    for folder in traced_code._TRACED:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(traced_code, "__file__", str(tmp_path / "jaxpage" / "device" / "a" / "b"))
    monkeypatch.setattr(traced_code.pallas_kernels, "__file__", str(tmp_path / "pallas_kernels/x"))
    before = traced_code.hash_traced_code.__wrapped__()
    (tmp_path / "pallas_kernels" / "tuned.json").write_text("{}")
    assert traced_code.hash_traced_code.__wrapped__() != before


def test_files_are_loaded_before_a_start_on_a_gpu_is_over():
    """A file that fails to load compiles then, and not in service."""
    table, made = object.__new__(Executables), []
    table._until_closed = contextlib.ExitStack()
    table._table = {"a file": Waiting(functools.partial(made.append, "a file"))}
    table._make_in_background(["a file"], waits=True)
    assert made == ["a file"]


def test_a_library_of_attention_is_there_before_an_executable_that_calls_it(monkeypatch):
    """Importing it registers what the executable calls; a start from files traces nothing."""
    names = []
    monkeypatch.setattr(fa3, "library", lambda: (None, names.append("library") or "not here"))
    pages = LayerPages(*(jax.ShapeDtypeStruct((64, 16, 2, 128), jnp.bfloat16) for _ in range(2)))
    with describe_gpu(CARD.device_kind):
        for name, number in (("triton", 0), ("auto", 1)):
            attention_sets(
                Backend(name), CARD, [(pages, None)], [Bucket(256, 8, 256)], 8, "bfloat16"
            )
            assert len(names) == number
