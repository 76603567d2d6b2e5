import math

import numpy as np
import pytest

from llmbuild.errors import RequestError
from llmbuild.runtime.params import SamplingParams, check_params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.5, True, "5", None)),
        *(("temperature", value) for value in (math.nan, -0.1, math.inf, -math.inf, "1", None)),
        *(("top_k", value) for value in (-1, 0.5, False, None)),
        *(("top_p", value) for value in (0, 0.0, -0.2, 1.0001, math.nan, "0.9", None)),
        *(("seed", value) for value in (-1, 0.5, True, "7")),
        *(("stop", value) for value in ("end", ("a", ""), (1,), None)),
        ("ignore_eos", 1),
    ],
)
def test_parameter_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(RequestError) as caught:
        check_params(SamplingParams(**{field: value}))
    assert str(caught.value).startswith(f"{field} is {value!r}; ")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=np.int64(1), temperature=np.float32(0.5), top_p=1, top_k=5),
        SamplingParams(seed=0, stop=("x",)),
        SamplingParams(seed=2**70, stop=["x", "yz"]),
    ],
)
def test_parameters_within_their_ranges_are_accepted(params):
    check_params(params)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_an_integer_beyond_every_float_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        check_params(SamplingParams(**{name: 10**400}))
