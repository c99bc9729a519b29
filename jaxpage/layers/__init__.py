"""Provides the layers, in Flax NNX, that model families are built from.

They see a flat stream of tokens, never a request. Each has a module of its own, which any room may
import; these are the names of which most pages of models speak. They are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.layers.activations import (
        ACTIVATIONS,  # has the functions of feed-forward halves by name
    )
    from jaxpage.layers.attention import (
        Attention,  # is attention of queries to the keys and values in pages
        HeadNorms,  # are the norms of its queries and keys
        Projections,  # are its products
        Scores,  # says how its scores are made
    )
    from jaxpage.layers.context import (
        ForwardContext,  # holds what the layers of a step share
        LayerPages,  # are the pages of a layer
    )
    from jaxpage.layers.delta_net import (
        DeltaWidths,  # are the widths of a gated delta net
    )
    from jaxpage.layers.embedding import (
        Embedding,  # is a table of vectors
    )
    from jaxpage.layers.experts import (
        ExpertsSpec,  # describes experts
    )
    from jaxpage.layers.linear import (
        Linear,  # is a product with a weight
    )
    from jaxpage.layers.mamba import (
        MambaSpec,  # describes Mamba 2
    )
    from jaxpage.layers.mlp import (
        MLP,  # is a feed-forward half
        GatedMLP,  # is one with gates
    )
    from jaxpage.layers.norms import (
        LayerNorm,  # is a norm with mean and variance
        RMSNorm,  # is a norm with the mean of squares
    )
    from jaxpage.layers.rope import (
        NO_ROTATION,  # is the rotation of a model that has none
        Angles,  # are the angles by which the heads of each token turn
        Rope,  # rotates queries and keys by their positions
    )

__getattr__, __dir__ = open_door(__name__)
