"""The plugin of gather_quantised_rows, launched as TensorRT would, against the torch reference."""

import numpy as np
import pytest
import torch
from plugin_contract import run
from quantised_matrices import random_matrix

from llmbuild.builder.targets.gpu.pack import pack
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.gather_rows.tensorrt import gather_quantised_rows

FORMATS = [
    WeightFormat("int4", 32),
    WeightFormat("int4", 32, "minima"),
    WeightFormat("int8", 0),
    WeightFormat("int8", 32, "zeros"),
]


@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
@pytest.mark.parametrize(("width", "count"), [(32, 3), (1056, 1)])  # 1024 a program
def test_rows_of_a_part_of_a_table(weights: WeightFormat, width: int, count: int) -> None:
    matrix = random_matrix(weights, 5, width)
    parts = {
        name: None
        if part is None
        else torch.from_numpy(part.view(np.int8) if name == "codes" else part)
        for name, part in vars(pack(matrix)).items()
    }
    index = torch.tensor([104, 99, 100][:count], dtype=torch.int32)
    plugin = gather_quantised_rows(80, weights, "fp16", width, first=100)
    (y,) = run(plugin, index=index, **parts)
    expected = np.stack([matrix.dequantised()[4], np.zeros(width), matrix.dequantised()[0]])
    np.testing.assert_allclose(y.float().numpy(), expected[:count], rtol=2e-3, atol=2e-3)
