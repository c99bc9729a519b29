"""Reads formats of quantised weights: what config.json says of them, and their tensors."""
