"""`python -m ssfl.comm.flower.link`: Flower's SuperLink, with a gate in front.

One port serves three of Flower's interfaces. Sites need the fleet's, where every request is signed
by a registered key. The other two (start a run, register a key, stop a run) ask for nothing, so
whoever reached the port could let himself in. The gate leaves them to this machine alone.
"""

import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Any], Callable[[Scope], Awaitable[None]]], Awaitable[None]]

FLEET = "/v1/fleet/"


class Gate:
    """ASGI middleware: from elsewhere, only the fleet's interface."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(
        self, scope: Scope, receive: Callable[..., Any], send: Callable[[Scope], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": b"only from the coordinator's machine"})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        return str(scope["path"]).startswith(FLEET) or _is_here(scope.get("client"))


def _is_here(client: tuple[str, int] | None) -> bool:
    if client is None:
        return False
    address = ipaddress.ip_address(client[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def main() -> None:
    """Run `flower-superlink` behind the gate, with the arguments given."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    start_parent_process_monitor(os.getppid())
    extensions.get_middleware = lambda: (Middleware(Gate),)
    flower_superlink()


if __name__ == "__main__":
    main()
