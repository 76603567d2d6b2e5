"""All that is checked, and all that is timed."""

from collections.abc import Iterable, Sequence

from bench.gpu.attention_cases import KINDS, attention_cases, attention_type, decode_case
from bench.gpu.attention_cases import prefill_case as prefill
from bench.gpu.case import Case
from bench.gpu.linear_cases import (
    FORMATS,
    INT8_ACTIVATIONS,
    int8_linear_case,
    linear_case,
    linear_cases,
)
from bench.gpu.rope_cases import KINDS as ROPE_KINDS
from bench.gpu.rope_cases import rope_case, rope_cases
from bench.gpu.row_cases import (
    add_norm_case,
    gated_case,
    gather_case,
    greedy_case,
    layer_norm_case,
    norm_case,
    row_cases,
)
from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.model_shape import LLAMA_8B

CHECKED_SMS = 8  # of a GPU that is small enough for a few splits


def timed_cases(
    sm: int, num_sms: int, batches: Sequence[int], contexts: Sequence[int]
) -> list[Case]:
    return [
        *linear_cases(sm, batches),
        *attention_cases(sm, num_sms, batches, contexts),
        *rope_cases(sm, batches),
        *row_cases(sm, batches),
    ]


def check_cases(sm: int) -> list[Case]:
    """Small ones of odd sizes, for every kernel that is timed: torch on the CPU is quick with
    them."""
    cases = []
    for activation, weights in FORMATS:
        for tokens in (1, 3, 7, 19):
            cases.append(linear_case(sm, activation, weights, 192, 144, tokens))
    for weights, group in INT8_ACTIVATIONS:
        for tokens in (3, 19):
            cases.append(int8_linear_case(sm, weights, group, 192, 144, tokens))
    for shape, dtype in ROPE_KINDS:
        cases.append(rope_case(sm, shape, dtype, 5))
    for shape, activation, kv_dtype in KINDS:
        of = attention_type(shape, activation, kv_dtype)
        cases += [decode_case(sm, of, 3, 275, CHECKED_SMS), prefill(sm, of, 37)]
    for activation in ("fp16", "bf16"):
        cases += [
            norm_case(sm, activation, LLAMA_8B, 3),
            add_norm_case(sm, activation, LLAMA_8B, 3),
            gated_case(sm, activation, LLAMA_8B, 2),
            gather_case(sm, activation, LLAMA_8B, 5, 50),
        ]
    return [*cases, layer_norm_case(sm, "bf16", LLAMA_8B, 3), greedy_case(sm, 3, 9008)]


def variants_of(cases: Iterable[Case]) -> list[KernelVariant]:
    """What has to be compiled, each once."""
    launches = (launch for case in cases for launch in case.launches)
    return list({launch.variant.name: launch.variant for launch in launches}.values())
