"""Reads GGUF files: their header, their settings and their tensors."""

from jaxpage.checkpoints.gguf.header import is_gguf  # says whether a path is a GGUF file
