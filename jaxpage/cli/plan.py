"""Runs `jaxpage plan`, which says how many blocks and users fit in memory.

It also says what another dtype or number of devices would change. It reads no weights, unless a
drafter has weights of its own.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxpage.assembly import choose_dtype, choose_kv_cache_dtype, lora_spec
from jaxpage.assembly.planning import (
    Described,
    Drafting,
    EngineSpec,
    MemoryPlan,
    ModelLayout,
    engine_spec_of,
    find_refused_settings,
    find_vision,
    notices,
    open_drafting,
    vector_input,
)
from jaxpage.checkpoints import (
    ModelDescription,
    describe_model,
    open_model,
    read_dtype,
    read_embedding_files,
)
from jaxpage.checkpoints.finding import resolve_model, resolve_model_config
from jaxpage.cli import plan_devices
from jaxpage.device.hardware import KNOWN_DEVICES, DeviceSpec, open_devices
from jaxpage.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    UsageError,
)
from jaxpage.models import EncoderConfig, KVSpec, ModelSpec, model_weights
from jaxpage.models.parameters import LoRASpec, num_bytes
from jaxpage.models.sharding import ShardingChecker
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import align, gib

logger = logging.getLogger(__name__)

# Users are counted at this length, and at lengths that are each twice the one before.
MIN_LENGTH = 256
REFERENCE_LENGTH = 1024  # the length of the users for which alternatives are compared
CACHE_DTYPES = ("auto", "int8", "fp8")
DEVICES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Subject:
    """The subject of a plan: a model with its settings on a device.

    Attributes:
        config: The settings of the engine.
        model: The model, as its config.json describes it.
        checker: Checks the shardings over devices that are possible, and the weights of the engine,
            quantised if the checkpoint or a setting says so.
        num_parameters: The parameters of the model, those of its encoder of pictures included; a
            quantised weight counts like a plain one.
        device: The device.
        drafting: The draft model or the draft head, if there is one.
        lora: The adapters that the engine takes, if it takes any.
        max_text: The tokens of the longest text that an encoder's files allow; None if they say
            nothing.
    """

    config: EngineConfig
    model: ModelDescription
    checker: ShardingChecker
    num_parameters: int
    device: DeviceSpec
    drafting: Drafting
    lora: LoRASpec | None
    max_text: int | None

    @property
    def spec(self) -> ModelSpec:
        """Returns the spec of the model."""
        return self.model.spec

    @property
    def architecture(self) -> str:
        """Returns the first architecture that config.json names."""
        name: str = self.model.config["architectures"][0]
        return name

    def describe(self, layout: ModelLayout) -> Described:
        """Returns the description from which an engine with this layout is planned."""
        weights_bytes = num_bytes(self.checker.weights, layout.dtype)
        family = self.model.family
        vision = find_vision(self.config, family, self.model.config)
        kernels = self.device.choose_kernels(
            self.config.attention_backend,
            layout.kv_cache_dtype,
            batch_invariant=self.config.batch_invariant,
        )
        return Described(
            self.config,
            self.spec,
            self.device,
            layout,
            weights_bytes,
            self.drafting,
            self.lora,
            kernels,
            vectors=vector_input(self.config, family, self.spec, vision),
            max_text=self.max_text,
        )

    def engine_spec(self, layout: ModelLayout) -> EngineSpec:
        """Returns the spec of an engine with this layout.

        Raises:
            ConfigError: A setting is wrong, or does not fit the layout.
            CapacityError: The model does not fit in memory.
        """
        return engine_spec_of(self.describe(layout), swaps=False)

    def option(self, layout: ModelLayout) -> Option:
        """Returns what each device would hold with this layout, or why it is not possible.

        Raises:
            ConfigError: No model can have this layout.
        """
        refused = find_refused_settings(self.config, layout)
        try:
            spec = self.engine_spec(layout)
            self.checker.check(spec.sharding)
        except (CapacityError, ConfigError, UnsupportedError) as error:
            return Option(layout, refused, error=error)
        num_devices = layout.tensor_parallel_size
        # With fewer KV heads than devices, several devices have a copy of the same head.
        num_copies = num_devices * spec.sharding.kv_heads_of_device // self.spec.kv.num_kv_heads
        return Option(layout, refused, spec.memory, num_copies, spec.attention)


@dataclass(frozen=True)
class Option:
    """A layout of the model with the memory plan of each device, or the reason why there is none.

    Attributes:
        layout: The layout.
        refused: The settings that this version plans but does not run.
        plan: The memory plan of each device, or None.
        num_kv_copies: The number of devices that have the same key/value heads.
        attention: The kernel sets that compute attention, by kind of step; empty if only the memory
            of the device is known.
        error: The reason why there is no plan, or None.
    """

    layout: ModelLayout
    refused: tuple[str, ...]
    plan: MemoryPlan | None = None
    num_kv_copies: int = 0
    attention: str = ""
    error: CapacityError | ConfigError | UnsupportedError | None = None

    def num_users(self, length: int) -> int:
        """Returns how many users of this many tokens fit; 0 without a plan."""
        return self.plan.num_users(length) if self.plan else 0


def run(arguments: argparse.Namespace, config: EngineConfig, explicit: Mapping[str, Any]) -> None:
    """Prints the tables, or one JSON object.

    Args:
        arguments: The command line.
        config: The settings of the engine.
        explicit: Fields of `ModelLayout` from the command line. They are not in `config`, because
            this version may not run them.

    Raises:
        ConfigError: A setting is wrong, or the devices cannot share the heads.
        UnsupportedError: The model cannot have this layout.
        CapacityError: The model does not fit, not even divided; the message has the numbers. The
            tables with the alternatives are printed all the same.
    """
    subject, layout = _describe(arguments, config, explicit)
    chosen = subject.option(layout)
    # No alternative would avoid these errors. After a CapacityError the tables show what would fit.
    if isinstance(chosen.error, ConfigError | UnsupportedError):
        raise chosen.error
    if isinstance(subject.spec, EncoderConfig):
        _print_encoder(subject, chosen, as_json=arguments.json)
        return
    for notice in notices(subject.describe(layout), chosen.plan) if chosen.plan else ():
        logger.warning(notice)
    count = arguments.devices or 0
    options = [subject.option(layout) for layout in _layouts(chosen.layout, count or max(DEVICES))]
    length = min(REFERENCE_LENGTH, config.max_model_len or subject.spec.max_position_embeddings)
    divided = plan_devices.divisions(subject.option, chosen.layout, count)
    fits = any(option.plan for option in (chosen, *divided))
    if not arguments.json:
        lines = [*_describe_choice(subject, chosen), *_option_lines(options, chosen, length)]
        print("\n".join([*lines, *(plan_devices.lines(divided, count, length) if count else [])]))
    elif fits:
        more = {"divisions": plan_devices.as_dicts(divided, count, length)} if count else {}
        print(json.dumps({**_as_dict(subject, chosen, options, length), **more}, allow_nan=False))
    if chosen.error and not fits:
        raise chosen.error


def _print_encoder(subject: Subject, chosen: Option, *, as_json: bool) -> None:
    """Prints what an encoder takes, which keeps nothing of its texts.

    Raises:
        CapacityError: It does not fit; the message has the numbers.
    """
    if chosen.error:
        raise chosen.error
    assert chosen.plan is not None, "there is a plan where there is no error"
    about = {
        "model": subject.config.model,
        "architecture": subject.architecture,
        "num_parameters": subject.num_parameters,
        "device": subject.device.name,
        "dtype": chosen.layout.dtype,
        "weights_bytes": chosen.plan.weights_bytes,
        "workspace_bytes": chosen.plan.workspace_bytes,
        "max_model_len": chosen.plan.max_model_len,
        "max_position_embeddings": subject.spec.max_position_embeddings,
    }
    if as_json:
        print(json.dumps(about))
        return
    rows = [
        (
            "model",
            f"{subject.config.model}: {subject.architecture}, {subject.num_parameters:,} "
            "parameters",
        ),
        ("keys and values", "none: the model is an encoder, which keeps nothing of a text"),
        ("dtype", chosen.layout.dtype),
        *chosen.plan.rows(),
        ("positions", f"{subject.spec.max_position_embeddings:,}"),
    ]
    print("\n".join(align(rows, num_words=2)))


def spec_of(
    arguments: argparse.Namespace, config: EngineConfig, explicit: Mapping[str, Any]
) -> EngineSpec:
    """Returns the spec of the engine that is planned.

    Args:
        arguments: The command line.
        config: The settings of the engine.
        explicit: Fields of `ModelLayout` from the command line; see `run`.

    Raises:
        ConfigError: A setting is wrong.
        CapacityError: The model does not fit in memory.
    """
    subject, layout = _describe(arguments, config, explicit)
    return subject.engine_spec(layout)


def _describe(
    arguments: argparse.Namespace, config: EngineConfig, explicit: Mapping[str, Any]
) -> tuple[Subject, ModelLayout]:
    directory = resolve_model_config(config.model, config.revision)
    model = describe_model(directory, config.quantization)
    device = _place(arguments, config.gpu_memory_utilization)
    checker = ShardingChecker(model.family, model.spec, model.rule)
    # A model is known by its number of weights, and not of packed codes and scales.
    unquantised = checker.weights if model.rule is None else model_weights(model.family, model.spec)
    if (vision := find_vision(config, model.family, model.config)) is not None:
        unquantised = [*unquantised, *model_weights(vision.family, vision.spec)]
    num_parameters = sum(weight.size for weight in unquantised)
    drafting = _drafting(config)
    lora = lora_spec(config, model.family, model.spec)
    max_text = read_embedding_files(directory).max_tokens
    subject = Subject(config, model, checker, num_parameters, device, drafting, lora, max_text)
    dtype = choose_dtype(config.dtype, device, read_dtype(model.config), model.family)
    layout = ModelLayout(
        dtype, choose_kv_cache_dtype(config.kv_cache_dtype, model.spec, model.quantization)
    )
    return subject, replace(layout, **explicit)


def _drafting(config: EngineConfig) -> Drafting:
    """Returns the drafting of the settings.

    Only if the drafter has weights of its own it opens the files of drafter and model, whose
    headers say how large the drafter is.

    Raises:
        CheckpointError: The drafter needs the model's weight files, and they cannot be opened.
    """
    requested = config.speculative_config
    if requested is None or not requested.has_weights:
        return Drafting()
    try:
        files = open_model(resolve_model(config.model, config.revision), config.quantization)
    except CheckpointError as error:
        raise CheckpointError(
            f"a plan with speculative_config method {requested.method!r} reads the headers "
            f"of the model's weight files (without these leave speculative_config out): {error}"
        ) from error
    return open_drafting(requested, files)


def _place(arguments: argparse.Namespace, utilization: float) -> DeviceSpec:
    memory = arguments.memory
    if arguments.device is not None:
        if (known := KNOWN_DEVICES.get(arguments.device.lower())) is None:
            raise UsageError(
                f"--device must be one of {', '.join(KNOWN_DEVICES)}, got {arguments.device!r}; "
                "for another device give its --memory"
            )
        if memory is not None:
            raise UsageError(
                "--device and --memory both say how much memory there is: leave out one"
            )
        return known.spec(utilization)
    if memory is None:
        # The limit of JAX's allocator can only be set before JAX opens the device.
        open_devices(utilization)
        return DeviceSpec.of(jax.devices()[0], utilization)
    return DeviceSpec(
        f"a device of {gib(memory)} (gpu_memory_utilization {utilization:g})",
        int(memory * utilization),
    )


def _layouts(chosen: ModelLayout, max_devices: int) -> list[ModelLayout]:
    """Returns the layouts with which the chosen one is compared, the chosen one included."""
    narrow = "bfloat16" if chosen.dtype == "float32" else chosen.dtype
    layouts = [
        ModelLayout(dtype, cache, num)
        for dtype in ("float32", narrow)
        for cache in CACHE_DTYPES
        for num in DEVICES
        if num <= max_devices
    ]
    return layouts if chosen in layouts else [chosen, *layouts]


def _bytes_per_token(plan: MemoryPlan) -> int:
    """Returns the bytes of a token's keys and values; states are not those of a token."""
    states = sum(group.block_bytes for group in plan.windows if group.is_state)
    return (plan.block_bytes - states) // plan.block_size


