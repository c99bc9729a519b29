"""Model families, one file each: a spec read from config.json, and Flax NNX modules that declare their weights."""
