"""A checkpoint seen through canonical names: every weight that a config calls for, read one at a
time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from llmbuild.builder.checkpoint.base import StoresCodes
from llmbuild.builder.models.canonical import EMBEDDING, HEAD, Shape, expected_tensors
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.family import (
    Experts,
    Family,
    Part,
    Source,
    StackedExperts,
    Tensor,
)
from llmbuild.builder.models.stored_rows import (
    RowNumbers,
    halves_from_pairs,
    span_of,
    stored_rows,
)
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix

if TYPE_CHECKING:
    from llmbuild.builder.checkpoint import Checkpoint


_DIGESTED_ITEMS = 1 << 20  # at a time


class _Prefixed:
    """A checkpoint with `prefix` put before its tensors' names."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.config, self.format = checkpoint.config, checkpoint.format
        self.notes = checkpoint.notes
        self.tensors = {prefix + name: info for name, info in checkpoint.tensors.items()}
        self._checkpoint, self._prefix = checkpoint, prefix

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(name.removeprefix(self._prefix))

    def read_rows(self, name: str, begin: int, end: int) -> Tensor:
        return self._checkpoint.read_rows(name.removeprefix(self._prefix), begin, end)

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        assert isinstance(self._checkpoint, StoresCodes)
        return self._checkpoint.read_codes(name.removeprefix(self._prefix), rows)


