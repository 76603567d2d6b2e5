"""Step graphs compiled for this processor, without a checkpoint or a recipe."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.cpu.build import build_cpu, cpu_target
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import ALONE, SCHEMA_VERSION, KVLayout, Limits, Manifest


@pytest.fixture
def build_engine(tmp_path: Path, kv_layout: Callable[..., KVLayout]) -> Callable[..., Engine]:
    """build_engine(step, config, read, kv=of fp32): steps of at most 24 tokens, of 7 sequences of
    32."""

    def build(
        step: StepGraph, config: DecoderConfig, read: ReadTensor, kv: KVLayout | None = None
    ) -> Engine:
        limits = Limits(max_sequence_length=32, max_step_tokens=24, max_sequences=7)
        kv = kv or kv_layout(config)
        level = supported_levels()[0]
        built = build_cpu(
            [RankGraph(step, config, kv, read)],
            name="m",
            limits=limits,
            levels=[level],
            root=tmp_path,
            stages=Stages(PlainProgress()),
        )
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            llmbuild_version="0",
            name="m",
            model={},
            vocab_size=config.vocab_size,
            precision="fp32",
            quantised={},
            target=cpu_target([level]),
            limits=limits,
            buckets=[1, 4, 7],
            kv=kv,
            parallel=ALONE,
            ranks=built.ranks,
            files={},
        )
        return Engine(tmp_path, manifest, level)

    return build
