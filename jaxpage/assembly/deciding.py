"""Decides everything before anything is loaded or compiled: the second call of a start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from jaxpage.assembly.describing import Opened
from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.assembly.planning.capacity import notices
from jaxpage.assembly.planning.described import ModelLayout
from jaxpage.assembly.planning.engine_spec import EngineSpec, engine_spec_of
from jaxpage.checkpoints import ModelFiles
from jaxpage.device import check_graphs
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import align

logger = logging.getLogger(__name__)


def decide_spec(opened: Opened, hooks: Hooks) -> EngineSpec:
    """Decides everything about an engine, and logs warnings.

    Raises:
        UnsupportedError: The device does not take a setting.
        ConfigError: Settings contradict the model or each other; see `engine_spec_of`.
        CapacityError: The memory is too small.
    """
    hooks.phase(PHASES[2])
    described = opened.described
    files = opened.files
    first = opened.mesh.first
    config = described.config
    kernels = described.kernels
    assert kernels is not None, "the device is at hand"
    check_graphs(config.graphs, first.platform)
    if kernels.interpret:
        logger.warning(
            "attention_backend %r is interpreted on CPU: for tests, many times slower", kernels.name
        )
    spec = engine_spec_of(described)
    if hooks.revise_sizes and (sizes := hooks.revise_sizes(spec)):
        spec = engine_spec_of(replace(described, config=config.replace(**sizes)))
    quantization = files.quantization.described if files.quantization else ""
    if spec.encoded:
        for warning in notices(spec.described, spec.memory):
            logger.warning(warning)
        hooks.show(align([*spec.rows()], num_words=2))
        return spec
    spec = replace(spec, quantization=quantization)
    for warning in (
        *_warnings_of_model(files, spec.layout, spec.config),
        *notices(spec.described, spec.memory),
    ):
        logger.warning(warning)
    hooks.show(align([*spec.rows()], num_words=2))
    return spec


def _warnings_of_model(
    files: ModelFiles, layout: ModelLayout, config: EngineConfig
) -> Iterator[str]:
    not_loaded = "" if files.vision else getattr(files.spec, "not_loaded", "")
    if not_loaded:
        globs = getattr(files.family, "others", ())
        count = sum(any(fnmatchcase(name, glob) for glob in globs) for name in files.plan.unused)
        text = f"this is the text model alone: {not_loaded} are not supported, and"
        if config.limit_images == 0 and getattr(files.family, "Vision", None) is not None:
            text = f"limit_images is 0, so this is the text model alone, without {not_loaded}:"
        yield f"{text} the checkpoint's {count} tensors for them are not loaded"
    requested = "auto" if files.quantization is None else files.quantization.kv_cache_dtype
    if layout.kv_cache_dtype == "auto" and requested != "auto":
        yield (
            f"config.json asks for a KV cache in {requested}, which "
            "a model with recurrent layers cannot have: "
            f"it stays in {layout.dtype}"
        )
