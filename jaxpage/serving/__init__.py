"""The OpenAI-compatible server: the wire format, the engine on a thread of its own, the HTTP application, and the inspector."""