def _bytes_per_token_text(plan: MemoryPlan) -> str:
    text = f"{_bytes_per_token(plan):,}"
    if not all(group.is_state for group in plan.windows):
        text += f"; {plan.first_block_bytes // plan.block_size:,} outside the windows"
    if any(group.is_state for group in plan.windows):
        text += "; and state blocks, a few for each sequence"
    return text


def _describe_cache(kv: KVSpec) -> str:
    states = [state for state in kv.states if state is not None]
    if kv.value_width is not None:
        heads = f"a latent of {kv.head_dim} for all heads"
    else:
        kinds = dict.fromkeys(kv.heads or [(kv.num_kv_heads, kv.head_dim)])
        heads = " or ".join(f"{count} heads of {width}" for count, width in kinds)
    text = f"{kv.num_layers - len(states)} layers, {heads}"
    for state, count in collections.Counter(states).items():
        of_block = ""
        if state.shape is not None:
            of_block = f"a state of {' x '.join(map(str, state.shape))} after each block and "
        text += f"; {count} layers, {of_block}{state.input_width} numbers of each token"
    return text


def _users(plan: MemoryPlan) -> list[tuple[int, int, int]]:
    """Returns tokens of each user, blocks of each user and users that fit, for several lengths."""
    doubling = (MIN_LENGTH << power for power in range(32))
    lengths = [*(length for length in doubling if length < plan.max_model_len), plan.max_model_len]
    return [(length, plan.blocks_for(length), plan.num_users(length)) for length in lengths]


