"""The build report's numbers, worked out by hand, and its page, which stands alone."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.report import Report, make_report, write_report
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import KVLayer, KVLayout, Limits, Manifest, Rank, Target

VERIFIED = {"x86-64-v4": None, "x86-64-v3": 1.5e-6}
SECONDS = {"fetch": 0.5, "trace & <passes>": 2.0}


@pytest.fixture
def report_of(
    traced: Callable[..., StepGraph], decoder_config: Callable[..., DecoderConfig]
) -> Callable[..., Report]:
    """report_of(max_sequence_length, name="m", quantised={}, **config overrides), in bf16.
    quantised: grids by canonical name."""

    def build(
        max_sequence_length: int,
        name: str = "m",
        quantised: dict[str, WeightGrid] | None = None,
        **overrides: object,
    ) -> Report:
        config, step = decoder_config(**overrides), traced("bf16", **overrides)
        run_passes(step, plan=QuantPlan(quantised or {}, dict.fromkeys(quantised or {}, 32)))
        plan = lower(step, config, "bf16", 4)
        layer = KVLayer(k_dtype="bf16", v_dtype="bf16")
        manifest = Manifest(
            schema_version=2,
            llmbuild_version="0",
            name=name,
            model={},
            vocab_size=config.vocab_size,
            precision="bf16",
            quantised={},
            target=Target(kind="cpu", machine="m", isa_levels=[], compiler="c", compiler_flags={}),
            limits=Limits(
                max_sequence_length=max_sequence_length, max_step_tokens=8, max_sequences=2
            ),
            buckets=[1],
            kv=KVLayout(
                block_size=4,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                layers=[layer] * config.num_layers,
            ),
            ranks=[Rank(executables={}, weights="w", arena_bytes=123_456)],
            files={},
        )
        return make_report(manifest, plan, config, VERIFIED, 1e-4, SECONDS)

    return build


# Hidden 20, inner 19, vocabulary 37; 6 heads in 2 groups of 4: Q is 24 wide, K and V are 8.
LAYER_MACS = 40 * 20 + 20 * 24 + 38 * 20 + 20 * 19
HEAD_MACS = 37 * 20
# In tiles of 16 rows: 48 for 40, 32 for 20, 48 for 38 and 37. All of them fill 64 bytes evenly.
LAYER_BYTES = 2 * (48 * 20 + 32 * 24 + 48 * 20 + 32 * 19)
HEAD_BYTES = 2 * 48 * 20


def test_bytes_and_operations_of_a_decode_step_are_those_counted_by_hand(
    report_of: Callable[..., Report],
) -> None:
    report = report_of(3000)
    assert [step.context_tokens for step in report.decode] == [128, 2048, 3000]
    for step in report.decode:
        tokens = step.context_tokens
        assert step.weight_bytes == 2 * LAYER_BYTES + HEAD_BYTES
        assert step.kv_bytes == tokens * 2 * 2 * (2 * 4) * 2  # layers, K and V, items, bytes
        attention_macs = 2 * (6 * 4) * tokens  # scores and sums of one layer
        assert step.operations == 2 * (2 * (LAYER_MACS + attention_macs) + HEAD_MACS)
        ratio = step.operations / (step.weight_bytes + step.kv_bytes)
        assert step.operations_per_byte == pytest.approx(ratio)


def test_tied_embedding_counts_once_and_an_untied_one_is_not_read_whole(
    report_of: Callable[..., Report],
) -> None:
    tied, untied = report_of(64, tie_embeddings=True), report_of(64)
    assert tied.decode == untied.decode
    embedding_bytes = 2 * 37 * 20 + 56  # rows, padded to 64 bytes
    assert untied.weights_bytes - tied.weights_bytes == embedding_bytes


def test_weights_are_summed_by_dtype_as_they_lie_in_the_file(
    report_of: Callable[..., Report],
) -> None:
    report = report_of(64, tie_embeddings=True, num_layers=1, windows=(0,))
    norms = 3 * 128  # 20 floats, padded to 64 bytes
    assert report.weights_by_dtype == {"bf16": LAYER_BYTES + HEAD_BYTES, "fp32": norms + 64}
    assert report.weights_bytes == sum(report.weights_by_dtype.values())
    assert report.kv_bytes_per_token == 2 * (2 * 4) * 2


def test_a_step_reads_codes_and_scales_of_matrices_but_only_rows_of_a_table(
    report_of: Callable[..., Report],
) -> None:
    """Hidden 64, 37 rows in 48; of each group of 32 codes of 4 bits, a scale and a minimum."""
    grid, hidden = WeightGrid(4, 32, False), {"hidden_size": 64}
    plain = report_of(64, **hidden)
    head = report_of(64, quantised={"lm_head.weight": grid}, **hidden)
    both = dict.fromkeys(("lm_head.weight", "embed.weight"), grid)
    with_table = report_of(64, quantised=both, **hidden)
    matrix_bytes = 48 * 2 * (16 + 2 + 2)
    assert plain.decode[0].weight_bytes - head.decode[0].weight_bytes == 2 * 48 * 64 - matrix_bytes
    assert head.decode == with_table.decode
    assert plain.decode[0].operations == head.decode[0].operations
    assert head.weights_by_dtype["int4"] == matrix_bytes
    assert with_table.weights_by_dtype["int4"] == 2 * matrix_bytes
    assert plain.weights_bytes - head.weights_bytes == 2 * 48 * 64 - matrix_bytes


def test_contexts_beyond_the_longest_sequence_become_that_one(
    report_of: Callable[..., Report],
) -> None:
    assert [step.context_tokens for step in report_of(5).decode] == [5]
    assert [step.context_tokens for step in report_of(9000).decode] == [128, 2048, 8192]


def test_json_holds_the_whole_report(report_of: Callable[..., Report], tmp_path: Path) -> None:
    report = report_of(64)
    write_report(report, tmp_path)
    content = (tmp_path / "report.json").read_bytes()
    assert msgspec.json.decode(content, type=Report) == report
    assert json.loads(content)["arena_bytes"] == 123_456


class Page(HTMLParser):
    """The page's tags with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_needs_no_other_file_and_no_server(
    report_of: Callable[..., Report], tmp_path: Path
) -> None:
    write_report(report_of(64), tmp_path)
    content = (tmp_path / "report.html").read_text()
    page = Page(content)
    allowed = {"html", "meta", "title", "style", "h1", "h2", "p", "table", "tr", "th", "td"}
    assert {tag for tag, _ in page.tags} <= allowed
    assert {name for _, attributes in page.tags for name in attributes} <= {"lang", "charset"}
    assert all(word not in content for word in ("url(", "@import", "://"))
    assert "$" not in content


def test_page_escapes_names_and_says_what_was_not_run(
    report_of: Callable[..., Report], tmp_path: Path
) -> None:
    name = '<script>alert("$name & more")</script>'
    write_report(report_of(64, name), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "script" not in {tag for tag, _ in page.tags}
    text = "".join(page.text)
    assert text.count(name) == 2  # title and heading
    assert "trace & <passes>" in page.text
    level = page.text.index("x86-64-v4")
    assert page.text[level + 1] == "not run here"
    assert page.text[page.text.index("x86-64-v3") + 1] == "1.5e-06"
