"""Keeps the table of executables, which are compiled ahead of time; the hot path only looks up.

A program for one text may begin before all are there: those of its first steps are compiled in the
background, and the others when a step asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.device.autotuning import (
    TUNED_PLATFORMS,
    autotuning_options,
    choices_of,
    hash_choices,
)
from jaxpage.device.batch_invariance import exact_options
from jaxpage.device.compilations import watch_compilations
from jaxpage.device.compiler_options import compiler_options
from jaxpage.device.drafters.drafter import DeviceDrafter, split_layers
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.hardware.mesh import DeviceMesh, compile_zeros
from jaxpage.device.inputs.buckets import Bucket, BucketMenu
from jaxpage.device.inputs.step_inputs import ProcessorInputs, processor_shapes, size_when_packed
from jaxpage.device.moving import gather_blocks, scatter_blocks, shapes_of_swap
from jaxpage.device.pages.kv_pages import KVPages, in_groups
from jaxpage.device.steps import StepOptions, StepOutput, copy_step, model_step
from jaxpage.device.stored_executables import StoredExecutable, StoredExecutables, workspace_bytes
from jaxpage.device.waiting import Jobs, Waiting, begin, run_all
from jaxpage.settings.cuda_graphs import USUAL_GRAPHS, GraphSettings
from pallas_kernels.compat import target_device


class CompiledStep(NamedTuple):
    """Holds the executable of a bucket.

    Attributes:
        executable: The executable.
        neutral: Arrays on the device for the inputs of logits processors that a step does not use.
        off: The drafter that is left out, so that the executable is the target's alone; None if
            none is.
    """

    executable: Any
    neutral: ProcessorInputs
    off: DeviceDrafter | None = None

    def __call__(
        self,
        parameters: Any,
        pages: KVPages,
        packed: Any,
        processor_inputs: ProcessorInputs | None = None,
        *vectors: Any,
    ) -> tuple[StepOutput, KVPages]:
        """Runs the step, and returns its output and the pages of all layers.

        `vectors` is the array of a bucket that takes vectors.
        """
        filled = self.neutral
        if processor_inputs is not None:
            filled = ProcessorInputs(
                *(
                    default if array is None else array
                    for array, default in zip(processor_inputs, filled, strict=True)
                )
            )
        pages, others = split_layers(pages, self.off)
        if self.off is not None:
            parameters = {**parameters, "drafter": None}
        output, pages = self.executable(parameters, pages, packed, filled, *vectors)
        return output, pages + others


class Executables:
    """Holds an executable for each bucket, and for each cache group those that move blocks.

    A group has one that copies blocks and, if the menu swaps, two that swap them. Where a drafter
    may be off, each bucket without drafts has a second executable: that of the target alone. One
    more makes empty pages. A shape that is not in the table is an error, never a compilation.
    """

    def __init__(
        self,
        menu: BucketMenu,
        parameters: Any,
        pages: KVPages,
        options: StepOptions,
        *,
        mesh: DeviceMesh,
        target_only: bool = False,
        stored: StoredExecutables | None = None,
        further: Jobs | None = None,
        first: Callable[[BucketMenu], Sequence[Bucket]] | None = None,
        progress: bool,
    ):
        """Compiles all executables, or finds them as files.

        Args:
            menu: The buckets, and the numbers of blocks that are moved in one call.
            parameters: The parameters' shapes, types and shardings; arrays and
                `jax.ShapeDtypeStruct` both do.
            pages: The same of the pages.
            options: The constants of the steps.
            mesh: The devices.
            target_only: The drafter may be off.
            stored: The executables of earlier starts; None if there are none and none are kept.
            further: Compile an encoder, by key.
            first: Chooses the buckets whose executables are compiled in the background, in this
                order, while the others are compiled when a step asks for them. None compiles all
                before this returns.
            progress: Shows a progress bar.
        """
        self.options = options
        self._mesh = mesh
        self.num_swapped = menu.num_swapped  # blocks that `gather` and `scatter` take
        self._compilations = watch_compilations()
        self._num_before = self._compilations.count
        self._num_found_before = self._compilations.num_found
        started = time.monotonic()
        rests = target_only and options.drafter is not None
        # A step that verifies has drafts, so a drafter that made them is on.
        alone = menu.decode + menu.chunk + menu.vectors if rests else ()
        # By bucket: the key of its second executable in the table.
        self._target_only = {bucket: f"target only {bucket}" for bucket in alone}
        self._neutral = {
            num_draws: _neutral(num_draws, options, mesh)
            for num_draws in {b.num_processed for b in menu.buckets}
        }
        jobs = self._step_jobs(menu, parameters, pages) | (further or {})
        jobs |= self._block_jobs(menu, pages)
        self._stored = stored
        self._workspace_bytes: int | None = None
        self._choices: dict[Bucket | str, str] = {}  # of executables that come from files
        self._table: dict[Bucket | str, Any] = {}
        self._until_closed = contextlib.ExitStack()
        in_use = contextlib.nullcontext() if stored is None else stored.in_use()
        if first is None:
            with in_use:
                self._get_all(jobs, progress)
            # A file that does not load is compiled again: on a GPU, where that takes long and may
            # measure kernels, before the first step.
            self._make_in_background(
                [*menu.by_first_use(), *self._table], waits=mesh.first.platform != "cpu"
            )
        else:
            self._until_closed.enter_context(in_use)
            self._table = {
                key: Waiting(functools.partial(_make, stored, job)) for key, job in jobs.items()
            }
            keys = first(menu)
            from_files = [key for key in keys if stored is not None and stored.has(jobs[key])]
            self._make_in_background(from_files)
            # With a compilation on each CPU the first step would wait for all of them: other
            # programs run, and two CPUs are often one core.
            num_threads = max(1, (os.cpu_count() or 1) // 2)
            new = [key for key in keys if key not in from_files]
            self._make_in_background(new, num_threads=num_threads)
        self.compile_seconds = time.monotonic() - started

    def _get_all(self, jobs: Jobs, progress: bool) -> None:
        """Fills the table with what is compiled now, and what is to be loaded from files."""
        entries = run_all(
            {key: functools.partial(_get, self._stored, job) for key, job in jobs.items()},
            progress,
        )
        self._workspace_bytes = max(map(_workspace_bytes, entries.values()))
        self._table = {
            key: Waiting(functools.partial(self._load, key, entry))
            if isinstance(entry, StoredExecutable)
            else entry
            for key, entry in entries.items()
        }

    def _load(self, key: Bucket | str, entry: StoredExecutable) -> Any:
        """Returns the executable of a file, of which the choices alone are kept."""
        executable = entry.load()
        self._choices[key] = entry.choices
        return executable

    def _step_jobs(self, menu: BucketMenu, parameters: Any, pages: KVPages) -> Jobs:
        """Returns what compiles the steps, by the keys of the table."""
        options = self.options
        jobs: Jobs = {
            bucket: functools.partial(_compile_step, parameters, pages, bucket, options, self._mesh)
            for bucket in menu.buckets
        }
        without_drafter = options._replace(drafter=None)
        for bucket, key in self._target_only.items():
            target = {**parameters, "drafter": None}, split_layers(pages, options.drafter)[0]
            jobs[key] = functools.partial(
                _compile_step, *target, bucket, without_drafter, self._mesh
            )
        return jobs

    def _block_jobs(self, menu: BucketMenu, pages: KVPages) -> Jobs:
        """Returns what compiles new pages, and copies and swaps of blocks, by the table's keys."""
        jobs: Jobs = {"pages": functools.partial(compile_zeros, pages, self._mesh)}
        settings = self.options.attention_backend, self._mesh
        for group in {*self.options.layer_groups}:
            group_pages = self._of_group(pages, group)
            jobs[f"copy {group}"] = functools.partial(
                _compile_copy, group_pages, menu.num_copies, *settings
            )
            if menu.num_swapped:
                jobs[f"gather {group}"] = functools.partial(
                    _compile_gather, group_pages, menu.num_swapped, *settings
                )
                jobs[f"scatter {group}"] = functools.partial(
                    _compile_scatter, group_pages, menu.num_swapped, *settings
                )
        return jobs

    @property
    def compile_total(self) -> int:
        """Returns how many compilations JAX has made since these executables were begun.

        It counts those of the whole process, and must not grow in service.
        """
        return self._compilations.count - self._num_before

    @property
    def num_found_of_all(self) -> tuple[int, int]:
        """Returns how many executables were in a cache, and how many there are.

        Where executables are kept as files, these are counted; else all that JAX compiled.
        """
        if self._stored is not None:
            return self._stored.num_found, len(self._table)
        return self._compilations.num_found - self._num_found_before, self.compile_total

    def step(self, bucket: Bucket, draft_depth: int | None = None) -> CompiledStep:
        """Returns the step of a bucket.

        Args:
            bucket: The shape.
            draft_depth: The value of `StepPlan.draft_depth`. With None the step runs without a
                drafter, where there is such a step.
        """
        neutral = self._neutral[bucket.num_processed]
        drafter = self.options.drafter
        is_off = draft_depth is None or (
            # A drafter without layers keeps nothing of the step's tokens, so it has no work.
            draft_depth == 0 and drafter is not None and not drafter.num_layers
        )
        if is_off and bucket in self._target_only:
            return CompiledStep(self.executable(self._target_only[bucket]), neutral, drafter)
        return CompiledStep(self.executable(bucket), neutral)

    def new_pages(self) -> KVPages:
        """Makes empty pages.

        A pool that is lost is made again in service, where nothing may be compiled.
        """
        return cast(KVPages, self.executable("pages")())

    def copy(self, pages: KVPages, group: int, pairs: Any) -> KVPages:
        """Copies blocks of a cache group; see `copy_step`."""
        return self._move(pages, group, f"copy {group}", pairs)

    def gather(self, pages: KVPages, group: int, blocks: Any) -> Any:
        """Returns the contents of blocks, as far as they are on devices of this process."""
        return self._mesh.of_process(
            self.executable(f"gather {group}")(self._of_group(pages, group), blocks), 1
        )

    def scatter(self, pages: KVPages, group: int, blocks: Any, contents: Any) -> KVPages:
        """Writes contents into blocks, as `gather` returned them."""
        return self._move(
            pages, group, f"scatter {group}", blocks, self._mesh.from_process(contents, 1)
        )

    def _move(self, pages: KVPages, group: int, name: str, *arguments: Any) -> KVPages:
        """Runs an executable that moves blocks of one group; returns the pages of all layers."""
        move = self.executable(name)
        return in_groups(
            pages,
            self.options.layer_groups,
            lambda other, group_pages: (
                move(group_pages, *arguments) if other == group else group_pages
            ),
        )

    def _of_group(self, pages: KVPages, group: int) -> KVPages:
        return tuple(
            layer
            for layer, other in zip(pages, self.options.layer_groups, strict=True)
            if other == group
        )

    def executable(self, key: Bucket | str) -> Any:
        """Returns an executable.

        In the first second after a start from files a step may wait until its own is loaded.
        """
        executable = self._table[key]
        if isinstance(executable, Waiting):
            self._table[key] = executable = executable.result()
        return executable

    @functools.cached_property
    def autotuning(self) -> str | None:
        """Returns the hash of what XLA's autotuning chose; None where XLA measures nothing.

        It waits until all executables are made.
        """
        if self._mesh.first.platform not in TUNED_PLATFORMS:
            return None
        made = {key: self.executable(key) for key in list(self._table)}
        return hash_choices(
            {
                repr(key): self._choices[key] if key in self._choices else choices_of(each)
                for key, each in made.items()
            }
        )

    def _make_in_background(
        self, keys: Iterable[Bucket | str], *, waits: bool = False, num_threads: int | None = None
    ) -> None:
        """Makes executables on other threads, in this order; see `begin`. `waits` for all."""
        pool = begin([self._table[key] for key in dict.fromkeys(keys)], num_threads)
        pool.shutdown(wait=waits)
        self._until_closed.callback(pool.shutdown, cancel_futures=True)

    def close(self) -> None:
        """Drops all executables."""
        self._until_closed.close()
        self._table = {}
        self._neutral = {}

    def workspace_bytes(self) -> int | None:
        """Returns the most temporary memory that one executable takes, as XLA planned it.

        It is None if not all are compiled before the first step.
        """
        return self._workspace_bytes


