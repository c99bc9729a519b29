"""The OpenAI-compatible server: its wire format, the engine loop behind it, and the inspector page."""
