"""What GPU this machine has, and what is installed to run plans on it."""

import ctypes
from importlib import import_module
from typing import Any

from llmbuild.errors import EngineError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def compute_capability() -> str:
    """Of the first GPU, such as 8.9. Raises EngineError where the driver or a GPU is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(
            "the engine needs an NVIDIA GPU and its driver, and libcuda.so.1 isn't here; run it on "
            "a machine that has them, compile the model for cpu, or check it with verify --emulate"
        ) from error
    status = driver.cuInit(0)
    if status == 0:
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
            status = status or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    if status != 0:
        raise EngineError(f"the engine needs an NVIDIA GPU; the driver finds none (error {status})")
    return f"{numbers[0].value}.{numbers[1].value}"


def tensorrt_version() -> str:
    """Of TensorRT, such as 11.4.0.106; loads it. Raises EngineError where it isn't installed."""
    return str(load_tensorrt().__version__)


def load_tensorrt() -> Any:
    """The module of TensorRT. Raises EngineError where it can't be imported."""
    try:
        return import_module("tensorrt")
    except ImportError as error:
        raise EngineError(
            f"the engine needs TensorRT, which can't be imported ({error}): "
            "`pip install '.[tensorrt]'` in llmbuild's checkout has it"
        ) from error


def rtx_version() -> str:
    """Of TensorRT for RTX, such as 1.7.1.116. Raises EngineError where it isn't installed."""
    # Engines of other targets go without: it takes a tenth of their load.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorrt-rtx-cu13-bindings")
    except PackageNotFoundError as error:
        raise EngineError(
            "the engine needs TensorRT for RTX, which isn't installed: "
            "`pip install '.[tensorrt-rtx]'` in llmbuild's checkout has it"
        ) from error
