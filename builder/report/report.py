"""The build report: what the engine weighs, reads and computes, what quantisation did to it, and
what the build took. page.py writes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmbuild.builder.assemble import Assembled
from llmbuild.builder.calibration.store import Distilled
from llmbuild.builder.gate import GateResult, Row
from llmbuild.builder.models.canonical import HEAD
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.recipe.calibration import ResolvedCalibration
from llmbuild.builder.report.compiled_precision import CompiledPrecision, WeightPrecision, in_words
from llmbuild.builder.stages import peak_rss_bytes
from llmbuild.builder.targets.cpu.pack import packed_bytes
from llmbuild.builder.targets.cpu.plan import Layout, PackedWeight, StepPlan
from llmbuild.builder.targets.cpu.read_precision import read_precision
from llmbuild.quant.kv import needs_channel_scales
from llmbuild.runtime.manifest import Manifest, Span

PRODUCTS, WEIGHTS = "products", "weights"  # what a loss is of

_CONTEXTS = (128, 2048, 8192)
_BF16_BYTES = 2


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
class Matrix:
    """A canonical matrix, its precision read back from the executable's plan.

    code: the precision in short, such as "w4 g64 s, a8". bits: of a weight. loss: relative squared
    error, None of one that isn't quantised; loss_of: PRODUCTS with calibration's inputs, or WEIGHTS
    where no calibration judged it.
    """

    name: str
    code: str
    weights: str
    activations: str  # "" where no linear reads it
    bits: int
    loss: float | None
    loss_of: str


@dataclass(frozen=True)
class KVDtypes:
    """A layer's KV cache, by KV head, read back from the executable's plan."""

    k: list[str]
    v: list[str]


@dataclass(frozen=True)
class RankShare:
    """What one rank of several has of the model. Layers and heads are "first-last" of the whole
    model's; a decode step reads `read_bytes` of its weights."""

    stage: int
    tp_rank: int
    layers: str
    heads: str
    kv_heads: str
    mlp_columns: int
    tokens: str
    read_bytes: int
    arena_bytes: int


@dataclass(frozen=True)
class CalibrationData:
    """The tokens that calibration ran on."""

    source: str
    sequences: int
    length: int
    seed: int


@dataclass(frozen=True)
class Report:
    """`weights_bytes` are the packed file's, of several ranks what those of the whole model would
    be; `unquantised_weights_bytes` what they would be in `precision`. `ranks`: none where there is
    one alone. `peak_rss_bytes` is the compiling process's."""

    name: str
    precision: str
    weights_bytes: int
    weights_by_dtype: dict[str, int]
    unquantised_weights_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    bf16_kv_bytes_per_token: int
    matrices: list[Matrix]
    kv: list[KVDtypes]  # by layer
    calibration: CalibrationData | None  # None: none ran
    distilled: Distilled | None  # None: it didn't run; the losses above are from before it
    decode: list[DecodeStep]
    ranks: list[RankShare]
    verified: dict[str, float | None]  # by ISA level; None: this processor can't run it
    tolerance: float
    gate: list[Row]
    seconds: dict[str, float]  # by stage of the build
    peak_rss_bytes: int


