"""The page of a step: what is in the file, and what a real browser makes of it.

Chromium comes from Debian (`make browser`); selenium drives it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gems.draw.html import html
from gems.draw.partition.svg import svg as partition_svg
from gems.predict.timeline import Event, Memory, Timeline
from tests.test_draw import MEASURED, PIPE, bare, drawn, unet_partition

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--force-device-scale-factor=1", "--window-size=1300,900"),
)


# --- the file ------------------------------------------------------------------------------------


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = html(drawn(PIPE), "step", PIPE, MEASURED, partition_svg(unet_partition()))
    addresses = set(re.findall(r"\w+://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import|url\(|fetch\(|import\(", page)
    assert "default-src 'none'" in page


def test_titles_may_hold_any_character() -> None:
    page = html(MEASURED, "</script><b>{{data}}")
    assert "<title>&lt;/script&gt;&lt;b&gt;{{data}}</title>" in page
    assert page.count("</script>") == 2


def test_the_page_has_every_event_and_every_count_of_bytes() -> None:
    data = data_of(html(MEASURED, "step", PIPE))
    named = [
        (rank, action, start, stop)
        for rank, row in enumerate(data["sides"][0]["events"])
        for start, stop, _, action in row
    ]
    assert sorted(named) == sorted((e.rank, e.action, e.start, e.stop) for e in MEASURED.events)
    assert [kind for kind, _ in data["kinds"]] == ["weights", "activations", "boundary"]
    assert data["sides"][0]["memory"][0] == [[0.0, 4 << 20, 0, 0], [0.01, 4 << 20, 1 << 20, 0]]
    assert data["ranks"] == ["stage 0", "stage 1"]
    assert data["charted"] == 0 and data["lined"] is None


def test_a_step_without_bytes_or_without_events_is_still_a_page() -> None:
    assert data_of(html(bare(MEASURED)))["charted"] is None
    assert data_of(html(Timeline(())))["sides"][0]["events"] == []


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(found):
        if os.geteuid() == 0 and shutil.which("apt-get"):
            pytest.fail("no Chromium here, but apt-get can install it: run `make browser`")
        pytest.skip(
            "THE PAGE WAS NOT TRIED IN A BROWSER: there is no chromium and chromedriver, and none "
            "can be installed without root and apt-get; install the two and run this again"
        )
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(found[1])))
    yield browser
    browser.quit()


class Page:
    """A page in the browser: what it shows, and what a person does to it."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get_log("browser")  # what earlier pages said
        driver.get(path.as_uri())
        self.settle()

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def settle(self) -> None:
        """Two frames: one to paint in, one to have painted."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def place(self, rank: int, action: str, side: int = 0) -> tuple[int, int]:
        """The middle of a box, in the window."""
        found = self.run("return gems.place(...arguments)", rank, action, side)
        return round(found["x"]), round(found["y"])

    def colour(self, x: int, y: int) -> str:
        script = """
            const chart = document.getElementById("chart"), at = chart.getBoundingClientRect();
            const [x, y] = [arguments[0] - at.left, arguments[1] - at.top];
            return [...chart.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3)"""
        return "#" + "".join(f"{c:02x}" for c in self.run(script, x, y))

    def view(self) -> tuple[float, float]:
        return self.run("return [gems.view.from, gems.view.to]")

    def chain(self) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        return ActionChains(self.driver, duration=10)

    def point(self, x: int, y: int) -> str:
        """What the tooltip says with the pointer there; nothing if it is hidden."""
        chain = self.chain()
        chain.w3c_actions.pointer_action.move_to_location(x, y)
        chain.perform()
        self.settle()
        return self.run("return tip.hidden ? '' : tip.innerText")

    def wheel(self, x: int, y: int, by: int) -> None:
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        origin = ScrollOrigin.from_viewport(x, y)
        self.chain().scroll_from_origin(origin, 0, by).perform()
        self.settle()

    def drag(self, start: tuple[int, int], stop: tuple[int, int], key: str = "") -> None:
        chain = self.chain()
        if key:
            chain.key_down(key)
            chain.perform()
        pointer = chain.w3c_actions.pointer_action
        pointer.move_to_location(*start).pointer_down().move_to_location(*stop).pointer_up()
        chain.perform()
        if key:
            self.chain().key_up(key).perform()
        self.settle()

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def opened(driver: Any, tmp_path: Path) -> Callable[..., Page]:
    def open_(*given: Any) -> Page:
        file = tmp_path / "step.html"
        file.write_text(html(*given), encoding="utf-8")
        return Page(driver, file)

    return open_


def test_the_page_draws_a_lane_per_rank_and_a_box_per_event(opened: Callable[..., Page]) -> None:
    page = opened(MEASURED, "A step & more", PIPE)
    assert page.driver.title == "A step & more"
    assert page.run("return gems.rows.map((row) => [row.rank, row.memory])") == [
        *([0, False], [0, True], [1, False], [1, True]),
    ]
    assert page.run("return gems.drawn") == len(MEASURED.events)
    assert page.complaints() == []
    x, y = page.place(0, "0F0")
    assert page.colour(x - 20, y) == "#2f6db5", "forward, beside its label"
    x, y = page.place(1, "1B0")
    assert page.colour(x - 20, y) == "#c2571a", "backward"
    chart = page.run("return [gems.rows[3].y - gems.rows[2].y, gems.rows[3].high]")
    assert page.colour(x, round(y - 12 + sum(chart)) - 3) == "#52606d", "weights, at the bottom"


def test_pointing_at_a_box_tells_what_it_is_and_how_many_bytes_are_live(
    opened: Callable[..., Page],
) -> None:
    page = opened(MEASURED, "step", PIPE)
    assert page.point(*page.place(1, "1B0")).splitlines() == [
        "1B0 backward",
        "rank 1 · stage 1 · micro-batch 0",
        "from 21 ms, lasts 20 ms",
        *("weights\t2.0 MiB", "activations\t0 B", "boundary\t1.5 MiB", "in all\t3.5 MiB"),
    ]
    assert page.run("return gems.joins") == [["1B0", "0B0"]]
    page.point(*page.place(0, "0F0"))
    assert page.run("return gems.joins") == [["0F0>1", "1F0"]], "by way of its message"
    assert page.point(*page.place(0, "0F0>1")).startswith("0F0>1 send to stage 1\nrank 0")
    x, _ = page.place(1, "1B0")
    _, y = page.place(0, "0F0")
    assert page.point(x, y).startswith("rank 0: idle")
    assert page.point(5, 5) == ""


def test_the_wheel_zooms_about_the_pointer_and_reset_shows_all_again(
    opened: Callable[..., Page],
) -> None:
    page = opened(MEASURED, "step", PIPE)
    whole = page.view()
    x, y = page.place(1, "1B0")
    page.wheel(x, y, -300)
    page.wheel(x, y, -300)
    near = page.view()
    assert near[1] - near[0] < (whole[1] - whole[0]) / 4
    assert near[0] < 0.031 < near[1], "what was under the pointer still is"
    assert abs(page.place(1, "1B0")[0] - x) <= 2
    assert page.point(x, y).startswith("1B0 backward")
    assert "×)" in page.run("return shown.textContent")
    page.drag((x, y), (x + 100, y))
    assert page.view()[0] < near[0], "dragged to the right, earlier things come into view"
    page.run("document.getElementById('reset').click()")
    page.settle()
    assert page.view() == whole
    assert page.run("return document.getElementById('reset').disabled")
    assert page.complaints() == []


def test_a_part_that_is_marked_with_shift_fills_the_view(opened: Callable[..., Page]) -> None:
    page = opened(MEASURED, "step", PIPE)
    (left, y), (right, _) = page.place(1, "1F0"), page.place(1, "1B0")
    page.drag((left, y), (right, y), key="\ue008")
    assert page.view() == [pytest.approx(t, abs=2e-4) for t in (0.016, 0.031)]
    page.chain().send_keys_to_element(page.driver.find_element("id", "chart"), "0").perform()
    page.settle()
    assert page.view()[1] == pytest.approx(0.063)


def test_one_step_over_another_shares_the_page_and_the_tooltip(
    opened: Callable[..., Page],
) -> None:
    page = opened(drawn(PIPE), "two", PIPE, MEASURED, partition_svg(unet_partition()))
    assert page.run("return document.querySelectorAll('.partition svg .arc').length") == 5
    page.run("document.getElementById('step').scrollIntoView()")
    above, under = page.place(1, "1B0", 0), page.place(1, "1B0", 1)
    assert above[1] < under[1]
    said = page.point(*under)
    assert "\npredicted: from 20 ms, lasts 20 ms (measured 0%)\n" in said
    assert page.complaints() == []


def test_the_page_follows_the_reader_into_the_dark(opened: Callable[..., Page]) -> None:
    page = opened(MEASURED, "step", None, None, partition_svg(unet_partition()))
    seen = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.settle()
        page.run("document.getElementById('step').scrollIntoView()")
        x, y = page.place(0, "0F0")
        script = "return getComputedStyle(document.querySelector('.partition rect')).fill"
        seen[scheme] = (page.colour(x - 20, y), page.colour(x, y - 16), page.run(script))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen["light"] == ("#2f6db5", "#ffffff", "rgb(255, 255, 255)")
    assert seen["dark"] == ("#2f6db5", "#14181d", "rgb(20, 24, 29)")


def test_many_ranks_and_events_are_drawn_at_once(opened: Callable[..., Page]) -> None:
    ranks, count = 64, 500
    events = tuple(
        Event(r, f"{r}{'FB'[n % 2]}{n // 2}", n + 0.1, n + 1.0)
        for r in range(ranks)
        for n in range(count)
    )
    row = tuple((n + 1.0, Memory(weights=1 << 30, activations=n << 20)) for n in range(count))
    page = opened(Timeline(events, memory=(row,) * ranks), "many")
    assert page.run("return chart.clientWidth <= frame.clientWidth"), "not under the scroll bar"
    drawn_at_first = page.run("return gems.drawn")
    assert 0 < drawn_at_first < ranks * count / 2, "only what is in view"
    script = "const t = performance.now(); for (let n = 0; n < 5; n++) gems.paint();"
    assert page.run(script + "return (performance.now() - t) / 5") < 400, "ms"
    page.run("frame.scrollTop = frame.scrollHeight")
    page.settle()
    x, y = page.place(63, "63F125")
    assert "rank 63 · stage 63 · micro-batch" in page.point(x, y)
    for _ in range(6):
        page.wheel(x, y, -300)
    assert page.run("return gems.drawn") < 400
    assert page.complaints() == []
