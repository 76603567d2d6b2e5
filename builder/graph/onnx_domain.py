"""Our plugin operations as an ONNX domain, derived from their torch schemas: tensors become
inputs, ints, floats and strings become attributes of the same name."""

import inspect
from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from onnx.defs import OpSchema, get_all_schemas_with_history, register_schema

from llmbuild.plugins.registry import DOMAIN, PLUGINS

_KINDS = ("float", "float16", "bfloat16", "float8e4m3fn", "uint8", "int32")
_TENSOR_TYPES = [f"tensor({kind})" for kind in _KINDS]
_ATTRIBUTE_TYPES = {
    "int": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "str": OpSchema.AttrType.STRING,
}


def _is_tensor(argument: torch.Argument) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _onnx_schema(name: str, schema: torch.FunctionSchema) -> OpSchema:
    single = OpSchema.FormalParameterOption.Single
    optional = OpSchema.FormalParameterOption.Optional
    inputs = [
        OpSchema.FormalParameter(
            argument.name,
            f"T_{argument.name}",
            param_option=single if str(argument.type) == "Tensor" else optional,
        )
        for argument in schema.arguments
        if _is_tensor(argument)
    ]
    outputs = [
        OpSchema.FormalParameter(f"out_{index}", f"T_out_{index}")
        for index in range(len(schema.returns))
    ]
    attributes = [
        OpSchema.Attribute(argument.name, _ATTRIBUTE_TYPES[str(argument.type)], required=True)
        for argument in schema.arguments
        if not _is_tensor(argument)
    ]
    return OpSchema(
        name,
        DOMAIN,
        1,
        inputs=inputs,
        outputs=outputs,
        attributes=attributes,
        type_constraints=[(p.type_str, _TENSOR_TYPES, "") for p in inputs + outputs],
    )


def _translation(name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
    """The function that torch.onnx calls to turn one call of the torch op into a node."""
    opset = onnxscript.values.Opset(DOMAIN, 1)
    signature = inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        ]
    )
    tensors = [argument.name for argument in schema.arguments if _is_tensor(argument)]

    def translate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        inputs = [bound.pop(tensor, None) for tensor in tensors]
        return getattr(opset, name)(*inputs, **bound)

    translate.__name__ = name
    translate.__signature__ = signature  # type: ignore[attr-defined]
    return translate


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Register every plugin's ONNX schema (once) and return torch.onnx's translations."""
    known = {schema.name for schema in get_all_schemas_with_history() if schema.domain == DOMAIN}
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name, op in PLUGINS.items():
        schema = op._opoverload._schema
        if name not in known:
            register_schema(_onnx_schema(name, schema))
        table[op._opoverload] = _translation(name, schema)
    return table
