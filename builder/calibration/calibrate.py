"""Calibration of a build: its tokens, and the tensors that they lead to, each kept in the cache."""

import hashlib
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import llmbuild.builder.calibration as calibration_package
import llmbuild.quant as quant_package
from llmbuild.builder.artifact import seal_engine
from llmbuild.builder.assemble import Model, assemble
from llmbuild.builder.calibration.distil import distil, needed_bytes
from llmbuild.builder.calibration.kv import measure_reaches
from llmbuild.builder.calibration.samples import sample_tokens
from llmbuild.builder.calibration.store import Distilled, TensorStore
from llmbuild.builder.calibration.text import tokens_of_file
from llmbuild.builder.calibration.weights import calibrate_weights
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.quantisation import kv_layout, plan_quantisation, untie_head
from llmbuild.builder.recipe.calibration import SELF, ResolvedCalibration
from llmbuild.builder.recipe.distillation import ResolvedDistillation
from llmbuild.builder.recipe.kv_cache import ResolvedKVCache
from llmbuild.builder.recipe.quantisation import Quantisation
from llmbuild.builder.recipe.recipe import (
    DEFAULT_BLOCK_SIZE,
    Parallel,
    ResolvedLimits,
    ResolvedRecipe,
)
from llmbuild.builder.recipe.target import NATIVE, Target
from llmbuild.builder.stages import Stages, available_bytes, growth_bytes
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.cache import cache_root
from llmbuild.errors import BuildError
from llmbuild.quant.kv import channel_scales
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import planned_reader, value_reader
from llmbuild.runtime.chat import load_chat_template
from llmbuild.runtime.manifest import KVLayout
from llmbuild.runtime.tokenizer import load_tokenizer

_FP32_BYTES = 4
_DRAFT_SEQUENCES = 32  # of a step of the engine that samples


