"""The report's page: it stands alone, and shows each matrix once in each grid."""

from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from llmbuild.builder.calibration.store import Distilled
from llmbuild.builder.gate import Row
from llmbuild.builder.report.grids import LogScale
from llmbuild.builder.report.page import write_report
from llmbuild.builder.report.report import CalibrationData, DecodeStep, KVDtypes, Matrix, Report

LOSSES = [0.0, 3e-9, 2e-5, 1e-4, 0.5, 7.0]
NAMES = [f"layers.{n}.attention.{part}_proj.weight" for n in (0, 1, 10) for part in "qv"]
EMBEDDING = Matrix("embed.weight", "bf16", "bf16", "", 16, None, "")
MATRICES = [
    EMBEDDING,
    *(
        Matrix(name, "w4 g64 s, a8", "int4, groups of 64", "int8", 4, loss, "products")
        for name, loss in zip(NAMES, LOSSES, strict=True)
    ),
    Matrix("lm_head.weight", "w8 row s", "int8, one group a row", "fp32", 8, 0.125, "weights"),
]
REPORT = Report(
    name="m",
    precision="bf16",
    weights_bytes=2_500_000,
    weights_by_dtype={"bf16": 500_000, "int4": 2_000_000},
    unquantised_weights_bytes=10_000_000,
    arena_bytes=123_456,
    kv_bytes_per_token=1234,
    bf16_kv_bytes_per_token=2468,
    matrices=MATRICES,
    kv=[KVDtypes(["int8"] * 3, ["int4", "int4", "bf16"])] * 11,
    calibration=CalibrationData("self", 32, 512, 7),
    distilled=Distilled(300, 0.1875, 0.0625),
    decode=[DecodeStep(128, 10, 10, 100)],
    ranks=[],
    verified={"x86-64-v4": None, "x86-64-v3": 1.5e-6},
    tolerance=1e-4,
    gate=[Row("token agreement", 0.98765, 0.9, True, "5 windows")],
    seconds={"fetch": 0.5, "trace & <passes>": 2.0},
    peak_rss_bytes=1_000_000,
)
TAGS = {"html", "meta", "title", "style", "h1", "h2", "p", "table", "tr", "th", "td", "div"}
NEVER_CLOSED = {"meta", "html"}
ATTRIBUTES = {"lang", "charset", "title", "style", "class", "colspan"}
SECTION = "Precision of each matrix"


