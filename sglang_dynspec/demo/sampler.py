"""Reading a server's status several times a second while it is under load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sglang_dynspec.demo.errors import DemoError
from sglang_dynspec.demo.load import Load
from sglang_dynspec.observe.server_info import Status
from sglang_dynspec.observe.timeline import Sample, Timeline

FetchStatus = Callable[[], Awaitable[Status]]


def require_in_force(status: Status) -> None:
    """Do nothing for a status that says that dynspec is in force.

    Raises:
        DemoError: it is not; with the reason that the server gives.
    """
    if not status.in_force:
        reason = status.reason or "the server gives no reason; its log may"
        raise DemoError(f"dynspec is not in force in the server ({status.state}): {reason}")


async def run_sampled(load: Load, fetch: FetchStatus, timeline: Timeline, *, every: float) -> None:
    """Run a load and put samples of its time into the timeline: one before, one after, and more
    while it lasts.

    Args:
        load: not yet run.
        fetch: reads the server's status.
        timeline: gains the samples.
        every: seconds between two samples.

    Raises:
        DemoError: dynspec has ceased to be in force.
        Exception: what ``fetch``, or a client of the load, has raised first.
    """

    async def sample() -> None:
        status = await fetch()
        require_in_force(status)
        timeline.samples.append(
            Sample.of(status, time=load.seconds, clients=load.clients, in_flight=load.in_flight)
        )

    async def sample_on() -> None:
        while True:
            await sample()
            await asyncio.sleep(every)

    await sample()
    running = asyncio.create_task(load.run())
    sampling = asyncio.create_task(sample_on())
    try:
        done, _ = await asyncio.wait({running, sampling}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        running.cancel()
        sampling.cancel()
        await asyncio.gather(running, sampling, return_exceptions=True)
    await sample()
