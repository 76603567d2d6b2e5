"""A checkpoint seen through canonical names: every weight that a config calls for, read one at a
time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

if TYPE_CHECKING:
    from llmbuild.builder.checkpoint import Checkpoint


class _Prefixed:
    """A checkpoint with `prefix` put before its tensors' names."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.config, self.format = checkpoint.config, checkpoint.format
        self.notes = checkpoint.notes
        self.tensors = {prefix + name: info for name, info in checkpoint.tensors.items()}
        self._checkpoint, self._prefix = checkpoint, prefix

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(name.removeprefix(self._prefix))

    def read_codes(self, name: str) -> QuantisedMatrix:
        assert isinstance(self._checkpoint, StoresCodes)
        return self._checkpoint.read_codes(name.removeprefix(self._prefix))


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
        extra = self._copied_head()
        ignored = {
            template.format(l=layer)
            for template in family.ignored
            for layer in range(config.num_layers)
        }
        self._check(ignored | extra)

    def read(self, name: str) -> Tensor:
        """One tensor, row-major, in the type that the checkpoint reads it in."""
        name = self._own_name(name)
        tensor = self._assemble(name)
        if self._is_interleaved(name):
            tensor = _halves_from_pairs(tensor, self._config)
        if self._plus_one and name.endswith("norm.weight"):
            tensor = tensor.astype(np.float32) + 1
        return tensor

    def stored_grid(self, name: str) -> WeightGrid | None:
        """The grid that the checkpoint has a matrix on; None if it is stored otherwise, or isn't
        made of whole stored rows."""
        name = self._own_name(name)
        source, layer = self._source(name)
        if not isinstance(source, str | Part) or len(self.names[name]) != 2:
            return None
        template = source if isinstance(source, str) else source.template
        grid = self._checkpoint.tensors[template.format(l=layer)].grid
        return grid if grid is not None and self._stored_rows(name) is not None else None

    def read_codes(self, name: str) -> QuantisedMatrix:
        """A matrix that has a stored grid, as it is stored."""
        name = self._own_name(name)
        source, layer = self._source(name)
        assert isinstance(source, str | Part)
        assert isinstance(self._checkpoint, StoresCodes)
        template = source if isinstance(source, str) else source.template
        matrix = self._checkpoint.read_codes(template.format(l=layer))
        rows = self._stored_rows(name)
        assert rows is not None
        return matrix.take_rows(rows)

    def _own_name(self, name: str) -> str:
        """A tied head's is the embedding's."""
        return EMBEDDING if name == HEAD and self._config.tie_embeddings else name

    def _stored_rows(self, name: str) -> NDArray[np.intp] | None:
        """Which rows of the stored matrix a canonical one is, in order: those that its reading
        takes from a matrix of row numbers. None if it isn't made of whole rows, which a matrix of
        column numbers shows."""
        source, _ = self._source(name)
        stored = source.shape(self._config) if isinstance(source, Part) else self.names[name]
        row_numbers, column_numbers = np.arange(stored[0])[:, None], np.arange(stored[1])

        def taken(numbers: Tensor) -> Tensor:
            numbers = np.broadcast_to(numbers, stored)
            if isinstance(source, Part):
                numbers = source.take(numbers, self._config)
            if self._is_interleaved(name):
                numbers = _halves_from_pairs(numbers, self._config)
            return numbers

        rows = taken(row_numbers)
        whole = rows.shape[1] == stored[1] and (rows == rows[:, :1]).all()
        return rows[:, 0] if whole and (taken(column_numbers) == column_numbers).all() else None

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
            case Experts():
                parts: list[tuple[int | slice, int, str]] = [
                    (expert, place, template.format(l=layer, e=expert))
                    for expert in range(shape[0])
                    for place, template in enumerate(source.templates)
                ]
                return self._stack(shape, parts)
            case StackedExperts(templates=(template,)):
                return read(template.format(l=layer)).reshape(shape)
            case StackedExperts():
                names = [template.format(l=layer) for template in source.templates]
                return self._stack(shape, [(slice(None), *part) for part in enumerate(names)])

    def _stack(self, shape: Shape, parts: Sequence[tuple[int | slice, int, str]]) -> Tensor:
        """A stack of experts made of parts: experts, place and stored tensor, which holds those
        experts' rows at that place, in rows of its own height. One is held beside the stack."""
        checkpoint, stack = self._checkpoint, np.empty(0)
        mixed = len({checkpoint.tensors[name].dtype for _, _, name in parts}) > 1
        for experts, place, name in parts:
            part = checkpoint.read(name)
            if not stack.size:
                stack = np.empty(shape, np.float32 if mixed else part.dtype)
            rows = part.shape[-2]
            stack[experts, place * rows : (place + 1) * rows] = part
            del part
        return stack

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
        if _digest(self._checkpoint.read(head)) != _digest(self._checkpoint.read(embedding)):
            raise CheckpointError(
                f"The config ties the head to the embedding (tie_word_embeddings is true), but "
                f"{head} differs from {embedding}. Set tie_word_embeddings to false if the model "
                "has its own head, or remove the tensor."
            )
        return {head}

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


def _halves_from_pairs(tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Reorder the turning rows of each head from rotary pairs (0, R/2, 1, R/2 + 1, ...) to halves
    (0, 1, ...); the rows that don't turn stay."""
    turning = config.ropes[0].rotary_dim
    order = np.concatenate(
        [np.arange(0, turning, 2), np.arange(1, turning, 2), np.arange(turning, config.head_dim)]
    )
    heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
    return np.ascontiguousarray(heads[:, order]).reshape(tensor.shape)


def _digest(tensor: Tensor) -> bytes:
    """Identifies the values, whatever type they are stored in, without a second whole copy."""
    digest = hashlib.sha256(str(tensor.shape).encode())
    for row in np.atleast_1d(tensor):
        digest.update(row.astype(np.float32).tobytes())
    return digest.digest()
