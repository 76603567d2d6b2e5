"""How a model is divided among ranks: heads, columns of the MLPs, tokens, and layers."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import lcm

from llmbuild.builder.models.canonical import Split, expected_tensors, tensor_splits
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.shard.shard import Shard
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import GROUP_UNIT, WeightGrid
from llmbuild.quant.plan import QuantPlan, activation_group
from llmbuild.runtime.manifest import Parallel

TILE_ROWS = 16  # a cut between tiles leaves kernels no remainder


def check_parallel(parallel: Parallel, config: DecoderConfig) -> None:
    """Raises RecipeError, with the legal values, for more ranks than a model can be cut into."""
    parts = {
        "query heads": config.num_heads,
        "tokens": config.vocab_size,
        **{kind.value: size for kind, size in _mlp_sizes(config).items()},
    }
    what, most = min(parts.items(), key=lambda part: part[1])
    if parallel.tp > 1 and config.qk_norm == "whole":
        raise RecipeError(
            f"parallel.tp: given {parallel.tp}; the model normalises Q and K over all heads "
            "together, which isn't divided, so 1 is allowed; parallel.pp divides its layers"
        )
    for key, given, allowed, of in (
        ("tp", parallel.tp, most, what),
        ("pp", parallel.pp, config.num_layers, "layers"),
    ):
        if given > allowed:
            raise RecipeError(
                f"parallel.{key}: given {given}; the model has {allowed} {of}, so 1 to {allowed} "
                "is allowed"
            )


def make_shards(
    parallel: Parallel, config: DecoderConfig, plan: QuantPlan, costs: Sequence[float]
) -> list[Shard]:
    """Every rank's shard, stage by stage.

    costs: of each layer, then of the head (cost.py). Raises RecipeError for what check_parallel
    refuses, and, with the legal pairs of ranks and group size, where a cut would part columns that
    share a scale.
    """
    check_parallel(parallel, config)
    tp = parallel.tp
    heads, kv_heads = split_heads(config.num_heads, config.num_kv_heads, tp)
    units = _column_units(plan, config)
    _check_heads(heads, units[Split.HEADS], parallel, config)
    even = [1.0] * tp
    shares = {Split.MLP: _mlp_shares(heads, kv_heads, config)}
    kinds = (Split.MLP, Split.SHARED_MLP, Split.EXPERT_MLP)
    columns = {kind: [range(0)] * tp for kind in kinds}
    for kind, size in _mlp_sizes(config).items():
        unit = units[kind] or (TILE_ROWS if size >= TILE_ROWS * tp else 1)
        if size < unit * tp:
            raise _no_such_pair(parallel, config)
        columns[kind] = split_columns(size, unit, shares.get(kind, even))
    return [
        Shard(
            parallel=parallel,
            stage=stage,
            tp_rank=rank,
            layers=layers,
            heads=heads[rank],
            kv_heads=kv_heads[rank],
            mlp=columns[Split.MLP][rank],
            shared_mlp=columns[Split.SHARED_MLP][rank],
            expert_mlp=columns[Split.EXPERT_MLP][rank],
            tokens=tokens,
        )
        for stage, layers in enumerate(split_layers(costs, parallel.pp))
        for rank, tokens in enumerate(_even(config.vocab_size, tp))
    ]


def split_heads(num_heads: int, num_kv_heads: int, tp: int) -> tuple[list[range], list[range]]:
    """Query heads and KV heads of each rank: whole groups of queries with their KV head while there
    are enough of these, else KV heads on several ranks, which divide its queries."""
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv_heads = _even(num_kv_heads, tp)
        return [range(kv.start * group, kv.stop * group) for kv in kv_heads], kv_heads
    heads, kv_heads = [], []
    for kv_head, ranks in enumerate(_even(tp, num_kv_heads)):
        for part in _even(group, len(ranks)):
            heads.append(range(kv_head * group + part.start, kv_head * group + part.stop))
            kv_heads.append(range(kv_head, kv_head + 1))
    return heads, kv_heads


def split_columns(size: int, unit: int, shares: Sequence[float]) -> list[range]:
    """Columns of each rank, as near to its share as whole units of columns allow, one unit at
    least; what doesn't fill a unit goes to the last."""
    units, ranks, total = size // unit, len(shares), sum(shares)
    cuts = [0]
    for rank, until in enumerate(accumulate(shares[:-1]), 1):
        nearest = round(until / total * size / unit) if total else 0
        cuts.append(min(max(nearest, cuts[-1] + 1), units - (ranks - rank)))
    cuts = [cut * unit for cut in cuts] + [size]
    return [range(a, b) for a, b in pairwise(cuts)]


