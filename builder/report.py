"""The build report: what the engine weighs, reads and computes, and what the build took."""

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Template

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.pack import packed_bytes
from llmbuild.builder.targets.cpu.plan import Layout, StepPlan
from llmbuild.runtime.manifest import KVLayout

_CONTEXTS = (128, 2048, 8192)


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of one sequence. A step can't take less time than its bytes need at the
    memory's bandwidth, nor than its operations need at the processor's peak."""

    context_tokens: int
    weight_bytes: int
    kv_bytes: int
    operations: int  # a multiply-add counts as two

    @property
    def operations_per_byte(self) -> float:
        return self.operations / (self.weight_bytes + self.kv_bytes)


@dataclass(frozen=True)
class Report:
    """`weights_bytes` are the packed file's; `peak_rss_bytes` is the compiling process's."""

    name: str
    weights_bytes: int
    weights_by_dtype: dict[str, int]
    arena_bytes: int
    kv_bytes_per_token: int
    decode: list[DecodeStep]
    verified: dict[str, float | None]  # by ISA level; None: this processor can't run it
    tolerance: float
    seconds: dict[str, float]  # by stage of the build
    peak_rss_bytes: int


def decode_steps(
    plan: StepPlan, config: DecoderConfig, kv: KVLayout, max_sequence_length: int
) -> list[DecodeStep]:
    """Bytes and operations of a decode step at several context lengths."""
    read = sum(packed_bytes(weight) for weight in plan.weights if _is_read_whole(weight.layout))
    macs = sum(
        weight.shape[0] * weight.shape[1]
        for weight in plan.weights
        if weight.layout is Layout.TILES_OF_16
    )
    contexts = sorted({min(context, max_sequence_length) for context in _CONTEXTS})
    attention_macs = 2 * config.num_heads * config.head_dim * config.num_layers
    return [
        DecodeStep(
            context_tokens=context,
            weight_bytes=read,
            kv_bytes=context * kv.block_bytes // kv.block_size,
            operations=2 * (macs + attention_macs * context),
        )
        for context in contexts
    ]


def _is_read_whole(layout: Layout) -> bool:
    """Only an untied embedding and small vectors lie in rows; of the former a step reads a row."""
    return layout is Layout.TILES_OF_16


def write_report(report: Report, root: Path) -> None:
    """Write report.json and report.html, which needs no other file and no server."""
    (root / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    template = Template(Path(__file__).with_name("report.html.in").read_text())
    sections = {
        "decode": _table(
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
        ),
        "memory": _table(
            ("what", "MB"),
            [
                *((f"weights, {d}", _mb(size)) for d, size in report.weights_by_dtype.items()),
                ("activations of the largest step", _mb(report.arena_bytes)),
                ("KV cache per 1,000 tokens", _mb(1000 * report.kv_bytes_per_token)),
            ],
        ),
        "verified": _table(
            ("ISA level", "largest logit difference", "allowed"),
            [
                (level, "not run here" if worst is None else f"{worst:.1e}", report.tolerance)
                for level, worst in report.verified.items()
            ],
        ),
        "seconds": _table(
            ("stage", "seconds"), [(stage, f"{s:.2f}") for stage, s in report.seconds.items()]
        ),
    }
    (root / "report.html").write_text(
        template.substitute(
            name=escape(report.name), peak_rss_mb=_mb(report.peak_rss_bytes), **sections
        )
    )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}"


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"
