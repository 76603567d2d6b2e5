"""Writes a Llama of random weights, to measure sizes of model that nothing has to be fetched for:
python -m bench.random_model SHAPE DIR."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import report
from bench.cases import SHAPES, Shape
from llmbuild.errors import UserError

STD = 0.02
MAX_POSITION = 4096


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names as Hugging Face gives them, and shapes."""
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    yield "lm_head.weight", (shape.vocab, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (shape.hidden,)
        yield f"{name}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{name}.self_attn.q_proj.weight", (shape.q, shape.hidden)
        yield f"{name}.self_attn.k_proj.weight", (shape.kv, shape.hidden)
        yield f"{name}.self_attn.v_proj.weight", (shape.kv, shape.hidden)
        yield f"{name}.self_attn.o_proj.weight", (shape.hidden, shape.q)
        yield f"{name}.mlp.gate_proj.weight", (shape.inner, shape.hidden)
        yield f"{name}.mlp.up_proj.weight", (shape.inner, shape.hidden)
        yield f"{name}.mlp.down_proj.weight", (shape.hidden, shape.inner)


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def byte_tokenizer() -> Tokenizer:
    """A token for each byte; the other rows of the vocabulary have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(shape: Shape, folder: Path) -> None:
    """bf16 weights from one seed, norms of ones, a config and a tokenizer, in a new folder. Raises
    UserError where that can't be written."""
    try:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config(shape), indent=2))
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        save_file(weights(shape), folder / "model.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"can't write {folder}: {error}; give a new folder") from error


def weights(shape: Shape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else (torch.randn(size, generator=generator) * STD).to(torch.bfloat16)
        for name, size in tensors(shape)
    }


@click.command()
@click.argument("shape", type=click.Choice(sorted(SHAPES)))
@click.argument("folder", type=click.Path(path_type=Path))
def main(shape: str, folder: Path) -> None:
    """Write a Llama of this shape with random weights into the new folder FOLDER."""
    write(SHAPES[shape], folder)
    click.echo(folder)


if __name__ == "__main__":
    report.run(main)
