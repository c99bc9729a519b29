"""Speaks other APIs than OpenAI's: each is a module that translates requests and answers.

`dialect.py` says what a dialect is, and `registry.py` lists them.
"""
