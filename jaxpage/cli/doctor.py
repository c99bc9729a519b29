"""Makes the report of `jaxpage doctor`: versions, devices, memory, caches, the packaged model.

A failure of a part becomes a line of the report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from jaxpage import __version__

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "orbax-checkpoint",
)
OPTIONAL_PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
DETECTION_SECONDS = 5
LINE_CHARACTERS = 78  # of a line of the list of architectures, after its name
# The driver of CUDA 12.8. With older ones a CUDA graph with a condition or a loop may hang
# (openxla/xla#25769).
MIN_DRIVER = 570
VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)


def report(model: str | None = None) -> Iterator[tuple[str, str]]:
    """Yields the lines of the report as pairs of a name and a value.

    If a part cannot be found out, its value says why.

    Args:
        model: A model whose files are looked at, too, or None.
    """
    yield "jaxpage", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for package in PACKAGES:
        yield package, _version(package) or "not installed"
    for package in OPTIONAL_PACKAGES:
        yield package, _version(package) or "not installed (optional)"
    yield from _part("devices", _devices)
    yield from _part("NVIDIA driver", _nvidia_driver)
    yield from _part("tensor parallel", _tensor_parallel)
    yield from _part("several hosts", _several_hosts)
    yield from _part("host memory", _host_memory)
    yield from _part("CPU kernels", _cpu_kernels)
    yield from _part("C++ compiler", _cpp_compiler)
    yield from _part("compile cache", _compile_cache)
    yield from _part("demo model", _demo_model)
    yield from _part("architectures", _architectures)
    yield from _part("families of packages", families_of_packages)
    yield from _part("quantised weights", _quantizations)
    if model is not None:
        yield from _model(model)
    for variable in (
        *VARIABLES,
        *sorted(name for name in os.environ if name.startswith("JAXPAGE_")),
    ):
        if variable in os.environ:
            # The report is meant to be sent to others.
            is_secret = any(word in variable for word in ("KEY", "TOKEN", "SECRET"))
            yield variable, "set" if is_secret else os.environ[variable]


def _model(model: str) -> Iterator[tuple[str, str]]:
    from jaxpage.checkpoints.finding import resolve_model

    try:
        resolve_model(model)
    except Exception as error:  # it is in the way of all that follows
        yield "model", _unknown(error)
        return
    yield from _part("model", lambda: _checkpoint(model))
    yield from _part("pictures", lambda: _pictures(model))
    yield from _part("tokenizer", lambda: _tokenizer(model))
    # An encoder takes no chats, so there is nothing to say about a template.
    if texts := list(_part("texts", lambda: _texts(model))):
        yield from texts
        return
    yield from _part("chat template", lambda: _chat_template(model))
    yield from _part("form of answers", lambda: _chat_form(model))


def _part(name: str, find: Callable[[], Iterator[str]]) -> Iterator[tuple[str, str]]:
    try:
        for value in find():
            yield name, value
    except Exception as error:  # people run doctor because something is broken
        yield name, _unknown(error)


def _unknown(error: Exception) -> str:
    return f"unknown: {type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[str]:
    import jax

    for device in jax.devices():
        memory = device.memory_stats() or {}
        limit = memory.get("bytes_limit")
        used = memory.get("bytes_in_use", 0)
        room = f", {_gib(limit - used)} free of {_gib(limit)}" if limit else ""
        yield f"{device.platform}:{device.id} {device.device_kind}{room}"


def _nvidia_driver() -> Iterator[str]:
    """Yields the version of the NVIDIA driver, and a warning if it is old.

    It asks nvidia-smi, which comes with the driver, so that it also knows where JAX finds no GPU.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        yield "none found (no nvidia-smi)"
        return
    # It hangs where the driver does, so it has a limit.
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DETECTION_SECONDS, check=False
    )
    version = done.stdout.strip().partition("\n")[0]
    if done.returncode or not version.partition(".")[0].isdecimal():
        yield f"unknown: nvidia-smi says {(done.stdout + done.stderr).strip()[:200]!r}"
        return
    is_old = int(version.partition(".")[0]) < MIN_DRIVER
    advice = "steps may hang, which are CUDA graphs with loops and conditions: install"
    alternative = "--xla_gpu_enable_command_buffer= does without graphs"
    yield (
        f"{version} (warning: {advice} r{MIN_DRIVER} or newer, or XLA_FLAGS={alternative})"
        if is_old
        else version
    )


