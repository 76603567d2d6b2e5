"""What a decode step reads of each layer: the cost by which layers are dealt to stages."""

from math import prod

from llmbuild.builder.models.canonical import EMBEDDING, HEAD, expected_tensors
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.quant.plan import QuantPlan

_BITS = {"fp32": 32, "bf16": 16}


def layer_costs(config: DecoderConfig, plan: QuantPlan, precision: str) -> list[float]:
    """Bits of weights that a token's decode step reads of each layer, then of the head, by the
    precision that each has. (Not a time: a build gives the same engine each time.)"""
    costs = [0.0] * (config.num_layers + 1)
    shapes = expected_tensors(config)
    for name, shape in shapes.items():
        if name.startswith("layers."):
            costs[int(name.split(".")[1])] += _bits(name, shape, config, plan, precision)
    head = EMBEDDING if HEAD not in shapes and HEAD not in plan.weights else HEAD
    costs[-1] = _bits(head, shapes[EMBEDDING], config, plan, precision)
    return costs


def _bits(
    name: str, shape: tuple[int, ...], config: DecoderConfig, plan: QuantPlan, precision: str
) -> float:
    grid, bits = plan.weights.get(name), float(_BITS[precision])
    if grid is not None:
        of_group = 8 * grid.scale_dtype.itemsize * (1 if grid.symmetric else 2)
        bits = grid.bits + of_group / grid.columns_of(shape[-1])
    return config.read_by_token(shape, prod(shape)) * bits
