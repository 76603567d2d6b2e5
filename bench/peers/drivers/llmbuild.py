"""Drives an engine of ours."""

import os
import time
from pathlib import Path

from bench.peers.drivers.line_protocol import Generation, Setup, serve
from llmbuild import LLM, SamplingParams, __version__
from llmbuild.runtime.manifest import read_manifest


class Llmbuild:
    load_s = None
    pid = os.getpid()
    versions = f"llmbuild {__version__}"

    def __init__(self, model: str, setup: Setup) -> None:
        block_size = read_manifest(Path(model)).kv.block_size
        num_blocks = 1 + -(-setup.kv_tokens // block_size)
        self.llm = LLM(model, num_blocks=num_blocks, num_threads=setup.threads, pin_threads=True)

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in new_tokens]
        start = time.perf_counter()
        completions = self.llm.generate(prompts, params)
        total_s = time.perf_counter() - start
        errors = [completion.error for completion in completions if completion.error]
        if errors:
            raise RuntimeError(errors[0])
        first_ms = min(c.ttft_ms for c in completions if c.ttft_ms is not None)
        return Generation(first_ms / 1e3, total_s, [len(c.token_ids) for c in completions])


if __name__ == "__main__":
    serve(Llmbuild)
