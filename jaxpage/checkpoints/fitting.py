"""Fits the tensors of a checkpoint to the parameters of a model, from headers alone.

All that does not fit is refused in one error.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpage.checkpoints.gguf.header import GGUFTensor, is_gguf
from jaxpage.checkpoints.gguf.tensors import gguf_names, read_gguf_tensors, under_model_names
from jaxpage.checkpoints.layer_counts import layers_beyond
from jaxpage.checkpoints.orbax_files import has_orbax, read_orbax_tensors
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.quantization import (
    METHODS,
    SIZES,
    UNQUANTISED,
    Scheme,
    explain_refused_experts,
)
from jaxpage.checkpoints.safetensors_files import (
    INDEX,
    NUMPY_DTYPES,
    has_safetensors,
    map_array,
    read_tensors,
)
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.layers.parameter import Piece, Source
from jaxpage.models.parameters import FLOATS, Weight

COMPARED_BYTES = 1 << 26  # The bytes of two copies of a tensor that are compared at a time.
CODES = ("I8", "U8", "I32", "F8_E4M3")  # The types that quantised weights are stored in.
_CODES = {dtype.name: code for code, dtype in NUMPY_DTYPES.items()}


@dataclass(frozen=True)
class Filled:
    """Holds a parameter, and the stored tensors that fill it.

    Attributes:
        weight: The parameter.
        pieces: The pieces of its source, each with its tensor.
    """

    weight: Weight
    pieces: tuple[tuple[Piece, TensorInfo], ...]

    def dtype(self, dtype: str | None) -> np.dtype[Any]:
        """Returns the parameter's type in a model of `dtype`.

        For None it is the stored type; where types are mixed, the one that holds them all.
        """
        if self.weight.dtype is not None:
            return np.dtype(jnp.dtype(self.weight.dtype))
        if dtype is not None:
            if dtype not in FLOATS:
                raise ValueError(f"dtype is {dtype!r}, not one of {', '.join(FLOATS)}")
            return np.dtype(jnp.dtype(dtype))
        stored = [NUMPY_DTYPES[info.dtype] for _, info in self.pieces]
        return np.dtype(functools.reduce(jnp.promote_types, stored))


@dataclass(frozen=True)
class LoadPlan:
    """Holds which stored tensors fill which parameter; `fit` makes it.

    Attributes:
        directory: The directory or file.
        layout: "safetensors", "orbax", "gguf", "memory" or "module".
        parameters: The parameters with their tensors.
        names: The names of tensors in a GGUF file, by the names that the model's family has.
        arrays: The arrays that are in memory, by name.
        unused: The names of tensors that fill nothing, and need not.
        may_alias: True if an array of JAX that needs no change may itself become a parameter;
            otherwise parameters share no memory with the arrays.
    """

    directory: Path
    layout: str
    parameters: tuple[Filled, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    unused: tuple[str, ...] = field(default=(), repr=False, compare=False)
    may_alias: bool = False

    @property
    def is_in_memory(self) -> bool:
        """Returns whether the tensors are arrays in memory and not in a file."""
        return self.layout in ("memory", "module")

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Returns the tensors that are used, each once, by the name in the model's family."""
        return {piece.name: info for filled in self.parameters for piece, info in filled.pieces}

    def num_bytes(self, dtype: str | None = None) -> int:
        """Returns the bytes of the parameters in a type of floats, or as they are stored."""
        return sum(filled.weight.size * filled.dtype(dtype).itemsize for filled in self.parameters)

    def most_common_dtype(self) -> str:
        """Returns the type of floats that most numbers of the checkpoint have."""
        counts = dict.fromkeys(FLOATS, 0)
        for info in self.tensors.values():
            name = info.counts_as if isinstance(info, GGUFTensor) else NUMPY_DTYPES[info.dtype].name
            if name in counts:
                counts[name] += math.prod(info.shape)
        return max(counts, key=lambda name: counts[name])


