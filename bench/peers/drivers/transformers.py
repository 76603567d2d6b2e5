"""Drives transformers' generate(): requests together are one batch, padded on the left."""

import os
import time
from typing import Any

from bench.peers.drivers.line_protocol import Generation, Setup, serve

PAD = 2


class Transformers:
    load_s = None
    pid = os.getpid()

    def __init__(self, model: str, setup: Setup) -> None:
        places = ",".join(f"{{{processor}}}" for processor in setup.processors)
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES=places, HF_HUB_OFFLINE="1")
        # OpenMP reads its environment when torch is imported.
        import torch
        import transformers

        torch.set_num_threads(setup.threads)
        torch.set_num_interop_threads(1)
        self.torch = torch
        self.versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        self.model = loaded.eval()

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        """Runs until the longest request is done; of each, only the tokens asked for count."""
        torch = self.torch
        width, longest = max(map(len, prompts)), max(new_tokens)
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        token_times: list[float] = []

        def note_time(ids: Any, scores: Any) -> Any:
            token_times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        start = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=PAD,
                stopping_criteria=[note_time],
            )
        total_s = time.perf_counter() - start
        done = output.shape[1] - width
        return Generation(token_times[0] - start, total_s, [min(n, done) for n in new_tokens])


if __name__ == "__main__":
    serve(Transformers)
