"""Drives vLLM's engine for processors, step by step."""

import os
import sys
import time
from pathlib import Path

from bench.peers.drivers.line_protocol import Generation, Setup, serve

KV_GB = 1  # the least that can be asked for


class Vllm:
    load_s = None
    pid = os.getpid()

    def __init__(self, model: str, setup: Setup) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(KV_GB),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, setup.processors)),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_CACHE_ROOT=str(Path(sys.prefix) / "cache"),  # of what it compiles when it loads
            HF_HUB_OFFLINE="1",
        )
        # Reads its environment when it's imported.
        import torch
        import vllm

        self.versions = f"vLLM {vllm.__version__}, torch {torch.__version__}"
        self.params = vllm.SamplingParams
        self.engine = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=setup.max_sequence,
            max_num_seqs=setup.max_requests,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self.submitted = 0

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        start = time.perf_counter()
        ids = [self._submit(p, n) for p, n in zip(prompts, new_tokens, strict=True)]
        counts: dict[str, int] = {}
        first_s = None
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if first_s is None and counts:
                first_s = time.perf_counter() - start
        total_s = time.perf_counter() - start
        return Generation(first_s or total_s, total_s, [counts[i] for i in ids])

    def _submit(self, prompt: list[int], new_tokens: int) -> str:
        self.submitted += 1
        params = self.params(
            temperature=0,
            min_tokens=new_tokens,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self.engine.add_request(str(self.submitted), {"prompt_token_ids": prompt}, params)
        return str(self.submitted)


if __name__ == "__main__":
    serve(Vllm)