class Calibration:
    """The calibration of one model; nothing is done before it is asked for. Samples are those of
    the model as the checkpoint has it, whether it was rotated or not.

    root: a folder that holds the model's tokenizer, as an engine does; beside it an engine that
    draws samples comes and goes.
    """

    def __init__(
        self, model: Model, resolved: ResolvedRecipe, base_dir: Path, root: Path, stages: Stages
    ) -> None:
        self._model, self._resolved, self._stages = model, resolved, stages
        self._base_dir, self._root = base_dir, root

    def tokens(self, sequences: int | None = None) -> NDArray[np.int32]:
        """[sequences, length]; by default as many as the recipe has calibration look at."""
        chosen = self._resolved.calibration
        chosen = chosen.model_copy(update={"sequences": sequences or chosen.sequences})
        if chosen.data != SELF:
            tokenizer = load_tokenizer(self._root)
            path = self._base_dir / chosen.data
            template = load_chat_template(self._root, tokenizer)
            asked = "calibration.sequences" if sequences is None else "distillation.sequences"
            return tokens_of_file(path, tokenizer, template, chosen, asked)
        key = _digest(
            [self._stored_digest, "tokens", f"{chosen.sequences} {chosen.length} {chosen.seed}"]
        )
        path = _kept(f"{key}.npy")
        tokens = _loaded(path)
        if tokens is None:
            tokens = self._sample(chosen)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                np.save(file, tokens)
            Path(file.name).replace(path)
        return tokens

    def tensors(self, plan: QuantPlan) -> TensorStore:
        """What the plan's methods make of the model's tensors, trained together where the recipe
        asks for it."""
        chosen = self._resolved.distillation
        if chosen is not None:
            self._check_memory(plan, chosen.batch)
        tokens = self.tokens()
        trained_on = None if chosen is None else self.tokens(chosen.sequences)
        text = repr(sorted(plan.weights.items())) + repr(sorted(plan.activation_groups.items()))
        text += repr(sorted(plan.methods.items())) + repr(sorted(plan.static))
        key = _digest([self._model_digest, "tensors", text, tokens.tobytes()])
        root = _kept(key)
        if not root.exists():
            with _making(root) as scratch:
                self._quantise(plan, tokens, TensorStore(scratch, plan.weights))
        if chosen is None or trained_on is None:
            return TensorStore(root, plan.weights)
        # Both decide in which order sums are taken.
        order = f"{self._resolved.calibration.seed} {torch.get_num_threads()}"
        parts = (key, repr(chosen), order, trained_on.tobytes())
        trained_root = _kept(_digest([self._model_digest, "distilled", *parts]))
        if not trained_root.exists():
            with _making(trained_root) as scratch:
                shutil.copytree(root, scratch, dirs_exist_ok=True)
                self._distil(plan, chosen, trained_on, TensorStore(scratch, plan.weights))
        return TensorStore(trained_root, plan.weights)

    def kv_scales(
        self, kv: KVLayout, plan: QuantPlan, calibrated: TensorStore | None
    ) -> dict[str, NDArray[np.float32]]:
        """The channel scales of the KV cache, for the weights as the plan has them."""
        step = self._traced(plan)
        read = planned_reader(self._model.weights, plan, calibrated)
        tokens = self.tokens()
        with self._stages.stage("calibrate KV cache"):
            reaches = measure_reaches(step, self._model.config, value_reader(read), tokens)
        return channel_scales(kv, reaches)

    def _quantise(self, plan: QuantPlan, tokens: NDArray[np.int32], store: TensorStore) -> None:
        step = self._traced(plan)
        shapes = {name: step.weights[name].shape for name in {*plan.methods, *plan.static}}
        items = sum(map(math.prod, shapes.values()))
        with (
            growth_bytes() as growth,
            self._stages.stage("quantise", shows_bars=True),
            self._stages.progress.task("quantising", _FP32_BYTES * items) as advance,
        ):
            read = planned_reader(self._model.weights, plan)

            def gone_through(count: int) -> None:
                advance(_FP32_BYTES * count)

            calibrate_weights(step, self._model.config, plan, read, tokens, store, gone_through)
            grown_bytes = growth()
        store.finish()
        largest_bytes = _FP32_BYTES * max(map(math.prod, shapes.values()))
        self._stages.progress.note(
            f"quantising held at most {grown_bytes / 1e6:.0f} MB beyond the base, the "
            f"activations of {tokens.size} tokens among it; the largest matrix has "
            f"{largest_bytes / 1e6:.0f} MB in fp32"
        )

    def _distil(
        self,
        plan: QuantPlan,
        chosen: ResolvedDistillation,
        tokens: NDArray[np.int32],
        store: TensorStore,
    ) -> None:
        weights = self._model.weights
        model = value_reader(planned_reader(weights, QuantPlan()))
        rounded = value_reader(planned_reader(weights, plan, store))
        step, config, seed = self._traced(plan), self._model.config, self._resolved.calibration.seed
        kls: list[float] = []
        with (
            growth_bytes() as growth,
            self._stages.stage("distil", shows_bars=True),
            self._stages.progress.counted("distilling, steps", chosen.steps) as advance,
        ):
            for kl in distil(step, config, plan, model, rounded, tokens, store, chosen, seed):
                if not math.isfinite(kl):
                    raise BuildError(
                        f"distillation: after {len(kls)} steps the KL to the model is {kl}; leave "
                        "distillation out, or quantise to more bits"
                    )
                kls.append(kl)
                advance(1)
            grown_bytes = growth()
        tenth = -(-len(kls) // 10)
        first, last = float(np.mean(kls[:tenth])), float(np.mean(kls[-tenth:]))
        store.distilled = Distilled(chosen.steps, first, last)
        store.finish()
        self._stages.progress.note(
            f"distilling: KL to the model {first:.3g} nats a token at first, {last:.3g} at last; "
            f"it held at most {grown_bytes / 1e6:.0f} MB beyond the base"
        )

    def _check_memory(self, plan: QuantPlan, batch: int) -> None:
        length = self._resolved.calibration.length
        needed = needed_bytes(self._traced(plan), self._model.config, plan, batch, length)
        if needed > available_bytes():
            raise BuildError(
                f"distillation: about {needed / 1e9:.1f} GB of memory are needed to train all "
                f"matrices together, and {available_bytes() / 1e9:.1f} GB are free; leave "
                "distillation out, or build where there is more"
            )

    def _traced(self, plan: QuantPlan) -> StepGraph:
        step = trace(self._model.config, "fp32")
        untie_head(step, plan)
        return step

    def _sample(self, chosen: ResolvedCalibration) -> NDArray[np.int32]:
        draft, model = self._draft_recipe(chosen), self._model.as_stored
        with tempfile.TemporaryDirectory(dir=self._root.parent) as scratch:
            root = Path(scratch)
            step = trace(model.config, draft.precision)
            plan = plan_quantisation(draft.quantisation, step, model.weights)
            assembled = assemble(
                model,
                draft,
                step,
                plan,
                kv_layout(draft, model.config),
                planned_reader(model.weights, plan),
                kv_scales={},
                levels=toolchain.resolve_levels((NATIVE,)),
                root=root,
                stages=self._stages,
            )
            seal_engine(root, assembled.manifest)
            with self._stages.stage("sample"):
                return sample_tokens(root, chosen.sequences, chosen.length, chosen.seed)

    def _draft_recipe(self, chosen: ResolvedCalibration) -> ResolvedRecipe:
        """Of the engine that samples: the checkpoint's own codes where it has such."""
        weights = self._model.as_stored.weights
        together = min(_DRAFT_SEQUENCES, chosen.sequences)
        has_codes = any(weights.stored_grid(name) for name in weights.names)
        block_size = min(DEFAULT_BLOCK_SIZE, chosen.length)
        return self._resolved.model_copy(
            update={
                "target": Target(),
                "precision": "bf16",
                "parallel": Parallel(),
                "quantisation": Quantisation(scheme="stored-a8" if has_codes else "none"),
                "kv_cache": ResolvedKVCache(dtype="bf16", block_size=block_size),
                "limits": ResolvedLimits(
                    max_sequence_length=chosen.length,
                    max_step_tokens=max(together, 64),
                    max_sequences=together,
                ),
                "buckets": tuple(2**n for n in range(together.bit_length())),
            }
        )

    @cached_property
    def _stored_digest(self) -> str:
        """Of what all results in the cache come from: the model, and the code that makes them."""
        return self._digest_of(self._model.as_stored)

    @cached_property
    def _model_digest(self) -> str:
        return self._digest_of(self._model) if self._model.unrotated else self._stored_digest

    def _digest_of(self, model: Model) -> str:
        def parts() -> Iterator[str | bytes]:
            yield _code_digest()
            yield repr(model.config)
            for name in model.weights.names:
                yield name
                yield model.weights.read(name).tobytes()

        with self._stages.stage("identify the model"):
            return _digest(parts())


def _loaded(path: Path) -> NDArray[np.int32] | None:
    """An array that is kept; None if it isn't, or is damaged."""
    try:
        return np.asarray(np.load(path, allow_pickle=False), np.int32)
    except (OSError, ValueError, EOFError):
        return None


def _kept(name: str) -> Path:
    """Where a result is, or will be."""
    return cache_root() / "calibration" / name


@contextmanager
def _making(root: Path) -> Iterator[Path]:
    """A folder to be filled, which then becomes `root`; nothing is left of one that fails."""
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root.parent))
    try:
        yield scratch
        try:
            scratch.rename(root)
        except OSError:
            if not root.exists():  # else another build was quicker
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _code_digest() -> str:
    """Changes with the code of calibration and quantisation."""
    folders = [*quant_package.__path__, *calibration_package.__path__]
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    return _digest(file.read_bytes() for file in files)
