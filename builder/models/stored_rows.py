"""Which rows of a stored matrix a canonical one is made of, so that some can be read alone."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.family import Part, Shape, Tensor

RowNumbers = NDArray[np.intp]


def stored_rows(
    source: str | Part, shape: Shape, config: DecoderConfig, interleaved: bool
) -> RowNumbers | None:
    """The numbers of a canonical matrix's rows in the stored one; None if it isn't made of whole
    rows. shape: of the canonical one. interleaved: stored in rotary pairs."""
    rows = _taken_rows(source, config) if isinstance(source, Part) else np.arange(shape[0])
    return halves_from_pairs(rows, config) if interleaved and rows is not None else rows


def halves_from_pairs(tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Reorder the turning rows of each head from rotary pairs (0, R/2, 1, R/2 + 1, ...) to halves
    (0, 1, ...); the rows that don't turn stay."""
    turning = config.ropes[0].rotary_dim
    order = np.concatenate(
        [np.arange(0, turning, 2), np.arange(1, turning, 2), np.arange(turning, config.head_dim)]
    )
    heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
    return np.ascontiguousarray(heads[:, order]).reshape(tensor.shape)


def span_of(rows: RowNumbers) -> tuple[int, int, RowNumbers | None]:
    """The least range [first, last) that rows are in, and their numbers counted from its first;
    None for those if they are the range."""
    if not rows.size:
        return 0, 0, None
    first, last = int(rows.min()), int(rows.max()) + 1
    is_range = np.array_equal(rows, np.arange(first, last))
    return first, last, None if is_range else rows - first


def _taken_rows(part: Part, config: DecoderConfig) -> RowNumbers | None:
    """What it takes from a matrix of row numbers; a matrix of column numbers shows whether rows
    come whole."""
    shape = part.shape(config)
    rows, columns = (np.arange(size, dtype=np.int32) for size in shape)
    taken = part.take(np.broadcast_to(rows[:, None], shape), config)
    if taken.shape[1] != shape[1] or (taken.min(1) != taken.max(1)).any():
        return None
    numbers: RowNumbers = taken[:, 0].astype(np.intp)
    del taken  # as large as the matrix, if it is a copy
    taken = part.take(np.broadcast_to(columns, shape), config)
    is_whole = (taken.min(0) == columns).all() and (taken.max(0) == columns).all()
    return numbers if is_whole else None
