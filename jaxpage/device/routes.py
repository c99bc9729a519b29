"""Collects the experts that a step's tokens are routed to, for requests that ask for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.layers.routing import Router

NO_EXPERT = -1  # stands in layers without experts


class RoutedLayers(NamedTuple):
    """Says which layers of a model route tokens to experts, in order."""

    places: tuple[int, ...]
    num_layers: int


def routed_layers(model: nnx.Module) -> RoutedLayers | None:
    """Returns the layers of a model that have experts; None if there are none."""
    paths: list[Any] = [path for path, node in nnx.iter_graph(model) if isinstance(node, Router)]
    if not paths:
        return None
    # The first number in a router's path is that of its layer.
    depth = next(index for index, part in enumerate(paths[0]) if isinstance(part, int))
    layers: Any = functools.reduce(getattr, map(str, paths[0][:depth]), model)
    return RoutedLayers(tuple(sorted(int(path[depth]) for path in paths)), len(layers))


def stack_routes(routes: Sequence[jax.Array], layers: RoutedLayers | None) -> jax.Array | None:
    """Returns the experts [T, L, X] of each token in each layer as int16; None without `layers`.

    Args:
        routes: The experts [T, X] in each layer that has some, in order.
        layers: The layers that these are.
    """
    if layers is None:
        return None
    routes_TLX = jnp.stack(routes, axis=1).astype(jnp.int16)
    num_tokens, _, per_token = routes_TLX.shape
    nothing = jnp.full((num_tokens, layers.num_layers, per_token), NO_EXPERT, jnp.int16)
    return nothing.at[:, jnp.array(layers.places)].set(routes_TLX)