def _describe_choice(subject: Subject, chosen: Option) -> list[str]:
    plan = chosen.plan
    layout = chosen.layout
    kv = subject.spec.kv
    max_num_seqs = subject.config.max_num_seqs
    rows = [
        (
            "model",
            f"{subject.config.model}: {subject.architecture}, {subject.num_parameters:,} "
            "parameters",
        ),
        ("keys and values", _describe_cache(kv)),
        ("dtype", f"{layout.dtype}; of keys and values: {layout.kv_cache_dtype}"),
        ("devices", str(layout.tensor_parallel_size)),
    ]
    if plan is None:
        return [*align([*rows, ("", "does not fit")], num_words=2), ""]
    if chosen.attention:
        rows.append(("attention", chosen.attention))
    rows += [*plan.rows(), ("KV bytes per token", _bytes_per_token_text(plan))]
    if chosen.refused:
        rows.append(("this version", f"plans it and does not run it ({', '.join(chosen.refused)})"))
    users = _users(plan)
    # One block of the pool is the null block, which no user has.
    if subject.device.is_cpu and plan.num_blocks - 1 == max_num_seqs * plan.blocks_for(
        plan.max_model_len
    ):
        rows.append(("", "(no more blocks than max_num_seqs x max_model_len can use)"))
    lines = [
        *align(rows, num_words=2),
        "",
        "Users at the same time, by the tokens of each, prompt and output together:",
        *align(
            [
                ("tokens", "blocks", "users"),
                *(tuple(f"{number:,}" for number in row) for row in users),
            ]
        ),
    ]
    if users[0][-1] > max_num_seqs:
        lines.append(
            f"At most {max_num_seqs} of them run at a time (max_num_seqs); the others wait."
        )
    return [*lines, ""]


