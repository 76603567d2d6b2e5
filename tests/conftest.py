"""What every test shares: the checkout, and small random models with engines made of them."""

import os

# Kernels are interpreted here; tests that compile them do so in processes of their own. It has to
# be said before torch imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmbuild.builder.compile import compile

# For manifests.py; last, as folders here have names of packages.
sys.path.append(str(Path(__file__).parent))

# A shared machine's timing says nothing about a property; a failure prints how to repeat it.
hypothesis.settings.register_profile("llmbuild", deadline=None, print_blob=True)
hypothesis.settings.load_profile("llmbuild")

# hidden_size divides by 3, 5, 6 and 8 heads; no head_dim of the tests is hidden_size / heads.
SMALL = {
    "vocab_size": 97,
    "hidden_size": 120,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,  # each byte, and EOS
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
TINY_RECIPE = """\
version: 1
name: tiny
model: {source: "path:model"}
precision: fp32
kv_cache: {block_size: 4}
limits: {max_step_tokens: 24, max_sequences: 8}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of whole builds come first: were they last, one worker would wait for the other."""
    root = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent != root)


@dataclass(frozen=True)
class SavedModel:
    model: Any  # transformers' PreTrainedModel
    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """config.json as it stands on disk."""
        return dict(json.loads((self.path / "config.json").read_text()))


@pytest.fixture
def hf_model(tmp_path: Path) -> Callable[..., SavedModel]:
    """hf_model(model_type, **config overrides): every weight random, norms and biases too."""

    def build(model_type: str, **overrides: Any) -> SavedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **(SMALL | overrides)), dtype=torch.float32
        ).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
            else:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        path = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(path)
        return SavedModel(model, path)

    return build


@pytest.fixture
def compile_engine(tmp_path: Path) -> Callable[..., Path]:
    """compile_engine(saved, *overrides): the saved model compiled in fp32 with small blocks and
    steps, and with a tokenizer whose tokens are the words t0, t1, ..."""

    def build(saved: SavedModel, *overrides: str) -> Path:
        vocab_size = saved.config["vocab_size"]
        words = models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0")
        tokenizer = Tokenizer(words)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(saved.path / "tokenizer.json"))
        recipe = tmp_path / "recipe.yaml"
        content = {
            "version": 1,
            "name": saved.path.name,
            "model": {"source": f"path:{saved.path}"},
            "precision": "fp32",
            "kv_cache": {"block_size": 4},
            "limits": {"max_step_tokens": 24, "max_sequences": 8},
        }
        recipe.write_text(yaml.safe_dump(content))
        return compile(recipe, tmp_path / f"engine-{len(list(tmp_path.iterdir()))}", overrides)

    return build


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def save_tiny_llama() -> Callable[..., Path]:
    """save_tiny_llama(folder, **config overrides): writes a random model of bytes into
    folder/model and a recipe that names it; returns the recipe's path."""

    def save(folder: Path, **overrides: Any) -> Path:
        config = TINY_LLAMA | overrides
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config))
        _byte_tokenizer().save(str(folder / "model" / "tokenizer.json"))
        rng = np.random.default_rng(1)
        tensors = {
            name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            for name, shape in _llama_shapes(config)
        }
        save_file(tensors, folder / "model" / "model.safetensors")
        recipe = folder / "recipe.yaml"
        recipe.write_text(TINY_RECIPE)
        return recipe

    return save


def _llama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def run_llmbuild() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_llmbuild(*arguments, **environment): the command in a process of its own."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llmbuild", *map(str, arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def tiny_engine(
    tmp_path_factory: pytest.TempPathFactory,
    save_tiny_llama: Callable[..., Path],
    run_llmbuild: Callable[..., subprocess.CompletedProcess[str]],
) -> Path:
    """A tiny model of bytes, compiled with an empty cache; tests leave it as it is. Beside it lie
    its recipe.yaml, the compile's output in compile.log, and the cache."""
    folder = tmp_path_factory.mktemp("tiny")
    recipe, engine = save_tiny_llama(folder), folder / "engine"
    environment = {"LLMBUILD_CACHE": str(folder / "cache"), "PYTHONHASHSEED": "1"}
    done = run_llmbuild("compile", recipe, "-o", engine, **environment)
    assert done.returncode == 0, done.stderr
    (folder / "compile.log").write_text(done.stderr + done.stdout)
    return engine
