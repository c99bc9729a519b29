"""Reads which layers of a model have windows, and which rotate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxpage.models.config.fields import NO_ROPE, Fields

T = TypeVar("T")


def windows_by_layer(
    fields: Fields, first: int = 28, *, has_switch: bool = True
) -> tuple[int | None, ...]:
    """Returns the window of each layer by Qwen's rule; None for all unless `use_sliding_window`.

    Layers are those of `layer_types`, or by default the ones from `max_window_layers` on.

    Args:
        fields: The fields of the config.
        first: The default of `max_window_layers`.
        has_switch: False for a family without `use_sliding_window`, which always has windows.
    """
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window", 4096)
    if has_switch and not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", first, minimum=0)
    full = "full_attention"
    sliding = "sliding_attention"
    types = fields.layer_types(
        [sliding if window and index >= first else full for index in range(num_layers)]
    )
    return windows_of(fields, types, window)


def rotating_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns which layers rotate: those with a 1 in `no_rope_layers`.

    By default, and where it is empty, all do but one in `no_rope_layer_interval`.
    """
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("no_rope_layer_interval", 4)
    usual = [int((index + 1) % every != 0) for index in range(num_layers)]
    rotates = fields.get("no_rope_layers", None)
    rotates = usual if rotates is None or rotates == [] else rotates
    if not isinstance(rotates, list) or len(rotates) != num_layers or set(rotates) - {0, 1}:
        text = f"no_rope_layers must have 0 or 1 for each of {num_layers} layers, not {rotates!r}"
        fields.note_wrong(text, no_rope_layers=None, num_hidden_layers=num_layers)
        rotates = usual
    return tuple(map(bool, rotates))


def read_by_layer(
    fields: Fields, name: str, usual: Sequence[T], is_right: Callable[[Any], bool], description: str
) -> list[T]:
    """Returns a list with a value for each layer.

    Args:
        fields: The fields of the config.
        name: The field.
        usual: The values where the field is absent or null.
        is_right: Returns whether a layer may have this value.
        description: The description of such a value, for the error.
    """
    values = fields.get(name, None)
    if values is None:
        return list(usual)
    if isinstance(values, list) and len(values) == len(usual) and all(map(is_right, values)):
        return values
    text = f"{name} must have {description} for each of {len(usual)} layers, not {values!r}"
    fields.note_wrong(text, **{name: None, "num_hidden_layers": len(usual)})
    return list(usual)


def layer_types(
    fields: Fields, every: int, first: int = 1, other: str = "sliding_attention"
) -> tuple[str, ...]:
    """Returns `Fields.layer_types`, with one full layer in `every` by default.

    By default a layer has full attention if `every` divides its number, and otherwise a window, or
    is of the `other` kind. The first layer has the number `first`.
    """
    numbers = range(first, first + fields.integer("num_hidden_layers"))
    kinds = ("full_attention", other)
    return fields.layer_types([kinds[number % every > 0] for number in numbers], kinds=kinds)


def windows_of(fields: Fields, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each layer, and notes an error if a layer with a window finds none."""
    if window is None and "sliding_attention" in types:
        text = "layer_types has sliding_attention, but there is no window in use"
        fields.note_wrong(text, layer_types=None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_windows(fields: Fields, types: Sequence[str], default: int) -> tuple[int | None, ...]:
    """Returns the window of each layer by `sliding_window`, whose default the family has."""
    return windows_of(fields, types, fields.optional_integer("sliding_window", default))


def slides(types: Sequence[str]) -> list[bool]:
    """Returns which layers have a window."""
    return [kind == "sliding_attention" for kind in types]


def read_ropes(
    fields: Fields,
    types: Sequence[str],
    head_dim: int,
    max_length: int,
    theta: Mapping[str, tuple[str, float]],
    **options: Any,
) -> dict[str, Any]:
    """Returns the arguments `rope` and `rope_by_layer` of `DecoderConfig.from_fields`.

    Args:
        fields: The fields of the config.
        types: The type of each layer, by which rotations differ.
        head_dim: The width of a head.
        max_length: The default of `max_position_embeddings`.
        theta: See `Fields.ropes_by_type`.
        **options: Further arguments of it.
    """
    max_length = fields.integer("max_position_embeddings", max_length)
    ropes, max_length = fields.ropes_by_type(head_dim, max_length, theta, **options)
    by_layer = tuple(ropes[kind] for kind in types)
    return {"rope": (ropes["full_attention"], max_length), "rope_by_layer": by_layer}


def refuse_rope_scaling(fields: Fields) -> None:
    """Refuses `rope_scaling` in a family whose class has ropes by layer type alone.

    transformers replaces `rope_parameters` by it, even if it is null, and then fails.
    """
    rope = fields.get("rope_parameters", None)
    if fields.get("rope_scaling", rope) != rope:
        text = "rope_scaling is not supported in this family, which has rope_parameters instead"
        fields.note_unsupported(text, **NO_ROPE)
