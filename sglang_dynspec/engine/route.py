"""The route ``/dynspec`` of SGLang's HTTP server: ``GET`` the status, ``POST`` a change.

It is a front of ``/set_internal_state`` and ``/server_info``: the schedulers get what these would
send them. A server that has not got the route serves as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang_dynspec import __version__
from sglang_dynspec.engine import change, contract
from sglang_dynspec.errors import ChangeError, ContractError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("sglang_dynspec")

PATH = "/dynspec"


def add(http_server: ModuleType) -> None:
    """Add the route to SGLang's application, before it serves. What fails is logged.

    Args:
        http_server: SGLang's module.
    """
    try:
        problems = contract.probe(contract.ROUTE)
        if problems:
            raise ContractError("; ".join(problems))
        _add(http_server)
    except Exception as error:
        logger.warning(
            "sglang_dynspec: the HTTP server has no route %s (%s: %s); use /set_internal_state and "
            "/server_info instead.",
            PATH,
            type(error).__name__,
            error,
        )


def _add(http_server: ModuleType) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.routing import Route

    routes = http_server.app.router.routes
    if any(getattr(route, "path", None) == PATH for route in routes):
        return
    front = Front(http_server)

    async def status(request: Request) -> Response:
        return await front.status()

    # As /set_internal_state; SGLang's middleware looks for it on the function.
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def change_it(request: Request) -> Response:
        return await front.make(await request.body())

    routes.append(Route(PATH, status, methods=["GET"]))
    routes.append(Route(PATH, change_it, methods=["POST"]))


class Front:
    """What the route does.

    Args:
        http_server: SGLang's module, which knows the tokenizer manager once it serves.
    """

    def __init__(self, http_server: ModuleType) -> None:
        self._http_server = http_server
        # One change after another, so that the status shows the outcome of each.
        self._lock = asyncio.Lock()

    async def status(self) -> Response:
        """Return the statuses of all schedulers."""
        return _answer(200, {"version": __version__, "schedulers": await self._states()})

    async def make(self, body: bytes) -> Response:
        """Make a change on all schedulers, and return what has come of it."""
        try:
            asked = change.from_json(_parsed(body))
        except ChangeError as error:
            refused = {"accepted": False, "dry_run": False, "reason": str(error), "schedulers": []}
            return _answer(400, refused)
        asked = replace(asked, id=secrets.randbelow(change.MAX_ID))
        async with self._lock:
            await self._send(asked)
            verdict = change.verdict(await self._states(), asked)
        return _answer(200 if verdict["accepted"] else 400, verdict)

    async def _send(self, asked: change.Change) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        manager = self._manager()
        await manager.set_internal_state(SetInternalStateReq(server_args=asked.as_keys()))

    async def _states(self) -> list[dict[str, Any] | None]:
        states = await self._manager().get_internal_state()
        return [state.get("dynspec") for state in states]

    def _manager(self) -> Any:
        manager = self._http_server._global_state.tokenizer_manager
        # 0.5.9 does not do it for control requests, and would wait for good.
        manager.auto_create_handle_loop()
        return manager


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as error:  # also where it is no UTF-8
        raise ChangeError(
            f"the body is no JSON ({error}); send an object such as "
            '{"policy": "batch_size(off_at=48)"}'
        ) from error


def _answer(code: int, content: dict[str, Any]) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(content), code, media_type="application/json")