def step_call(
    parameters: Any, pages: KVPages, bucket: Bucket, options: StepOptions, mesh: DeviceMesh
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted step of a bucket, and the shapes of its last arguments.

    The parameters and the pages come before them; the pages are donated.
    """
    packed = jax.ShapeDtypeStruct((size_when_packed(bucket, options.tables),), jnp.int32)
    last: tuple[Any, ...] = (packed, _processor_shapes(bucket.num_processed, options))
    if bucket.takes_vectors:
        assert options.vectors is not None
        shape = (bucket.num_tokens, *options.vectors.shape)
        last += (jax.ShapeDtypeStruct(shape, options.vectors.dtype),)
    shapes = mesh.whole(last)
    of_device = functools.partial(model_step, bucket=bucket, options=options)
    step = mesh.on_each(of_device, (parameters, pages, *(None,) * len(last)), (None, pages))
    return jax.jit(step, donate_argnums=1), shapes


def _compile_step(
    parameters: Any, pages: KVPages, bucket: Bucket, options: StepOptions, mesh: DeviceMesh
) -> Any:
    step, shapes = step_call(parameters, pages, bucket, options, mesh)
    return compile_ahead(
        step, parameters, pages, *shapes, graphs=options.graphs, backend=options.attention_backend
    )


def compile_ahead(
    function: Any,
    *shapes: Any,
    graphs: GraphSettings = USUAL_GRAPHS,
    backend: Backend | None = None,
) -> Any:
    """Compiles a function for arguments of these shapes.

    Raises:
        UnsupportedError: The backend is batch invariant, and the function is not.
    """
    traced = function.trace(*shapes)
    device = target_device()
    options = compiler_options(device.platform, graphs) | autotuning_options(device)
    if backend is not None:
        options |= exact_options(backend, traced.jaxpr)
    return traced.lower().compile(options)


def _processor_shapes(num_draws: int, options: StepOptions) -> ProcessorInputs:
    return processor_shapes(num_draws, vocab_size=options.vocab_size, context=options.context)


def _neutral(num_draws: int, options: StepOptions, mesh: DeviceMesh) -> ProcessorInputs:
    return jax.tree.map(
        lambda shape: mesh.put(np.zeros(shape.shape, shape.dtype)),
        _processor_shapes(num_draws, options),
    )


def _compile_copy(pages: KVPages, num_copies: int, backend: Backend, mesh: DeviceMesh) -> Any:
    pairs = mesh.whole(jax.ShapeDtypeStruct((num_copies, 2), jnp.int32))
    copy = mesh.on_each(functools.partial(copy_step, backend=backend), (pages, None), pages)
    return compile_ahead(jax.jit(copy, donate_argnums=0), pages, pairs)


def _compile_gather(pages: KVPages, num_blocks: int, backend: Backend, mesh: DeviceMesh) -> Any:
    blocks, contents = shapes_of_swap(pages, num_blocks, mesh)
    gather = mesh.on_each(
        functools.partial(gather_blocks, backend=backend), (pages, None), contents
    )
    return compile_ahead(jax.jit(gather), pages, blocks)


def _compile_scatter(pages: KVPages, num_blocks: int, backend: Backend, mesh: DeviceMesh) -> Any:
    blocks, contents = shapes_of_swap(pages, num_blocks, mesh)
    scatter = mesh.on_each(
        functools.partial(scatter_blocks, backend=backend), (pages, None, contents), pages
    )
    return compile_ahead(jax.jit(scatter, donate_argnums=0), pages, blocks, contents)


def _get(stored: StoredExecutables | None, job: functools.partial[Any]) -> Any:
    """Returns what a job compiles, or where it is stored."""
    return job() if stored is None else stored.get(job, *_trees(job))


def _make(stored: StoredExecutables | None, job: functools.partial[Any]) -> Any:
    """Returns what a job compiles, or loads it."""
    executable = _get(stored, job)
    return executable.load() if isinstance(executable, StoredExecutable) else executable


def _trees(job: functools.partial[Any]) -> tuple[Any, Any]:
    """Returns trees like a job's arguments and results; their leaves mean nothing."""
    if job.func is _compile_step:
        parameters, pages, bucket, options, mesh = job.args
        drafts = options.drafter is not None and options.drafter.drafts_in(bucket)
        routes = options.routed is not None
        may_be_there = (drafts, options.returns_masks, routes, options.returns_hidden)
        leaves: Any = (0, 0, 0, *(0 if is_there else None for is_there in may_be_there))
        return (parameters, pages, *step_call(parameters, pages, bucket, options, mesh)[1]), (
            StepOutput(*leaves),
            pages,
        )
    if job.func.__name__ == "compile_vision":
        return (job.args[0], job.args[1]), 0
    pages = job.args[0]
    moves = {
        compile_zeros: ((), pages),
        _compile_copy: ((pages, 0), pages),
        _compile_gather: ((pages, 0), 0),
        _compile_scatter: ((pages, 0, 0), pages),
    }
    return moves.get(job.func, ((pages, 0), 0))  # else of an encoder, with one array as its result


def _workspace_bytes(executable: Any) -> int:
    return (
        executable.workspace_bytes
        if isinstance(executable, StoredExecutable)
        else workspace_bytes(executable)
    )
