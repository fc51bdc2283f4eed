"""SVG and HTML: well-formed, complete, safe; whether they are beautiful is for eyes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from farspan.report import Kind, Span, Timeline, html, svg

SVG = "{http://www.w3.org/2000/svg}"
MS = 1_000_000
NASTY = "<script>alert('1')</script> & \"x\" \x00\x1b\ud800 ]]>"


def step(num_ranks: int = 2, num_micro_batches: int = 8, name: str = "blocks.0-5") -> Timeline:
    spans: list[Span] = []
    for rank in range(num_ranks):
        at = rank * 10
        spans.append(Span(rank=rank, kind="wait", name=name, start_ns=0, end_ns=at * MS))
        for number in range(num_micro_batches):
            for kind in ("F", "B"):
                spans.append(
                    Span(
                        rank=rank,
                        kind=kind,
                        name=name,
                        micro_batch=number,
                        start_ns=at * MS,
                        end_ns=(at + 10) * MS,
                    )
                )
                at += 10
    return Timeline(spans=tuple(spans), num_ranks=num_ranks, title="a step")


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def cells(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in root.iter(f"{SVG}rect") if element.get("class") == f"cell {kind}"]


def test_svg_shows_every_task_lane_and_number() -> None:
    root = ElementTree.fromstring(svg(step()))
    assert (len(cells(root, "F")), len(cells(root, "B"))) == (16, 16)
    shown = texts(root)
    assert {"a step", "rank 0", "rank 1", "forward", "backward", "waiting for a message", "idle", "ms"} <= set(shown)
    assert "sending" not in shown  # the legend has only what there is
    assert all(shown.count(str(number)) >= 4 for number in range(8))


def test_svg_cells_stand_where_the_times_say() -> None:
    root = ElementTree.fromstring(svg(step(num_ranks=1, num_micro_batches=1)))
    (forward,), (backward,) = cells(root, "F"), cells(root, "B")
    end_of_forward = float(forward.attrib["x"]) + float(forward.attrib["width"])
    assert end_of_forward == pytest.approx(float(backward.attrib["x"]), abs=1.1)
    assert float(forward.attrib["width"]) == pytest.approx(float(backward.attrib["width"]), abs=0.1)


def test_svg_stays_inside_its_frame() -> None:
    for num_ranks in (1, 8, 9, 30):
        root = ElementTree.fromstring(svg(step(num_ranks)))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for rect in root.iter(f"{SVG}rect"):
            assert 0 <= float(rect.attrib["x"]) <= float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            assert 0 <= float(rect.attrib["y"]) <= float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_svg_has_tooltips_and_is_accessible() -> None:
    root = ElementTree.fromstring(svg(step()))
    tooltips = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert "blocks.0-5\nforward, micro-batch 3, rank 1\n10.0 ms (70.00 to 80.00 ms)" in tooltips
    assert root.get("role") == "img"
    labels = root.attrib["aria-labelledby"].split()
    assert set(labels) <= {element.get("id") for element in root.iter()}


def test_svg_is_readable_in_light_and_dark() -> None:
    assert "prefers-color-scheme:dark" in svg(step())


def test_narrow_cells_carry_no_number() -> None:
    root = ElementTree.fromstring(svg(step(num_micro_batches=400)))
    assert not [e for e in root.iter(f"{SVG}text") if (e.get("class") or "").startswith("in ")]
    assert len(cells(root, "F")) == 800


@pytest.mark.parametrize("num_ranks", [0, 3])
def test_empty_timelines_can_be_drawn(num_ranks: int) -> None:
    timeline = Timeline(spans=(), num_ranks=num_ranks)
    assert "no tasks" in texts(ElementTree.fromstring(svg(timeline)))
    assert "Step time" in html(timeline)


def test_names_cannot_break_the_svg() -> None:
    root = ElementTree.fromstring(svg(Timeline(spans=step(name=NASTY).spans, num_ranks=2, title=NASTY)))
    assert not list(root.iter(f"{SVG}script"))
    assert any(text.startswith("<script>") for text in texts(root))


class Page(HTMLParser):
    """Collects tags, their attributes and the text, and checks that tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, str] = {}
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name: value or "" for name, value in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_shows_numbers_plan_and_environment() -> None:
    timeline = step()
    page = Page(html(timeline, plan="stage  modules\n0      blocks.0-5\n", environment=["torch 2.13.0", "2 x H100"]))
    for text in (
        "a step",
        "Step time",
        "170 ms",
        "Bubble",
        "5.9 %",
        "Micro-batches",
        "rank 1",
        "10.0 ms",
        "blocks.0-5",
    ):
        assert text in page.text
    assert "torch 2.13.0\n2 x H100" in page.text
    assert page.tags.count("svg") == 1