def fit(
    directory: Path,
    layout: str,
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    ignored: Sequence[str],
    problems: Problems,
    *,
    compare: bool = True,
    scheme: Scheme | None = None,
) -> LoadPlan:
    """Fits the checkpoint to `weights`, and adds what does not fit to `problems`.

    That is every missing, unexpected or misshapen tensor, every dtype that weights cannot have, and
    every tensor that is stored twice with different numbers. Nothing reaches the device.

    Args:
        directory: The directory or file.
        layout: The layout that `read_layout` has found.
        stored: The tensors that it has found.
        weights: The parameters of the model.
        ignored: Globs over names of tensors that may stay unused.
        problems: The list that errors are added to.
        compare: True to compare the numbers of a tensor that is stored under two names.
        scheme: The scheme of a quantised checkpoint.
    """
    plan = LoadPlan(directory, layout)
    if layout == "gguf":
        plan = replace(plan, names=gguf_names(directory, weights))
        stored = under_model_names(stored, plan.names, weights)
    return fit_stored(plan, stored, weights, ignored, problems, compare=compare, scheme=scheme)


def fit_stored(
    plan: LoadPlan,
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    ignored: Sequence[str],
    problems: Problems,
    *,
    compare: bool = True,
    scheme: Scheme | None = None,
    refused: Set[str] = frozenset(),
) -> LoadPlan:
    """Fits tensors whose headers have been read, and returns the filled plan.

    Args:
        plan: The plan without parameters.
        stored: The tensors by name.
        weights: The parameters of the model.
        ignored: Globs over names of tensors that may stay unused.
        problems: The list that errors are added to; it has those of the headers already.
        compare: See `fit`.
        scheme: See `fit`.
        refused: The names of tensors whose errors the caller reports.
    """
    if scheme:
        ignored = (*ignored, *scheme.ignored)
        if refusal := _explain_refused_experts(stored, weights, ignored, scheme):
            problems.add(refusal)
            return plan
    files_sound = not problems
    used = set[str]()
    parameters = []
    searched = _list_searched_files(stored)
    names = _find_unexpected(stored, used, ignored)
    is_beyond = layers_beyond(names if files_sound else (), weights, problems)
    checkpoint = stored, weights, scheme, problems
    other_form = _of_other_form(*checkpoint) | _of_other_sizes(*checkpoint)
    for weight in weights:
        pieces = []
        for piece in _choose(weight.sources, stored).pieces:
            if _module(piece.name) in other_form:
                continue
            infos = [stored[name] for name in piece.names if name in stored]
            if infos:
                pieces.append((piece, infos[0]))
            if not used.isdisjoint(piece.names):
                continue  # another part of a tensor that has been checked
            used.update(piece.names)
            candidates = [info for info in infos if info.name not in refused]
            fitting = [info for info in candidates if _fits(weight, piece, info, problems)]
            if fitting and compare and files_sound:
                _check_numbers(piece, fitting[0], plan.layout, problems)
            # With no readable file at all, a list of every tensor would be of no use.
            if not infos and (stored or files_sound) and not is_beyond(piece.names):
                name = quote(plan.names.get(piece.name, piece.name))
                problems.add(f"tensor {name} of shape {piece.stored_shape} is missing{searched}")
            if plan.layout == "orbax":
                for copy in fitting[1:]:
                    problems.add(f"{_both(fitting[0], copy)} are one parameter, kept twice")
            elif compare and files_sound:
                for copy in fitting[1:]:
                    _check_copy(fitting[0], copy, problems)
        parameters.append(Filled(weight, tuple(pieces)))
    if scheme and compare and files_sound and plan.layout == "safetensors":
        _check_unused(stored, scheme, used, other_form, problems)
    for name in _find_unexpected(stored, used, ignored):
        if not is_beyond([name]) and _module(name) not in other_form:
            problems.add(f"{stored[name].described} of shape {stored[name].shape} is unexpected")
    unused = sorted(stored.keys() - used)
    return replace(plan, parameters=tuple(parameters), unused=tuple(unused))


def _explain_refused_experts(
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    ignored: Sequence[str],
    scheme: Scheme,
) -> str | None:
    """Returns why experts of this scheme cannot be read; None if they can, or if there are none."""
    known = {name for weight in weights for name in weight.tensor_names}
    return explain_refused_experts(scheme, weights, _find_unexpected(stored, known, ignored))


def rename_tensors(
    tensors: Mapping[str, TensorInfo], rename: Callable[[str], str], problems: Problems
) -> dict[str, TensorInfo]:
    """Returns the tensors by the names that `rename` gives them; two with one name are an error."""
    stored: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        first = stored.setdefault(rename(name), info)
        if first is not info:
            problems.add(f"{_both(first, info)} are one parameter")
    return stored


