"""What a decode step reads of each layer, against sums by hand."""

from collections.abc import Callable

from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.shard.cost import layer_costs
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan

HIDDEN, EXPERTS, TOP_K, SIZE, VOCAB = 64, 5, 2, 96, 37


def test_a_token_reads_the_experts_that_it_is_routed_to_as_they_are_quantised(
    decoder_config: Callable[..., DecoderConfig],
) -> None:
    moe = MoeConfig(EXPERTS, TOP_K, SIZE)
    config = decoder_config(hidden_size=HIDDEN, moe=moe, moe_layers=(True, True))
    down, gate_up = "layers.1.mlp.experts.down", "layers.1.mlp.experts.gate_up"
    grids = {down: WeightGrid(4, 32, True), gate_up: WeightGrid(8, 0, False)}
    first, second, head = layer_costs(config, QuantPlan(grids), "bf16")
    plain, *_ = layer_costs(config, QuantPlan(), "bf16")
    assert first == plain
    assert head == VOCAB * HIDDEN * 16
    in_bf16 = TOP_K * 3 * SIZE * HIDDEN * 16
    of_down = TOP_K * HIDDEN * (SIZE * 4 + SIZE // 32 * 16)  # a scale of fp16 for each group
    of_gate_up = TOP_K * 2 * SIZE * (HIDDEN * 8 + 2 * 16)  # and a minimum
    assert second == plain - in_bf16 + of_down + of_gate_up
