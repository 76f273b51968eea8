"""A running server, seen and changed over HTTP; the standard library only."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

from sglang_dynspec.engine.change import MAX_ID, Change, verdict
from sglang_dynspec.errors import DynspecError
from sglang_dynspec.observe.server_info import PATH as SERVER_INFO

ROUTE = "/dynspec"
SET_INTERNAL_STATE = "/set_internal_state"

_TIMEOUT = 60.0  # s; the scheduler answers between two steps


class CtlError(DynspecError, RuntimeError):
    """A server that cannot be asked."""


class _NoRouteError(Exception):
    """The server has no such route."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a server asks for: its ``--api-key`` and its ``--admin-api-key``."""

    api_key: str | None = None
    admin_api_key: str | None = None


class Client:
    """One server.

    Args:
        url: without a path; ``http://`` may be left out.
        keys: what it asks for, if anything.

    Raises:
        CtlError: the URL is none.
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urllib.parse.urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CtlError(f"{url!r} is no URL of a server; write it as http://localhost:30000")
        self._keys = keys

    def status(self) -> list[dict[str, Any] | None]:
        """Return the status of every scheduler; None of one that dynspec was not started in.

        Raises:
            CtlError: the server does not answer, or refuses to.
        """
        try:
            states: list[dict[str, Any] | None] = self._get(ROUTE)["schedulers"]
        except _NoRouteError:
            states = [s.get("dynspec") for s in self._get(SERVER_INFO)["internal_states"]]
        return states

    def make(self, asked: Change) -> dict[str, Any]:
        """Make a change, and return ``accepted``, ``reason`` and the outcome on each of
        ``schedulers``.

        Raises:
            CtlError: the server does not answer, or refuses to.
        """
        try:
            answer: dict[str, Any] = self._post(ROUTE, asked.as_json(), refused=400)
        except _NoRouteError:
            answer = self._through_internal_state(asked)
        return answer

    def _through_internal_state(self, asked: Change) -> dict[str, Any]:
        asked = replace(asked, id=secrets.randbelow(MAX_ID))
        self._post(SET_INTERNAL_STATE, {"server_args": asked.as_keys()})
        states = self._get(SERVER_INFO)["internal_states"]
        return verdict([state.get("dynspec") for state in states], asked)

    def _get(self, path: str) -> Any:
        return self._ask(path, None, self._keys.api_key or self._keys.admin_api_key)

    def _post(self, path: str, body: dict[str, Any], refused: int | None = None) -> Any:
        # SGLang takes the admin key alone for what is for admins, where it has one.
        key = self._keys.admin_api_key or self._keys.api_key
        return self._ask(path, json.dumps(body).encode(), key, refused)

    def _ask(
        self, path: str, body: bytes | None, key: str | None, refused: int | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            request = urllib.request.Request(self._url + path, body, headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return _parsed(path, answer.read())
        except urllib.error.HTTPError as error:
            if error.code == refused:
                return _parsed(path, error.read())
            raise self._failed(path, error, key) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise CtlError(
                f"cannot reach {self._url}: {reason}; is the server running, and is that its "
                "address?"
            ) from error

    def _failed(self, path: str, error: urllib.error.HTTPError, key: str | None) -> Exception:
        if error.code == 404:
            if path == ROUTE:
                return _NoRouteError()
            return CtlError(f"{self._url} has no {path}; it does not look like a server of SGLang")
        if error.code in (401, 403):
            given = "refuses the key that was given" if key else "asks for a key"
            return CtlError(
                f"{self._url} {given} (HTTP {error.code}); pass --api-key, or --admin-api-key "
                "where the server was started with one"
            )
        said = error.read(500).decode(errors="replace").strip()
        return CtlError(f"{self._url}{path} answers HTTP {error.code}: {said}")


def _parsed(path: str, said: bytes) -> Any:
    try:
        return json.loads(said)
    except ValueError as error:
        shown = said[:200].decode(errors="replace")
        raise CtlError(f"{path} answers with what is no JSON: {shown!r}") from error
