"""The report page in a headless Chromium: it opens without errors, counts what the report counts, tells what is known of a node, finds, and is
quick with 3,000 nodes. Skipped without Playwright (`pip install 'fxfuse[browser]'`) and a Chromium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, fuse, traced_graph
from test_page import MODEL, NASTY, Many, Two, explained, written
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxfuse import page
from fxfuse.document import document
from fxfuse.options import Options

pytestmark = pytest.mark.usefixtures("explains")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'fxfuse[browser]'")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Seconds until 3,000 nodes are drawn and milliseconds a frame, many times what an idle machine takes.
DRAWN_IN, FRAME_IN = 20.0, 150.0

Open = Callable[[Path], Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, CHROMIUMS)), None) or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("needs a Chromium: the system's, or `playwright install chromium`")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file and waits until it is drawn; errors that it logs or raises and whatever it fetches fail the test."""
    told: list[str] = []

    def opened(file: Path, **context: Any) -> Any:
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, **context)
        # Not warnings: Chromium has one about `getImageData`, which only these tests call.
        tab.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: told.append(str(error)))
        tab.on("dialog", lambda dialog: told.append(dialog.message))
        tab.on("request", lambda request: told.append(request.url) if request.url.startswith("http") else None)
        tab.goto(file.as_uri())
        tab.wait_for_selector("body.ready", timeout=60_000)
        return tab

    yield opened
    for context in browser.contexts:
        context.close()
    assert not told


def saved(directory: Path, model: Callable[..., Any], *args: torch.Tensor) -> Path:
    """The page of an explain."""
    data = explained(model, *args)
    file = directory / "page.html"
    file.write_text(page.html(data["report"], [(graph["before"], graph["after"]) for graph in data["graphs"]]))
    return file


def inked(tab: Any) -> list[float]:
    """The share of pixels of each pane's drawing that are not ground."""
    return tab.evaluate(
        """() => {
        const canvas = document.getElementById("picture"), context = canvas.getContext("2d");
        return [0, 1].map(side => {
            const { data } = context.getImageData((side * canvas.width) / 2 + 2, 0, canvas.width / 2 - 4, canvas.height);
            let drawn = 0;
            for (let at = 0; at < data.length; at += 4) drawn += data[at] !== data[0] || data[at + 1] !== data[1];
            return drawn / (data.length / 4);
        });
    }"""
    )


def click_middle(tab: Any, side: str) -> None:
    """Clicks the middle of a pane, where a search brings what it found."""
    box = tab.locator("#picture").bounding_box()
    tab.mouse.click(box["x"] + box["width"] * (0.25 if side == "before" else 0.75), box["y"] + box["height"] / 2)


def search(tab: Any, text: str) -> None:
    tab.fill("#search", text)
    tab.press("#search", "Enter")


def test_it_opens_and_counts_what_the_report_counts(tmp_path: Path, open_page: Open, scheme: str) -> None:
    _, told = written(tmp_path)
    tab = open_page(tmp_path / "page.html", color_scheme=scheme)
    summary = tab.inner_text("#summary")
    assert (
        f"{len(told['fused'])} fused, {len(told['declined'])} declined in {told['graphs']} graphs" in summary and told["target"] in summary
    )
    assert (tab.locator("tr.record.fused").count(), tab.locator("tr.record.declined").count()) == (
        len(told["fused"]),
        len(told["declined"]),
    )
    assert tab.locator("#graph option").count() == told["graphs"]
    assert all(share > 0.005 for share in inked(tab))
    assert told["declined"][0]["reason"] in tab.inner_text("tr.record.declined")


def test_a_row_of_another_graph_opens_it(tmp_path: Path, open_page: Open) -> None:
    _, told = written(tmp_path)
    tab = open_page(tmp_path / "page.html")
    assert tab.input_value("#graph") == "0"
    tab.click("tr.record.declined")
    tab.wait_for_selector("#details:not([hidden])")
    assert tab.input_value("#graph") == "1" and told["declined"][0]["reason"] in tab.inner_text("#details .note.declined")
    line = 1 + next(at for at, text in enumerate(MODEL.splitlines()) if "amax" in text)
    assert f"mine.py:{line}" in tab.inner_text("#details dl") and "self.second(x)" in tab.inner_text("#details pre.source")


def test_a_row_of_like_candidates_opens_into_one_for_each(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, Many(), torch.randn(2, 4, 8, 8)))
    shown = tab.locator("tr.record:visible")
    assert shown.count() == 3 and tab.locator("tr.record").count() == 8
    first = tab.locator("tr.record.declined").first
    assert "blocks.0" in first.inner_text() and "and 3 more" in first.inner_text()
    search(tab, "gelu_2")
    assert "selected" in first.get_attribute("class"), "a row is marked for all that it stands for"
    first.locator("button.more").click()
    assert shown.count() == 6 and "more" not in first.inner_text()
    tab.keyboard.press("Escape")
    shown.nth(3).click()
    assert "blocks.2" in shown.nth(3).inner_text() and "selected" in shown.nth(3).get_attribute("class")
    assert "selected" not in first.get_attribute("class") and tab.inner_text("#details h2") == "gelu_2"


