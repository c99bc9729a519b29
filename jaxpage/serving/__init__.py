"""The OpenAI-compatible server: its wire format, and the inspector page; a driver runs its engine."""