class ModelWeights:
    """The weights of a model by canonical name, read one at a time.

    names: canonical name -> shape. Construction raises CheckpointError when a tensor that the
    config calls for is missing, one is left over, or one has another shape: each list is whole.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> None:
        self.names: Mapping[str, Shape] = expected_tensors(config)
        self._gguf = gguf = checkpoint.format == "gguf"
        prefix = family.bare_prefix
        if not gguf and not any(name.startswith(prefix) for name in checkpoint.tensors):
            checkpoint = _Prefixed(checkpoint, prefix)
        self._checkpoint = checkpoint
        self._config = config
        self._sources = family.gguf_names if gguf else family.hf_names
        self._interleaved = config.rope_interleaved or (gguf and family.gguf_permuted_qk)
        self._plus_one = config.norm.plus_one and not (gguf and family.gguf_adds_one)
        self._known_rows: dict[tuple[str | Part, bool], RowNumbers | None] = {}
        extra = self._copied_head()
        ignored = {
            template.format(l=layer)
            for template in family.ignored
            for layer in range(config.num_layers)
        }
        self._check(ignored | extra)

    def shape(self, name: str) -> Shape:
        """A tensor's; a tied head has one, too."""
        return self.names[self._own_name(name)]

    def read(self, name: str) -> Tensor:
        """One tensor, row-major, in the type that the checkpoint reads it in."""
        name = self._own_name(name)
        tensor = self._assemble(name)
        if self._is_interleaved(name):
            tensor = halves_from_pairs(tensor, self._config)
        if self._plus_one and name.endswith("norm.weight"):
            tensor = tensor.astype(np.float32) + 1
        return tensor

    def has_rows(self, name: str) -> bool:
        """Whether some rows of a matrix, or some experts of a stack, can be read without the
        rest."""
        name = self._own_name(name)
        dimensions = len(self.names[name])
        source, _ = self._source(name)
        if isinstance(source, Experts):
            return True
        infos = [self._checkpoint.tensors[stored] for stored in self._stored_shapes(name)]
        if not all(info.by_rows and len(info.shape) == dimensions for info in infos):
            return False
        return dimensions == 3 or (dimensions == 2 and self._stored_rows(name) is not None)

    def read_rows(self, name: str, begin: int, end: int) -> Tensor:
        """read(name)[begin:end]. Of a tensor that has rows, no more is read than from the first to
        the last one of them in the checkpoint."""
        name = self._own_name(name)
        if not self.has_rows(name):
            return self.read(name)[begin:end].copy()
        read_rows, (source, _) = self._checkpoint.read_rows, self._source(name)
        if isinstance(source, Experts | StackedExperts):
            experts = range(begin, end)
            return self._stack(name, source, experts, lambda each: read_rows(each, begin, end))
        rows = self._stored_rows(name)
        assert rows is not None
        first, last, order = span_of(rows[begin:end])
        stored = read_rows(self._stored_name(name), first, last)
        return stored if order is None else stored[order]

    def stored_grid(self, name: str) -> WeightGrid | None:
        """The grid that the checkpoint has a matrix, or a stack, on; None if it is stored
        otherwise, or isn't made of whole stored rows."""
        name = self._own_name(name)
        if len(self.names[name]) == 1:
            return None
        grids = {self._checkpoint.tensors[each].grid for each in self._stored_shapes(name)}
        grid = grids.pop() if len(grids) == 1 else None
        is_stack = len(self.names[name]) == 3
        return grid if grid and (is_stack or self._stored_rows(name) is not None) else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        """A matrix that has a stored grid, as it is stored; or its rows [begin, end), of a stack
        those experts."""
        name = self._own_name(name)
        assert isinstance(self._checkpoint, StoresCodes)
        source, _ = self._source(name)
        if isinstance(source, Experts | StackedExperts):
            return self._stacked_codes(name, source, range(*(rows or (0, self.names[name][0]))))
        numbers = self._stored_rows(name)
        assert numbers is not None
        stored_name = self._stored_name(name)
        first, last, order = span_of(numbers[slice(*rows)] if rows else numbers)
        is_all = last - first == self._checkpoint.tensors[stored_name].shape[0]
        matrix = self._checkpoint.read_codes(stored_name, None if is_all else (first, last))
        return matrix if order is None else matrix.take_rows(order)

    def _own_name(self, name: str) -> str:
        """A tied head's is the embedding's."""
        return EMBEDDING if name == HEAD and self._config.tie_embeddings else name

    def _stored_name(self, name: str) -> str:
        """The one stored tensor that a canonical one is in."""
        (stored,) = self._stored_shapes(name)
        return stored

    def _stored_rows(self, name: str) -> RowNumbers | None:
        """Which rows of the stored matrix a canonical one is: the same in every layer."""
        source, _ = self._source(name)
        assert isinstance(source, str | Part)
        key = source, self._is_interleaved(name)
        if key not in self._known_rows:
            self._known_rows[key] = stored_rows(source, self.names[name], self._config, key[1])
        return self._known_rows[key]

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaved and name.split(".")[-2] in ("q_proj", "k_proj")

    def _source(self, name: str) -> tuple[Source, str]:
        """Where a canonical tensor is in the checkpoint, and the layer's number as text."""
        if not name.startswith("layers."):
            return self._sources[name], ""
        _, layer, rest = name.split(".", 2)
        return self._sources[f"layers.{{l}}.{rest}"], layer

    def _assemble(self, name: str) -> Tensor:
        source, layer = self._source(name)
        read, shape = self._checkpoint.read, self.names[name]
        match source:
            case str():
                return read(source.format(l=layer)).reshape(shape)
            case Part():
                return source.take(read(source.template.format(l=layer)), self._config)
            case Experts() | StackedExperts():
                return self._stack(name, source, range(shape[0]), read)

    def _stack(
        self,
        name: str,
        source: Experts | StackedExperts,
        experts: range,
        read_stacked: Callable[[str], Tensor],
    ) -> Tensor:
        """Some experts of a stack. read_stacked: gives theirs of a stored stack."""
        shape = (len(experts), *self.names[name][1:])
        read = self._checkpoint.read if isinstance(source, Experts) else read_stacked
        parts = self._parts(name, source, experts)
        if isinstance(source, StackedExperts) and len(parts) == 1:
            return read(parts[0][2]).reshape(shape)
        stored = self._checkpoint.tensors
        is_mixed = len({stored[each].dtype for each in self._stored_shapes(name)}) > 1
        stack = None
        for own, place, part_name in parts:
            part = read(part_name)
            if stack is None:
                stack = np.empty(shape, np.float32 if is_mixed else part.dtype)
            rows = part.shape[-2]
            stack[own, place * rows : (place + 1) * rows] = part
            del part  # one is held beside the stack
        assert stack is not None
        return stack

    def _stacked_codes(
        self, name: str, source: Experts | StackedExperts, experts: range
    ) -> QuantisedMatrix:
        """The same of a stack that has a stored grid."""
        assert isinstance(self._checkpoint, StoresCodes)
        grid, shape = self.stored_grid(name), self.names[name]
        assert grid is not None
        stack = empty_matrix(grid, (len(experts), *shape[1:]))
        of_stack = (experts.start, experts.stop) if isinstance(source, StackedExperts) else None
        for own, place, part_name in self._parts(name, source, experts):
            part = self._checkpoint.read_codes(part_name, of_stack)
            rows = part.shape[-2]
            stack.take_rows((own, slice(place * rows, (place + 1) * rows))).fill(part)
        return stack

    def _parts(
        self, name: str, source: Experts | StackedExperts, experts: range
    ) -> list[tuple[slice, int, str]]:
        """What some experts of a stack are made of: which of them, place and stored tensor, which
        holds those experts' rows at that place, in rows of its own height."""
        _, layer = self._source(name)
        templates = list(enumerate(source.templates))
        if isinstance(source, StackedExperts):
            return [(slice(None), place, each.format(l=layer)) for place, each in templates]
        return [
            (slice(index, index + 1), place, template.format(l=layer, e=expert))
            for index, expert in enumerate(experts)
            for place, template in templates
        ]

    def _stored_shapes(self, name: str) -> dict[str, Shape]:
        """Every stored tensor that a canonical one is made of, with the shape it must have."""
        source, layer = self._source(name)
        shape = self.names[name]
        match source:
            case str():
                return {source.format(l=layer): shape}
            case Part():
                return {source.template.format(l=layer): source.shape(self._config)}
            case Experts():
                rows = shape[1] // len(source.templates)
                return {
                    template.format(l=layer, e=expert): (rows, shape[2])
                    for template in source.templates
                    for expert in range(shape[0])
                }
            case StackedExperts():
                rows = shape[1] // len(source.templates)
                stacked = (shape[0], rows, shape[2])
                return {template.format(l=layer): stacked for template in source.templates}

    def _copied_head(self) -> set[str]:
        """The head's tensor where a tied config's checkpoint stores the embedding again."""
        head, embedding = self._sources[HEAD], self._sources[EMBEDDING]
        stored = self._checkpoint.tensors
        if not isinstance(head, str) or not isinstance(embedding, str):
            return set()
        if not self._config.tie_embeddings or head not in stored or embedding not in stored:
            return set()
        if self._digest(head) != self._digest(embedding):
            raise CheckpointError(
                f"The config ties the head to the embedding (tie_word_embeddings is true), but "
                f"{head} differs from {embedding}. Set tie_word_embeddings to false if the model "
                "has its own head, or remove the tensor."
            )
        return {head}

    def _digest(self, name: str) -> bytes:
        """Identifies a stored tensor's values, whatever type they are in, without a whole copy."""
        info = self._checkpoint.tensors[name]
        digest = hashlib.sha256(str(info.shape).encode())
        count = info.shape[0] if info.shape else 0
        step = max(1, _DIGESTED_ITEMS // max(1, math.prod(info.shape[1:])))
        step = step if info.by_rows else max(1, count)
        for begin in range(0, count, step):
            rows = self._checkpoint.read_rows(name, begin, min(begin + step, count))
            digest.update(rows.astype(np.float32).tobytes())
        return digest.digest()

    def _is_idle_bias(self, name: str, sources: Mapping[str, Shape]) -> bool:
        """Whether it is a bias that adds nothing, of a quantised linear that has none in the model:
        AutoGPTQ gave one to each."""
        weight = f"{name.removesuffix('.bias')}.weight"
        stored = self._checkpoint.tensors.get(weight)
        is_quantised = stored is not None and stored.dtype in ("int4", "int8")
        is_bias = is_quantised and weight in sources and name.endswith(".bias")
        return is_bias and not self._checkpoint.read(name).any()

    def _fits(self, stored: Shape, shape: Shape) -> bool:
        """GGUF files may leave a first dimension of 1 out."""
        return stored == shape or (self._gguf and (1, *stored) == shape)

    def _check(self, droppable: set[str]) -> None:
        stored = self._checkpoint.tensors
        sources: dict[str, Shape] = {}
        for name in self.names:
            sources |= self._stored_shapes(name)
        missing = [f"{name} {shape}" for name, shape in sources.items() if name not in stored]
        known = sources.keys() | droppable
        leftover = [n for n in stored if n not in known and not self._is_idle_bias(n, sources)]
        wrong = [
            f"{name}: shape is {stored[name].shape}, the config calls for {shape}"
            for name, shape in sources.items()
            if name in stored and not self._fits(stored[name].shape, shape)
        ]
        faults = (("missing", missing), ("not part of the model", leftover), ("misshapen", wrong))
        if any(names for _, names in faults):
            lists = [f"{what}: {', '.join(names)}" for what, names in faults if names]
            raise CheckpointError(
                "The checkpoint doesn't hold the tensors that its config calls for; "
                + "; ".join(lists)
                + ". Check that the config belongs to these files."
            )