def make_report(
    assembled: Assembled,
    config: DecoderConfig,
    verified: dict[str, float | None],
    gate: GateResult | None,
    tolerance: float,
    seconds: dict[str, float],
    *,
    rounding_losses: Mapping[str, float],
    calibration: ResolvedCalibration,
) -> Report:
    """The report of a build that is about to be published. rounding_losses: of the quantised
    matrices that calibration didn't judge. calibration: the recipe's, whether or not it ran."""
    manifest, plan, kv = assembled.manifest, assembled.plan, assembled.manifest.kv
    compiled = read_precision(plan, assembled.step)
    by_dtype: dict[str, int] = {}
    for weight in plan.weights:
        by_dtype[weight.dtype] = by_dtype.get(weight.dtype, 0) + packed_bytes(weight)
    return Report(
        name=manifest.name,
        precision=manifest.precision,
        weights_bytes=sum(by_dtype.values()),
        weights_by_dtype=by_dtype,
        unquantised_weights_bytes=_unquantised_bytes(plan, manifest.precision, config),
        arena_bytes=sum(rank.arena_bytes for rank in manifest.ranks),
        kv_bytes_per_token=kv.block_bytes // kv.block_size,
        bf16_kv_bytes_per_token=2 * len(kv.layers) * kv.num_kv_heads * kv.head_dim * _BF16_BYTES,
        matrices=_matrices(compiled, assembled.product_losses, rounding_losses),
        kv=_kv_dtypes(compiled, config),
        calibration=_calibration(assembled, calibration),
        distilled=assembled.distilled,
        decode=_decode_steps(manifest, plan, config),
        ranks=_rank_shares(assembled) if len(manifest.ranks) > 1 else [],
        verified=verified,
        tolerance=tolerance,
        gate=[] if gate is None else gate.rows,
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _matrices(
    compiled: CompiledPrecision,
    product_losses: Mapping[str, float],
    rounding_losses: Mapping[str, float],
) -> list[Matrix]:
    matrices = []
    for name, (precision,) in compiled.weights.items():
        activations = next(iter(compiled.activations.get(name, ())), None)
        code, bits = _code_and_bits(precision)
        if activations is not None and activations.group:
            code += ", a8 static" if activations.static else ", a8"
        of_products = name in product_losses
        matrices.append(
            Matrix(
                name=name,
                code=code,
                weights=in_words(precision),
                activations="" if activations is None else in_words(activations),
                bits=bits,
                loss=product_losses[name] if of_products else rounding_losses.get(name),
                loss_of=PRODUCTS if of_products else WEIGHTS if name in rounding_losses else "",
            )
        )
    return matrices


def _code_and_bits(precision: WeightPrecision) -> tuple[str, int]:
    if isinstance(precision, str):
        return precision, {"fp32": 32, "bf16": 16}[precision]
    groups = f"g{precision.group_size}" if precision.group_size else "row"
    offset = "s" if precision.symmetric else "z" if precision.zero_points else "m"
    return f"w{precision.bits} {groups} {offset}", precision.bits


def _kv_dtypes(compiled: CompiledPrecision, config: DecoderConfig) -> list[KVDtypes]:
    def dtypes(layer: int, kind: str) -> list[str]:
        heads = range(config.num_kv_heads)
        return [next(iter(compiled.kv[f"layers.{layer}.{kind}.{head}"])) for head in heads]

    layers = range(config.num_layers)
    return [KVDtypes(dtypes(layer, "k"), dtypes(layer, "v")) for layer in layers]


def _calibration(assembled: Assembled, chosen: ResolvedCalibration) -> CalibrationData | None:
    kv = assembled.manifest.kv
    if not assembled.quant_plan.needs_calibration and not needs_channel_scales(kv):
        return None
    return CalibrationData(chosen.data, chosen.sequences, chosen.length, chosen.seed)


def _unquantised_bytes(plan: StepPlan, precision: str, config: DecoderConfig) -> int:
    """Of the same weights without grids; a tied head that got a matrix of its own needs none."""
    return sum(
        packed_bytes(replace(weight, dtype=precision, layout=Layout.TILES_OF_16, grid=None))
        if weight.grid is not None
        else packed_bytes(weight)
        for weight in plan.weights
        if weight.name != HEAD or not config.tie_embeddings
    )


def _decode_steps(manifest: Manifest, plan: StepPlan, config: DecoderConfig) -> list[DecodeStep]:
    """Bytes and operations of a decode step at several context lengths."""
    matrices = _matrices_read(plan)
    weight_bytes = _bytes_read(plan, config)
    macs = sum(config.read_by_token(w.shape, math.prod(w.shape)) for w in matrices)
    attention_macs = 2 * config.num_heads * config.head_dim * config.num_layers
    return [
        DecodeStep(
            context_tokens=context,
            weight_bytes=weight_bytes,
            kv_bytes=context * manifest.kv.block_bytes // manifest.kv.block_size,
            operations=2 * (macs + attention_macs * context),
        )
        for context in decode_contexts(manifest.limits.max_sequence_length)
    ]


def decode_contexts(longest: int) -> list[int]:
    """Tokens of context that decode steps are reported for, in an engine of this longest."""
    return sorted({min(context, longest) for context in _CONTEXTS})


def _rank_shares(assembled: Assembled) -> list[RankShare]:
    ranks = zip(assembled.manifest.ranks, assembled.graphs, assembled.rank_plans, strict=True)
    return [
        RankShare(
            stage=rank.stage,
            tp_rank=rank.tp_rank,
            layers=_of(rank.layers),
            heads=_of(rank.heads),
            kv_heads=_of(rank.kv_heads),
            mlp_columns=len(graph.shard.mlp) or len(graph.shard.expert_mlp),
            tokens=_of(rank.tokens),
            read_bytes=_bytes_read(plan, graph.config),
            arena_bytes=rank.arena_bytes,
        )
        for rank, graph, plan in ranks
    ]


def _of(span: Span) -> str:
    return f"{span.first}-{span.end - 1}"


def _bytes_read(plan: StepPlan, config: DecoderConfig) -> int:
    """Of weights, by a decode step of one sequence."""
    matrices = _matrices_read(plan)
    return sum(config.read_by_token(w.shape, packed_bytes(w)) for w in matrices)


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
