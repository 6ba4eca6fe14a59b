"""The pictures of the console in docs/, taken from the page as it is.

`PICTURES=docs pytest tests/console/test_pictures.py` puts them there; otherwise they are only
taken.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page, expect

from tests.console.conftest import REPLICAS, ConsoleServer, Engines, watched_page
from tests.console.steps import TIMEOUT_MS, answered, ask, set_fields, settle

MAX_BYTES = 150_000
EARLIER = ("Plan a weekend in Oslo", "Regex for ISO dates", "Why is the sky blue?")
ANSWER = """\
Walk through both lists with one index each, and always take the **smaller** head:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:  # equal ones keep their order
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
```

| Way | Time | Good for |
|:----|:-----|:---------|
| two indices | O(n + m) | learning; nothing to import |
| `heapq.merge` | O(n + m) | any number of streams, lazily |
| `sorted(a + b)` | O(n log n) | lists in memory; hard to beat |
"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_in_docs_are_small() -> None:
    pictures = list(DOCS.glob("console*.png"))
    assert len(pictures) == 3
    assert all(picture.stat().st_size < MAX_BYTES for picture in pictures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(os.environ.get("PICTURES", tmp_path))


@pytest.fixture
def scene(browser: Browser, console: ConsoleServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    with watched_page(browser, console, **request.param) as page:
        settle(page)
        yield page


def desk(**how: Any) -> dict[str, Any]:
    return {"viewport": {"width": 1200, "height": 760}, **how}


def take(page: Page, path: Path) -> None:
    page.mouse.move(0, 0)
    page.screenshot(path=path, animations="disabled")


@pytest.mark.parametrize("scene", [desk(color_scheme="light")], indirect=True)
def test_a_conversation(scene: Page, service: Engines, folder: Path) -> None:
    for question in EARLIER:
        ask(scene, question)
        answered(scene)
        scene.get_by_role("button", name="New chat").click()
    service.answer = ANSWER
    ask(scene, "How do I merge two sorted lists in Python?")
    answered(scene)
    scene.get_by_role("button", name="Ask again").click()
    answered(scene)
    expect(scene.locator(".branch")).to_have_text("2/2")
    expect(scene.locator("#toast p")).to_have_count(0, timeout=TIMEOUT_MS)
    take(scene, folder / "console.png")


@pytest.mark.parametrize("scene", [desk(color_scheme="dark")], indirect=True)
def test_the_batch_beside_it(scene: Page, service: Engines, slow: None, folder: Path) -> None:
    service.answer = "Gladly. " + "Here is one sentence after the other. " * 12
    ask(scene, "Tell me something while the batch is at work.")
    scene.keyboard.press("F2")
    scene.keyboard.press("F4")
    scene.click("#crowd")
    expect(scene.locator(".slots li.busy").first).to_be_visible(timeout=TIMEOUT_MS)
    expect(scene.locator("#timeline figcaption")).to_have_count(len(REPLICAS))
    answered(scene)
    take(scene, folder / "console-batch.png")
    expect(scene.locator("#crowd-status")).to_have_text("12 of 12 answered", timeout=TIMEOUT_MS)


@pytest.mark.parametrize(
    "scene", [{"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}], indirect=True
)
def test_a_phone(scene: Page, service: Engines, folder: Path) -> None:
    service.answer = f"<think>\nThe user wants the weather.\n</think>\n\n{CALL}"
    set_fields(scene, tools=TOOLS, enable_thinking="true")
    ask(scene, "Do I need an umbrella in Rome?")
    answered(scene)
    service.answer = "No: it stays **dry** until Sunday.\n\n- Friday: 24 °C\n- Saturday: 26 °C\n- Sunday: 25 °C"
    scene.get_by_role("textbox", name="Result of weather").fill('{"rain": 0, "high": [24, 26, 25]}')
    scene.get_by_role("button", name="Send results").click()
    answered(scene, 2)
    assert scene.evaluate("document.documentElement.scrollWidth") <= 390
    take(scene, folder / "console-phone.png")
