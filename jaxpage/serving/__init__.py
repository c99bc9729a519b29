"""Serves a model over HTTP as OpenAI's API does, and shows its engine on the inspector page.

The server translates requests (`wire/`), limits what connections may do (`http/`), and leads an
engine that several hosts share (`hosts/`). A driver runs the engine on a thread of its own.
"""