def _tensor_parallel() -> Iterator[str]:
    import jax

    count = len(jax.devices())
    advice = (
        f", if the model's heads can be divided: jaxpage plan MODEL --devices {count}"
        if count > 1
        else ""
    )
    yield (
        f"{count} {jax.devices()[0].platform} device(s), so tensor_parallel_size can be up to "
        f"{count}{advice}"
    )


def _several_hosts() -> Iterator[str]:
    from jaxpage.serving import find_job

    job = find_job(DETECTION_SECONDS)
    if job is None:
        yield (
            "jax.distributed detects no job of Slurm, Open MPI or Kubernetes: give --num-hosts, "
            "--host-rank and --coordinator"
        )
    else:
        host = job.coordinator.rpartition(":")[0]
        yield (
            f"process {job.process_id} of {job.num_processes} of a job, process 0 on {host}: "
            "--coordinator auto"
        )


def _host_memory() -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield f"{_gib(memory.available)} free of {_gib(memory.total)}, {os.cpu_count()} cores"


def _cpu_kernels() -> Iterator[str]:
    from jaxpage.device.hardware import cpu_kernels

    yield cpu_kernels()


def _cpp_compiler() -> Iterator[str]:
    from jaxpage.device.hardware import cpp_compiler

    try:
        command = cpp_compiler()
    except RuntimeError:
        yield (
            "none (g++, clang++, c++ or $CXX): kernels for CPUs come from a wheel that has them, "
            "or not at all"
        )
        return
    done = subprocess.run(
        [*command, "--version"],
        capture_output=True,
        text=True,
        timeout=DETECTION_SECONDS,
        check=False,
    )
    version = (done.stdout + done.stderr).strip().partition("\n")[0]
    failure = f", which fails with status {done.returncode}" if done.returncode else ""
    yield f"{' '.join(command)}{failure}: {version}"


def _compile_cache() -> Iterator[str]:
    from jaxpage.device import compile_cache_directory

    directory = compile_cache_directory()
    if not directory.is_dir():
        yield f"{directory} (not there yet)"
        return
    files = [path for path in directory.rglob("*") if path.is_file()]
    # Whoever can write there can have code run in later starts.
    mode = stat.S_IMODE(directory.stat().st_mode)
    warning = "" if mode & 0o077 == 0 else " (others can enter it: it holds code; chmod 700)"
    yield (
        f"{directory}, {len(files)} files, "
        f"{sum(path.stat().st_size for path in files) / 2**20:.1f} MiB, mode {mode:o}{warning}"
    )


def _demo_model() -> Iterator[str]:
    directory = Path(__file__).parents[1] / "demo"
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    present = (directory / "config.json").is_file()
    yield f"{directory}, {size / 2**20:.1f} MiB" if present else "not in this installation"


def _checkpoint(model: str) -> Iterator[str]:
    from jaxpage.checkpoints import open_model
    from jaxpage.checkpoints.finding import resolve_model

    files = open_model(resolve_model(model))
    architecture = ", ".join(files.config.get("architectures") or ["of no named architecture"])
    yield f"{files.directory}, {architecture}: config and tensors fit"


