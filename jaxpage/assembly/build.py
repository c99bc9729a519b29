"""Makes an engine from settings, in four calls."""

from __future__ import annotations

from typing import Any

from jaxpage.assembly.assembling import Built, assemble
from jaxpage.assembly.compiling import compile_steps
from jaxpage.assembly.deciding import decide_spec
from jaxpage.assembly.describing import describe
from jaxpage.assembly.hooks import Hooks
from jaxpage.checkpoints import ModelFiles
from jaxpage.settings.engine_config import EngineConfig

NO_HOOKS: Hooks = Hooks()


def build_engine(
    config: EngineConfig,
    hooks: Hooks = NO_HOOKS,
    *,
    files: ModelFiles | None = None,
    tokenizer: Any | None = None,
) -> Built:
    """Makes an engine: describes the model, decides, loads and compiles, assembles.

    Args:
        config: The settings.
        hooks: The listeners, and parts that replace the engine's own.
        files: The model's files; None opens those that the settings name.
        tokenizer: The tokenizer; None loads the one that the settings name. A model that is given
            as `files` may have none.

    Raises:
        ModelNotFoundError: There is no such model.
        CheckpointError: The model's files cannot be used.
        UnsupportedError: The model or the device does not take a setting.
        CapacityError: The memory is too small. Nearly always, errors come before the devices hold
            anything.
    """
    opened = describe(config, hooks, files, tokenizer)
    spec = decide_spec(opened, hooks)
    compiled = compile_steps(opened, spec, hooks)
    return assemble(opened, spec, compiled, hooks)
