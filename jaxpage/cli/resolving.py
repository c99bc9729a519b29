"""Resolves the flags of a command: to settings, to sampling parameters, and to an engine.

It also prints the lines for the person who runs the command.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxpage.cli.flags import engine_settings, sampling_settings, server_settings
from jaxpage.errors import UnsupportedError, UsageError
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.settings.sources import BUILT_IN, Resolved, ResolvedConfig, resolve_config

if TYPE_CHECKING:
    from jaxpage.device.inputs import Bucket, BucketMenu
    from jaxpage.llm import LLM
    from jaxpage.serving import ServerConfig

DEFAULT_MAX_TOKENS = 200

Say = Callable[[str], None]


def say(text: str) -> None:
    """Prints a line to standard error for the person at the terminal.

    Standard output is for generated text and reports alone.
    """
    print(text, file=sys.stderr, flush=True)


def reporter(arguments: argparse.Namespace) -> Say:
    """Returns `say`, or with --quiet a function that prints nothing."""
    return (lambda text: None) if arguments.quiet else say


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns the ValueError with which an engine refuses a prompt or parameter into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given sampling parameters, which are checked before a model is loaded.

    Args:
        arguments: The command line.

    Raises:
        UsageError: A parameter is wrong.
        UnsupportedError: More than one sample is asked for.
    """
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_settings(arguments)}
    # A default must not contradict what the user asks for.
    if sampling.get("min_tokens", 0) > DEFAULT_MAX_TOKENS and "max_tokens" not in vars(arguments):
        sampling["max_tokens"] = sampling["min_tokens"]
    try:
        params = SamplingParams(**sampling)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if params.n > 1:
        raise UnsupportedError(
            f"n={params.n} is not supported on the command line, which streams one output; "
            "use LLM.generate"
        )
    return sampling


def resolve_settings(
    arguments: argparse.Namespace, excluded: tuple[str, ...] = ()
) -> ResolvedConfig:
    """Returns the engine's settings, except `excluded`, with their origins."""
    return resolve_config(
        arguments.config, engine_settings(arguments, excluded), overrides_origin="command line"
    )


def resolve_both_settings(
    arguments: argparse.Namespace,
) -> tuple[ResolvedConfig, Resolved[ServerConfig]]:
    """Returns the settings of the engine and of the server, with their origins."""
    file = getattr(arguments, "file", None)
    if file and arguments.config:
        raise UsageError(f"two configuration files: {file} and --config {arguments.config}")
    from jaxpage.serving import resolve_both

    explicit = engine_settings(arguments), server_settings(arguments)
    return resolve_both(file or arguments.config, *explicit, overrides_origin="command line")


def engine_for_one(
    arguments: argparse.Namespace, *, prompt: str | None = None, chats: bool = False
) -> LLM:
    """Returns an engine for one text at a time.

    By default it has no shape that only several sequences would use. Without speculation it is
    ready before all shapes are compiled: those of the first steps come first, and others when a
    step asks for them.

    Args:
        arguments: The command line.
        prompt: The prompt, if it is the only one; None compiles all shapes in the background.
        chats: The model needs a chat template.

    Raises:
        UsageError: The model has no tokenizer, or lacks a chat template that it needs. Nothing has
            been loaded then.
    """
    # `--seed` is the seed of the request here, and not the engine's.
    settings = resolve_settings(arguments, excluded=("seed",))
    config = settings.config
    if settings.origins["max_num_seqs"] == BUILT_IN:
        # Fewer shapes are compiled, and a start is quicker.
        config = config.replace(max_num_seqs=1)
    tokenizer = _check_text(config, chats=chats)

    def first(menu: BucketMenu) -> list[Bucket]:
        if prompt is None:
            return menu.by_first_use()
        try:
            return menu.of_one_text(len(tokenizer(prompt)["input_ids"]))
        except Exception:  # The engine says what is wrong with the prompt.
            return []

    # Speculation may measure all shapes before the first step.
    early = first if config.speculative_config is None else None
    return engine(config, quiet=arguments.quiet, verbose=arguments.verbose, first=early)


def engine(
    config: EngineConfig,
    *,
    quiet: bool,
    verbose: bool,
    first: Callable[[BucketMenu], Sequence[Bucket]] | None = None,
) -> LLM:
    """Returns an engine with these settings; for `first` see `LLM`."""
    from jaxpage.llm import LLM  # late, because this imports jax

    return LLM(**config.explicit_settings(), use_tqdm=not quiet, verbose=verbose, first=first)


def _check_text(config: EngineConfig, *, chats: bool) -> Any:
    """Returns the model's tokenizer, which has a template if the model chats."""
    from jaxpage.checkpoints import open_model
    from jaxpage.checkpoints.finding import resolve_model
    from jaxpage.checkpoints.tokenizers import tokenizer_of

    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        # If this is no model at all, the error must say so instead.
        open_model(resolve_model(config.model, config.revision))
        raise UsageError(
            f"the model {config.model!r} has no tokenizer, so it cannot read text: set "
            "--tokenizer, or give token ids to "
            "LLM.generate"
        )
    if chats and not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"the model {config.model!r} has no chat template; use jaxpage generate")
    return tokenizer
