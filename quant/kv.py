"""Channel scales of a quantised KV cache, from how far each channel reaches."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import BuildError
from llmbuild.runtime.manifest import KVLayout

CALIBRATED_K = ("int8-static", "int4")
CALIBRATED_V = ("int8-static",)
_STATIC_CODES = 127


def needs_channel_scales(kv: KVLayout) -> bool:
    """Whether any pool's precision needs calibration."""
    return any(
        run.k_dtype in CALIBRATED_K or run.v_dtype in CALIBRATED_V
        for layer in kv.layers
        for run in layer.heads
    )


def channel_scales(
    kv: KVLayout, reaches: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Scales fp32 [num_kv_heads * head_dim], named layers.L.k_scale and layers.L.v_scale, of the
    layers that need them; 1 for heads that don't.

    reaches: largest magnitude of each channel, [num_kv_heads, head_dim], of layers.L.k and
    layers.L.v. int8-static: the reach is the largest code. int4: K's channels are brought to the
    same reach, so that a strong one doesn't take the codes of the others (Lin et al., "QServe",
    2024). Raises BuildError, naming them, for channels whose scale would be zero or no number.
    """
    scales: dict[str, NDArray[np.float32]] = {}
    faults: list[str] = []
    for index, layer in enumerate(kv.layers):
        for part, dtypes, calibrated in (
            ("k", layer.k_dtypes, CALIBRATED_K),
            ("v", layer.v_dtypes, CALIBRATED_V),
        ):
            if not {*dtypes} & {*calibrated}:
                continue
            name = f"layers.{index}.{part}"
            heads = [
                _scale(dtype, reach) if dtype in calibrated else np.ones_like(reach)
                for dtype, reach in zip(dtypes, reaches[name], strict=True)
            ]
            scales[f"{name}_scale"] = np.concatenate(heads).astype(np.float32)
            faults += [
                f"{name}.{head} ({dtypes[head]}): {bad} of {len(scale)} channels"
                for head, scale in enumerate(heads)
                if (bad := int((~(np.isfinite(scale) & (scale > 0))).sum()))
            ]
    if faults:
        raise BuildError(
            "kv_cache: the calibration gives scales that are zero or no numbers to "
            + "; ".join(faults)
            + ". Calibrate with other or more tokens, or give these heads the dtype int8, which "
            "needs no calibration"
        )
    return scales


def _scale(dtype: str, reach: NDArray[np.float32]) -> NDArray[np.float32]:
    if dtype == "int8-static":
        return reach / np.float32(_STATIC_CODES)
    return reach / np.float32(reach.mean()) if reach.any() else reach
