"""Drives OpenVINO GenAI's continuous batching, step by step."""

import os
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.drivers.line_protocol import Generation, Setup, serve

BLOCK_TOKENS = 32  # of a block of its KV cache on processors


class OpenVino:
    load_s = None
    pid = os.getpid()
    versions = f"OpenVINO {openvino.__version__}, GenAI {openvino_genai.__version__}"

    def __init__(self, model: str, setup: Setup) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-setup.kv_tokens // BLOCK_TOKENS) + setup.max_requests
        scheduler.max_num_seqs = setup.max_requests
        scheduler.max_num_batched_tokens = setup.max_sequence
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "ENABLE_CPU_PINNING": True,
            "KV_CACHE_PRECISION": "u8",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )
        self.submitted = 0

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        start = time.perf_counter()
        handles = [self._submit(p, n) for p, n in zip(prompts, new_tokens, strict=True)]
        while not any(handle.can_read() for handle in handles):
            self.pipeline.step()
        first_s = time.perf_counter() - start
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        total_s = time.perf_counter() - start
        counts = [len(handle.read_all()[0].generated_ids) for handle in handles]
        return Generation(first_s, total_s, counts)

    def _submit(self, prompt: list[int], new_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self.submitted += 1
        tokens = openvino.Tensor(np.array([prompt], np.int64))
        return self.pipeline.add_request(self.submitted, tokens, config)


if __name__ == "__main__":
    serve(OpenVino)
