"""Holds the parts of which the pages of models are composed.

    Decoder              is a model; a page makes its block and what else differs
    Block                is a layer: attention, then a feed-forward half
    HalfBlock            is a layer that has one half
    DecoderConfig        holds what config.json says of most decoders
    Scope                names a module in a checkpoint, and the type of its parameters

Pages import each part from its own module.
"""
