"""The layers that model families are built from, in Flax NNX: they see a flat stream of tokens, never a request."""
