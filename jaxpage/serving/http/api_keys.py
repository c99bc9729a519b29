"""Lets requests in by API key.

Every path needs a key, whether it exists or not, except for a list of open paths.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.http.answers import send_error
from jaxpage.serving.wire.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeys:
    """Lets a request through if its header `Authorization: Bearer` has one of the keys.

    The state of its scope then has a digest of the key as `owner`, by which files belong to it.
    Without any key every request comes in. The paths of a dialect may also take the key from
    another header.

    A path is open only if it equals an open path to the letter, as the router sees it. Host, query
    and other headers make no difference. All keys are compared, each in constant time.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it with status 401."""
        if self._digests and scope["path"] not in self._open_paths and not self._has_key(scope):
            message = "No valid API key was given; send it in a header: 'Authorization: Bearer KEY'"
            refusal = ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
            await send_error(refusal, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Returns whether a request has a key, and notes the owner."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if not values and (header := dialect_of(scope["path"]).habits.key_header):
            values = [b"Bearer " + value for name, value in scope["headers"] if name == header]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        scope.setdefault("state", {})["owner"] = digest.hex()[:32]
        # The list compares all keys; a generator would stop at the first one that fits.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def owner_of(scope: Scope) -> str:
    """Returns a digest of the API key of a request, or "" where the server has no keys."""
    owner: str = scope.get("state", {}).get("owner", "")
    return owner


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
