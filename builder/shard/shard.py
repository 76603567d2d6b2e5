"""A shard: the part of a model that one rank has."""

from dataclasses import dataclass, replace

from llmbuild.builder.models.canonical import Shape, Split, Splits
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.quant.reader import Ranges
from llmbuild.runtime.manifest import Parallel, Span


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model. Ranges are of the whole model's layers, heads, columns of the
    MLPs and tokens; those of a kind that the model lacks are empty."""

    parallel: Parallel
    stage: int
    tp_rank: int
    layers: range
    heads: range
    kv_heads: range
    mlp: range
    shared_mlp: range
    expert_mlp: range
    tokens: range

    @property
    def rank(self) -> int:
        return self.stage * self.parallel.tp + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.parallel.pp - 1

    @property
    def is_split(self) -> bool:
        """Whether other ranks have parts of the same layers."""
        return self.parallel.tp > 1

    @property
    def adds_biases(self) -> bool:
        """Whether it is the one that adds what is to be added once."""
        return self.tp_rank == 0

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """The config of the rank's own, smaller decoder; the vocabulary stays whole."""
        own = slice(self.layers.start, self.layers.stop)
        moe = whole.moe and replace(
            whole.moe, expert_size=len(self.expert_mlp), shared_size=len(self.shared_mlp)
        )
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.mlp),
            layer_ropes=whole.layer_ropes[own],
            windows=whole.windows[own],
            moe=moe,
            moe_layers=whole.moe_layers[own],
        )


def whole_model(config: DecoderConfig) -> Shard:
    """The shard of an only rank."""
    moe = config.moe
    return Shard(
        parallel=Parallel(tp=1, pp=1),
        stage=0,
        tp_rank=0,
        layers=range(config.num_layers),
        heads=range(config.num_heads),
        kv_heads=range(config.num_kv_heads),
        mlp=range(config.intermediate_size),
        shared_mlp=range(moe.shared_size if moe else 0),
        expert_mlp=range(moe.expert_size if moe else 0),
        tokens=range(config.vocab_size),
    )


def span(part: range) -> Span:
    """A range as the manifest has it."""
    return Span(first=part.start, count=len(part))


def own_ranges(
    shard: Shard, config: DecoderConfig, shape: Shape, splits: Splits
) -> tuple[Ranges, ...]:
    """What a rank has of a canonical tensor: of each axis the ranges to take. config: the whole
    model's."""
    elements = {
        Split.HEADS: _scaled(shard.heads, shape, splits, config.num_heads, Split.HEADS),
        Split.KV_HEADS: _scaled(shard.kv_heads, shape, splits, config.num_kv_heads, Split.KV_HEADS),
        Split.MLP: _one(shard.mlp),
        Split.SHARED_MLP: _one(shard.shared_mlp),
        Split.EXPERT_MLP: _one(shard.expert_mlp),
        Split.EXPERT_GATE_UP: _gate_and_up(shard.expert_mlp, config),
        Split.TOKENS: _one(shard.tokens),
    }
    return tuple(
        ((0, size),) if split in (None, Split.ADDED_ONCE) else elements[split]
        for size, split in zip(shape, splits, strict=True)
    )


def _one(part: range) -> Ranges:
    return ((part.start, part.stop),)


def _scaled(part: range, shape: Shape, splits: Splits, count: int, split: Split) -> Ranges:
    """A range of heads in elements: an axis has one, or head_dim, for each head."""
    each = shape[splits.index(split)] // count if split in splits else 0
    return ((part.start * each, part.stop * each),)


def _gate_and_up(part: range, config: DecoderConfig) -> Ranges:
    size = config.moe.expert_size if config.moe else 0
    return ((part.start, part.stop), (size + part.start, size + part.stop))
