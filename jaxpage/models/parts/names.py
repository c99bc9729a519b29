"""Holds the names of modules in a checkpoint: of one that is made, and of those inside of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from flax import nnx

from jaxpage.layers import Linear
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.parameter import parameter, tensor


@dataclass(frozen=True)
class Scope:
    """Holds the name of a module in the checkpoint, and the type of its parameters.

    `scope / "self_attn"` is the scope of a module inside of it.

    Attributes:
        name: The name.
        dtype: The type.
        whole: True if each device has all of its parameters, so that no axis has a name.
    """

    name: str
    dtype: jax.typing.DTypeLike
    whole: bool = False

    def __truediv__(self, module: str) -> Scope:
        """Returns the scope of a module of this one; "" is this one itself."""
        return replace(self, name=".".join(filter(None, (self.name, module))))

    def axis(self, name: str | None) -> str | None:
        """Returns the name of an axis; None where no axis has one."""
        return None if self.whole else name

    def projection(
        self,
        num_in: int,
        *parts: tuple[str, int],
        axes: tuple[str | None, str | None] = ("embed", "heads"),
        bias: bool = False,
        each: tuple[int, ...] = (),
    ) -> Linear:
        """Returns a linear layer whose outputs are those of one or several layers in this module.

        Args:
            num_in: The width of the input.
            *parts: The name and the number of outputs of each of them.
            axes: The axes of the input and of the outputs.
            bias: True if they have biases.
            each: See `Part`, for the first one.
        """
        input_axis, output_axis = map(self.axis, axes)
        made = [Part(rows, output_axis, (self / name).name) for name, rows in parts]
        made[0] = replace(made[0], each=each)
        return linear(num_in, *made, input_axis=input_axis, bias=bias, dtype=self.dtype)

    def vector(
        self, name: str, size: int, axis: str | None = None, aliases: tuple[str, ...] = ()
    ) -> nnx.Param[jax.Array]:
        """Returns a parameter that is a vector.

        Args:
            name: The name of its tensor in this module; "" if it has the name of the module.
            size: The number of its entries.
            axis: The name of its axis.
            aliases: Whole names that the tensor has in other files.
        """
        source = tensor((self / name).name, size, aliases=aliases)
        return parameter((size,), axes=(axis,), dtype=self.dtype, sources=[source])


@dataclass(frozen=True)
class ModuleNames:
    """Holds the names of a decoder's modules in a checkpoint.

    Attributes:
        tokens: The token table.
        positions: The table of learned positions; None if there is none.
        layers: The layers.
        norm: The norm after the last layer.
        heads: The names that the head has, the usual one first.
    """

    tokens: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)


@dataclass(frozen=True)
class NormNames:
    """Holds the names of the norms of a layer, each as the argument of `Block`.

    A norm whose name is None is not made.

    Attributes:
        attention_norm: The norm before attention.
        mlp_norm: The norm before the feed-forward half.
        post_attention_norm: The norm of the output of attention.
        post_mlp_norm: The norm of the output of the feed-forward half.
    """

    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    post_attention_norm: str | None = None
    post_mlp_norm: str | None = None


@dataclass(frozen=True)
class AttentionNames:
    """Holds the names of the products of attention.

    Attributes:
        output: The product for the output.
        fused: The one product for queries, keys and values; None for three products.
        in_groups: True if that product has for each key/value head its queries, its key and its
            value; False if it has all queries, then all keys, then all values.
        inputs: The products for queries, keys and values.
        module: Attention, in its layer.
    """

    output: str = "o_proj"
    fused: str | None = None
    in_groups: bool = True
    inputs: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    module: str = "self_attn"


@dataclass(frozen=True)
class MLPNames:
    """Holds the names of a gated feed-forward half.

    Attributes:
        module: The half, in its layer.
        gate: The product for the gates; None where no file has it apart from the ups.
        up: The product for the ups; None like `gate`.
        down: The product for the output.
        fused: The product for both gates and ups, in files that join them.
    """

    module: str = "mlp"
    gate: str | None = "gate_proj"
    up: str | None = "up_proj"
    down: str = "down_proj"
    fused: str | None = "gate_up_proj"


@dataclass(frozen=True)
class PlainNames:
    """Holds the names of a feed-forward half without gates.

    Attributes:
        up: The first product.
        down: The second product.
        module: The half, in its layer.
    """

    up: str
    down: str
    module: str = "mlp"


@dataclass(frozen=True)
class ExpertNames:
    """Holds the names of the experts' weights in files.

    Attributes:
        module: The mixture, in its layer.
        gate: The product for the gates, in an expert.
        up: The product for the ups, in an expert.
        down: The product for the output, in an expert.
        router: The router, in the mixture.
        shared: The expert of all tokens, in the mixture, and the weight of its gate or None. The
            expert is None if it has the names of a feed-forward half without experts.
        correction: The corrections of ratings, in the mixture.
        corrections_in_row: True if the corrections are [1, E], not [E].
        in_memory: The mixture, where transformers keeps it in memory and saves it so on request,
            with the names of its router and of the corrections there.
        only_stacked: True if no file has the experts apart. The stacked ones are then [in, out].
        together: The modules that have the gates and ups, and the downs, of all experts, in a
            family that never has experts apart; empty for others. transformers keeps them in memory
            in the same mixture.
        in_rows_too: True if some files have those as [out, in].
    """

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: tuple[str | None, str | None] = ("shared_expert", "shared_expert_gate.weight")
    correction: str = "gate.e_score_correction_bias"
    corrections_in_row: bool = False
    in_memory: tuple[str, str, str] = ("mlp", "gate", "gate.e_score_correction_bias")
    only_stacked: bool = False
    together: tuple[str, ...] = ()
    in_rows_too: bool = False


LLAMA_ATTENTION = AttentionNames()
LLAMA_MLP = MLPNames()
QWEN_EXPERTS = ExpertNames()
DEEPSEEK_EXPERTS = ExpertNames(shared=("shared_experts", None))