def test_forward_backward_and_weight_gradients_are_all_that_is_computed() -> None:
    rows: tuple[tuple[Kind, int, int], ...] = (("F", 0, 2), ("B", 2, 5), ("W", 5, 6), ("wait", 6, 7), ("F", 9, 10))
    spans = [
        Span(rank=0, kind=kind, name="a", micro_batch=0, start_ns=start * 10**7, end_ns=end * 10**7)
        for kind, start, end in rows
    ]
    page = html(Timeline(spans=tuple(spans), num_ranks=1))
    (row,) = re.findall(r'<tr><th scope="row">rank 0</th>(.*?)</tr>', page)
    assert re.findall(r"<td>(.*?)</td>", row) == [
        "30.0 ms",
        "30.0 ms",
        "10.0 ms",
        "70.0 ms",
        "10.0 ms",
        "20.0 ms",
        "70 %",
    ]
    assert re.findall(r"width:([\d.]+)%", row) == ["30.00", "30.00", "10.00"]


def test_a_page_says_which_busy_is_which() -> None:
    text = Page(html(step(), planned=step(), plan="stage  busy")).text
    assert text.count("busy: the share of") == 2 and "what was predicted then" in text
    assert "what was predicted then" not in html(step(), plan="stage  busy", is_predicted=True)


def test_the_picture_in_the_readme_counts_what_it_draws() -> None:
    picture = (Path(__file__).parents[2] / "docs" / "report.svg").read_text()
    (said,) = set(re.findall(r"(\d+) micro-batches", picture))
    assert set(re.findall(r"micro-batch (\d+), rank", picture)) == {str(number) for number in range(int(said))}
    assert not re.search(r"segment|stage", picture)


def test_html_leaves_out_what_is_not_given() -> None:
    page = Page(html(step(), title="other title"))
    assert "pre" not in page.tags
    assert "other title" in page.text


def test_html_is_self_contained_and_escaped() -> None:
    timeline = Timeline(spans=step(name=NASTY).spans, num_ranks=2, title=NASTY)
    text = html(timeline, title=NASTY, plan=NASTY, environment=[NASTY])
    page = Page(text)
    assert "script" not in page.tags
    assert not {"src", "href", "onload"} & set(page.attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    assert text.encode("utf-8")


def test_what_is_said_of_a_cell_counts_from_the_start_of_the_picture() -> None:
    spans = (
        Span(rank=0, kind="F", name="a", micro_batch=0, start_ns=1000 * MS, end_ns=1010 * MS),
        Span(rank=0, kind="B", name="a", micro_batch=0, start_ns=1015 * MS, end_ns=1040 * MS),
    )
    root = ElementTree.fromstring(svg(Timeline(spans=spans, num_ranks=1, title="late")))
    said = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert [line for text in said for line in text.split("\n") if "ms)" in line] == [
        "10.0 ms (0.00 to 10.00 ms)",
        "25.0 ms (15.00 to 40.00 ms)",
    ]
    (cell,) = cells(root, "F")
    (number,) = [each for each in root.iter(f"{SVG}text") if each.get("class") == "in onF"]
    top, height = float(cell.attrib["y"]), float(cell.attrib["height"])
    assert 0 < float(number.attrib["y"]) - (top + height / 2) < height / 2  # the base line of what is in the middle