def read_layout(directory: Path, problems: Problems) -> tuple[str, Mapping[str, TensorInfo]]:
    """Returns the layout of the directory or file, and its tensors by name, from headers alone."""
    if is_gguf(directory):
        return "gguf", read_gguf_tensors(directory, problems)
    if has_orbax(directory) and has_safetensors(directory):
        problems.add(
            "there are both safetensors files and an orbax directory: set load_format to one of them"
        )
        return "safetensors", {}
    if has_orbax(directory):
        return "orbax", read_orbax_tensors(directory, problems)
    return "safetensors", read_tensors(directory, problems)


def same_bytes(info: TensorInfo, copy: TensorInfo) -> bool:
    """Returns whether two tensors in safetensors files have the same type, shape and bytes."""
    if (info.dtype, info.shape) != (copy.dtype, copy.shape):
        return False
    # The bytes are compared and not the numbers, because a NaN is not equal to itself.
    first, second = (map_array(tensor).reshape(-1).view(np.uint8) for tensor in (info, copy))
    chunks = range(0, len(first), COMPARED_BYTES)
    return all(
        np.array_equal(first[at : at + COMPARED_BYTES], second[at : at + COMPARED_BYTES])
        for at in chunks
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _of_other_form(
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    scheme: Scheme | None,
    problems: Problems,
) -> set[str]:
    """Returns the modules that are quantised where the model's are not, or the reverse.

    It adds one sentence in place of a list of all their tensors.
    """
    pieces = [piece for weight in weights for source in weight.sources for piece in source.pieces]
    coded = {
        _module(piece.name)
        for piece in pieces
        if piece.stored and not {*piece.stored.dtypes} <= {*FLOATS}
    }
    known = {name for piece in pieces for name in piece.names}
    floats = [_CODES[name] for name in FLOATS]
    plain = [
        info
        for name in sorted(coded)
        if scheme and (info := stored.get(f"{name}.weight")) and info.dtype in floats
    ]
    if plain and scheme:
        problems.add(
            f"{plain[0].described} has dtype {plain[0].dtype}, but quantization_config of config.json says that it is quantised, by "
            f"{scheme.name!r} (such modules: {len(plain)}): remove quantization_config, or name there what is not"
        )
    other_forms = [
        info
        for name, info in stored.items()
        if info.dtype in CODES
        and (module := _module(name)) not in coded
        and f"{module}.weight" in known
    ]
    modules = {_module(info.name) for info in other_forms}
    if modules:
        advice = (
            "config.json has no quantization_config: add the one that belongs to the checkpoint"
        )
        if scheme and scheme.name in METHODS:
            module = _module(other_forms[0].name)
            advice = (
                "quantization_config of config.json says that it is not quantised: correct that"
            )
            if scheme.form_of(module):
                advice = (
                    "only those of linear layers, experts and an untied head are supported: use a "
                    f"checkpoint where {module} is not quantised"
                )
        problems.add(
            f"{other_forms[0].described} has dtype {other_forms[0].dtype}, which is of quantised weights (such modules: {len(modules)}), "
            "but "
            f"{advice}, or use {UNQUANTISED}"
        )
    return modules | {_module(info.name) for info in plain}


def _of_other_sizes(
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    scheme: Scheme | None,
    problems: Problems,
) -> set[str]:
    """Returns the modules of which some tensors have the model's shapes and some not.

    If these are most modules, it adds one sentence in place of a list; otherwise it returns none.
    """
    if not scheme or scheme.name not in SIZES:
        return set()
    fitting = dict[str, set[bool]]()
    wrong = list[Piece]()
    for piece in [
        piece for weight in weights for source in weight.sources for piece in source.pieces
    ]:
        if piece.stored and (info := stored.get(piece.name)):
            fits = _has_shape(info, piece)
            fitting.setdefault(_module(piece.name), set()).add(fits)
            wrong += [] if fits else [piece]
    modules = {name for name, sizes in fitting.items() if len(sizes) == 2}
    # Where no tensor of a module fits, the sizes of the model are wrong, and not those of groups.
    if 2 * len(modules) <= len(fitting) or {False} in fitting.values():
        return set()
    info = stored[wrong[0].name]
    problems.add(
        f"{info.described} has shape {info.shape}, and the model needs {wrong[0].stored_shape}, as in {len(modules)} of {len(fitting)} "
        f"quantised modules: change {SIZES[scheme.name]} in quantization_config of config.json to what the checkpoint has"
    )
    return modules


def _list_searched_files(stored: Mapping[str, TensorInfo]) -> str:
    """Returns the end of the sentence that says that a tensor is missing: the files that were read.

    It is empty where the list of problems names the one place.
    """
    files = {info.label for info in stored.values() if info.label}
    if not files:
        return ""
    return f" in {files.pop()}" if len(files) == 1 else f" in {INDEX} and its {len(files)} files"


def _choose(sources: Sequence[Source], stored: Mapping[str, TensorInfo]) -> Source:
    """Returns the first source of which all tensors are there, else the first.

    Two sources may take the same tensors in two shapes.
    """

    def is_there(source: Source, fits: Callable[[TensorInfo, Piece], bool]) -> bool:
        return all(
            any(name in stored and fits(stored[name], piece) for name in piece.names)
            for piece in source.pieces
        )

    complete = [source for source in sources if is_there(source, lambda *_: True)]
    if len(complete) > 1:
        complete = [source for source in complete if is_there(source, _has_shape)] or complete
    return next(iter(complete), sources[0])


def _find_unexpected(
    stored: Mapping[str, TensorInfo], known: Set[str], ignored: Sequence[str]
) -> list[str]:
    return [
        name
        for name in sorted(stored.keys() - known)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]


def _fits(weight: Weight, piece: Piece, info: TensorInfo, problems: Problems) -> bool:
    dtypes = piece.stored.dtypes if piece.stored else (weight.dtype,) if weight.dtype else FLOATS
    codes = [_CODES[name] for name in dtypes]
    has_shape = _has_shape(info, piece)
    if not has_shape:
        problems.add(
            f"{info.described} has shape {info.shape}, and the model needs {piece.stored_shape}"
        )
    if info.dtype not in codes:
        problems.add(
            f"{info.described} has dtype {info.dtype}, not {'one of ' if len(codes) > 1 else ''}{', '.join(codes)}"
        )
    return has_shape and info.dtype in codes


def _has_shape(info: TensorInfo, piece: Piece) -> bool:
    """Returns whether the tensor has the piece's shape. For one number () and (1,) are the same."""
    return info.shape == piece.stored_shape or {info.shape, piece.stored_shape} == {(), (1,)}


def _check_numbers(piece: Piece, info: TensorInfo, layout: str, problems: Problems) -> None:
    """Checks scales, which are small.

    In Orbax's layout they are not checked: jaxpage writes it, from a checkpoint that was checked.
    """
    if (
        piece.stored
        and piece.stored.check
        and layout == "safetensors"
        and (wrong := piece.stored.check(map_array(info)))
    ):
        problems.add(f"{info.described} {wrong}")


def _check_unused(
    stored: Mapping[str, TensorInfo],
    scheme: Scheme,
    used: Set[str],
    passed: Set[str],
    problems: Problems,
) -> None:
    """Checks the scheme's tensors that fill no parameter, and adds one sentence of each kind.

    See `Scheme.checks`. Modules in `passed` are left out.
    """
    unused = sorted(stored.keys() - used)
    for check in scheme.checks:
        wrong: list[tuple[TensorInfo, str]] = []
        for name in (
            name for name in unused if name.endswith(check.end) and _module(name) not in passed
        ):
            info = stored[name]
            says = f"has dtype {stored[name].dtype}, not {' or '.join(check.codes)}"
            problem = (
                check.says(_module(name), map_array(info)) if info.dtype in check.codes else says
            )
            wrong += [(info, problem)] if problem else []
        if wrong:
            problems.add(f"{wrong[0][0].described} {wrong[0][1]} (such tensors: {len(wrong)})")


def _both(first: TensorInfo, second: TensorInfo) -> str:
    files = " and ".join(dict.fromkeys(info.label for info in (first, second) if info.label))
    return f"{files}{': ' if files else ''}tensors {quote(first.name)} and {quote(second.name)}"


def _check_copy(info: TensorInfo, copy: TensorInfo, problems: Problems) -> None:
    """Checks that two names for one tensor (a tied table saved in full) have the same bytes."""
    if not same_bytes(info, copy):
        problems.add(f"{_both(info, copy)} are one parameter, but they differ")
