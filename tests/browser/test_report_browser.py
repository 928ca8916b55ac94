"""The HTML report in a real browser: what a person sees of it, points at and types. `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_samples import HOSTILE, make_run

from inflight.report.html import page as report

pytestmark = pytest.mark.browser
BLUE, ORANGE = [0x00, 0x72, 0xB2], [0xE6, 0x9F, 0x00]
"""Of versions 0 and 1."""


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("INFLIGHT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A page of one run, and one of two."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = make_run(folder / "a"), make_run(folder / "b<b>", groups=30)
    report.write([first], folder / "one.html")
    report.write([first, second], folder / "two.html")
    return folder / "one.html", folder / "two.html"


@pytest.fixture
def opened(chromium):
    """Opens a page; at the end there must have been no error and no request but for the file itself."""
    contexts, errors, requests = [], [], []

    def open_page(file: Path, width: int = 1400, scheme: str = "light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_function("inflight.views.every((view) => view.bands.width)")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert {url.partition("#")[0].rpartition("/")[2] for url in requests} <= {"one.html", "two.html"}


WHERE = """([row, token]) => {
  const { bands } = inflight.views[0], each = bands.rows[row];
  bands.canvas.scrollIntoView();
  const box = bands.canvas.getBoundingClientRect();
  const x = (bands.x(each.place(token, bands.byTime)) + bands.x(each.place(token + 1, bands.byTime))) / 2;
  return [box.left + x, box.top + bands.y(row) + bands.rowHeight / 2, x, bands.y(row) + bands.rowHeight / 2];
}"""
PIXEL = """([x, y]) => {
  const { canvas } = inflight.views[0].bands, ratio = window.devicePixelRatio || 1;
  return [...canvas.getContext("2d").getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data].slice(0, 3);
}"""


def colour_of(page, row: int, token: int) -> list[int]:
    _, _, x, y = page.evaluate(WHERE, [row, token])
    return page.evaluate(PIXEL, [x, y + 3])  # beside a text that stands in the middle


def test_the_token_under_the_pointer_is_explained(opened, files):
    page = opened(files[0])
    x, y, *_ = page.evaluate(WHERE, [0, 7])
    page.mouse.move(x, y)
    said = page.locator(".inspector").inner_text()
    assert "token 8 of 12" in said
    assert HOSTILE[7] == "\x1b[31m"
    assert "text “␛[31m”" in said
    assert "log-probability -0.5 (p = 0.6065)" in said
    assert "version 1, lag -1 when trained on" in said
    assert "rollout q0/0" in said
    page.mouse.move(5, 5)
    assert "token 8 of 12" in page.locator(".inspector").inner_text(), "it can be read and scrolled"
    page.locator("canvas").focus()
    page.keyboard.press("Escape")
    assert "Point at a token" in page.locator(".inspector").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_have_the_colour_of_their_version_on_both_sides_of_a_swap(opened, files, scheme):
    page = opened(files[0], scheme=scheme)
    for row in (0, 3):
        assert [colour_of(page, row, token) for token in (2, 4)] == [BLUE] * 2
        assert [colour_of(page, row, token) for token in (8, 10)] == [ORANGE] * 2
    page.get_by_label("Horizontal axis").select_option("token")
    assert (colour_of(page, 0, 4), colour_of(page, 0, 8)) == (BLUE, ORANGE)
    page.get_by_label("Colours").select_option("ordered")
    assert BLUE != colour_of(page, 0, 4) != colour_of(page, 0, 8)


def test_a_swap_is_where_the_colour_changes(opened, files):
    """Sequence 0 runs from 1000 to 1002; version 1 became live at 1001."""
    page = opened(files[0])
    cut = page.evaluate("inflight.views[0].bands.x(1)")
    where = page.evaluate("inflight.views[0].bands.x(inflight.views[0].bands.rows[0].place(6, true))")
    assert where == pytest.approx(cut)


LABELS = """() => {
  const { bands } = inflight.views[0], { prototype } = CanvasRenderingContext2D, own = prototype.fillText, seen = {};
  bands.right = 2.004;
  prototype.fillText = function (text, x, y) {
    if (/^v\\d+$/.test(text)) seen[text] = [x, x + this.measureText(text).width, bands.width];
    return own.call(this, text, x, y);
  };
  inflight.views[0].draw();
  prototype.fillText = own;
  return seen;
}"""


def test_the_label_of_a_swap_at_the_right_edge_is_whole(opened, files):
    page = opened(files[0])
    labels = page.evaluate(LABELS)
    assert set(labels) == {"v1", "v2"}
    left, right, width = labels["v2"]
    assert width - 60 < left < right < width


def test_keys_choose_tokens_swaps_and_zoom(opened, files):
    page = opened(files[0])
    canvas, spoken = page.locator("canvas"), page.locator(".bands > .readout")
    canvas.focus()
    page.keyboard.press("n")
    assert spoken.inner_text().startswith("q0/0, token 7: ")
    assert "version 1" in spoken.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "version 0" in spoken.inner_text()
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert spoken.inner_text().startswith("q0/1, token 7: ")
    page.keyboard.press("End")
    assert "token 12: " in spoken.inner_text()
    span = "inflight.views[0].bands.right - inflight.views[0].bands.left"
    whole = page.evaluate(span)
    page.keyboard.press("+")
    assert page.evaluate(span) < whole
    page.keyboard.press("f")
    assert page.evaluate(span) == pytest.approx(whole)
    page.keyboard.press("Escape")
    assert spoken.inner_text() == ""


def test_the_chosen_token_stays_in_sight_when_zoomed(opened, tmp_path):
    run = make_run(tmp_path / "run", groups=90, size=2, length=40)
    report.write([run], tmp_path / "one.html")
    page = opened(tmp_path / "one.html")
    page.locator("canvas").focus()
    for _ in range(120):
        page.keyboard.press("n")
    inside = """() => {
      const { bands } = inflight.views[0], { index, token } = bands.chosen, each = bands.rows[index];
      const [x, y] = [bands.x(each.place(token, true)), bands.y(index)];
      return [x >= bands.gutter && x <= bands.width, y >= 0 && y + bands.rowHeight <= bands.height - bands.axis + 0.01];
    }"""
    low = page.evaluate("inflight.views[0].bands.rowHeight")
    for _ in range(8):
        page.keyboard.press("+")
        assert page.evaluate(inside) == [True, True]
    assert page.evaluate("inflight.views[0].bands.rowHeight") > low
    for _ in range(9):
        page.keyboard.press("-")
        assert page.evaluate(inside) == [True, True]


def test_zoomed_in_each_cell_is_a_token_and_dragging_moves(opened, files):
    page = opened(files[0])
    for _ in range(6):
        page.get_by_label("Zoom in").click()
    before = page.evaluate("inflight.views[0].bands.left")
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 400, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 30, steps=4)
    page.mouse.up()
    assert page.evaluate("inflight.views[0].bands.left") > before


def test_nothing_that_a_model_wrote_is_run(opened, files):
    page = opened(files[1])
    x, y, *_ = page.evaluate(WHERE, [0, 1])
    page.mouse.move(x, y)
    shown = page.locator(".answer").first.inner_text()
    assert "</script><script>window.hurt=1</script><img src=x onerror=window.hurt=2>" in shown
    assert "\\u202e" in shown
    assert page.evaluate("window.hurt") is None
    assert page.locator("img, iframe, b b").count() == 0
    assert page.title() == "a and b<b>: inflight report"


def test_the_policy_stops_a_script_that_is_not_the_pages_own(chromium, files):
    page = chromium.new_page()
    page.goto(files[0].as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("""() => {
      const added = document.createElement("script");
      added.textContent = "window.hurt = 1";
      document.body.append(added);
    }""")
    assert page.evaluate("window.hurt") is None
    page.close()


def test_evaluations_and_scores_are_shown(opened, files):
    """Text of a failed evaluation is text; the score's time has its unit."""
    page = opened(files[0])
    section = page.locator("#evaluations").inner_text()
    assert "version 2, the best so far" in section
    assert "Given up: </script><script>window.hurt=1</script>" in section
    assert "Scoring a sequence took 0.25 s (median)" in page.locator("body").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened, files, scheme):
    page = opened(files[0], scheme=scheme)
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
    assert page.evaluate(back) == (light if scheme == "light" else dark)
    page.locator("#theme").click()
    assert page.evaluate(back) == (dark if scheme == "light" else light)
    corner = page.evaluate(PIXEL, [2, 2])
    assert corner == ([20, 23, 26] if scheme == "light" else [255, 255, 255]), "the canvas is drawn anew"


