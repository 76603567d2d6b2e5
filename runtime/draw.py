"""Draws samples from an engine, in a process of its own: `python -m llmbuild.runtime.draw`.

Standard input: JSON of a `Draw`. Standard output: the samples' token ids, a JSON list of lists.
"""

import random
import sys
from pathlib import Path

import msgspec

from llmbuild.runtime.api import LLM, SamplingParams
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.tokenizer import load_tokenizer


class Draw(msgspec.Struct, frozen=True):
    """What to draw from the engine in a directory: `sequences` of `length` tokens each."""

    engine_dir: str
    sequences: int
    length: int
    seed: int


def draw(wanted: Draw) -> list[list[int]]:
    """Token ids of samples at temperature 1, the same for the same seed.

    Each begins as a prompt does, with BOS where the model wants one, and a random token, so that
    they differ. `length` has room for these and one more.
    """
    root = Path(wanted.engine_dir)
    begin = load_tokenizer(root).encode("")
    block_size = read_manifest(root).kv.block_size
    num_blocks = wanted.sequences * -(-wanted.length // block_size) + 1
    rng = random.Random(wanted.seed)
    with LLM(root, num_blocks=num_blocks) as llm:
        prompts = [
            [*begin, rng.randrange(llm.manifest.vocab_size)] for _ in range(wanted.sequences)
        ]
        params = [
            SamplingParams(
                max_tokens=wanted.length - len(prompt),
                temperature=1.0,
                seed=rng.getrandbits(32),
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        completions = llm.generate(prompts, params)
    return [
        [*prompt, *completion.token_ids]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


if __name__ == "__main__":
    drawn = draw(msgspec.json.decode(sys.stdin.buffer.read(), type=Draw))
    sys.stdout.buffer.write(msgspec.json.encode(drawn))
