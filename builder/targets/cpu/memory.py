"""Memory plan of the arena: buffers that are alive at the same time don't overlap, others may."""

from dataclasses import dataclass

from llmbuild.builder.targets.cpu.plan import Buffer, Rows, StepPlan
from llmbuild.runtime.manifest import Limits

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offset of each buffer in one allocation of `size_bytes`, for the largest step."""

    offsets: dict[Buffer, int]
    size_bytes: int


@dataclass(frozen=True)
class _Placed:
    begin: int
    end: int
    first: int
    last: int


def plan_arena(plan: StepPlan, limits: Limits) -> ArenaPlan:
    """Place the buffers, largest first, each at the lowest offset where it meets no other that
    lives at the same time (best-fit by size, as in Pisarchyk and Lee, 2020)."""
    lifetimes = _lifetimes(plan)
    sizes = {buffer: size_bytes(buffer, limits) for buffer in lifetimes}
    placed: list[_Placed] = []
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(lifetimes, key=lambda each: (-sizes[each], lifetimes[each])):
        first, last = lifetimes[buffer]
        offset = 0
        for other in sorted(placed, key=lambda each: each.begin):
            apart = other.last < first or last < other.first
            if not apart and offset < other.end and other.begin < offset + sizes[buffer]:
                offset = other.end
        offsets[buffer] = offset
        placed.append(_Placed(offset, offset + sizes[buffer], first, last))
    return ArenaPlan(offsets, max((each.end for each in placed), default=0))


def size_bytes(buffer: Buffer, limits: Limits) -> int:
    """Bytes of a buffer in the largest step, rounded up to the alignment."""
    match buffer.rows:
        case Rows.ONE:
            rows = 1
        case Rows.LONGEST:
            rows = limits.max_sequence_length
        case Rows.TOKENS | Rows.LOGIT_ROWS:
            rows = limits.max_step_tokens
    size = 4 * rows * buffer.rows_each * buffer.width
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _lifetimes(plan: StepPlan) -> dict[Buffer, tuple[int, int]]:
    """First and last call that touches each buffer of the arena."""
    lifetimes: dict[Buffer, tuple[int, int]] = {}
    for index, call in enumerate(plan.calls):
        for buffer in call.buffers - {plan.logits}:
            first, _ = lifetimes.get(buffer, (index, index))
            lifetimes[buffer] = (first, index)
    return lifetimes
