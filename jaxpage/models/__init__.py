"""Model families, one file each: a spec read from config.json, Flax NNX modules, and a table of weight names."""
