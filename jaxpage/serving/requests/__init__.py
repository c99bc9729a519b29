"""Answers requests with the engine: prepares them on threads, generates, embeds and ranks."""