def test_a_click_on_a_node_tells_what_is_known(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, Two(), torch.randn(2, 4, 8, 8)))
    search(tab, "amax")
    assert tab.inner_text("#hits") == "1 of 1"
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#details")
    click_middle(tab, "before")
    assert tab.inner_text("#details h2") == "amax"
    facts = tab.inner_text("#details dl").split("\n")
    assert [facts[facts.index(name) + 1] for name in ("shape", "dtype", "strides", "device")] == ["[2, 8]", "float32", "[8, 1]", "cpu"]
    assert "test_page.py:" in tab.inner_text("#details dl") and "amax((2, 3))" in tab.inner_text("#details pre.stack")
    tab.click("#details button.node")
    assert tab.inner_text("#details h2") == "gelu_1" and "gelu is followed by amax" in tab.inner_text("#details .note.declined")


def test_a_fused_chain_leads_to_its_op_and_back(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, Two(), torch.randn(2, 4, 8, 8)))
    tab.click("tr.record.fused")
    assert "tail kernel" in tab.inner_text("#details .note.fused") and tab.inner_text("#details h2") == "conv2d"
    search(tab, "fxfuse::gelu_pool")
    tab.keyboard.press("Escape")
    click_middle(tab, "after")
    assert tab.inner_text("#details h2").startswith("gelu_pool") and "fxfuse::gelu_pool" in tab.inner_text("#details dl")
    tab.click("#details .note button.node >> nth=0")
    assert tab.inner_text("#details h2") == "conv2d"


def test_search_goes_round_and_finds_parameters(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, Two(), torch.randn(2, 4, 8, 8)))
    tab.keyboard.press("/")
    tab.keyboard.type("conv_weight")
    assert tab.inner_text("#hits") == "1 found"
    tab.keyboard.press("Enter")
    assert tab.inner_text("#details h2").endswith("conv_weight_") and "[8, 4, 3, 3]" in tab.inner_text("#details dl")
    tab.fill("#search", "GELU")
    seen = []
    for _ in range(4):
        tab.press("#search", "Enter")
        seen.append((tab.inner_text("#hits"), tab.inner_text("#details h2")))
    assert [hits for hits, _ in seen] == ["1 of 3", "2 of 3", "3 of 3", "1 of 3"] and seen[0] == seen[3]
    assert len({name for _, name in seen}) == 3
    tab.fill("#search", "no such node")
    assert tab.inner_text("#hits") == "0 found"


def test_moving_and_zooming(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, Two(), torch.randn(2, 4, 8, 8)))
    box = tab.locator("#picture").bounding_box()
    x, y = box["x"] + box["width"] / 8, box["y"] + box["height"] / 3
    view = "() => ({ scale: state.view.scale, ...state.view.middle, under: state.view.toDrawing('before', { x: %f, y: %f }) })" % (
        x,
        y - box["y"],
    )
    views = [tab.evaluate(view)]
    tab.mouse.move(x, y)
    tab.mouse.wheel(0, 50)
    tab.wait_for_timeout(100)
    views.append(tab.evaluate(view))
    tab.mouse.down()
    tab.mouse.move(x + 30, y + 40)
    tab.mouse.up()
    views.append(tab.evaluate(view))
    tab.mouse.move(x, y)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -100)
    tab.keyboard.up("Control")
    tab.wait_for_timeout(100)
    views.append(tab.evaluate(view))
    assert [step["scale"] for step in views[:3]] == [views[0]["scale"]] * 3 and views[3]["scale"] > 1.1 * views[2]["scale"]
    scale = views[0]["scale"]
    assert views[1]["y"] - views[0]["y"] == pytest.approx(50 / scale)
    assert (views[1]["x"] - views[2]["x"], views[1]["y"] - views[2]["y"]) == pytest.approx((30 / scale, 40 / scale))
    # What lies under the pointer stays there, to a pixel.
    assert (views[3]["under"]["x"], views[3]["under"]["y"]) == pytest.approx((views[2]["under"]["x"], views[2]["under"]["y"]), abs=1)
    # Dragging is no click.
    assert tab.is_hidden("#details")
    tab.click("#fit")
    assert tab.evaluate(view)["scale"] == pytest.approx(scale)


def test_names_of_the_users_are_text(tmp_path: Path, open_page: Open) -> None:
    written(tmp_path / NASTY)
    tab = open_page(tmp_path / NASTY / "page.html")
    assert NASTY in tab.inner_text("#summary") and tab.locator("img").count() == 0
    tab.click("tr.record.declined")
    tab.wait_for_selector("#details:not([hidden])")
    assert NASTY in tab.inner_text("#details dl") and "</script><!-- é" in tab.inner_text("#details pre.source")


