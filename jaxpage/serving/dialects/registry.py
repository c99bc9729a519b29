"""Lists the dialects."""

from __future__ import annotations

from jaxpage.serving.dialects import messages, ollama, openai, responses
from jaxpage.serving.dialects.dialect import Dialect

DIALECTS = (openai.DIALECT, responses.DIALECT, messages.DIALECT, ollama.DIALECT)


def dialect_of(path: str) -> Dialect:
    """Returns the dialect of the API that a path belongs to; OpenAI's for any unknown path."""
    return next((dialect for dialect in DIALECTS if dialect.has(path)), openai.DIALECT)
