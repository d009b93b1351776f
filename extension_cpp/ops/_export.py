"""The operators in programs that run without this package: as PyTorch's own operators, and in ONNX."""

from collections.abc import Callable
from typing import Any

from extension_cpp.ops import _backends


def decompositions() -> dict[Any, Callable]:
    """What each operator is in PyTorch's own operators, for ``torch.export.ExportedProgram.run_decompositions``.

    Returns:
        Overload to its reference: a table as PyTorch's own ones, for `make_fx` and compilers of models too. The operators
        that :func:`onnx_translations` has are not in it, as their steps depend on values: they stay as they are.

    A reference's loop over a dimension is unrolled, so that its size must not be dynamic.

    Raises:
        RuntimeError: from ``run_decompositions``, if a reference can't be traced, or loops over a dimension whose size is
            dynamic; it names the operator.

    Example:
        >>> program = torch.export.export(model, args).run_decompositions(extension_cpp.decompositions())
    """
    found: dict[Any, Callable] = {}
    for operator in _backends.operators.values():
        if operator.declared.onnx is None:
            operator.show_exporters()
            found |= {getattr(operator.packet, name): operator.decomposition for name in operator.packet.overloads()}
    return found


def onnx_translations() -> dict[Any, Callable]:
    """What the operators that :func:`decompositions` leaves are in ONNX: `custom_translation_table` of ``torch.onnx.export``.

    Returns:
        Overload to a function on onnxscript's operators.

    Raises:
        RuntimeError: as the cause of an error from ``torch.onnx.export``, if ONNX can't express a call. It names operator and
            argument.

    Example:
        >>> program = torch.export.export(model, args).run_decompositions(extension_cpp.decompositions())
        >>> torch.onnx.export(program, f="model.onnx", custom_translation_table=extension_cpp.onnx_translations())
    """
    return {
        getattr(operator.packet, name): operator.declared.onnx
        for operator in _backends.operators.values()
        if operator.declared.onnx
        for name in operator.packet.overloads()
    }