def test_a_chain_in_a_body_is_shown_in_its_body(tmp_path: Path, open_page: Open) -> None:
    model = ConvGeluPool()
    tab = open_page(saved(tmp_path, lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(2, 4, 8, 8)))
    assert tab.locator("#graph option").all_inner_texts()[1].startswith("0 wrap_body_0: ")
    tab.click("tr.record.fused")
    tab.wait_for_selector("#details:not([hidden])")
    assert tab.inner_text("#details h2").startswith("conv2d") and tab.input_value("#graph") == "1"


def test_a_graph_without_candidates(tmp_path: Path, open_page: Open) -> None:
    tab = open_page(saved(tmp_path, nn.ReLU(), torch.randn(3)))
    assert "No candidate" in tab.inner_text("#candidates") and all(share > 0.001 for share in inked(tab))


def large(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """Residual blocks, with a chain or a near miss beside every tenth, all of whose results leave the graph."""
    outputs = []
    for block in range(415):
        y = torch.relu(torch.conv2d(x, weight, bias, padding=1))
        y = torch.tanh(torch.conv2d(y, weight, bias, padding=1))
        x = torch.relu(torch.add(y, x))
        if block % 10 == 0:
            head = F.gelu(torch.conv2d(x, weight, bias))
            outputs.append(F.adaptive_avg_pool2d(head, 1) if block % 20 else torch.sigmoid(head))
    return [x, *outputs, *(torch.neg(x) for _ in range(385))]


def test_three_thousand_nodes(tmp_path: Path, open_page: Open, record_property: Callable[[str, Any], None]) -> None:
    gm = traced_graph(large, torch.randn(1, 4, 16, 16), torch.randn(4, 4, 3, 3), torch.randn(4))
    after, report = fuse(gm)
    assert len(gm.graph.nodes) >= 3000 and (len(report.fused), len(report.declined)) == (21, 21)
    file = tmp_path / "page.html"
    file.write_text(page.html(document(report, Options(), []), [(page.picture(gm.graph), page.picture(after))]))
    begin = time.perf_counter()
    tab = open_page(file)
    drawn = time.perf_counter() - begin
    assert all(share > 0.005 for share in inked(tab))
    frames = [milliseconds_a_frame(tab), (tab.click("#fit"), milliseconds_a_frame(tab))[1]]
    record_property("drawn_s", drawn)
    record_property("frame_ms", frames)
    assert drawn < DRAWN_IN and max(frames) < FRAME_IN
    search(tab, "neg_384")
    tab.keyboard.press("Escape")
    click_middle(tab, "after")
    assert tab.inner_text("#details h2") == "neg_384"


def milliseconds_a_frame(tab: Any) -> float:
    """Of panning by the pointer, event after event."""
    return tab.evaluate(
        """async () => {
        const canvas = document.getElementById("picture"), frames = 40;
        const send = (type, at) => canvas.dispatchEvent(new PointerEvent(type, { pointerId: 1, clientX: 300, clientY: 300 + 10 * at }));
        canvas.setPointerCapture = () => {};
        send("pointerdown", 0);
        const begin = performance.now();
        for (let frame = 1; frame <= frames; frame++) {
            send("pointermove", frame % 2 ? frame : -frame);
            await new Promise(requestAnimationFrame);
            document.getElementById("picture").getContext("2d").getImageData(0, 0, 1, 1);
        }
        send("pointerup", frames);
        return (performance.now() - begin) / frames;
    }"""
    )


def test_models_that_are_hard_to_lay_out(tmp_path: Path, open_page: Open) -> None:
    """Every layer reads all layers before it, and two long streams never meet: no library lays these out as they are."""

    def dense(x: torch.Tensor) -> Any:
        features = [x]
        for _ in range(60):
            features.append(torch.relu(torch.tanh(torch.cat(features, 1))))
        left, right = x, x
        for _ in range(700):
            left, right = torch.relu(left), torch.tanh(right)
        return features[-1], left, right

    picture = page.picture(traced_graph(dense, torch.randn(1, 1)).graph)
    file = tmp_path / "page.html"
    _, report = fuse(traced_graph(ConvGeluPool(), torch.randn(2, 4, 8, 8)))
    report.fused.clear()
    file.write_text(page.html(document(report, Options(), []), [(picture, picture)]))
    tab = open_page(file)
    overlaps = tab.evaluate(
        """() => {
        const boxes = state.graph.before.drawn.map(({ box }) => box).sort((a, b) => a.y - b.y);
        const over = (a, b) => Math.abs(a.x - b.x) < (a.width + b.width) / 2 && Math.abs(a.y - b.y) < (a.height + b.height) / 2;
        return boxes.flatMap((box, at) => boxes.slice(at + 1, at + 40).filter(other => over(box, other))).length;
    }"""
    )
    assert overlaps == 0
