"""SGLang's native HTTP interface, as far as the demo uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sglang_dynspec.demo.errors import DemoError
from sglang_dynspec.observe.server_info import PATH, Status

if TYPE_CHECKING:
    import aiohttp

_STATUS_TIMEOUT = 30.0  # s; under load the scheduler answers between two steps


def greedy_payloads(prompts: Sequence[Mapping[str, Any]], *, tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of ``/generate`` requests that always take the most probable token.

    Args:
        prompts: ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        tokens: output tokens, on average. From prompt to prompt it varies by a quarter, as equally
            long requests that begin together would also end together, in every round.
    """
    return [
        {
            **prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max(1, round(tokens * (0.75 + 0.125 * (number * 3 % 5)))),
                "ignore_eos": True,
            },
        }
        for number, prompt in enumerate(prompts)
    ]


class Client:
    """A server's client, for use in one event loop.

    Args:
        url: the server's, without a path.
        request_timeout: seconds that one request may take.
    """

    def __init__(self, url: str, *, request_timeout: float = 600.0) -> None:
        self._url = url
        self._request_timeout = request_timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        import aiohttp

        # SGLang's own limit is --max-running-requests; there should be none before it.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, payload: Mapping[str, Any]) -> list[int]:
        """Run one request and return the output's token ids.

        Raises:
            DemoError: the server answers with an error, or not at all.
        """
        answer = await self._ask("POST", "/generate", self._request_timeout, json=payload)
        token_ids: list[int] = answer["output_ids"]
        return token_ids

    async def status(self) -> Status:
        """Return the status of dynspec in the server.

        Raises:
            StatusError: it shows none.
            DemoError: the server answers with an error, or not at all.
        """
        return Status.from_server_info(await self._ask("GET", PATH, _STATUS_TIMEOUT))

    async def _ask(self, method: str, path: str, timeout: float, **kwargs: Any) -> Any:
        import aiohttp

        assert self._session is not None, "use `async with Client(...)`"
        total = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(
                method, self._url + path, timeout=total, **kwargs
            ) as response:
                if response.status != 200:
                    raise DemoError(f"{method} {path}: {await _refusal(response)}")
                return await response.json()
        except asyncio.TimeoutError as error:
            raise DemoError(f"{method} {path}: no answer within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise DemoError(f"{method} {path}: {type(error).__name__}: {error}") from error


async def _refusal(response: aiohttp.ClientResponse) -> str:
    body = ""
    with suppress(UnicodeDecodeError):
        body = (await response.text())[:500]
    return f"HTTP {response.status} {response.reason}: {body}"
