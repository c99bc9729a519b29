"""What writes keys and values and what moves blocks, in plain XLA: the definitions."""
