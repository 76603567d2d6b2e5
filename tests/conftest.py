"""What every test shares: the checkout, and small random models with engines made of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from llmbuild.builder.compile import compile

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
