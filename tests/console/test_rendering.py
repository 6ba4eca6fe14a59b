"""`POST /markdown`: what it makes of texts, its bounds, and that no text holds it up."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from serve_app.console import rendering
from serve_app.console.markdown import blocks
from serve_app.console.rendering import MAX_CHARS, Renderer
from serve_app.errors import InvalidRequestError, OverloadedError
from tests.console.conftest import ConsoleServer

SLOW = "![" * 50_000  # seconds of the parser's time


@pytest.fixture
def http(console: ConsoleServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=console.url, timeout=60) as client:
        yield client


def html(text: str) -> str:
    return "".join(part for _, part in blocks(text))


def test_blocks_come_with_their_lines(http: httpx.Client) -> None:
    answer = http.post("/markdown", json={"text": "# Title\n\none\ntwo\n\n- a\n\n  b\n- c\n\n```\nx\n\ny\n```\n"})
    assert answer.status_code == 200
    assert [line for line, _ in answer.json()] == [0, 2, 5, 10]
    assert answer.json()[0][1].strip() == "<h1>Title</h1>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "<p>a<br>\nb</p>"),
        ("~~a~~", "<p><s>a</s></p>"),
        ("<b>a</b> &amp;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;</p>"),
        ("3. a", '<ol start="3">\n<li>a</li>\n</ol>'),
        ("[a](/b)", "<p>[a](/b)</p>"),
        ("[a](mailto:b@c.d)", '<p><a href="mailto:b@c.d" target="_blank" rel="noopener noreferrer nofollow">a</a></p>'),
        ("```nosuch\n<a>\n```", '<pre data-language="nosuch"><code>&lt;a&gt;\n</code></pre>'),
        ("    <a>", '<pre data-language=""><code>&lt;a&gt;\n</code></pre>'),
    ],
)
def test_forms(text: str, shown: str) -> None:
    assert html(text).strip() == shown


def test_code_is_highlighted_and_cells_are_aligned() -> None:
    assert '<span class="t-k">def</span>' in html("```python\ndef f(): pass\n```")
    assert '<td align="right">1</td>' in html("|a|\n|-:|\n|1|")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "text"),
        ({"text": 1}, 400, "text"),
        ({"text": "x" * (MAX_CHARS + 1)}, 400, "text"),
        ({"text": "x", "more": 1}, 400, "more"),
    ],
    ids=["none", "type", "length", "unknown"],
)
def test_wrong_bodies_are_refused(http: httpx.Client, body: dict[str, object], status: int, param: str) -> None:
    answer = http.post("/markdown", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_it_wants_a_key(keyed: ConsoleServer) -> None:
    url = f"{keyed.url}/markdown"
    assert httpx.post(url, json={"text": "x"}).status_code == 401
    assert httpx.post(url, json={"text": "x"}, headers={"x-api-key": "team-key"}, timeout=60).status_code == 200


async def test_a_text_that_takes_too_long_is_given_up_and_the_next_is_rendered() -> None:
    renderer = Renderer(cpu_limit_s=0.5)
    with pytest.raises(InvalidRequestError, match=r"could not be rendered within 0\.5 seconds"):
        await renderer.blocks(SLOW)
    assert json.loads(await renderer.blocks("a"))[0][1].strip() == "<p>a</p>"


async def test_the_process_may_die_between_two_texts() -> None:
    renderer = Renderer()
    await renderer.blocks("a")
    process = renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert json.loads(await renderer.blocks("b"))[0][1].strip() == "<p>b</p>"


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_MAX_WAITING", 2)
    renderer = Renderer()
    asked = [asyncio.create_task(renderer.blocks(text)) for text in "abc"]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, OverloadedError) for one in done] == [False, False, True]
    assert json.loads(await renderer.blocks("d"))
