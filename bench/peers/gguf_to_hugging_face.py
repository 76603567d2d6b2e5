"""Runs in the environment of transformers: GGUF FILE to a directory of save_pretrained's form.

python gguf_to_hugging_face.py FILE.gguf DTYPE OUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOREIGN = ("quantization_config", "_name_or_path", "_model_name_or_path")


def main(source: Path, dtype: str, out: Path) -> None:
    """A model that was read from GGUF refuses to be saved, so another one gets its weights."""
    folder, name = source.parent, source.name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = {k: v for k, v in read.config.to_dict().items() if k not in FOREIGN}
    model = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
