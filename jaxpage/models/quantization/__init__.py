"""Formats of quantised weights: what config.json says of them, and how their tensors become those of the layers."""