@pytest.mark.parametrize("file", [0, 1])
@pytest.mark.parametrize("width", [400, 1400])
def test_no_width_cuts_anything_off(opened, files, width, file):
    page = opened(files[file], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_two_runs_stand_side_by_side_where_there_is_room(opened, files):
    lefts = {}
    for width in (1400, 400):
        page = opened(files[1], width=width)
        boxes = [each.bounding_box() for each in page.locator("#bands canvas").all()]
        lefts[width] = [round(box["x"]) for box in boxes]
    assert lefts[1400][0] < lefts[1400][1]
    assert lefts[400][0] == lefts[400][1]


def test_what_differs_between_two_configurations_is_marked(opened, files):
    page = opened(files[1])
    marked = page.locator("#configuration tr.differs th").all_inner_texts()
    assert marked == ["model.name", "run_dir"]


def test_curves_over_steps_tokens_and_time(opened, files):
    page = opened(files[0])
    chart = page.locator("#reward svg").first
    chart.focus()
    page.keyboard.press("End")
    readout = page.locator("#reward .readout").first
    assert readout.inner_text() == "step 3: of the groups trained on 0.5 · of all groups 0.4"
    page.locator("#axis").select_option("tokens")
    chart.focus()
    page.keyboard.press("End")
    assert readout.inner_text().startswith("tokens trained on or masked 330: ")


def test_a_long_run_is_opened_and_its_parts_can_be_chosen(opened, tmp_path):
    run = make_run(tmp_path / "run", groups=300, size=4, length=60)
    report.write([run], tmp_path / "one.html")
    page = opened(tmp_path / "one.html")
    assert "of 1,200 sequences are shown" in page.locator("#bands").inner_text()
    first = page.evaluate("inflight.views[0].bands.rows[0].row.id")
    page.get_by_label("Part of the run").select_option("4")
    assert page.evaluate("inflight.views[0].bands.rows[0].row.id") != first
