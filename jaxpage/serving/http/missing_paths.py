"""Answers requests to paths that this server does not have, and says why of some of them."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.serving.http.answers import error_answer
from jaxpage.serving.wire.errors import ApiError

_WHY_MISSING = {
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/is_sleeping"),
        "A server of one model does not sleep: start one with `jaxpage serve --models FILE`, "
        "of which each model sleeps and wakes by itself",
    ),
    **dict.fromkeys(
        ("/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache"),
        "A server of one model is paused for updates of its weights, which it takes if it was "
        "started with `--weights-directory DIRECTORY`",
    ),
    **dict.fromkeys(
        (
            *("/init_communicator/", "/update_named_param/", "/close_communicator/"),
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        ),
        "This server takes no weights by NCCL: write them as safetensors below "
        "`--weights-directory` and POST /v1/update_weights, as jaxpage.integrations.trl does",
    ),
}


async def answer_missing(request: Request, error: Exception) -> Response:
    """Answers a request for which the router has no route."""
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "This path does not exist", 405: "This path does not support the method"}.get(
        error.status_code, error.detail
    )
    if error.status_code == 404:
        message = _WHY_MISSING.get(request.scope["path"], message)
    refusal = ApiError(error.status_code, message, code=code, headers=error.headers)
    return error_answer(refusal, request.scope["path"])
