"""Answers `/v1/files` and `/v1/batches`, as far as OpenAI's clients use them for batches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from jaxpage.serving.batches.jobs import Batches
from jaxpage.serving.batches.lines import URLS
from jaxpage.serving.batches.store import OPEN, Record
from jaxpage.serving.batches.uploads import read_form
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.api_keys import owner_of
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.pages import page_of
from jaxpage.serving.http.request_limits import check_is_json
from jaxpage.serving.wire.body import check_fields, parse_object, text_field
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

MAX_UPLOAD_BYTES = 1 << 26
_FORM_BYTES = 1 << 16  # the most bytes of an upload around its file
_MAX_LABELS = 16
_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata"}
_Answer = Callable[[Request], Awaitable[Response]]


def upload_limits(max_stored_bytes: int) -> dict[str, int]:
    """Returns the largest bodies by the paths that take larger ones than other paths."""
    return {"/v1/files": min(MAX_UPLOAD_BYTES, max_stored_bytes) + _FORM_BYTES}


class BatchRoutes:
    """Answers the requests of these paths."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._store = batches.store
        self.routes: list[BaseRoute] = [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._files),
            Route("/v1/files/{file_id}", self._file),
            Route("/v1/files/{file_id}", self._delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self._content),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list),
            Route("/v1/batches/{batch_id}", self._batch),
            Route("/v1/batches/{batch_id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _upload(self, request: Request) -> Response:
        check_origin(request.headers)
        body = await request.body()
        content_type = request.headers.get("content-type", "")
        form = await asyncio.to_thread(read_form, content_type, body)
        if unknown := sorted(form.keys() - {"file", "purpose"}):
            raise ApiError(400, f"{show(unknown[0])} is not supported", param="body")
        if "file" not in form or not form["file"].filename:
            raise ApiError(400, "file is required, with a file name", param="file")
        if "purpose" not in form or form["purpose"].content != b"batch":
            raise ApiError(400, "purpose must be 'batch'", param="purpose")
        uploaded = form["file"]
        if not uploaded.content:
            raise ApiError(400, "file is empty", param="file")
        file_id = f"file-{uuid.uuid4().hex}"
        with self._store.room(len(uploaded.content)):
            record = await asyncio.to_thread(
                self._store.write_file,
                uploaded.filename,
                "batch",
                owner_of(request.scope),
                file_id,
                uploaded.content,
            )
        return json_answer(record)

    async def _files(self, request: Request) -> Response:
        records = self._store.of_owner("file", owner_of(request.scope))
        if purpose := request.query_params.get("purpose"):
            records = [record for record in records if record["purpose"] == purpose]
        return page_of(request, records, {"after", "limit", "order", "purpose"}, 1000)

    async def _file(self, request: Request) -> Response:
        return json_answer(self._find_file(request))

    async def _delete(self, request: Request) -> Response:
        record = self._find_file(request)
        for batch in self._store.every("batch"):
            # A batch that a later start continues reads its input, whatever it does now.
            if batch["input_file_id"] == record["id"] and batch["status"] in OPEN:
                raise ApiError(
                    409,
                    f"The file is the input of {batch['id']}, which has not ended",
                    code="conflict",
                )
        self._store.forget(record)
        await asyncio.to_thread(self._store.delete_files, record)
        return json_answer({"id": record["id"], "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        path = self._store.content(self._find_file(request)["id"])
        return FileResponse(path, media_type="application/jsonl")

    async def _create(self, request: Request) -> Response:
        check_origin(request.headers)
        check_is_json(request.headers)
        body = await asyncio.to_thread(parse_object, await request.body())
        check_fields(body, _FIELDS)
        owner = owner_of(request.scope)
        file_id = text_field(body, "input_file_id")
        if self._store.find("file", file_id, owner)["purpose"] != "batch":
            raise ApiError(
                400, "input_file_id must be of a file for batches", param="input_file_id"
            )
        if (endpoint := body.get("endpoint")) not in URLS:
            raise ApiError(
                400,
                f"endpoint must be {', '.join(URLS)}; got {show(endpoint)}",
                param="endpoint",
            )
        # The API of OpenAI has no other window.
        if body.get("completion_window") != "24h":
            raise ApiError(400, "completion_window must be '24h'", param="completion_window")
        record = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "metadata": _labels(body.get("metadata")),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        # The record changes as soon as the batch runs, and the answer shows it as it was made.
        answer = json_answer(record)
        forgotten = self._store.forget_ended_batch()
        await self._batches.add(record, owner)
        if forgotten is not None:
            await asyncio.to_thread(self._store.delete_files, forgotten)
        return answer

    async def _list(self, request: Request) -> Response:
        records = self._store.of_owner("batch", owner_of(request.scope))
        return page_of(request, records, {"after", "limit"}, 20)

    async def _batch(self, request: Request) -> Response:
        return json_answer(self._find_batch(request))

    async def _cancel(self, request: Request) -> Response:
        check_origin(request.headers)
        record = self._find_batch(request)
        return json_answer(await self._batches.cancel(record))

    def _find_file(self, request: Request) -> Record:
        return self._store.find("file", request.path_params["file_id"], owner_of(request.scope))

    def _find_batch(self, request: Request) -> Record:
        return self._store.find("batch", request.path_params["batch_id"], owner_of(request.scope))


def _labels(metadata: Any) -> dict[str, str] | None:
    if metadata is None:
        return None
    # The numbers are OpenAI's limits for metadata.
    if (
        not isinstance(metadata, dict)
        or len(metadata) > _MAX_LABELS
        or not all(isinstance(value, str) and len(value) <= 512 for value in metadata.values())
        or not all(len(name) <= 64 for name in metadata)
    ):
        raise ApiError(
            400,
            f"metadata must be an object of at most {_MAX_LABELS} strings of up to 512 characters",
            param="metadata",
        )
    return metadata
