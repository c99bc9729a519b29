"""Times a mixture of experts by the number of experts, next to every expert for every token.

A time is milliseconds of a layer, the least of some rounds.

    python tools/lab/bench_experts.py --experts 8 32 128 --rows 1 8 64 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import choose_backend
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.routing import Routing
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models.base import abstract
from jaxpage.models.parts.experts import make_experts
from jaxpage.models.parts.names import QWEN_EXPERTS


def main() -> None:
    """Prints a line for each number of experts and of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument(
        "--experts", **many, default=[8, 32, 128], help="of the layer; default: 8 32 128"
    )
    parser.add_argument(
        "--rows", **many, default=[1, 8, 64, 512], help="tokens; default: 1 8 64 512"
    )
    parser.add_argument(
        "--per-token", type=int, default=2, metavar="N", help="experts of a token; default: 2"
    )
    parser.add_argument("--model-width", type=int, default=1024, help="default: 1024")
    parser.add_argument("--width", type=int, default=512, help="of an expert; default: 512")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    arguments = parser.parse_args()
    print("experts   rows   routed, ms   all, ms")
    for num_experts in arguments.experts:
        for num_rows in arguments.rows:
            routed, of_all = times(num_experts, num_rows, arguments)
            print(
                f"{num_experts:7} {num_rows:6} {routed * 1e3:12.2f} {of_all * 1e3:9.2f}", flush=True
            )


def times(num_experts: int, num_rows: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Returns the seconds of the layer, and of the products of every expert for every token."""
    spec = ExpertsSpec(Routing(num_experts, arguments.per_token, normalized=True), arguments.width)
    kind: dict[str, Any] = {"activation": "silu", "shared": None, "dtype": arguments.dtype}
    graph, shapes = abstract(
        make_experts(spec, arguments.hidden_size, QWEN_EXPERTS, layer="0", **kind)
    )
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda each: jnp.asarray(0.05 * rng.standard_normal(each.shape), each.dtype), shapes
    )
    x_TD = jnp.asarray(rng.standard_normal((num_rows, arguments.hidden_size)), arguments.dtype)

    def route(parameters: Any, x_TD: jax.Array) -> jax.Array:
        with TraceScope(make_layer_kernels(choose_backend("auto", jax.devices()[0]))).open():
            out_TD: jax.Array = nnx.merge(graph, parameters)(x_TD)
        return out_TD

    def of_all(parameters: Any, x_TD: jax.Array) -> jax.Array:
        gate_up, down = (parameters["experts"][part]["kernel"] for part in ("gate_up", "down"))
        gate, up = jnp.split(jnp.einsum("TD,EFD->ETF", x_TD, gate_up), 2, axis=-1)
        return jnp.einsum("ETF,EDF->ETD", jax.nn.silu(gate) * up, down).sum(axis=0)

    return tuple(
        _minimum(jax.jit(each), parameters, x_TD, arguments.rounds) for each in (route, of_all)
    )  # type: ignore[return-value]


def _minimum(run: Callable[..., jax.Array], parameters: Any, x_TD: jax.Array, rounds: int) -> float:
    run(parameters, x_TD).block_until_ready()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run(parameters, x_TD).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
