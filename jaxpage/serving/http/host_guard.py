"""Keeps pages of other sites from using a local server that has no API keys.

Such pages run in a browser on this machine, and so they reach a server that listens here alone.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage.serving.http.answers import send_error
from jaxpage.serving.wire.errors import ApiError

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/?#@]+)(:[0-9]*)?")


class HostGuard:
    """Lets a request through if its Host names this machine and no foreign page has sent it.

    A foreign name may have been made to lead here by DNS (DNS rebinding). A foreign page may send
    simple requests anywhere; browsers only keep the answer from it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it with status 403."""
        headers = Headers(scope=scope)
        try:
            # A request of HTTP/1.0 has no Host, and passes.
            if not all(is_of_this_machine(host) for host in headers.getlist("host")):
                raise ApiError(
                    403,
                    _refusal("a Host header that names this machine (localhost, 127.0.0.1, [::1])"),
                    code="foreign_host",
                )
            check_origin(headers, may_be_link=scope["method"] in ("GET", "HEAD"))
        except ApiError as error:
            await send_error(error, scope, receive, send)
            return
        await self._app(scope, receive, send)


def check_origin(headers: Headers, *, may_be_link: bool = False) -> None:
    """Refuses a request that a browser sends for a page of another origin than the server's.

    Args:
        headers: The headers of the request.
        may_be_link: True for a request that changes nothing, which may come from a link that
            somebody has followed.

    Raises:
        ApiError: A page of another origin has sent the request.
    """
    # The server itself speaks no TLS.
    own_origin = f"http://{headers.get('host')}"
    if any(origin != own_origin for origin in headers.getlist("origin")):
        raise ApiError(
            403, _refusal("no Origin header, or the server's own"), code="foreign_origin"
        )
    if may_be_link and (
        "sec-fetch-site" not in headers or headers.get("sec-fetch-mode") == "navigate"
    ):
        return
    # Browsers send some requests without Origin, but say in other headers for whom they send them.
    if not {"none", "same-origin"}.issuperset(headers.getlist("sec-fetch-site")):
        raise ApiError(
            403, _refusal("no Sec-Fetch-Site header, or 'same-origin'"), code="foreign_origin"
        )
    if not all(
        referer == own_origin or referer.startswith(f"{own_origin}/")
        for referer in headers.getlist("referer")
    ):
        raise ApiError(
            403, _refusal("no Referer header, or a page of the server's own"), code="foreign_origin"
        )


def is_of_this_machine(host: str) -> bool:
    """Returns whether a Host header names this machine in a form that no DNS owner can define."""
    if not (match := _HOST.fullmatch(host)):
        return False
    name = match[1].strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _refusal(condition: str) -> str:
    return (
        f"Without an API key this server only accepts requests with {condition}; set "
        "--api-key-file to allow others"
    )
