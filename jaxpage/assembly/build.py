"""Makes an engine from settings, in four calls."""

from __future__ import annotations

from typing import Any

from jaxpage.assembly.assembling import Built, assemble
from jaxpage.assembly.compiling import compile_steps
from jaxpage.assembly.describing import describe
from jaxpage.assembly.engine_spec import decide_spec
from jaxpage.assembly.hooks import Hooks
from jaxpage.checkpoints import ModelFiles
from jaxpage.settings.engine_config import EngineConfig

NO_HOOKS = Hooks()


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
        hooks: What listens, and what takes part.
        files: The model; None: that of the settings.
        tokenizer: The tokenizer; None: that of the settings. With `files` there may be none.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedError, CapacityError: The engine cannot be
            made; nearly always before the devices hold anything.
    """
    opened = describe(config, hooks, files, tokenizer)
    spec = decide_spec(opened, hooks)
    compiled = compile_steps(opened, spec, hooks)
    return assemble(opened, spec, compiled, hooks)
