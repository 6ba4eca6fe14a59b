"""The official clients, as strict as they can be: every object and event is checked against its
type."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import openai


def strict_openai(http: httpx.AsyncClient, url: str = "http://test") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url=f"{url}/v1", http_client=http, max_retries=0, _strict_response_validation=True
    )


def strict_anthropic(http: httpx2.AsyncClient, url: str = "http://test") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        api_key="none", base_url=url, http_client=http, max_retries=0, _strict_response_validation=True
    )


@asynccontextmanager
async def anthropic_of(app: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client of the application in this process."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test", timeout=30)
    async with http:
        yield strict_anthropic(http)
