"""The console in a real browser: real streaming, real engines."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, Route, expect

from serve_app.console.picture import picture
from tests.console.conftest import REPLICAS, SLOTS, ConsoleServer
from tests.observability.recordings import record_run

TIMEOUT_MS = 60_000
COLOURS = """() => {
    const drawn = document.querySelector("canvas");
    const pixels = drawn.getContext("2d").getImageData(0, 0, drawn.width, drawn.height).data;
    const colours = new Set();
    for (let i = 0; i < pixels.length; i += 4) colours.add(pixels.slice(i, i + 3).join());
    return [...colours];
}"""
"""The colours in the first canvas, each as "red,green,blue"."""


@pytest.fixture
def says(console: ConsoleServer) -> Iterator[list[str]]:
    """What the model says instead of its nonsense, piece by piece."""
    console.service.override[:] = ["Paris is the capital of France. "]
    yield console.service.override
    console.service.override.clear()


@pytest.fixture
def slow(console: ConsoleServer) -> Iterator[None]:
    """240 steps take five seconds."""
    console.service.pace.step_s = 0.02
    yield
    console.service.pace.step_s = 0.0


def settle(page: Page, max_tokens: int = 12) -> None:
    """Wait until the page knows the model, and ask for short answers."""
    page.locator("#model option").wait_for(state="attached", timeout=TIMEOUT_MS)
    page.locator("#settings summary").click()
    page.fill("#max_tokens", str(max_tokens))


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_text(page: Page, selector: str, pattern: str) -> str:
    """The text of the first such element, once it matches."""
    found = page.locator(selector).first
    expect(found).to_have_text(re.compile(pattern), timeout=TIMEOUT_MS)
    return found.text_content() or ""


@pytest.mark.usefixtures("slow")
def test_chat_streams_and_tells_its_figures(page: Page, says: list[str]) -> None:
    settle(page)
    ask(page, "What is the capital of France?")
    figures = wait_text(page, ".assistant .figures-line", r"length · req-")
    assert re.search(r"first token [\d.]+ s · [\d.]+ tokens/s · 12 tokens · prompt \d+", figures)
    assert page.locator(".assistant .text").text_content().startswith("Paris is the capital")  # type: ignore[union-attr]
    assert page.locator(".user .text").text_content() == "What is the capital of France?"
    assert page.input_value("#prompt") == ""
    ask(page, "And of Italy?")
    expect(page.locator(".assistant .figures-line").nth(1)).to_contain_text("length", timeout=TIMEOUT_MS)
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")


def test_what_the_model_says_is_never_markup(page: Page, console: ConsoleServer, says: list[str]) -> None:
    says[:] = ["<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script> "]
    settle(page, max_tokens=60)
    ask(page, "<b>bold</b>")
    wait_text(page, ".assistant .figures-line", "length")
    assert "<img src=x onerror=" in (page.locator(".assistant .text").text_content() or "")
    assert page.locator(".user .text").text_content() == "<b>bold</b>"
    chunk = {"choices": [{"index": 0, "delta": {"content": says[0]}, "finish_reason": "stop"}]}
    whole = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=whole, content_type="text/event-stream"))
    ask(page, "All of it in one piece.")
    expect(page.locator(".assistant .text").nth(1)).to_have_text(says[0])
    assert page.locator("#messages img, #messages script, #messages b").count() == 0
    assert page.title() == "serve_app"


@pytest.mark.usefixtures("slow")
def test_stop_frees_the_slot(page: Page, console: ConsoleServer, says: list[str]) -> None:
    settle(page, max_tokens=1500)
    ask(page, "Go on for long.")
    wait_text(page, ".assistant .text", "Paris")
    page.press("#prompt", "Escape")
    wait_text(page, ".assistant .figures-line", "stopped by you")
    expect(page.locator("#send")).to_be_enabled()
    while console.busy():  # the test's time limit ends a leak
        page.wait_for_timeout(20)


def test_a_refusal_is_shown_in_the_servers_words(page: Page, says: list[str]) -> None:
    settle(page)
    page.fill("#temperature", "9")
    with page.expect_response("**/v1/chat/completions") as answer:
        ask(page, "Hello")
    assert answer.value.status == 400
    assert "temperature" in wait_text(page, ".assistant .error", ".")


@pytest.mark.usefixtures("slow")
def test_the_batch_and_the_timeline_move(page: Page) -> None:
    settle(page)
    page.click("#crowd")
    wait_text(page, "#fleet", rf"running[1-9]\d* of {SLOTS * len(REPLICAS)} slots")
    expect(page.locator(".slots li.busy").first).to_be_visible(timeout=TIMEOUT_MS)
    assert page.locator(".replica").count() == len(REPLICAS)
    wait_text(page, "#timeline-view figcaption", r"Replica alpha: [1-9]\d* steps in 30 s.* [1-9]\d* prefill")
    assert len(page.evaluate(COLOURS.replace("canvas", "#timeline-view canvas", 1))) > 5
    wait_text(page, "#crowd-status", "12 of 12 answered")


def test_a_step_that_is_told_twice_counts_once(page: Page) -> None:
    """Each look asks for a little more than the time since the last one, so that nothing is missed."""
    run = record_run((9, 3, 5), (6, 12, 4), max_num_batched_tokens=6)
    now = time.time()
    records = tuple(replace(r, started_at=r.started_at - run.records[0].started_at + now - 1) for r in run.records)
    told = json.loads(replace(run, replica="gamma", records=records, now=now).to_json())
    looks: list[str] = []

    def answer(route: Route) -> None:
        looks.append(route.request.url)
        route.fulfill(json={"now": now, "queue": {"waiting": 0, "ongoing": 0}, "replicas": [told]})

    page.route("**/debug/timeline*", answer)
    while len(looks) < 4:
        page.wait_for_timeout(100)
    expect(page.locator("figcaption", has_text="gamma")).to_contain_text(f"gamma: {len(records)} steps in 30 s")


def test_a_replica_that_died_stays_in_the_picture(page: Page, console: ConsoleServer) -> None:
    settle(page)
    page.click("#crowd")
    wait_text(page, "#crowd-status", "12 of 12 answered")
    its_steps = page.locator("figcaption", has_text="Replica beta: ")
    expect(its_steps).to_contain_text(re.compile(r"beta: [1-9]\d* steps"), timeout=TIMEOUT_MS)
    console.service.silent.add("beta")
    try:
        wait_text(page, "#health", "^1 replica ready$")
        expect(page.locator(".replica", has_text="beta: gone")).to_be_visible()
        expect(page.locator("figcaption", has_text="Replica beta (gone): ")).to_be_visible()
        console.service.silent.add("alpha")
        wait_text(page, "#health", "^no replica$")
    finally:
        console.service.silent.clear()
    wait_text(page, "#health", "^2 replicas ready$")


def test_a_page_whose_server_is_away_says_so_and_comes_back(page: Page) -> None:
    wait_text(page, "#health", "ready")
    page.route("**/debug/timeline*", lambda route: route.fulfill(status=400, body="{}"))
    wait_text(page, "#health", "^server unreachable$")
    page.unroute("**/debug/timeline*")
    wait_text(page, "#health", "ready$")


def test_everything_is_reached_by_keyboard_and_has_a_name(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, canvas, section")]
            .filter((element) => element.checkVisibility())
            .filter((element) => !(element.labels?.length || element.textContent.trim()
                || element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")))
            .map((element) => element.outerHTML)"""
    )
    assert nameless == []
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "crowd":
            return
    pytest.fail("Tab does not reach the button that sends 12 requests")


