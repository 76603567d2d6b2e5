"""The torch Decoder's logits against transformers, for every family and odd shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llmbuild.builder.checkpoint import Checkpoint, open_checkpoint
from llmbuild.builder.models.decoder import Decoder
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.rope import inverse_frequencies
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools

TOLERANCE = 1e-4  # of the largest logit
BLOCK_SIZE = 4
LENGTHS = (41, 23)  # tokens; the first goes past max_position_embeddings, 32
NUM_BLOCKS = 19
# Every sequence's blocks are scattered; block 0 belongs to none.
BLOCK_TABLES = torch.tensor(
    [[8, 1, 17, 3, 12, 5, 10, 7, 14, 9, 2], [4, 6, 18, 11, 13, 15, *[0] * 5]]
)

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GROUPS = {  # query heads, KV heads
    "groups of 1": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "groups of 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "groups of 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one group": {"num_attention_heads": 5, "num_key_value_heads": 1},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
VARIANTS = [
    *(pytest.param(f, o, id=f"{f}: {g}") for f in ("llama", "qwen3") for g, o in GROUPS.items()),
    *(
        pytest.param("mistral", {"sliding_window": 9} | o, id=f"mistral: {g}")
        for g, o in GROUPS.items()
    ),
    *(pytest.param("qwen2", {"head_dim": 10} | o, id=f"qwen2: {g}") for g, o in GROUPS.items()),
    pytest.param("llama", {"rope_parameters": LINEAR}, id="llama: linear"),
    pytest.param("llama", {"rope_parameters": LLAMA3}, id="llama: llama3"),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama: biases"),
    pytest.param("llama", {"tie_word_embeddings": True}, id="llama: tied"),
    pytest.param("llama", {"head_dim": None}, id="llama: derived head_dim"),
    pytest.param("mistral", {"sliding_window": None}, id="mistral: no window"),
    pytest.param("mistral", {"sliding_window": 1}, id="mistral: window of 1"),
    pytest.param("mistral", {"sliding_window": 8, "rope_parameters": LLAMA3}, id="mistral: llama3"),
    pytest.param("qwen2", SLIDING | {"num_hidden_layers": 3}, id="qwen2: windows by layer"),
    pytest.param("qwen2", {"tie_word_embeddings": True}, id="qwen2: tied"),
    pytest.param("qwen3", SLIDING, id="qwen3: windows by layer"),
    pytest.param("qwen3", {"attention_bias": True, "rope_parameters": LINEAR}, id="qwen3: biases"),
]


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS)
def test_logits_equal_transformers_in_whole_and_chunked_prefill_and_decode(
    hf_model: Callable[..., Any], model_type: str, overrides: dict[str, Any]
) -> None:
    saved = hf_model(model_type, **overrides)
    _assert_same_logits(_decoder(open_checkpoint(saved.path)), saved.model)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": DEFAULT, "tie_word_embeddings": True}),
        ("qwen2", {"rope_parameters": DEFAULT}),
        ("qwen3", {"rope_parameters": DEFAULT}),
    ],
)
def test_logits_of_a_gguf_file_equal_those_of_the_model_it_was_made_from(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    model_type: str,
    overrides: dict[str, Any],
) -> None:
    saved = hf_model(model_type, **overrides)
    _assert_same_logits(_decoder(open_checkpoint(write_gguf(saved))), saved.model)


def _assert_same_logits(decoder: Decoder, model: PreTrainedModel) -> None:
    tokens = [torch.randint(decoder.config.vocab_size, (length,)) for length in LENGTHS]
    with torch.no_grad():
        expected = [model(ids[None]).logits[0] for ids in tokens]
    pools, computed = _pools(decoder), [0, 0]
    # Whole and chunked prefill in one step, then a chunk past several blocks, then decode.
    for counts in ((5, 23), (35, 0), (1, 0)):
        with bind_kv_pools(pools):
            logits = decoder(*_step_inputs(tokens, computed, counts))
        for sequence, count in enumerate(counts):
            ours, logits = logits[:count], logits[count:]
            theirs = expected[sequence][computed[sequence] :][:count]
            computed[sequence] += count
            if count:
                error = (ours - theirs).abs().max() / theirs.abs().max()
                assert error < TOLERANCE
    assert computed == list(LENGTHS)


def _decoder(checkpoint: Checkpoint) -> Decoder:
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    weights = ModelWeights(checkpoint, family, config)
    decoder = Decoder(config, torch.float32)
    state = {name: torch.from_numpy(weights.read(name)) for name in weights.names}
    inv_freq = torch.from_numpy(inverse_frequencies(config.ropes[0]))
    decoder.load_state_dict(state | {"ropes.0.inv_freq": inv_freq})
    return decoder


def _pools(decoder: Decoder) -> list[LayerPools]:
    """NaN everywhere, so that a key read without having been written shows."""
    config = decoder.config
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return [
        LayerPools(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        for _ in range(config.num_layers)
    ]


def _step_inputs(
    tokens: list[torch.Tensor], computed: list[int], counts: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """The step graph's inputs for the next `counts` tokens of the sequences, every row wanted.
    A sequence without tokens in this step isn't in it."""
    live = [sequence for sequence, count in enumerate(counts) if count]
    spans = [(computed[s], computed[s] + counts[s]) for s in live]
    positions = torch.cat([torch.arange(start, end) for start, end in spans])
    token_ids = torch.cat([tokens[s][slice(*span)] for s, span in zip(live, spans, strict=True)])
    lengths = torch.tensor([end for _, end in spans])
    query_start = torch.tensor([0] + [end - start for start, end in spans]).cumsum(0)
    inputs = (token_ids, positions, query_start, lengths, BLOCK_TABLES[live])
    return tuple(x.int() for x in (*inputs, torch.arange(len(positions))))
