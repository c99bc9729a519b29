"""Defines what a dialect is: an API that the server speaks, as one record.

A dialect has its own names of a request's parameters (in settings/field_table.py), translates its
requests into chats and completions and their answers back, and is listed in registry.py. The rest
of the server knows no dialect by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpage.serving.requests.response_store import OwnerResponses
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import EmbeddingAnswer
from jaxpage.serving.wire.encoding import COMMENT, Frame
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.serving.wire.openapi_parts import DialectDocument
from jaxpage.serving.wire.tokenizing import Transformed

Body = dict[str, Any]


class Description(NamedTuple):
    """Says how an API describes a model.

    Attributes:
        about: Returns the facts about a model.
        answer: Makes the answer to a request from such facts.
    """

    about: Callable[[ModelContext], dict[str, Any]]
    answer: Callable[[Body, ModelContext, Mapping[str, Any]], Transformed]


class ListedModel(NamedTuple):
    """Holds what a list of models says of one.

    Attributes:
        name: The name by which requests call it.
        card: The description of its files.
        created: The time since which it is served, in seconds since 1970.
        context_length: The most tokens of a sequence.
        num_bytes: The bytes that it takes; None if the server has only one model, which stays.
        device_bytes: The part of them that is memory of a device of its own.
        until: The time at which it is unloaded, in seconds since 1970.
        context: What else is known of it; None if it is not loaded.
    """

    name: str
    card: ModelCard
    created: float
    context_length: int = 0
    num_bytes: int | None = None
    device_bytes: int = 0
    until: float = 0.0
    context: ModelContext | None = None


class ModelList(NamedTuple):
    """Says how an API lists models.

    Attributes:
        is_of_loaded: True if it has those models only that are loaded.
        write: Returns the answer.
    """

    is_of_loaded: bool
    write: Callable[[Sequence[ListedModel]], dict[str, Any]]


class Stay(NamedTuple):
    """Holds how long a request wants its model to stay loaded.

    Attributes:
        seconds: The seconds after the request; None if it does not say.
        unload: Makes the answer, of the name in the request, if all that it asks for is that the
            model be unloaded; None otherwise.
    """

    seconds: float | None = None
    unload: Callable[[str], dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class StreamForm:
    """Says how an API writes a stream.

    Attributes:
        new_frame: Makes, for each stream, the function that encodes its parts.
        end: The bytes that end a stream.
        media_type: The media type.
        comment: Bytes without meaning, which keep a silent stream open.
    """

    new_frame: Callable[[], Frame]
    end: bytes = b""
    media_type: str = "text/event-stream; charset=utf-8"
    comment: bytes = COMMENT


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Holds one API.

    Attributes:
        beginnings: Its paths, or what they begin with if it ends with a slash.
        error: Makes the body of an answer of an error.
        fail: Makes the last parts of a stream that fails, of the error and of the exchange, if that
            was opened; None if they are the body of an error.
        stream: How its streams are written.
        streams_by_default: True if a request streams that does not say whether it does.
        exchanges: What opens a request that generates, by path.
        conversations: What opens a request that may go on from a stored answer, by path; the
            answers are below that path.
        transforms: What answers a request without the engine, by path.
        vectors: What opens a request for embeddings, by path.
        descriptions: Those of the transforms that describe a model, which need not be loaded.
        lists: How models are listed, by path.
        operations: What the paths of `exchanges`, `conversations` and `vectors` do, as the semantic
            conventions of OpenTelemetry for generative AI call it, such as "chat".
        versions: The version that clients are told, by path.
        document: What the OpenAPI document says.
        key_header: A header that may have the API key in place of `Authorization`; empty for none.
        id_header: A header of answers that has the id of the request as well; empty for none.
        takes_any_media_type: True if JSON may be sent under any media type.
        plain_name: Returns the name of a model without what the API's clients add to it.
        read_stay: Reads how long a request, of this path and body, wants its model to stay.
    """

    beginnings: tuple[str, ...]
    error: Callable[[ApiError], dict[str, Any]] = ApiError.body
    fail: Callable[[ApiError, Exchange | None], list[dict[str, Any]]] | None = None
    stream: StreamForm
    streams_by_default: bool = False
    exchanges: Mapping[str, Callable[[Body, ModelContext], Exchange]] = field(default_factory=dict)
    conversations: Mapping[str, Callable[[Body, ModelContext, OwnerResponses], Exchange]] = field(
        default_factory=dict
    )
    transforms: Mapping[str, Callable[[Body, ModelContext], Transformed]] = field(
        default_factory=dict
    )
    vectors: Mapping[str, Callable[[Body, ModelContext], EmbeddingAnswer]] = field(
        default_factory=dict
    )
    descriptions: Mapping[str, Description] = field(default_factory=dict)
    lists: Mapping[str, ModelList] = field(default_factory=dict)
    operations: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    document: DialectDocument
    key_header: bytes = b""
    id_header: str = ""
    takes_any_media_type: bool = False
    plain_name: Callable[[str], str] = str
    read_stay: Callable[[str, Body], Stay] = lambda path, body: Stay()

    def has(self, path: str) -> bool:
        """Returns whether a path belongs to the API."""
        return any(
            path == beginning or path.startswith(beginning.removesuffix("/") + "/")
            for beginning in self.beginnings
        )

    def failure_chunks(self, error: ApiError, exchange: Exchange | None) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream that fails.

        Args:
            error: The error.
            exchange: The request and its answer; None if it was not read yet.
        """
        return [self.error(error)] if self.fail is None else self.fail(error, exchange)

    def is_for_stream(self, path: str, body: Body) -> bool:
        """Returns whether a request of this path and body asks for a stream."""
        value = body.get("stream")
        is_requested = self.streams_by_default if value is None else value is True
        generates = path in self.exchanges or path in self.conversations
        return generates and is_requested
