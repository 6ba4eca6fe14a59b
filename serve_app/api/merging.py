"""Merges the streams of one HTTP request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(runs: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all runs as they arrive. The first error ends all runs."""
    items: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(maxsize=len(runs))

    async def pump(run: AsyncGenerator[T, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(run):
                async for item in run:
                    await items.put((item,))
        except Exception as error:
            end = error
        await items.put(end)

    pumps = [asyncio.create_task(pump(run)) for run in runs]
    running = len(pumps)
    try:
        while running:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item[0]
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
