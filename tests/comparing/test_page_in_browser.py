"""`report.html` in a real browser, without its window: Debian's chromium."""

from __future__ import annotations

import html
import json
import re
import subprocess

import matplotlib.image
import pytest
from places import CHROMIUM

from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.write import render_page

THEMES = {"dark": 0, "light": 1}
"""As the browser's `preferredColorScheme` numbers them."""

WIDTHS = (390, 1200)
"""Pixels: a phone's, a desktop's."""

LOOK = """
<script>
const box = each => { const b = each.getBoundingClientRect(); return [b.width, b.height]; };
const within = [...document.querySelectorAll("main *")].filter(
  each => !each.closest(".scroll, pre, svg") && each.getBoundingClientRect().right > innerWidth + 1
);
const found = document.createElement("output");
found.id = "found";
found.textContent = JSON.stringify({
  figures: Object.fromEntries([...document.querySelectorAll("figure")].map(
    each => [each.id, box(each.querySelector("svg"))])),
  letters: [...document.querySelectorAll("svg text")].map(each => box(each)[1]),
  frames: Object.fromEntries([...document.querySelectorAll(".scroll")].map(
    each => [each.closest("section").id, each.scrollWidth - each.clientWidth])),
  wide: document.documentElement.scrollWidth - innerWidth,
  over: within.map(each => each.outerHTML.slice(0, 200)),
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector("svg text")).fill,
});
document.body.append(found);
</script>
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture
def browse(tmp_path):
    """Open a page and return what the browser says, and what it prints."""

    def browse(page, *words, theme="light", width=1200):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400"]
        command += [f"--blink-settings=preferredColorScheme={THEMES[theme]}"]
        command += ["--enable-logging=stderr", "--virtual-time-budget=2000", *map(str, words)]
        done = subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return said, done.stdout

    return browse


@pytest.fixture(scope="module", params=[True, False], ids=["rehearsal", "gpus"])
def text(request, full_results):
    return render_page(redact_results(full_results(rehearsal=request.param)), show_speed=True)


@pytest.fixture
def page(text, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(text)
    return path


def with_script(page, *, allowed, script=LOOK):
    """Return a copy that has a script in it, and the page's own word on scripts or not."""
    text = page.read_text().replace("</body>", f"{script}</body>")
    if allowed:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text)
    copy = page.with_name("copy.html")
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_browser_has_nothing_to_complain_of_and_draws_both_themes(browse, page, theme, width):
    picture = page.with_name("page.png")
    said, _ = browse(page, f"--screenshot={picture}", theme=theme, width=width)
    assert said == []
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[1] == width
    assert (pixels.mean() < 0.3) == (theme == "dark")
    assert pixels.std() > 0.05


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_has_a_size_and_nothing_is_wider_than_the_page(browse, page, theme, width):
    said, dom = browse(with_script(page, allowed=True), "--dump-dom", theme=theme, width=width)
    assert said == []
    found = json.loads(html.unescape(re.search(r'id="found">(.*?)</output>', dom)[1]))
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
<script>
const shape = document.querySelector('#figure-memory [data-run="1"][data-tip]');
const at = shape.getBoundingClientRect();
const found = document.createElement("output");
found.id = "found";
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
found.textContent = JSON.stringify({shown, away, hidden, visible, names});
document.body.append(found);
</script>
"""


def test_values_stand_under_the_pointer_and_runs_are_switched_off_and_on(browse, page):
    said, dom = browse(with_script(page, allowed=True, script=POINT), "--dump-dom")
    assert said == []
    found = json.loads(html.unescape(re.search(r'id="found">(.*?)</output>', dom)[1]))
    assert found["shown"] == [False, "ddp-trainer: parameters 0.25 GiB"]
    assert found["away"] is True
    assert (found["hidden"], found["visible"]) == ("hidden", "visible")
    assert found["names"][:2] == ["single-trainer", "ddp-trainer"]


def test_the_page_s_own_script_runs_as_it_is(browse, page):
    said, dom = browse(page, "--dump-dom")
    assert said == []
    assert "Runs in the figures" in re.sub(r"<script>.*?</script>", "", dom, flags=re.DOTALL)


def test_the_page_forbids_a_script_that_got_into_it(browse, page):
    said, dom = browse(with_script(page, allowed=False), "--dump-dom")
    assert "Content Security Policy" in "".join(said)
    assert 'id="found"' not in dom
