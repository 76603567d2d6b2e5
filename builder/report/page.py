"""Writes the build report: report.json, and report.html, a page that needs no other file, no script
and no server."""

import json
from collections import Counter
from dataclasses import asdict
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

from llmbuild.builder.calibration.store import Distilled
from llmbuild.builder.report.grids import Cell, LogScale, bars, bits_colour, layer_grid
from llmbuild.builder.report.report import WEIGHTS, KVDtypes, Report
from llmbuild.runtime.manifest import KV_ITEM_BITS

_DTYPE_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


def write_report(report: Report, root: Path) -> None:
    """Write both files into a folder."""
    (root / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    template = Template(Path(__file__).with_name("report.html.in").read_text())
    page = template.substitute(
        name=escape(report.name),
        peak_rss_mb=_mb(report.peak_rss_bytes),
        sizes=_sizes(report),
        losses=_losses(report),
        precisions=_precisions(report),
        kv=_kv(report),
        gate=_gate(report),
        calibration=_calibration(report),
        decode=_decode(report),
        ranks=_ranks(report),
        memory=_memory(report),
        verified=_verified(report),
        seconds=_table(
            ("stage", "seconds"), [(stage, f"{s:.2f}") for stage, s in report.seconds.items()]
        ),
    )
    (root / "report.html").write_text(page)


def _sizes(report: Report) -> str:
    weights, plain = report.weights_bytes, report.unquantised_weights_bytes
    kv, plain_kv = report.kv_bytes_per_token, report.bf16_kv_bytes_per_token
    by_dtype = [
        (f"of these, {dtype}", size, f"{_mb(size)} MB", f"b{_DTYPE_BITS[dtype]}")
        for dtype, size in report.weights_by_dtype.items()
    ]
    return (
        bars(
            [
                (f"weights in {report.precision}", plain, f"{_mb(plain)} MB", "plain"),
                ("weights here", weights, f"{_mb(weights)} MB{_saved(weights, plain)}", "whole"),
                *by_dtype,
            ]
        )
        + "<p>The KV cache of one token:</p>"
        + bars(
            [
                ("KV in bf16", plain_kv, f"{plain_kv:,} bytes", "plain"),
                ("KV here", kv, f"{kv:,} bytes{_saved(kv, plain_kv)}", "whole"),
            ]
        )
    )


def _saved(size: int, plain: int) -> str:
    return f", {1 - size / plain:.0%} saved" if size < plain else ""


def _losses(report: Report) -> str:
    losses = {each.name: each for each in report.matrices if each.loss is not None}
    if not losses:
        return "<p>No matrix is quantised, so none loses anything.</p>"
    scale = LogScale.of(each.loss or 0.0 for each in losses.values())
    cells: dict[str, Cell] = {}
    for each in report.matrices:
        if each.loss is None:
            cells[each.name] = Cell("", f"{each.name}: not quantised")
            continue
        star = "*" if each.loss_of == WEIGHTS else ""
        title = f"{each.name}: relative squared error of its {each.loss_of}, {each.loss:.3g}"
        colour = scale.colour(each.loss) if scale is not None else ""
        cells[each.name] = Cell(f"{each.loss:.1e}{star}", title, colour)
    note = (
        "<p>* No calibration judged this matrix: the number is the error of its weights alone, "
        "relative to them. It is 0 where the checkpoint's own codes were kept.</p>"
        if any(each.loss_of == WEIGHTS for each in losses.values())
        else ""
    )
    return (scale.legend() if scale is not None else "") + layer_grid(cells) + note


def _precisions(report: Report) -> str:
    cells: dict[str, Cell] = {}
    for each in report.matrices:
        activations = f"; activations {each.activations}" if each.activations else ""
        title = f"{each.name}: weights {each.weights}{activations}"
        cells[each.name] = Cell(each.code, title, bits_colour(each.bits))
    kinds = Counter(each.code for each in report.matrices)
    counts = "; ".join(f"{code}: {count}" for code, count in kinds.most_common())
    return f"<p>Number of matrices: {escape(counts)}.</p>" + layer_grid(cells)


def _kv(report: Report) -> str:
    cells = {
        f"layers.{index}.{kind}": _kv_cell(f"layer {index}, {kind}", dtypes)
        for index, layer in enumerate(report.kv)
        for kind, dtypes in _kinds(layer)
    }
    return layer_grid(cells)


def _kinds(layer: KVDtypes) -> tuple[tuple[str, list[str]], ...]:
    return ("K", layer.k), ("V", layer.v)


def _kv_cell(where: str, dtypes: list[str]) -> Cell:
    """Heads that are alike and neighbours are named together; the widest gives the colour."""
    parts, first = [], 0
    for dtype, run in groupby(dtypes):
        end = first + len(list(run))
        heads = f"head {first}" if end == first + 1 else f"heads {first}-{end - 1}"
        parts.append(f"{heads} {dtype}")
        first = end
    text = dtypes[0] if len(parts) == 1 else ", ".join(parts)
    colour = bits_colour(max(KV_ITEM_BITS[dtype] for dtype in dtypes))
    return Cell(text, f"{where}: {', '.join(parts)}", colour)


def _gate(report: Report) -> str:
    if not report.gate:
        return "<p>The recipe has no gate, so nothing was measured.</p>"
    head = ("figure", "measured", "allowed", "of what")
    rows: list[tuple[object, ...]] = []
    for row in report.gate:
        limit = "no limit"
        if row.allowed is not None:
            limit = f"at {'least' if row.at_least else 'most'} {row.allowed:g}"
        rows.append((row.what, f"{row.measured:.4g}", limit, row.basis))
    return _table(head, rows)


def _calibration(report: Report) -> str:
    data = report.calibration
    if data is None:
        return "<p>Nothing in this plan needs calibration, and none ran.</p>"
    source = "the model's own samples (self)" if data.source == "self" else data.source
    tokens = _table(
        ("tokens from", "sequences", "tokens of each", "seed"),
        [(source, data.sequences, data.length, data.seed)],
    )
    return tokens + ("" if report.distilled is None else _distilled(report.distilled))


def _distilled(reached: Distilled) -> str:
    return (
        f"<p>Then the matrices were trained together in {reached.steps} steps (distillation): "
        f"KL to the model went from {reached.first_kl_nats:.3g} to {reached.last_kl_nats:.3g} nats "
        "a token, means of the first and last tenth of the steps. The losses above are those of "
        "the matrices that it began with.</p>"
    )


def _decode(report: Report) -> str:
    return _table(
        ("context (tokens)", "weights (MB)", "KV (MB)", "operations (M)", "operations / byte"),
        [
            (
                step.context_tokens,
                _mb(step.weight_bytes),
                _mb(step.kv_bytes),
                f"{step.operations / 1e6:.1f}",
                f"{step.operations_per_byte:.2f}",
            )
            for step in report.decode
        ],
    )


def _ranks(report: Report) -> str:
    """What each has, and how even that is: a step waits for the rank that has most to do."""
    if not report.ranks:
        return ""
    head = ("rank", "layers", "heads", "KV heads", "MLP columns", "tokens", "weights read (MB)")
    rows: list[tuple[object, ...]] = [
        (index, x.layers, x.heads, x.kv_heads, x.mlp_columns, x.tokens, _mb(x.read_bytes))
        for index, x in enumerate(report.ranks)
    ]
    read = [rank.read_bytes for rank in report.ranks]
    balance = sum(read) / (len(read) * max(read))
    return (
        "<h2>Ranks</h2><p>What a decode step reads of each rank's weights. On average a rank has "
        f"{balance:.0%} of what the one with most has.</p>" + _table(head, rows)
    )


def _memory(report: Report) -> str:
    return _table(
        ("what", "MB"),
        [
            *((f"weights, {d}", _mb(size)) for d, size in report.weights_by_dtype.items()),
            ("activations of the largest step", _mb(report.arena_bytes)),
            ("KV cache per 1,000 tokens", _mb(1000 * report.kv_bytes_per_token)),
        ],
    )


def _verified(report: Report) -> str:
    return _table(
        ("ISA level", "largest logit difference", "allowed"),
        [
            (level, "not run here" if worst is None else f"{worst:.1e}", report.tolerance)
            for level, worst in report.verified.items()
        ],
    )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}"


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"
