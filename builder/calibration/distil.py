"""Distillation: trains the rounded matrices all together until the model's output is again that of
the model as it was.

Rounding one matrix after the other minds each one's own products. Here the gradient of what counts,
KL(model || rounded model) over the calibration tokens, reaches every code and scale: Liu et al.,
"LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.side import Matrices, Read, Side, linear_matrices
from llmbuild.builder.calibration.store import ACTIVATION_SCALES, TensorStore
from llmbuild.builder.calibration.threads import one_thread
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.recipe.distillation import ResolvedDistillation
from llmbuild.quant.grid import QuantisedMatrix
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.trained import Rates, TrainedMatrix

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_RATES = Rates(positions=0.02, scales=0.002)
_WARM_UP = 0.1  # of the steps, in which rates rise
_LOGITS_AT_ONCE = 1 << 25  # so many a thread holds: 128 MB in fp32, several times
_BYTES_A_WEIGHT = 20  # position, two moments, gradient, and in bf16 its value and the model's
_BYTES_AN_EXPERTS_WEIGHT = 8  # in fp32, the model's and the rounded one's
_BYTES_A_LOGIT = 64  # measured: of both models, logarithms, gradients, and activations beside


def distil(
    step: StepGraph,
    config: DecoderConfig,
    plan: QuantPlan,
    read_model: Read,
    read_rounded: Read,
    tokens: NDArray[np.int32],
    store: TensorStore,
    chosen: ResolvedDistillation,
    seed: int,
) -> Iterator[float]:
    """Train the store's matrices, which are put back when the iterator is exhausted; gives the KL
    of each step's tokens before the step, nats a token.

    step: as traced in fp32, before any pass. read_model, read_rounded: tensors as values, of the
    model as it was and as it is rounded. tokens: [sequences, length], gone through in an order that
    follows from the seed.
    """
    names = trained_names(step, plan)
    trained = {name: TrainedMatrix(_stored(store, name), _RATES) for name in names}
    teacher = Side(step, config, functools.cache(read_model), linear_matrices(step, read_model), {})
    others = linear_matrices(step, read_rounded, without=trained)
    activations = _activations(plan, store)
    student = Side(step, config, functools.cache(read_rounded), others, activations)
    for index, rows in enumerate(_drawn(len(tokens), chosen, seed)):
        values = dict(
            zip(trained, _in_threads(TrainedMatrix.values, trained.values()), strict=True)
        )
        loss, gradients = kl_gradients(teacher, student, values, tokens[rows])
        move = functools.partial(_move, trained, _rate(index, chosen.steps))
        _in_threads(move, gradients.items())
        yield loss
    for name, each in trained.items():
        store.put(name, each.rounded())


def needed_bytes(
    step: StepGraph, config: DecoderConfig, plan: QuantPlan, batch: int, length: int
) -> int:
    """About what training holds beyond the base, for `batch` sequences of this length a step."""
    sizes = {name: math.prod(weight.shape) for name, weight in step.weights.items()}
    weights = sum(sizes[name] for name in trained_names(step, plan))
    experts = sum(size for name, size in sizes.items() if len(step.weights[name].shape) == 3)
    threads = torch.get_num_threads()
    of_sequence = length * config.vocab_size
    logits = min(max(_LOGITS_AT_ONCE, of_sequence), batch * of_sequence)
    of_threads = threads * (_BYTES_A_LOGIT * logits + 2 * weights)
    return _BYTES_A_WEIGHT * weights + _BYTES_AN_EXPERTS_WEIGHT * experts + of_threads


def kl_gradients(
    teacher: Side, student: Side, values: Matrices, tokens: NDArray[np.int32]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean KL over the tokens, and its gradients by the values of the student's matrices."""
    threads = min(torch.get_num_threads(), len(tokens))
    share = functools.partial(_share, teacher, student, values, 1 / tokens.size)
    shares = _in_threads(share, np.array_split(tokens, threads))
    total = shares[0][1]
    for _, gradients in shares[1:]:
        for name, gradient in gradients.items():
            total[name] += gradient
    return sum(loss for loss, _ in shares), total


def trained_names(step: StepGraph, plan: QuantPlan) -> list[str]:
    """What calibrated methods rounded, but for experts, of which a batch reaches few."""
    return [name for name in plan.methods if len(step.weights[name].shape) == 2]


def _move(
    trained: Mapping[str, TrainedMatrix], rate: float, gradient: tuple[str, torch.Tensor]
) -> None:
    name, values = gradient
    trained[name].step(values, rate)


def _in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Of each item, in as many threads as torch has: each has whole sequences, or matrices, as
    waiting for each other in every operation costs more."""
    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _share(
    teacher: Side,
    student: Side,
    values: Matrices,
    weight: float,
    tokens: NDArray[np.int32],
) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the sum over these tokens, times the weight."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    student = replace(student, matrices={**student.matrices, **leaves})
    together = max(1, _LOGITS_AT_ONCE // (tokens.shape[1] * student.config.vocab_size))
    total = 0.0
    for begin in range(0, len(tokens), together):
        part = tokens[begin : begin + together]
        with torch.no_grad():
            wanted = teacher.logits(part).log_softmax(-1)
        given = student.logits(part).log_softmax(-1)
        loss = torch.nn.functional.kl_div(given, wanted, reduction="sum", log_target=True) * weight
        loss.backward()
        total += float(loss.detach())
    return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _stored(store: TensorStore, name: str) -> QuantisedMatrix:
    matrix = store.get(name)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def _activations(plan: QuantPlan, store: TensorStore) -> dict[str, tuple[int, torch.Tensor | None]]:
    static = {
        name: torch.from_numpy(np.asarray(store.get(f"{name}.{ACTIVATION_SCALES}")))
        for name in plan.static
    }
    return {name: (group, static.get(name)) for name, group in plan.activation_groups.items()}


def _drawn(sequences: int, chosen: ResolvedDistillation, seed: int) -> Iterator[NDArray[np.intp]]:
    """The sequences of each step: all in turn, in an order that is new each time."""
    rng = np.random.default_rng(seed)
    waiting = np.empty(0, np.intp)
    for _ in range(chosen.steps):
        while len(waiting) < chosen.batch:
            waiting = np.concatenate((waiting, rng.permutation(sequences)))
        yield waiting[: chosen.batch]
        waiting = waiting[chosen.batch :]


def _rate(index: int, steps: int) -> float:
    """Rises at first, then falls with the cosine."""
    warm = max(1, round(_WARM_UP * steps))
    return min(1, (index + 1) / warm) * (1 + math.cos(math.pi * index / steps)) / 2
