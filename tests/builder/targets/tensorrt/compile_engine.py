"""Compiles a recipe for tensorrt with stand-ins for TensorRT and its GPU. In a process of its own,
in which Triton compiles: compile_engine.py RECIPE OUT [KEY=VALUE]..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stand_in_tensorrt import build_machine

from llmbuild.builder.compile import compile

recipe, out, *overrides = sys.argv[1:]
with build_machine():
    compile(recipe, out, overrides)
