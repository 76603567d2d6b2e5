"""A checkpoint seen through canonical names: which weights a config calls for, and reading them."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint import Checkpoint
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.family import Family
from llmbuild.errors import CheckpointError

Shape = tuple[int, ...]

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Canonical name -> shape ([out, in]) of every weight of the model, in the model's order."""
    expected: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            expected[f"layers.{layer}.{name}"] = shape
    expected["final_norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        expected[HEAD] = (config.vocab_size, config.hidden_size)
    return expected


def _layer_tensors(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = (
        ("q_proj", config.q_size, hidden, config.qkv_bias),
        ("k_proj", config.kv_size, hidden, config.qkv_bias),
        ("v_proj", config.kv_size, hidden, config.qkv_bias),
        ("o_proj", hidden, config.q_size, config.o_bias),
        ("gate_proj", inner, hidden, config.mlp_bias),
        ("up_proj", inner, hidden, config.mlp_bias),
        ("down_proj", hidden, inner, config.mlp_bias),
    )
    yield "attn_norm.weight", (hidden,)
    yield "mlp_norm.weight", (hidden,)
    if config.qk_norm:
        yield "q_norm.weight", (config.head_dim,)
        yield "k_norm.weight", (config.head_dim,)
    for name, out_size, in_size, bias in projections:
        yield f"{name}.weight", (out_size, in_size)
        if bias:
            yield f"{name}.bias", (out_size,)


class ModelWeights:
    """The weights of a model by canonical name, read one at a time.

    names: canonical name -> shape. Construction raises CheckpointError when a tensor that the
    config calls for is missing, one is left over, or one has another shape: each list is whole.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> None:
        self.names: Mapping[str, Shape] = expected_tensors(config)
        self._checkpoint = checkpoint
        gguf = checkpoint.format == "gguf"
        self._templates = family.gguf_names if gguf else family.hf_names
        self._interleaved = gguf and family.gguf_permuted_qk
        self._head_dim = config.head_dim
        extra = self._copied_head(config)
        ignored = {
            template.format(l=layer)
            for template in family.ignored
            for layer in range(config.num_layers)
        }
        self._check(ignored | extra)

    def read(self, name: str) -> NDArray[Any]:
        """One tensor, row-major, in the type that the checkpoint reads it in."""
        tensor = self._checkpoint.read(self._source(name))
        if self._interleaved and name.split(".")[-2] in ("q_proj", "k_proj"):
            return _halves_from_pairs(tensor, self._head_dim)
        return tensor

    def _source(self, name: str) -> str:
        """The checkpoint's name of a canonical one."""
        if not name.startswith("layers."):
            return self._templates[name]
        _, layer, rest = name.split(".", 2)
        return self._templates[f"layers.{{l}}.{rest}"].format(l=layer)

    def _copied_head(self, config: DecoderConfig) -> set[str]:
        """The head's tensor where a tied config's checkpoint stores the embedding again."""
        head, embedding = self._source(HEAD), self._source(EMBEDDING)
        stored = self._checkpoint.tensors
        if not config.tie_embeddings or head not in stored or embedding not in stored:
            return set()
        if _digest(self._checkpoint.read(head)) != _digest(self._checkpoint.read(embedding)):
            raise CheckpointError(
                f"The config ties the head to the embedding (tie_word_embeddings is true), but "
                f"{head} differs from {embedding}. Set tie_word_embeddings to false if the model "
                "has its own head, or remove the tensor."
            )
        return {head}

    def _check(self, droppable: set[str]) -> None:
        stored = self._checkpoint.tensors
        sources = {self._source(name): shape for name, shape in self.names.items()}
        missing = [f"{name} {shape}" for name, shape in sources.items() if name not in stored]
        leftover = [name for name in stored if name not in sources and name not in droppable]
        wrong = [
            f"{name}: shape is {stored[name].shape}, the config calls for {shape}"
            for name, shape in sources.items()
            if name in stored and stored[name].shape != shape
        ]
        faults = (("missing", missing), ("not part of the model", leftover), ("misshapen", wrong))
        if any(names for _, names in faults):
            lists = [f"{what}: {', '.join(names)}" for what, names in faults if names]
            raise CheckpointError(
                "The checkpoint doesn't hold the tensors that its config calls for; "
                + "; ".join(lists)
                + ". Check that the config belongs to these files."
            )


def _halves_from_pairs(tensor: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Reorder each head's rows from rotary pairs (0, D/2, 1, D/2+1, ...) to halves (0, 1, ...)."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    halves: NDArray[Any] = pairs.swapaxes(1, 2).reshape(tensor.shape)
    return halves


def _digest(tensor: NDArray[Any]) -> bytes:
    """Identifies the values, whatever type they are stored in, without a second whole copy."""
    digest = hashlib.sha256(str(tensor.shape).encode())
    for row in np.atleast_1d(tensor):
        digest.update(row.astype(np.float32).tobytes())
    return digest.digest()
