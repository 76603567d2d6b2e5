"""The build report: what the engine weighs, reads and computes, and what the build took."""

import json
import math
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Template

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.stages import peak_rss_bytes
from llmbuild.builder.targets.cpu.pack import packed_bytes
from llmbuild.builder.targets.cpu.plan import Layout, PackedWeight, StepPlan
from llmbuild.runtime.manifest import Manifest

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


def make_report(
    manifest: Manifest,
    plan: StepPlan,
    config: DecoderConfig,
    verified: dict[str, float | None],
    tolerance: float,
    seconds: dict[str, float],
) -> Report:
    """The report of a build that is about to be published."""
    by_dtype: dict[str, int] = {}
    for weight in plan.weights:
        by_dtype[weight.dtype] = by_dtype.get(weight.dtype, 0) + packed_bytes(weight)
    return Report(
        name=manifest.name,
        weights_bytes=sum(by_dtype.values()),
        weights_by_dtype=by_dtype,
        arena_bytes=manifest.ranks[0].arena_bytes,
        kv_bytes_per_token=manifest.kv.block_bytes // manifest.kv.block_size,
        decode=_decode_steps(manifest, plan, config),
        verified=verified,
        tolerance=tolerance,
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _decode_steps(manifest: Manifest, plan: StepPlan, config: DecoderConfig) -> list[DecodeStep]:
    """Bytes and operations of a decode step at several context lengths."""
    matrices = _matrices_read(plan)
    weight_bytes = sum(_read_of(weight, packed_bytes(weight), config) for weight in matrices)
    macs = sum(_read_of(weight, math.prod(weight.shape), config) for weight in matrices)
    attention_macs = 2 * config.num_heads * config.head_dim * config.num_layers
    longest = manifest.limits.max_sequence_length
    return [
        DecodeStep(
            context_tokens=context,
            weight_bytes=weight_bytes,
            kv_bytes=context * manifest.kv.block_bytes // manifest.kv.block_size,
            operations=2 * (macs + attention_macs * context),
        )
        for context in sorted({min(context, longest) for context in _CONTEXTS})
    ]


def _matrices_read(plan: StepPlan) -> list[PackedWeight]:
    """All but those of which a step only gathers rows, an untied embedding; small vectors lie in
    rows, too."""
    read = {
        argument
        for call in plan.calls
        if not call.kernel.startswith("gather")
        for argument in call.arguments
        if isinstance(argument, PackedWeight)
    }
    return [weight for weight in plan.weights if weight in read and weight.layout != Layout.ROWS]


def _read_of(weight: PackedWeight, size: int, config: DecoderConfig) -> int:
    """What a token reads of a matrix, the whole, or of a stack of experts, those it is routed to.
    size: the weight's, in any unit."""
    if len(weight.shape) < 3:
        return size
    assert config.moe is not None
    return size * config.moe.top_k // config.moe.num_experts


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