def _pictures(model: str) -> Iterator[str]:
    """Yields what a model does with pictures; nothing for one without an encoder."""
    from jaxpage.assembly import open_pictures
    from jaxpage.checkpoints import open_model
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.checkpoints.tokenizers import load_tokenizer

    directory = resolve_model(model)
    files = open_model(directory, vision=True)
    if files.vision is None:
        return
    pictures = open_pictures(directory, files.config, load_tokenizer(directory))
    if pictures is None:
        yield "refused: the files name no image processor that is known"
    else:
        yield f"processed by {pictures.settings.kind}; {pictures.rule.marker!r} stands for one"


def _texts(model: str) -> Iterator[str]:
    """Yields what an encoder does with texts; nothing for a model that generates."""
    from jaxpage.checkpoints import describe_model, read_embedding_files
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.models import EncoderConfig

    directory = resolve_model(model)
    described = describe_model(directory)
    if not isinstance(described.spec, EncoderConfig):
        return
    files = read_embedding_files(directory)
    files = files.of_encoder(described.config, scores_pairs=described.spec.scores_pairs)
    positions = described.spec.max_position_embeddings
    max_length = f"at most {min(positions, files.max_tokens or positions)} tokens of {positions}"
    if files.pair_activation is not None:
        yield f"pairs are scored, by {files.pair_activation}: {max_length}"
    else:
        yield f"embedded by {', '.join(files.modes)}: {max_length}"
        if files.refusal:
            yield f"not supported: {files.refusal}"


def _tokenizer(model: str) -> Iterator[str]:
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.checkpoints.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(model))
    yield "none: prompts are token ids" if tokenizer is None else f"{len(tokenizer)} tokens"


def _chat_template(model: str) -> Iterator[str]:
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.checkpoints.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(model))
    if tokenizer is None or not tokenizer.chat_template:
        yield "none: completions alone"
        return
    # A template can be broken in ways that only rendering shows.
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    yield f"makes {len(text)} characters of one message of 5"


def _chat_form(model: str) -> Iterator[str]:
    """Yields the forms of tool calls and of reasoning that `serve` derives from the template."""
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.checkpoints.tokenizers import load_tokenizer
    from jaxpage.serving import derive_form

    form, problem = derive_form(load_tokenizer(resolve_model(model)))
    if form.tools is not None:
        yield f"tool calls: {form.tool_form}, such as {form.tools.example!r}"
    elif form.declared is not None:
        yield "tool calls: as the tokenizer's response_template says"
    elif form.has_tools:
        yield f"tool calls: of no form that can be read: {problem}"
    else:
        yield "tool calls: the template writes none"
    if form.reasoning is not None:
        yield (
            f"reasoning: {form.reasoning_form}, from {form.reasoning.open!r} to "
            f"{form.reasoning.close!r}"
        )
    else:
        yield "reasoning: the template writes none"


def _architectures() -> Iterator[str]:
    from jaxpage.models import ENCODERS, FAMILIES

    yield f"{len(FAMILIES)}, also listed in docs/reference/models.md:"
    yield from textwrap.wrap(", ".join(FAMILIES), LINE_CHARACTERS, break_on_hyphens=False)
    yield f"and {len(ENCODERS)} encoders, which embed or rank texts:"
    yield from textwrap.wrap(", ".join(ENCODERS), LINE_CHARACTERS, break_on_hyphens=False)


def families_of_packages() -> Iterator[str]:
    """Yields the model families that other installed packages add."""
    from jaxpage.models import ENTRY_POINTS

    entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    described = [
        f"{entry_point.name} of {entry_point.dist.name} {entry_point.dist.version}"
        if entry_point.dist
        else entry_point.name
        for entry_point in entry_points
    ]
    yield ", ".join(sorted(described)) or "none are installed"


def _quantizations() -> Iterator[str]:
    from jaxpage.checkpoints.quantization import GGUF_FORMATS, METHODS, SCHEMES

    yield (
        f"checkpoints of {', '.join(METHODS)}; at load {', '.join(SCHEMES)}; kept of GGUF files "
        f"{', '.join(GGUF_FORMATS)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
