"""Translates OpenAI's wire format by pure functions.

Request bodies go in and prompts for the engine come out; outputs of the engine go in and response
bodies come out. Other formats are translated into it; see serving/dialects.
"""
