"""Translates OpenAI's wire format by pure functions.

Request bodies go in and prompts for the engine come out; outputs of the engine go in and response
bodies come out. The formats of Anthropic and Ollama are translated into OpenAI's.
"""