class Page(HTMLParser):
    """The page's tags with their attributes, and its text; every tag is closed in turn. cells: text
    and attributes of each td, by heading."""

    def __init__(self, report: Report, folder: Path) -> None:
        super().__init__()
        write_report(report, folder)
        self.content = (folder / "report.html").read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.cells: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
        self._open: list[str] = []
        self._heading = ""
        self.feed(self.content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in NEVER_CLOSED:
            self._open.append(tag)
        if tag == "h2":
            self._heading = ""
        if tag == "td":
            self.cells.setdefault(self._heading, []).append(("", dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in NEVER_CLOSED:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open[-1:] == ["h2"]:
            self._heading += data
        if self._open[-1:] == ["td"]:
            cells = self.cells[self._heading]
            cells[-1] = (cells[-1][0] + data, cells[-1][1])

    def titled(self, heading: str) -> dict[str, str]:
        """Text of a section's cells that name what they are of, by that name."""
        named = [(str(a["title"]).split(":")[0], text) for text, a in self.of(heading)]
        assert len({name for name, _ in named}) == len(named)
        return dict(named)

    def of(self, heading: str) -> list[tuple[str, dict[str, str | None]]]:
        (found,) = [cells for title, cells in self.cells.items() if title.startswith(heading)]
        return [cell for cell in found if "title" in cell[1]]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(REPORT, tmp_path)


def test_page_needs_no_other_file_no_script_and_no_server(page: Page) -> None:
    assert {tag for tag, _ in page.tags} <= TAGS
    assert {name for _, attributes in page.tags for name in attributes} <= ATTRIBUTES
    assert all(word not in page.content for word in ("url(", "@import", "://", "src=", "$"))


def test_every_matrix_stands_once_with_its_loss_and_once_with_its_precision(page: Page) -> None:
    losses = page.titled("What quantisation lost")
    codes = page.titled(SECTION)
    names = [matrix.name for matrix in MATRICES]
    assert sorted(losses) == sorted(codes) == sorted(names)
    assert codes == {matrix.name: matrix.code for matrix in MATRICES}
    assert losses["embed.weight"] == ""
    assert losses["lm_head.weight"] == "1.2e-01*"  # of its weights
    assert [losses[name] for name in NAMES[:3]] == ["0.0e+00", "3.0e-09", "2.0e-05"]
    assert any("No calibration judged" in text for text in page.text)


def test_layers_stand_in_order_and_tensors_of_no_layer_apart(page: Page) -> None:
    rows = [text for text in page.text if text.startswith("layer ")]
    assert rows[:3] == ["layer 0", "layer 1", "layer 10"]
    assert page.text.count("lm_head") == page.text.count("embed") == 2
    assert page.text.count("q") == page.text.count("v") == 2


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[n : n + 2], 16) for n in (0, 2, 4))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def background_and_text(attribute: str) -> tuple[str, str]:
    background, text = attribute.split(";")
    return background.rpartition("#")[2], text.rpartition("#")[2]


def test_a_larger_loss_is_darker(page: Page) -> None:
    styles = {
        str(attributes["title"]).split(":")[0]: str(attributes["style"])
        for _, attributes in page.of("What quantisation lost")
        if "style" in attributes
    }
    shades = [lightness(background_and_text(styles[name])[0]) for name in NAMES]
    assert all(a > b for a, b in pairwise(shades))


@pytest.mark.parametrize("loss", [0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.023, 0.024, 1e-1, 1.0])
def test_text_on_a_colour_can_be_read(loss: float) -> None:
    """At least 4.5 to 1, as WCAG 2.1 asks of text."""
    scale = LogScale(-5, 0)
    background, text = background_and_text(scale.colour(loss).removesuffix('"'))

    def luminance(colour: str) -> float:
        wide = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(wide[n : n + 2], 16) / 255 for n in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(background), luminance(text)))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_scale_spans_the_decades_of_what_is_lost() -> None:
    assert LogScale.of([0.0, 3e-4, 0.02]) == LogScale(-4, -1)
    assert LogScale.of([1e-3]) == LogScale(-3, -2)
    assert LogScale.of([0.0]) is None
    assert LogScale.of([]) is None


def test_kv_plan_is_shown_by_layer_and_runs_of_heads(page: Page) -> None:
    cells = page.titled("Precision of the KV cache")
    assert len(cells) == 2 * 11
    assert cells["layer 10, K"] == "int8"
    assert cells["layer 0, V"] == "heads 0-1 int4, head 2 bf16"


def test_bars_say_what_was_saved(page: Page) -> None:
    text = "".join(page.text)
    assert "2.5 MB, 75% saved" in text
    assert "1,234 bytes, 50% saved" in text
    widths = [str(a["style"]) for tag, a in page.tags if tag == "div"]
    expected = ("100.0", "25.0", "5.0", "20.0", "100.0", "50.0")
    assert widths == [f"width:{width}%" for width in expected]


def test_gate_and_calibration_are_shown_or_said_not_to_have_run(page: Page, tmp_path: Path) -> None:
    row = page.text.index("token agreement")
    assert page.text[row + 1 : row + 4] == ["0.9877", "at least 0.9", "5 windows"]
    source = page.text.index("the model's own samples (self)")
    assert page.text[source + 1 : source + 4] == ["32", "512", "7"]
    assert "in 300 steps" in (trained := "".join(page.text))
    assert "from 0.188 to 0.0625 nats" in trained
    bare = replace(REPORT, gate=[], calibration=None, distilled=None, matrices=[EMBEDDING])
    text = "".join(Page(bare, tmp_path).text)
    assert "distillation" not in text
    assert "has no gate" in text
    assert "needs calibration, and none ran" in text
    assert "No matrix is quantised" in text


def test_page_escapes_names_and_says_what_was_not_run(tmp_path: Path) -> None:
    name = '<script>alert("$name & more")</script>'
    matrix = replace(MATRICES[1], name=f"layers.0.{name}")
    page = Page(replace(REPORT, name=name, matrices=[matrix]), tmp_path)
    assert {tag for tag, _ in page.tags} <= TAGS
    assert page.text.count(name) == 1 + 2  # heading, and a column of each grid
    assert f"{name}: build report" in page.text
    assert f"layers.0.{name}" in page.titled(SECTION)
    assert "trace & <passes>" in page.text
    level = page.text.index("x86-64-v4")
    assert page.text[level + 1] == "not run here"
    assert page.text[page.text.index("x86-64-v3") + 1] == "1.5e-06"