@pytest.mark.parametrize("width", [360, 390, 768, 1366])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    expect(page.locator(".replica canvas")).to_have_count(len(REPLICAS), timeout=TIMEOUT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page: Page, scheme: str) -> None:
    """WCAG's contrast of 4.5 between each text colour and the grounds it stands on."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    colours = page.evaluate(
        """() => Object.fromEntries(["paper", "card", "lane", "mine", "ink", "soft", "accent", "danger"].map((name) =>
            [name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim()]))"""
    )
    for text, grounds in {
        "ink": ("paper", "card", "lane", "mine"),
        "soft": ("card", "lane", "mine"),
        "accent": ("card",),
        "danger": ("card", "lane"),
    }.items():
        for ground in grounds:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_saved_picture_draws_under_its_own_policy(page: Page, console: ConsoleServer) -> None:
    settle(page)
    ask(page, "Hello")
    wait_text(page, ".assistant .figures-line", "length")
    page.goto(f"{console.url}/debug/timeline?format=html")
    assert "steps in" in wait_text(page, "figcaption", r"Replica alpha")
    page.get_by_role("button", name="Earlier").click()
    page.select_option("select >> nth=1", "steps")
    assert page.locator("canvas").count() == len(REPLICAS)


def test_the_saved_picture_shows_every_kind_of_event_from_disk(page: Page, tmp_path: Path) -> None:
    """Preempted, moved here, gate closed: each has a colour of its own, and the words say the same."""
    recording = record_run((9, 3, 5), (6, 12, 4), ("one.1", "two.1", "three.2"), max_num_batched_tokens=6, num_blocks=6)
    records = [replace(record, gate_open=i != 4) for i, record in enumerate(recording.records)]
    path = tmp_path / "picture.html"
    path.write_bytes(picture([replace(recording, records=tuple(records)).to_json()]))
    other = page.context.new_page()
    faults: list[str] = []
    other.on("pageerror", lambda error: faults.append(str(error)))
    other.goto(path.as_uri())
    preempted, moved = (
        sum(len(r.preempted) for r in records),
        sum(name == "three.2" for r in records for name, _ in r.admitted),
    )
    words = wait_text(other, "figcaption", "Replica alpha")
    assert f"{preempted} preempted, {moved} moved here from another replica; gate closed in 1 steps" in words
    for axis in ("time", "steps"):
        other.select_option("select >> nth=1", axis)
        shown = other.evaluate(COLOURS)
        assert {"179,38,30", "192,57,43", "29,122,76"} <= set(shown), "preemption, gate closed, gate open"
    other.mouse.move(0, 0)
    box = other.locator("canvas").bounding_box()
    assert box is not None
    other.mouse.move(box["x"] + box["width"] / 2, box["y"] + 3)
    assert "slot 0" in wait_text(other, ".tip", "step")
    assert faults == []


def test_the_api_is_documented_and_tried_without_a_cdn(page: Page, console: ConsoleServer, says: list[str]) -> None:
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url) if console.url not in request.url else None)
    page.goto(f"{console.url}/docs")
    page.get_by_text("/v1/chat/completions", exact=True).click()
    fields = page.locator("details[open] table").first.inner_text()
    assert "temperature" in fields
    assert "from 0 to 2" in fields
    page.locator("details[open]").get_by_role("button", name="Send").click()
    assert "Paris is the capital of France." in wait_text(page, "details[open] pre", "finish_reason")
    assert elsewhere == []