def _option_lines(options: Sequence[Option], chosen: Option, length: int) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("dtype", "KV dtype", "devices", "weights", "KV per token", "users", "factor", "")
    ]
    rows += [_option_row(option, chosen, length) for option in options]
    title = (
        f"Alternatives, with users of {length:,} tokens; weights and KV are those of one device:"
    )
    lines = [title, *align(rows, num_words=2)]
    if refused := sorted({name for option in options for name in option.refused}):
        lines.append(f"* planned; not run by this version ({', '.join(refused)})")
    return lines


def _option_row(option: Option, chosen: Option, length: int) -> tuple[str, ...]:
    layout = option.layout
    plan = option.plan
    users = option.num_users(length)
    chosen_users = chosen.num_users(length)
    names = (
        layout.dtype,
        layout.kv_cache_dtype,
        f"{layout.tensor_parallel_size}{'*' if option.refused else ' '}",
    )
    if plan is None:
        return (
            *names,
            "",
            "",
            "",
            "",
            _remark(option.error),
        )
    factor = f"{users / chosen_users:.2f}" if chosen_users else ""
    remark = (
        f"{option.num_kv_copies} devices have the same KV heads" if option.num_kv_copies > 1 else ""
    )
    return (
        *names,
        gib(plan.weights_bytes),
        gib(_bytes_per_token(plan)),
        f"{users:,}",
        factor,
        remark,
    )


def _remark(error: Exception | None) -> str:
    """Returns why a layout is not possible."""
    if isinstance(error, CapacityError):
        return "does not fit"
    return "not supported" if isinstance(error, UnsupportedError) else str(error)


def _as_dict(
    subject: Subject, chosen: Option, options: Sequence[Option], length: int
) -> dict[str, Any]:
    chosen_users = chosen.num_users(length)
    users = _users(chosen.plan) if chosen.plan else []
    return {
        "model": subject.config.model,
        "architecture": subject.architecture,
        "num_parameters": subject.num_parameters,
        "device": subject.device.name,
        **_option_dict(chosen, length),
        "users_by_length": [
            {"length": tokens, "blocks": blocks, "users": number}
            for tokens, blocks, number in users
        ],
        "reference_length": length,
        "alternatives": [
            {
                **_option_dict(option, length),
                "factor": option.num_users(length) / chosen_users if chosen_users else None,
            }
            for option in options
        ],
    }


def _option_dict(option: Option, length: int) -> dict[str, Any]:
    """Returns an option for JSON; its numbers are those of one device, and need a plan."""
    numbers: dict[str, Any] = {}
    if plan := option.plan:
        numbers = {
            **{name: value for name, value in asdict(plan).items() if name != "device"},
            "pool_bytes": plan.pool_bytes,
            "num_slots": plan.num_slots,
            "bytes_per_token": _bytes_per_token(plan),
            "num_kv_copies": option.num_kv_copies,
            "attention": option.attention,
        }
    return {
        **asdict(option.layout),
        "not_run_because_of": list(option.refused),
        "error": None if option.error is None else str(option.error),
        "users": option.num_users(length),
        **numbers,
    }
