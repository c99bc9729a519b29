"""Opens a model directory: its config, family, spec and fitted tensors, or its config alone.

All that is wrong is raised as one error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpage.checkpoints.config_file import check_config, out_of_bounds
from jaxpage.checkpoints.fitting import CODES, LoadPlan, fit, read_layout
from jaxpage.checkpoints.gguf.header import GGUFTensor, is_gguf
from jaxpage.checkpoints.gguf.tensors import gguf_scheme
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.quantization import (
    FIELDS,
    GGUF,
    Scheme,
    quantization_of,
    without_quantization,
)
from jaxpage.checkpoints.vision_files import VisionFiles, fit_vision
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models import (
    Family,
    ModelSpec,
    find_ignored_tensors,
    leaves_tying_open,
    load_family,
    model_weights,
    other_names,
)
from jaxpage.models.config import FieldError
from jaxpage.models.parameters import Rule


@dataclass(frozen=True)
class ModelDescription:
    """Holds what config.json says of a model."""

    config: dict[str, Any]
    family: Family
    spec: ModelSpec
    quantization: Scheme | None

    @property
    def rule(self) -> Rule | None:
        """Returns the rule for modules that take the place of the family's."""
        return self.quantization.rule if self.quantization else None


@dataclass(frozen=True)
class ModelFiles:
    """Holds a checkpoint that fits. Only headers have been read, and nothing is on a device."""

    directory: Path
    config: dict[str, Any]
    family: Family
    spec: ModelSpec
    plan: LoadPlan
    quantization: Scheme | None = None
    vision: VisionFiles | None = None  # its encoder of pictures, if that is opened

    @property
    def rule(self) -> Rule | None:
        """Returns the rule for modules that take the place of the family's."""
        return self.quantization.rule if self.quantization else None

    def drop_arrays(self) -> ModelFiles:
        """Returns the same without arrays in memory, which are free when others drop them."""
        return replace(self, plan=replace(self.plan, arrays={}))

    @property
    def rounded_before(self) -> tuple[str, ...]:
        """Returns the types of tensors that the file has rounded, and that loading rounds again."""
        rounded = {
            info.kind
            for filled in self.plan.parameters
            for piece, info in filled.pieces
            if piece.stored and isinstance(info, GGUFTensor) and info.is_quantised
        }
        return tuple(sorted(rounded))


def open_model(
    directory: str | os.PathLike[str], quantization: str | None = None, *, vision: bool = False
) -> ModelFiles:
    """Reads all of a local model but its weights, in Hugging Face, Orbax or GGUF layout.

    Args:
        directory: The directory or GGUF file.
        quantization: See `EngineConfig`.
        vision: True opens its encoder of pictures, too, if the files have one that is known.

    Raises:
        CheckpointError: The config, the architecture, files or tensors do not fit; the error lists
            all that is wrong.
    """
    files = _open(Path(directory), quantization, compare=True)
    return _with_vision(files) if vision else files


def _with_vision(files: ModelFiles) -> ModelFiles:
    """Returns the model with its encoder of pictures, if the checkpoint has one that is known.

    Raises:
        CheckpointError: The encoder does not fit; the error lists all that is wrong.
    """
    family = getattr(files.family, "Vision", None)
    has_config = isinstance(files.config.get("vision_config"), dict)
    takes_rows = getattr(files.family.Model, "takes_vectors", False)
    if (
        family is None
        or not takes_rows
        or not has_config
        or files.plan.layout not in ("safetensors", "orbax")
    ):
        return files
    problems = Problems(files.directory)
    spec = check_spec(family, without_quantization(files.config), problems)
    vision = None if spec is None else _open_vision(family, spec, problems)
    try:
        problems.raise_if_any()
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nlimit_images = 0 loads the text model alone") from None
    return replace(files, vision=vision)


def _open_vision(family: Any, spec: Any, problems: Problems) -> VisionFiles | None:
    layout, stored = read_layout(problems.directory, problems)
    return fit_vision(family, spec, LoadPlan(problems.directory, layout), stored, problems)


def with_weights_of(files: ModelFiles, directory: str | os.PathLike[str]) -> ModelFiles:
    """Returns the same model with the weights of another directory.

    Its config.json may be missing; if it is there, it must say the same of the model. Without an
    encoder of pictures there, the result has none.

    Raises:
        CheckpointError: The weights do not fit; the error lists all that is wrong.
    """
    problems = Problems(Path(directory))
    if (problems.directory / "config.json").is_file():
        described = _describe(problems.directory, None, problems)
        for name, local, served in _differences(files, described) if described else ():
            problems.add(
                f"config.json: {name} is {local} here, and {served} in the model that is served"
            )
    weights = model_weights(files.family, files.spec, files.rule)
    plan = fit(
        problems.directory,
        *read_layout(problems.directory, problems),
        weights,
        find_ignored_tensors(files.family, files.spec),
        problems,
    )
    vision = files.vision
    if vision is not None:
        vision = _open_vision(vision.family, vision.spec, problems)
    problems.raise_if_any()
    return replace(files, directory=problems.directory, plan=plan, vision=vision)


