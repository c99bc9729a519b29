"""Says what a model is, without loading it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from jaxpage.errors import JaxpageError
from jaxpage.serving.dialects.dialect import Description
from jaxpage.serving.http.answers import json_answer, make_ignored_header
from jaxpage.serving.several.model_requests import ModelRequest
from jaxpage.serving.several.models_file import ModelEntry
from jaxpage.serving.several.served_model import ServedModel
from jaxpage.serving.several.table import ModelTable
from jaxpage.serving.startup import describe_context
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.settings.argument_checks import show


class ShownModels:
    """Remembers what is said of each model, from its engine or from its files.

    Only an engine knows how long a sequence its memory holds; until a model is loaded for the first
    time, the length is that of its config.
    """

    def __init__(
        self,
        table: ModelTable[ServedModel],
        entries: Mapping[str, ModelEntry],
        description: Description,
    ) -> None:
        """Remembers nothing yet.

        Args:
            table: The table of the models.
            entries: The models of the file.
            description: The way in which a dialect describes a model.
        """
        self._table = table
        self._entries = entries
        self._description = description
        self._about: dict[str, dict[str, Any]] = {}
        self._reading = asyncio.Lock()

    async def answer(self, requested: ModelRequest) -> Response:
        """Answers a request.

        Raises:
            ApiError: A field is refused, or the files of the model cannot be read.
        """
        entry = self._entries[requested.model]
        async with self._reading:
            about = await asyncio.to_thread(self._read, entry)
        context = ModelContext(
            model_names=(entry.name, *entry.adapters),
            max_model_len=0,
            vocab_size=0,
            tokenizer=None,
            strict_requests=entry.server.strict_requests,
        )
        answer = quotes(self._description.answer)(requested.body, context, about)
        return json_answer(answer.body, headers=make_ignored_header(answer.ignored_fields))

    def _read(self, entry: ModelEntry) -> dict[str, Any]:
        model = self._table.slots[entry.name].model
        if model is not None:
            self._about[entry.name] = self._description.about(model.context)
        elif entry.name not in self._about:
            try:
                context = describe_context(entry.engine, entry.server)
            except JaxpageError as error:
                raise not_loaded(entry.name, error) from error
            self._about[entry.name] = self._description.about(context)
        return self._about[entry.name]


def not_loaded(name: str, error: JaxpageError) -> ApiError:
    """Returns the error for a model that cannot be loaded."""
    # No Retry-After: what is wrong with its files or its memory seldom passes by itself.
    return ApiError(
        500,
        f"The model {show(name)} cannot be loaded: {error}",
        param="model",
        code="model_not_loaded",
    )
