"""What compiled kernels use, as lines, a Markdown table, or records."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from llmbuild.builder.targets.gpu.capabilities import occupancy
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel
from llmbuild.builder.targets.gpu.kernels import Compiled, Request

_HEADER = ("kernel", "SM", "registers", "shared bytes", "spilled bytes", "warps", "occupancy")


class Row(msgspec.Struct, frozen=True):
    kernel: str
    sm: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a block
    spilled_bytes: int  # of a thread
    num_warps: int  # of a block
    occupancy: float  # estimated, of an SM's warps
    bytes_per_token: int | str


def rows(kernels: Iterable[Compiled]) -> list[Row]:
    return [_row(request, kernel) for request, kernel in kernels]


def lines(table: Sequence[Row]) -> Iterator[str]:
    """A header and a line for each kernel and SM."""
    cells = [_HEADER, *map(_cells, table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *figures in cells:
        right = [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *right])


def markdown(table: Sequence[Row]) -> Iterator[str]:
    """A line for each kernel, a column for each SM: registers, shared bytes, occupancy."""
    sms = sorted({row.sm for row in table})
    of = {(row.kernel, row.sm): row for row in table}
    moved = {row.kernel: row.bytes_per_token for row in table}
    yield _markdown_line(["kernel", "bytes a token", *(f"SM {sm}" for sm in sms)])
    yield _markdown_line(["---"] * (2 + len(sms)))
    for name, bytes_per_token in moved.items():
        figures = [_figures(of.get((name, sm))) for sm in sms]
        yield _markdown_line([name, str(bytes_per_token) or "-", *figures])


def _row(request: Request, kernel: CompiledKernel) -> Row:
    variant, uses = request.variant, kernel.resources
    return Row(
        kernel=variant.name,
        sm=request.sm,
        registers=uses.registers,
        stack_bytes=uses.stack_bytes,
        shared_bytes=uses.shared_bytes,
        spilled_bytes=uses.spilled_bytes,
        num_warps=uses.num_warps,
        occupancy=occupancy(request.sm, uses.registers, uses.shared_bytes, uses.num_warps),
        bytes_per_token=variant.bytes_per_token,
    )


def _cells(row: Row) -> tuple[str, ...]:
    figures = (row.sm, row.registers, row.shared_bytes, row.spilled_bytes, row.num_warps)
    return (row.kernel, *map(str, figures), f"{row.occupancy:.0%}")


def _figures(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.registers}, {row.shared_bytes}, {row.occupancy:.0%}"


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