def _differences(files: ModelFiles, described: ModelDescription) -> Iterator[tuple[str, str, str]]:
    """Yields the fields of config.json that make it another model, with both of their values."""
    served = files.config
    local = described.config
    names = [name for name in {**served, **local} if served.get(name) != local.get(name)]
    if described.family is not files.family:
        names = ["architectures"]
    elif described.quantization is not None:
        names = [name for name in FIELDS if name in local]
    elif described.spec != files.spec:
        # Many fields may differ without effect; those count that change the spec by themselves.
        alone = [
            (
                name,
                check_spec(
                    files.family, {**served, name: local.get(name)}, Problems(files.directory)
                ),
            )
            for name in names
        ]
        names = [name for name, spec in alone if spec != files.spec] or names
    else:
        return
    for name in names:
        there_is, here_is = (
            "missing" if config.get(name) is None else quote(config[name])
            for config in (local, served)
        )
        yield name, there_is, here_is


def describe_model(
    directory: str | os.PathLike[str], quantization: str | None = None
) -> ModelDescription:
    """Reads what config.json says, for which no weights need to be there.

    Raises:
        CheckpointError: The config is wrong; the error lists all that is.
    """
    problems = Problems(Path(directory))
    described = _describe(Path(directory), quantization, problems)
    problems.raise_if_any()
    assert described is not None
    return described


def weights_bytes(directory: str | os.PathLike[str], dtype: str | None = None) -> int:
    """Returns the bytes of the weights in `dtype`, or as stored for None, from headers alone.

    It raises what `open_model` raises.
    """
    return _open(Path(directory), None, compare=False).plan.num_bytes(dtype)


def _open(directory: Path, quantization: str | None, *, compare: bool) -> ModelFiles:
    problems = Problems(directory)
    described = _describe(directory, quantization, problems)
    layout, stored = read_layout(directory, problems)
    # It is looked at only now, so that the error has the problems of config.json and of files.
    if described is None:
        problems.raise_if_any()
    assert described is not None
    family = described.family
    spec = described.spec
    with problems.collect():
        if (scheme := described.quantization) is not None:
            codes = {name for name, info in stored.items() if info.dtype in CODES}
            described = replace(described, quantization=scheme.with_head(codes))
        weights = model_weights(family, spec, described.rule)
        plan = fit(
            directory,
            layout,
            stored,
            weights,
            find_ignored_tensors(family, spec),
            problems,
            compare=compare,
            scheme=described.quantization,
        )
    problems.raise_if_any()
    return ModelFiles(directory, described.config, family, spec, plan, described.quantization)


def _describe(
    directory: Path, quantization: str | None, problems: Problems
) -> ModelDescription | None:
    """Returns the description; None if config.json is wrong, which is then in `problems`."""
    config = check_config(directory, problems)
    if not config:
        return None
    # Where the config does not say whether the head is tied, the tensors do.
    if leaves_tying_open(config):
        _, stored = read_layout(directory, Problems(directory))
        has_head = any("lm_head." in name for name in stored)
        config["tie_word_embeddings"] = bool(stored) and not has_head
    if quantization == GGUF and is_gguf(directory):
        return describe_config(config, lambda: gguf_scheme(directory), problems)
    return describe_config(config, lambda: quantization_of(config, quantization), problems)


def describe_config(
    config: dict[str, Any], scheme_of: Callable[[], Scheme | None], problems: Problems
) -> ModelDescription | None:
    """Returns what a config says whose sizes have been checked.

    It is None if something is wrong with it, which is added to `problems`.

    Args:
        config: The content of config.json.
        scheme_of: Returns the scheme; it may raise CheckpointError or UnsupportedError.
        problems: The list that errors are added to.
    """
    family = None
    spec = None
    scheme = None
    with problems.collect():
        family = load_family(config)
    with problems.collect():
        scheme = scheme_of()
    if scheme and hasattr(family, "older_names"):
        assert family is not None
        scheme = scheme.under_names(functools.partial(other_names, family))
    if family:
        spec = check_spec(family, without_quantization(config), problems)
    return (
        None
        if problems or not family or spec is None
        else ModelDescription(config, family, spec, scheme)
    )


def check_spec(family: Family, config: Mapping[str, Any], problems: Problems) -> ModelSpec | None:
    """Returns the spec that the family reads from config.json.

    It is None if something is wrong with it, all of which is added to `problems`.
    """
    out = out_of_bounds(config)  # These are in `problems` already.
    spec = None
    try:
        try:
            spec = family.Spec.from_config({**config, **dict.fromkeys(out)})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if not out:  # A family checks its fields by name: this is a config of an unknown form.
                problems.add(f"config.json cannot be understood: {type(error).__name__}: {error}")
    except* (CheckpointError, UnsupportedError) as group:
        for each in group.exceptions:
            if not (isinstance(each, FieldError) and each.fields.intersection(out)):
                problems.add(str(each))
    return None if out else spec
