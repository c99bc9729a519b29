"""Defines what a dialect is: an API that the server speaks, as one record.

A dialect has its own names of a request's parameters (in settings/field_table.py), translates its
requests into chats and completions and their answers back, and is listed in registry.py. The rest
of the server knows no dialect by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
    """Is a path that lists models.

    Attributes:
        is_of_loaded: True if the list has those models only that are loaded.
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


class GenerationPath(NamedTuple):
    """Is a path whose requests generate.

    Attributes:
        open: Opens a request.
        operation: What it does, as the semantic conventions of OpenTelemetry for generative AI call
            it.
        is_for_batches: True if lines of a batch may name it.
    """

    open: Callable[[Body, ModelContext], Exchange]
    operation: str = "chat"
    is_for_batches: bool = False


class ConversationPath(NamedTuple):
    """Is a path whose requests generate, and may go on from a stored answer.

    The answers are below the path. For the other attributes see `GenerationPath`.

    Attributes:
        open: Opens a request.
    """

    open: Callable[[Body, ModelContext, OwnerResponses], Exchange]
    operation: str = "chat"
    is_for_batches: bool = False


class VectorsPath(NamedTuple):
    """Is a path whose requests want embeddings.

    Attributes:
        open: Opens a request.
        operation: See `GenerationPath`.
    """

    open: Callable[[Body, ModelContext], EmbeddingAnswer]
    operation: str = "embeddings"


class TransformPath(NamedTuple):
    """Is a path whose requests are answered without the engine.

    Attributes:
        answer: Makes the answer.
        description: How it describes a model, which then need not be loaded; None if the path does
            something else.
    """

    answer: Callable[[Body, ModelContext], Transformed]
    description: Description | None = None


class VersionPath(NamedTuple):
    """Is a path that tells clients a version.

    Attributes:
        version: The version.
    """

    version: str


PathKind = GenerationPath | ConversationPath | VectorsPath | TransformPath | ModelList | VersionPath
_Kind = TypeVar("_Kind", bound=PathKind)


@dataclass(frozen=True, kw_only=True)
class StreamForm:
    """Says how an API writes a stream.

    Attributes:
        new_frame: Makes, for each stream, the function that encodes its parts.
        end: The bytes that end a stream.
        media_type: The media type.
        comment: Bytes without meaning, which keep a silent stream open.
        is_default: True if a request streams that does not say whether it does.
        fail: Makes the last parts of a stream that fails, of the error and of the exchange, if that
            was opened; None if they are the body of an error.
    """

    new_frame: Callable[[], Frame]
    end: bytes = b""
    media_type: str = "text/event-stream; charset=utf-8"
    comment: bytes = COMMENT
    is_default: bool = False
    fail: Callable[[ApiError, Exchange | None], list[dict[str, Any]]] | None = None


@dataclass(frozen=True, kw_only=True)
class ClientHabits:
    """Says what the clients of an API do that those of OpenAI's do not.

    Attributes:
        key_header: A header that may have the API key in place of `Authorization`; empty for none.
        id_header: A header of answers that has the id of the request as well; empty for none.
        takes_any_media_type: True if they may send JSON under any media type.
        plain_name: Returns the name of a model without what they add to it.
        read_stay: Reads how long a request, of this path and body, wants its model to stay.
    """

    key_header: bytes = b""
    id_header: str = ""
    takes_any_media_type: bool = False
    plain_name: Callable[[str], str] = str
    read_stay: Callable[[str, Body], Stay] = lambda path, body: Stay()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Holds one API.

    Attributes:
        beginnings: Its paths, or what they begin with if it ends with a slash.
        paths: What each path does.
        document: What the OpenAPI document says.
        stream: How its streams are written.
        error: Makes the body of an answer of an error.
        habits: What its clients do that those of OpenAI's do not.
    """

    beginnings: tuple[str, ...]
    paths: Mapping[str, PathKind]
    document: DialectDocument
    stream: StreamForm
    error: Callable[[ApiError], dict[str, Any]] = ApiError.body
    habits: ClientHabits = ClientHabits()

    def has(self, path: str) -> bool:
        """Returns whether a path belongs to the API."""
        return any(
            path == beginning or path.startswith(beginning.removesuffix("/") + "/")
            for beginning in self.beginnings
        )

    def paths_of(self, kind: type[_Kind]) -> dict[str, _Kind]:
        """Returns the paths of a kind."""
        return {path: entry for path, entry in self.paths.items() if isinstance(entry, kind)}

    @property
    def operations(self) -> dict[str, str]:
        """Returns what the paths do that use the engine; see `GenerationPath`."""
        return {
            path: entry.operation
            for path, entry in self.paths.items()
            if isinstance(entry, GenerationPath | ConversationPath | VectorsPath)
        }

    @property
    def descriptions(self) -> dict[str, Description]:
        """Returns how paths describe a model, of those that do."""
        transforms = self.paths_of(TransformPath).items()
        return {path: each.description for path, each in transforms if each.description is not None}

    @property
    def batch_paths(self) -> list[str]:
        """Returns the paths that lines of a batch may name."""
        return [
            path
            for path, entry in self.paths.items()
            if isinstance(entry, GenerationPath | ConversationPath) and entry.is_for_batches
        ]

    def failure_chunks(self, error: ApiError, exchange: Exchange | None) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream that fails.

        Args:
            error: The error.
            exchange: The request and its answer; None if it was not read yet.
        """
        fail = self.stream.fail
        return [self.error(error)] if fail is None else fail(error, exchange)

    def is_for_stream(self, path: str, body: Body) -> bool:
        """Returns whether a request of this path and body asks for a stream."""
        value = body.get("stream")
        is_requested = self.stream.is_default if value is None else value is True
        generates = isinstance(self.paths.get(path), GenerationPath | ConversationPath)
        return generates and is_requested
