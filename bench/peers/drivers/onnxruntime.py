"""Drives ONNX Runtime GenAI: requests together are one batch, padded on the left."""

import json
import os
import time

import numpy as np
import onnxruntime
import onnxruntime_genai

from bench.peers.drivers.line_protocol import Generation, Setup, serve

PAD = 2


class OnnxRuntime:
    load_s = None
    pid = os.getpid()
    versions = f"ONNX Runtime {onnxruntime.__version__}, GenAI {onnxruntime_genai.__version__}"

    def __init__(self, model: str, setup: Setup) -> None:
        first, *others = setup.processors
        options = {"intra_op_num_threads": setup.threads, "inter_op_num_threads": 1}
        if others:  # of the threads beside the calling one; it counts processors from 1
            places = ";".join(str(processor + 1) for processor in others)
            options["session.intra_op_thread_affinities"] = places
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = onnxruntime_genai.Model(config)
        os.sched_setaffinity(0, {first})

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        """Runs until the longest request is done; of each, only the tokens asked for count."""
        width, longest = max(map(len, prompts)), max(new_tokens)
        rows = np.array([[PAD] * (width - len(p)) + p for p in prompts], np.int32)
        start = time.perf_counter()
        params = onnxruntime_genai.GeneratorParams(self.model)
        length = width + longest
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(rows)
        generator.generate_next_token()
        generator.get_next_tokens()
        first_s = time.perf_counter() - start
        done = 1
        while not generator.is_done():
            generator.generate_next_token()
            generator.get_next_tokens()
            done += 1
        total_s = time.perf_counter() - start
        return Generation(first_s, total_s, [min(n, done) for n in new_tokens])


if __name__ == "__main__":
    serve(OnnxRuntime)