def split_layers(costs: Sequence[float], pp: int) -> list[range]:
    """Layers of each stage so that the dearest stage costs least; the head, whose cost is the last,
    is the last stage's."""
    before = [0.0, *accumulate(costs)]
    num_layers = len(costs) - 1

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The dearest stage's cost and the cuts when layers from `first` on are so many stages."""
        if stages == 1:
            return before[-1] - before[first], (num_layers,)
        choices = []
        for cut in range(first + 1, num_layers - stages + 2):
            rest, cuts = best(cut, stages - 1)
            choices.append((max(before[cut] - before[first], rest), (cut, *cuts)))
        return min(choices)

    cuts = (0, *best(0, pp)[1])
    return [range(a, b) for a, b in pairwise(cuts)]


def _even(count: int, parts: int) -> list[range]:
    """Runs whose lengths differ by one at most, the longer ones first."""
    least, longer = divmod(count, parts)
    ends = list(accumulate(least + (part < longer) for part in range(parts)))
    return [range(a, b) for a, b in pairwise([0, *ends])]


def _mlp_sizes(config: DecoderConfig) -> dict[Split, int]:
    """Columns of each kind of MLP that the model has."""
    moe = config.moe
    has_dense = moe is None or not all(config.moe_layers)
    sizes = {
        Split.MLP: config.intermediate_size if has_dense else 0,
        Split.SHARED_MLP: moe.shared_size if moe else 0,
        Split.EXPERT_MLP: moe.expert_size if moe else 0,
    }
    return {kind: size for kind, size in sizes.items() if size}


def _mlp_shares(
    heads: Sequence[range], kv_heads: Sequence[range], config: DecoderConfig
) -> list[float]:
    """How many columns of the MLP make up for what a rank has of the attention, so that all ranks
    have as many weights of a layer."""
    attention = [
        2 * config.head_dim * (len(own) + len(own_kv))
        for own, own_kv in zip(heads, kv_heads, strict=True)
    ]
    each = 3 if config.gated_mlp else 2  # of a column: gate, up and down
    level = (sum(attention) + each * config.intermediate_size) / len(heads)
    return [max(level - own, 0) / each for own in attention]


def _column_units(plan: QuantPlan, config: DecoderConfig) -> dict[Split, int]:
    """How many neighbouring columns of the matrices that are divided by columns must stay together,
    0 where none: quantisation groups, of weights and activations."""
    splits, shapes = tensor_splits(config), expected_tensors(config)
    units = dict.fromkeys(Split, 0)
    for name, grid in plan.weights.items():
        split = splits[name][-1]  # of columns
        if split is not None:
            group = plan.activation_groups.get(name, GROUP_UNIT)
            if name in plan.static and group == shapes[name][-1]:
                group = GROUP_UNIT  # one scale that no cut changes
            units[split] = lcm(units[split] or 1, grid.group_size or GROUP_UNIT, group)
    return units


def _check_heads(
    heads: Sequence[range], unit: int, parallel: Parallel, config: DecoderConfig
) -> None:
    if unit and any(own.stop * config.head_dim % unit for own in heads):
        raise _no_such_pair(parallel, config)


def _no_such_pair(parallel: Parallel, config: DecoderConfig) -> RecipeError:
    pairs = [
        f"tp {tp}: {', '.join(sizes)}"
        for tp in range(2, config.num_heads + 1)
        if (sizes := list(_legal_group_sizes(tp, config)))
    ]
    allowed = f"allowed are tp 1 with every group size{''.join(f'; {pair}' for pair in pairs)}"
    return RecipeError(
        f"parallel.tp: given {parallel.tp}, which would part columns that share a scale of "
        f"quantisation; by group size {allowed}"
    )


def _legal_group_sizes(tp: int, config: DecoderConfig) -> Iterator[str]:
    """Group sizes that every cut of o_proj's and down_proj's columns, experts' too, keeps whole."""
    heads, _ = split_heads(config.num_heads, config.num_kv_heads, tp)
    sizes = list(_mlp_sizes(config).values())
    widths = [config.q_size, *sizes]
    for group in (*range(GROUP_UNIT, min(widths) + 1, GROUP_UNIT), 0):
        grid = WeightGrid(8, group, symmetric=True)
        if not all(grid.fits(width) for width in widths):
            continue
        units = [lcm(group or 1, activation_group(grid, width)) for width in widths]
        fits = all(own.stop * config.head_dim % units[0] == 0 for own in heads)
        if fits and all(size >= unit * tp for size, unit in zip(sizes, units[1:], strict=True)):
            yield str(group) if group else "row"
