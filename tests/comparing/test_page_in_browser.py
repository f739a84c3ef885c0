"""`report.html` in a real browser, without its window: Debian's chromium."""

from __future__ import annotations

import io
import json
import os
import re
import select
import subprocess
from base64 import b64decode
from subprocess import DEVNULL

import matplotlib.image
import pytest
from places import CHROMIUM

from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.write import render_page

THEMES = ("dark", "light")

SAID = {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}

WIDTHS = (390, 1200)
"""Pixels: a phone's, a desktop's."""

LOOK = """
const box = each => { const b = each.getBoundingClientRect(); return [b.width, b.height]; };
const within = [...document.querySelectorAll("main *")].filter(
  each => !each.closest(".scroll, pre, svg") && each.getBoundingClientRect().right > innerWidth + 1
);
({
  figures: Object.fromEntries([...document.querySelectorAll("figure")].map(
    each => [each.id, box(each.querySelector("svg"))])),
  letters: [...document.querySelectorAll("svg text")].map(each => box(each)[1]),
  frames: Object.fromEntries([...document.querySelectorAll(".scroll")].map(
    each => [each.closest("section").id, each.scrollWidth - each.clientWidth])),
  wide: document.documentElement.scrollWidth - innerWidth,
  over: within.map(each => each.outerHTML.slice(0, 200)),
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector("svg text")).fill,
})
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


class Browser:
    """One chromium, which is asked over a pipe: messages of its DevTools, each ended by a zero."""

    def __init__(self, folder):
        (asked, self.ask), (self.answer, answered) = os.pipe(), os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
        # It reads the descriptor 3, and writes to 4.
        words = f'exec "$@" 3<&{asked} 4>&{answered} {asked}<&- {answered}>&-'
        self.process = subprocess.Popen(
            ["bash", "-c", words, "bash", *command], pass_fds=[asked, answered], stderr=DEVNULL
        )
        os.close(asked)
        os.close(answered)
        self.session, self.number, self.rest, self.events = None, 0, b"", []

    def end(self):
        self.session = None
        try:
            self("Browser.close")
            self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.ask)
            os.close(self.answer)

    def __call__(self, method, **parameters):
        """Call a method of DevTools, and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {} if self.session is None else {"sessionId": self.session}
        os.write(self.ask, json.dumps(message).encode() + b"\0")
        answer = self.read(lambda message: message.get("id") == self.number)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self, is_wanted):
        """Read messages up to one that is wanted, and keep the events before it."""
        while True:
            while b"\0" not in self.rest:
                assert select.select([self.answer], [], [], 120)[0], "the browser does not answer"
                assert (data := os.read(self.answer, 2**20)), "the browser has ended"
                self.rest += data
            line, _, self.rest = self.rest.partition(b"\0")
            message = json.loads(line)
            if is_wanted(message):
                return message
            self.events.append(message)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    try:
        yield browser
    finally:
        browser.end()


@pytest.fixture
def browse(browser):
    """Open a page in a new tab; return what the browser says, and a function that asks it more."""
    tabs = []

    def browse(page, *, theme="light", width=1200):
        browser.session, browser.events = None, []
        tabs.append(browser("Target.createTarget", url="about:blank")["targetId"])
        browser.session = browser("Target.attachToTarget", targetId=tabs[-1], flatten=True)[
            "sessionId"
        ]
        size = {"width": width, "height": 2400, "deviceScaleFactor": 1, "mobile": False}
        browser("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": theme}
        browser("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log"):
            browser(f"{domain}.enable")
        browser("Page.navigate", url=page.as_uri())
        browser.read(lambda message: message.get("method") == "Page.loadEventFired")
        evaluate("0")  # what its scripts said comes before the answer
        said = [each for each in browser.events if each["method"] in SAID]
        return [str(each["params"]) for each in said], evaluate

    def evaluate(script):
        """Return the value of a script in the page, which forbids it no script of ours."""
        answer = browser("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    yield browse
    browser.session = None
    for tab in tabs:
        browser("Target.closeTarget", targetId=tab)


@pytest.fixture(scope="module", params=[True, False], ids=["rehearsal", "gpus"])
def text(request, full_results):
    return render_page(redact_results(full_results(rehearsal=request.param)), show_speed=True)


@pytest.fixture
def page(text, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(text)
    return path


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_browser_has_nothing_to_complain_of_and_draws_both_themes(
    browser, browse, page, theme, width
):
    said, _ = browse(page, theme=theme, width=width)
    assert said == []
    picture = io.BytesIO(b64decode(browser("Page.captureScreenshot")["data"]))
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[1] == width
    assert (pixels.mean() < 0.3) == (theme == "dark")
    assert pixels.std() > 0.05


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_has_a_size_and_nothing_is_wider_than_the_page(browse, page, theme, width):
    said, evaluate = browse(page, theme=theme, width=width)
    assert said == []
    found = evaluate(LOOK)
    assert len(found["figures"]) == 7
    for name, (wide, high) in found["figures"].items():
        assert wide > 0.7 * min(width, 600), name
        assert high > 60, name
    assert len(found["letters"]) > 40
    assert min(found["letters"]) >= 9
    assert found["wide"] <= 0
    assert found["over"] == []
    assert {"table", "agreement", "memory", "traffic"} < found["frames"].keys()
    assert max(found["frames"].values()) <= 0, found["frames"]
    paper, ink = (sum(map(int, re.findall(r"\d+", found[each])[:3])) for each in ("paper", "ink"))
    assert abs(paper - ink) > 450
    assert (paper < ink) == (theme == "dark")


POINT = """
const shape = document.querySelector('#figure-memory [data-run="1"][data-tip]');
const at = shape.getBoundingClientRect();
const point = (x, y) => {
  const under = document.elementFromPoint(x, y);
  under.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: x, clientY: y}));
};
point(at.x + at.width / 2, at.y + at.height / 2);
const tip = document.getElementById("tip");
const shown = [tip.hidden, tip.textContent];
point(1, 1);
const away = tip.hidden;
const boxes = [...document.querySelectorAll("fieldset input")];
boxes[1].click();
const hidden = getComputedStyle(shape).visibility;
boxes[1].click();
const names = boxes.map(box => box.parentElement.textContent);
const visible = getComputedStyle(shape).visibility;
({shown, away, hidden, visible, names})
"""


def test_values_stand_under_the_pointer_and_runs_are_switched_off_and_on(browse, page):
    said, evaluate = browse(page)
    assert said == []
    found = evaluate(POINT)
    assert found["shown"] == [False, "ddp-trainer: parameters 0.25 GiB"]
    assert found["away"] is True
    assert (found["hidden"], found["visible"]) == ("hidden", "visible")
    assert found["names"][:2] == ["single-trainer", "ddp-trainer"]


def test_the_page_s_own_script_runs_as_it_is(browse, page):
    said, evaluate = browse(page)
    assert said == []
    dom = evaluate("document.documentElement.outerHTML")
    assert "Runs in the figures" in re.sub(r"<script>.*?</script>", "", dom, flags=re.DOTALL)


def test_the_page_forbids_a_script_that_got_into_it(browse, page):
    script = '<script>document.body.id = "found";</script></body>'
    page.write_text(page.read_text().replace("</body>", script))
    said, evaluate = browse(page)
    assert "Content Security Policy" in "".join(said)
    assert evaluate("document.body.id") == ""
    # The script is one that runs where the page forbids nothing.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text())
    page.write_text(text)
    assert browse(page)[1]("document.body.id") == "found"
