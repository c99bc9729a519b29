"""Says where compiled steps are kept as files, and has JAX keep them there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

from jaxpage.user_cache import user_cache
from pallas_kernels.cpu.library import make_private

logger = logging.getLogger(__name__)


def compile_cache_directory() -> Path:
    """Returns the directory of the compile cache.

    It is $JAX_COMPILATION_CACHE_DIR if that is set, else the user's own directory for this version
    and platform, below $JAXPAGE_CACHE_DIR.
    """
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(chosen)
    return user_cache() / "xla" / f"{jax.__version__}-{jax.default_backend()}"


def own_cache_directory() -> Path | None:
    """Returns the directory of the compile cache, or None if the user has chosen another one."""
    directory = compile_cache_directory()
    is_ours = getattr(jax.config, "jax_compilation_cache_dir", None) == str(directory)
    return directory if is_ours and "JAX_COMPILATION_CACHE_DIR" not in os.environ else None


def use_compile_cache(directory: Path) -> bool:
    """Keeps executables in `directory` across processes.

    Executables are code: only this user may own the directory and write there.

    Returns:
        False, with a warning, where that cannot be had; then everything is compiled at each start.
    """
    try:
        make_private(directory)
    except OSError as error:
        logger.warning("no compile cache at %s: %s", directory, error)
        return False
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # By default JAX keeps what took a second or more, and leaves out the many small ones of a
    # start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True
