"""The work of an engine's step, by its manifest: weights and KV to read, operations to do."""

import numpy as np

from bench.roofline import Work
from llmbuild.errors import UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Manifest
from llmbuild.runtime.vocab_matrices import embedding_bytes, has_own_head, head_bytes


class StepWork:
    """step_work(batch) is the least work of a step.

    Weights are read once, and so is each sequence's KV; activations stay in caches. Operations
    are those of linears and attention. Sequences that pad a bucket are no work.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Raises UserError for a mixture of experts: what it reads depends on the tokens."""
        model = manifest.model
        if model.get("moe") is not None:
            raise UserError(
                f"{manifest.name} is a mixture of experts, whose steps read what tokens choose; "
                "this benchmark bounds dense models only"
            )
        hidden, inner = (
            model_size(manifest, f"{what}_size") for what in ("hidden", "intermediate")
        )
        kv = manifest.kv
        self.q_size = model_size(manifest, "num_heads") * kv.head_dim
        kv_size = kv.num_kv_heads * kv.head_dim
        mlp = (3 if model["gated_mlp"] else 2) * hidden * inner
        self.layer_weights = hidden * (2 * self.q_size + 2 * kv_size) + mlp
        self.head_weights = manifest.vocab_size * hidden
        sizes = {"q_proj": hidden * self.q_size, "o_proj": hidden * self.q_size}
        sizes |= {"k_proj": hidden * kv_size, "v_proj": hidden * kv_size}
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden * inner)
        rounded = [n for n, tensor in manifest.quantised.items() if tensor.activation_group > 0]
        linears = [sizes[name.split(".")[-2]] for name in rounded if name.startswith("layers.")]
        self.int8_weights = sum(linears)  # of all layers, that multiply bytes
        self.int8_head_weights = self.head_weights if len(linears) < len(rounded) else 0
        self.head_bytes = head_bytes(manifest)
        # The token embedding's rows are gathered.
        table_bytes = embedding_bytes(manifest) if has_own_head(manifest) else 0
        names = {name for rank in manifest.ranks for name in (rank.weights, rank.shared_weights)}
        weights_bytes = sum(manifest.files[name].size_bytes for name in names if name is not None)
        self.body_bytes = weights_bytes - table_bytes - self.head_bytes
        windows = model["windows"]
        assert isinstance(windows, list)
        self.windows = [window or manifest.limits.max_sequence_length for window in windows]
        self.kv_token_bytes = kv.block_bytes // kv.block_size // len(kv.layers)

    def __call__(self, batch: StepBatch) -> Work:
        new_tokens = np.diff(batch.query_start)
        is_real = batch.block_tables[:, 0] != SCRATCH_BLOCK
        token_is_real = np.repeat(is_real, new_tokens)
        lengths, news = batch.kv_lengths[is_real], new_tokens[is_real]
        seen = batch.positions[token_is_real] + 1
        logit_rows = int(token_is_real[batch.logit_rows].sum())
        kv_tokens = sum(int(np.minimum(lengths, news + w - 1).sum()) for w in self.windows)
        keys = sum(int(np.minimum(seen, w).sum()) for w in self.windows)
        all_weights = len(self.windows) * self.layer_weights
        int8_operations = self.int8_weights * len(seen) + self.int8_head_weights * logit_rows
        operations = all_weights * len(seen) + self.head_weights * logit_rows
        return Work(
            cold_bytes=self.body_bytes
            + (self.head_bytes if logit_rows else 0)
            + kv_tokens * self.kv_token_bytes,
            operations=2 * (operations - int8_operations) + 4 * self.q_size * keys,
            int8_operations=2 * int8_operations,
        )


def model_size(manifest: Manifest, name: str) -> int:
    """A whole number of the manifest's decoder config."""
    size = manifest.model[name]
    assert isinstance(size, int)
    return size
