"""Holds a saved model to transformers: the torch decoder, and the compiled engine."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.checkpoint import Checkpoint, open_checkpoint
from llmbuild.builder.models.decoder import Decoder
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.rope import inverse_frequencies
from llmbuild.builder.models.rotated import ModelTensors, RotatedTensors, rotated_config
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor

TOLERANCE = 1e-4  # of the largest logit
BLOCK_SIZE = 4  # compile_engine's too
TABLE = [8, 1, 11, 3, 6, 5, 10, 7, 2, 9, 4]  # scattered blocks; 0 belongs to none
STEPS = [(0, 17), (17, 24), *((n, n + 1) for n in range(24, 29)), (29, 41)]  # token spans
NUM_TOKENS = STEPS[-1][1]


def _tokens(vocab_size: int) -> list[int]:
    return np.random.default_rng(3).integers(1, vocab_size, NUM_TOKENS).tolist()


def _theirs(model: Any, tokens: list[int]) -> np.ndarray:
    """transformers' logits of every token, through its own cache in the same steps."""
    cache, logits = None, []
    for start, stop in STEPS:
        with torch.no_grad():
            out = model(torch.tensor([tokens[start:stop]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0].float().numpy())
    return np.concatenate(logits)


def _batch(tokens: list[int], start: int, stop: int) -> StepBatch:
    return StepBatch(
        token_ids=np.array(tokens[start:stop], np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        query_start=np.array([0, stop - start], np.int32),
        kv_lengths=np.array([stop], np.int32),
        block_tables=np.array([TABLE], np.int32),
        logit_rows=np.arange(stop - start, dtype=np.int32),
    )


def _assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    difference = np.abs(ours - theirs).max(axis=1)
    assert not np.isnan(ours).any()
    assert (difference <= TOLERANCE * np.abs(theirs).max(axis=1)).all(), difference


def load_decoder(checkpoint: Checkpoint, is_rotated: bool = False) -> Decoder:
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    weights: ModelTensors = ModelWeights(checkpoint, family, config)
    if is_rotated:
        weights, config = RotatedTensors(weights, config), rotated_config(config)
    state = {name: torch.from_numpy(weights.read(name)).float() for name in weights.names}
    for index, rope in enumerate(config.ropes):
        if rope.kind != "dynamic":
            state[f"ropes.{index}.inv_freq"] = torch.from_numpy(inverse_frequencies(rope))
    decoder = Decoder(config, torch.float32)
    decoder.load_state_dict(state)
    return decoder


@pytest.fixture
def assert_decoder_matches() -> Callable[..., None]:
    """assert_decoder_matches(saved, path=None, is_rotated=False): the torch decoder's logits equal
    transformers', in a prefill of two chunks, decode, and a chunk after decode;
    max_position_embeddings of the model must be at least 41. path: the checkpoint to load instead,
    a GGUF of the same model. is_rotated: the model in rotated coordinates."""

    def check(saved: Any, path: Path | None = None, is_rotated: bool = False) -> None:
        decoder = load_decoder(open_checkpoint(path or saved.path), is_rotated)
        config, tokens = decoder.config, _tokens(decoder.config.vocab_size)
        assert config.max_position >= NUM_TOKENS
        shape = (12, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        nan = float("nan")  # so that a key read without having been written shows
        pools = [
            LayerPools(torch.full(shape, nan), torch.full(shape, nan))
            for _ in range(config.num_layers)
        ]
        ours = []
        with bind_kv_pools(pools), torch.no_grad():
            for start, stop in STEPS:
                batch = _batch(tokens, start, stop)
                arrays = (
                    *(batch.token_ids, batch.positions, batch.query_start, batch.kv_lengths),
                    *(batch.block_tables, batch.logit_rows),
                )
                ours.append(decoder(*map(torch.from_numpy, arrays)).numpy())
        _assert_close(np.concatenate(ours), _theirs(saved.model, tokens))

    return check


@pytest.fixture
def assert_engine_matches(compile_engine: Callable[..., Path]) -> Callable[..., None]:
    """assert_engine_matches(saved, *overrides): the same of the compiled engine, its recipe's keys
    overridden; takes some ten seconds."""

    def check(saved: Any, *overrides: str) -> None:
        engine = open_engine(compile_engine(saved, *overrides))
        tokens = _tokens(engine.manifest.vocab_size)
        with closing(CpuExecutor(engine, num_blocks=12, num_threads=2)) as executor:
            ours = [executor.step(_batch(tokens, *span)) for span in STEPS]
        _assert_close(np.concatenate(ours), _theirs(saved.model, tokens))

    return check
