"""Reads and computes the experts of Gemma 4, which stand beside the feed-forward half."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers import ExpertsSpec
from jaxpage.layers.expert_linear import ExpertLinear, ExpertLinearSpec
from jaxpage.layers.experts import Experts
from jaxpage.layers.parameter import Axis, tensor
from jaxpage.layers.routing import Router, Routing
from jaxpage.models.config import Fields
from jaxpage.models.parts import DecoderConfig, Scope, norms


def read_experts(fields: Fields) -> ExpertsSpec | None:
    """Returns what the fields say of experts."""
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.integer("num_experts")
    per_token = fields.integer("top_k_experts")
    if per_token > num_experts:
        text = f"top_k_experts = {per_token} of num_experts = {num_experts} experts cannot be"
        fields.note_wrong(text, top_k_experts=1, num_experts=num_experts)
        per_token = 1
    routing = Routing(num_experts=num_experts, per_token=per_token, normalized=True)
    return ExpertsSpec(routing, fields.integer("moe_intermediate_size"))


class Gemma4Experts(nnx.Module):
    """Adds chosen experts, which take the input of the feed-forward half before its norm, to it.

    The router has a norm of its own, and each expert a factor of its weight.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsSpec, layer: Scope):
        """Makes the experts.

        Args:
            config: The config of the model.
            experts: The experts.
            layer: The scope of the layer, which has their modules.
        """
        width, dtype = config.hidden_size, layer.dtype
        count = experts.routing.num_experts
        inner = experts.width

        def stack(part: str, sizes: tuple[int, int], axes: tuple[str, Axis]) -> ExpertLinear:
            return ExpertLinear(
                ExpertLinearSpec(
                    count,
                    *sizes,
                    *axes,
                    name=(layer / "experts" / part).name,
                    transposed=False,
                    modules=(),
                    bias=False,
                    dtype=dtype,
                )
            )

        gate_up_axis: Axis = (("ffn", inner), ("ffn", inner))
        self.experts = Experts(
            stack("gate_up_proj", (width, 2 * inner), ("embed", gate_up_axis)),
            stack("down_proj", (inner, width), ("ffn", "embed")),
            activation=config.activation,
            swiglu=None,
        )
        router = (layer / "router").name
        self.router = Router(
            experts.routing,
            width,
            weight=tensor(f"{router}.proj.weight", count, width),
            bias=tensor(f"{router}.bias", count),
            correction=tensor(f"{router}.correction", count),
            dtype=dtype,
        )
        # Its learned scale is a vector of the router.
        self.router_norm = norms.rms_norm(config, None)
        self.router_scale = (layer / "router").vector("scale", width, "embed")
        self.factor = (layer / "router").vector("per_expert_scale", count)
        self.norm = norms.rms_norm(config, layer / "pre_feedforward_layernorm_2")
        self.post_expert_norm = norms.rms_norm(config, layer / "post_feedforward_layernorm_2")
        self.post_dense_norm = norms.rms_norm(config, layer / "post_feedforward_layernorm_1")

    def __call__(
        self, x_TD: Float[Array, "T D"], dense_TD: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """Returns the sum of the experts' output and that of the dense half."""
        # transformers multiplies by the learned scale first, and then by the inverse root of the
        # width.
        scale = x_TD.shape[1] ** -0.5
        routed_TD = self.router_norm(x_TD) * self.router_scale[...][None] * scale
        expert_TX, weight_TX = self.router(routed_TD)
        weight_TX = weight_TX * self.factor[...][expert_TX]
        made_TD = self.experts(self.norm(x_TD), expert_TX, weight_TX)
        return self.post_dense_norm(dense_TD) + self.post_expert_norm(made_TD)
