"""Holds the parts of which the pages of models are composed.

    decoder, encoder     a model and its layers; a page makes its block, and what else differs
    decoder_config, encoder_config
                         what config.json says of most of them
    attention, mlp, experts, latent, norms, recurrences
                         functions that make these parts of a layer
    names                names of modules in a checkpoint
    vision, vision_config, vision_tower, patches
                         the same of encoders of pictures

Pages import these modules and call what they have, as in `attention.grouped_query_attention`. The
classes of which most pages speak are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.parts.attention import (
        Gates,  # describes gates of the outputs of heads
    )
    from jaxpage.models.parts.decoder import (
        Block,  # is a layer of two halves
        Decoder,  # is a model that generates
        HalfBlock,  # is a layer of one half
    )
    from jaxpage.models.parts.decoder_config import (
        DecoderConfig,  # holds what the configs of decoders say
        Defaults,  # says what absent fields mean to a family
        ExpertsConfig,  # is the config of a decoder with experts
    )
    from jaxpage.models.parts.latent import (
        LatentDefaults,  # says what absent fields of latent attention mean
        LatentSpec,  # describes latent attention
    )
    from jaxpage.models.parts.names import (
        DEEPSEEK_EXPERTS,  # names the weights of experts as DeepSeek does
        LLAMA_MLP,  # names the products of a feed-forward half as Llama does
        QWEN_EXPERTS,  # names the weights of experts as Qwen does
        AttentionNames,  # names the products of attention
        ExpertNames,  # names the weights of experts
        MLPNames,  # names the products of a feed-forward half
        ModuleNames,  # names the modules of a decoder
        NormNames,  # names the norms of a layer
        PlainNames,  # names the products of a feed-forward half without gates
        Scope,  # names a module in a checkpoint, and the type of its parameters
    )

__getattr__, __dir__ = open_door(__name__)
