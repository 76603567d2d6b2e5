"""Linear KV caches of emulated networks, one slot for each sequence."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.emulation.ranks import Arrays
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, cache_name, updated_name

_DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class SlotCaches:
    """A rank's, of all its layers, zeros at first. config: the rank's."""

    def __init__(
        self, config: DecoderConfig, capacity: int, activations: ActivationDtype, num_slots: int
    ) -> None:
        shape = (num_slots, config.num_kv_heads, capacity, config.head_dim)
        self._layers = range(config.num_layers)
        self._caches: dict[str, NDArray[Any]] = {
            cache_name(layer, kind): np.zeros(shape, _DTYPES[activations])
            for layer in self._layers
            for kind in "kv"
        }

    def slots(self, first: int, end: int) -> Arrays:
        """The network's inputs for these slots."""
        return {name: cache[first:end] for name, cache in self._caches.items()}

    def update(self, first: int, end: int, outputs: Arrays) -> None:
        for layer in self._layers:
            for kind in "kv":
                self._caches[cache_name(layer, kind)][first:end] = outputs[
                    updated_name(layer, kind)
                ]
