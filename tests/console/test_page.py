"""What stands around the chat, in a real browser: live batch, timeline, saved pictures, the API's
page."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, Route, expect

from serve_app.console.picture import picture
from tests.console.conftest import REPLICAS, SLOTS, ConsoleServer, Engines
from tests.console.steps import TIMEOUT_MS, answered, ask, settle, wait_text
from tests.observability.recordings import record_run

COLOURS = """() => {
    const drawn = document.querySelector("canvas");
    const pixels = drawn.getContext("2d").getImageData(0, 0, drawn.width, drawn.height).data;
    const colours = new Set();
    for (let i = 0; i < pixels.length; i += 4) colours.add(pixels.slice(i, i + 3).join());
    return [...colours];
}"""
"""The colours in the first canvas, each as "red,green,blue"."""


def open_panels(page: Page) -> None:
    page.keyboard.press("F2")
    page.keyboard.press("F4")


@pytest.mark.usefixtures("slow")
def test_the_batch_and_the_timeline_move(page: Page) -> None:
    settle(page)
    open_panels(page)
    page.click("#crowd")
    wait_text(page, "#fleet", rf"running[1-9]\d* of {SLOTS * len(REPLICAS)} slots")
    expect(page.locator(".slots li.busy").first).to_be_visible(timeout=TIMEOUT_MS)
    assert page.locator(".replica").count() == len(REPLICAS)
    wait_text(page, "#timeline-view figcaption", r"Replica alpha: [1-9]\d* steps in 30 s.* [1-9]\d* prefill")
    assert len(page.evaluate(COLOURS.replace("canvas", "#timeline-view canvas", 1))) > 5
    wait_text(page, "#crowd-status", "12 of 12 answered")


def test_a_step_that_is_told_twice_counts_once(page: Page) -> None:
    """Each look asks for a little more than the time since the last one, so that nothing is
    missed."""
    run = record_run((9, 3, 5), (6, 12, 4), max_num_batched_tokens=6)
    now = time.time()
    records = tuple(replace(r, started_at=r.started_at - run.records[0].started_at + now - 1) for r in run.records)
    told = json.loads(replace(run, replica="gamma", records=records, now=now).to_json())
    looks: list[str] = []

    def answer(route: Route) -> None:
        looks.append(route.request.url)
        route.fulfill(json={"now": now, "queue": {"waiting": 0, "ongoing": 0}, "replicas": [told]})

    page.route("**/debug/timeline*", answer)
    open_panels(page)
    while len(looks) < 4:
        page.wait_for_timeout(100)
    expect(page.locator("figcaption", has_text="gamma")).to_contain_text(f"gamma: {len(records)} steps in 30 s")


def test_a_replica_that_died_stays_in_the_picture(page: Page, console: ConsoleServer) -> None:
    settle(page)
    open_panels(page)
    page.click("#crowd")
    wait_text(page, "#crowd-status", "12 of 12 answered")
    its_steps = page.locator("figcaption", has_text="Replica beta: ")
    expect(its_steps).to_contain_text(re.compile(r"beta: [1-9]\d* steps"), timeout=TIMEOUT_MS)
    console.service.silent.add("beta")
    try:
        expect(page.locator(".replica", has_text="beta: gone")).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.locator("figcaption", has_text="Replica beta (gone): ")).to_be_visible()
        console.service.silent.add("alpha")
        wait_text(page, "#health", "^no replica is ready$")
    finally:
        console.service.silent.clear()
    wait_text(page, "#health", "^ready$")
    expect(page.locator(".replica", has_text="beta: gone")).to_have_count(0)


def test_a_page_whose_server_is_away_says_so_and_comes_back(page: Page) -> None:
    wait_text(page, "#health", "^ready$")
    page.route("**/health/ready", lambda route: route.fulfill(status=400, body="{}"))
    page.route("**/debug/timeline*", lambda route: route.fulfill(status=400, body="{}"))
    page.keyboard.press("F2")
    wait_text(page, "#live .panel-note", "^No news from the server.$")
    wait_text(page, "#health", "^no replica is ready$")
    page.unroute("**/debug/timeline*")
    page.unroute("**/health/ready")
    wait_text(page, "#health", "^ready$")
    wait_text(page, "#live .panel-note", "^$")


def test_panels_are_a_key_away_and_stay_as_they_were(page: Page) -> None:
    """What nobody looks at is not asked for."""
    looks: list[str] = []
    page.on("request", lambda asked: looks.append(asked.url) if "/debug/" in asked.url else None)
    wait_text(page, "#health", "^ready$")
    assert looks == []
    page.keyboard.press("F4")
    wait_text(page, "#timeline-view figcaption", "Replica alpha")
    page.reload()
    wait_text(page, "#timeline-view figcaption", "Replica alpha")
    expect(page.locator("#live")).to_be_hidden()
    page.get_by_role("button", name="Close the timeline").click()
    expect(page.locator("#timeline")).to_be_hidden()
    button = page.get_by_role("button", name="Live batch", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#live")).to_be_visible()


def test_the_timeline_is_saved_with_the_key(page: Page) -> None:
    page.keyboard.press("F4")
    with page.expect_download() as saved:
        page.get_by_role("link", name="JSON").click()
    assert saved.value.suggested_filename == "timeline.json"
    assert len(json.loads(saved.value.path().read_text())["replicas"]) == len(REPLICAS)


@pytest.mark.parametrize("width", [360, 390, 768, 1366])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for key in ("F2", "F4"):
        page.keyboard.press(key)
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


def test_the_saved_picture_draws_under_its_own_policy(page: Page, console: ConsoleServer, service: Engines) -> None:
    settle(page)
    ask(page, "Hello")
    answered(page)
    page.goto(f"{console.url}/debug/timeline?format=html")
    assert "steps in" in wait_text(page, "figcaption", r"Replica alpha")
    page.get_by_role("button", name="Earlier").click()
    page.select_option("select >> nth=1", "steps")
    assert page.locator("canvas").count() == len(REPLICAS)


def test_the_saved_picture_shows_every_kind_of_event_from_disk(page: Page, tmp_path: Path) -> None:
    """Preempted, moved here, gate closed: each has a colour of its own, and the words say the
    same."""
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
