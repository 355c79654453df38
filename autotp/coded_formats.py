"""The forms in which packages keep a quantised weight beside its scales. All that is particular to a package
stands here; nothing says where its tensors may be cut: that is tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import PlanError


class Coding(Protocol):
    """What a package makes of the tensors that are a weight. several: they are several parameters of it."""

    several: ClassVar[bool]

    def product(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """`x @ weight.T + bias`, with all that the package does to its activations. shape: [out, in]."""

    def stored(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What they are made of as a state dict of the package has it."""


@dataclass(frozen=True)
class Found:
    """Of a linear: the tensors that are its weight, what is made of them, and the attributes that made its
    own forward of them. dtype: of the weight when unpacked."""

    parts: Mapping[str, Tensor]
    coding: Coding
    dtype: torch.dtype
    attributes: tuple[str, ...] = ()


def found_in(path: str, module: Any, dtype: torch.dtype) -> Found | None:
    """How the weight of the linear at `path` is kept; None where in no form that is known here. dtype: of the
    model. PlanError, with the module's path, where it is quantised so that it can't be split."""
    weight = module._parameters.get("weight")
    if getattr(weight, "quant_state", None) is not None:
        return _blocks(path, module, dtype)
    if any(getattr(kept, "SCB", None) is not None for kept in (weight, getattr(module, "state", None))):
        return _rows(path, module, dtype)
    return _compressed(path, module, dtype)


def let_go(model: nn.Module) -> None:
    """Take off what would unpack all weights at the first call."""
    for module in model.modules():
        hook = vars(module).pop("ct_decompress_hook", None)
        if hook is not None:
            hook.remove()


@contextmanager
def undistributed() -> Iterator[None]:
    """While a package prepares a model: without its progress bars, and without sharing the work out over the
    ranks, each of which prepares its own."""
    with ExitStack() as contexts:
        contexts.enter_context(redirect_stderr(StringIO()))
        if "compressed_tensors" in sys.modules:
            from compressed_tensors.offload import as_single_threaded

            contexts.enter_context(as_single_threaded())
        yield


# ---------------------------------------------------------------- compressed-tensors
@dataclass(frozen=True)
class Compressed:
    """A module's scheme: how it is stored, and what becomes of what goes in and comes out."""

    several: ClassVar[bool] = True
    scheme: Any

    def product(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        module: Any = SimpleNamespace(**parts, quantization_status=None)
        if self.scheme.input_activations is not None:
            x = forward_quantize(module, x, "input", self.scheme.input_activations)
        # The shape that is stored is the whole's: a part has its own.
        own = {"weight_shape": torch.tensor(shape)} if "weight_shape" in parts else {}
        compressor: Any = BaseCompressor.get_value_from_registry(self.scheme.format.value)
        weight = compressor.decompress({**parts, **own}, self.scheme)["weight"]
        y = F.linear(x, weight.to(dtype), bias)
        if self.scheme.output_activations is not None:
            y = forward_quantize(module, y, "output", self.scheme.output_activations)
        return y

    def stored(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return parts


def _compressed(path: str, module: nn.Module, dtype: torch.dtype) -> Found | None:
    scheme: Any = getattr(module, "quantization_scheme", None)
    status: Any = getattr(module, "quantization_status", None)
    if scheme is None or status is None:
        return None
    if not isinstance(module, nn.Linear) or scheme.weights is None:
        raise PlanError(
            f"{path} is quantised by compressed-tensors, and is no linear with a quantised weight: how its "
            "scales lie over ranks is not known. Leave it out of the scheme."
        )
    if status.value == "decompressed":
        raise PlanError(
            f"{path} is unpacked: compressed-tensors does that at a model's first call. Split the model "
            "before it is called, or load it unpacked: CompressedTensorsConfig(dequantize=True)."
        )
    if status.value != "compressed":
        raise PlanError(
            f"{path} is still being quantised ({status.value}): save the model compressed, and split what is "
            "loaded from there."
        )
    tensors = {**module._parameters, **module._buffers}
    parts = {name: tensor for name, tensor in tensors.items() if name != "bias" and tensor is not None}
    taken = ("forward", "quantization_scheme", "quantization_status")
    scale = parts["weight_scale"].dtype
    wide = scale.is_floating_point and scale.itemsize > 1  # then the weight is unpacked to that
    return Found(parts, Compressed(scheme), scale if wide else dtype, taken)


# ---------------------------------------------------------------- bitsandbytes
@dataclass(frozen=True)
class Blocks:
    """4 bits, a scale for every `size` elements of a row-major weight. compute: the dtype of the product;
    None: that of the activations. nested: how many of the scales, quantised too, have one scale, and all of
    them `offset`."""

    several: ClassVar[bool] = False
    kind: str
    size: int
    compute: torch.dtype | None
    nested: int | None
    offset: float = field(default=0.0, repr=False)

    def computing_in(self, dtype: torch.dtype) -> Blocks:
        return replace(self, compute=dtype)

    def product(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        import bitsandbytes

        state, nested, offset = bitsandbytes.functional.QuantState, None, None
        if self.nested is not None:
            scales, code = parts["weight.nested_absmax"].flatten(), parts["weight.nested_quant_map"]
            nested = state(absmax=scales, code=code, blocksize=self.nested, dtype=torch.float32)
            offset = torch.tensor(self.offset, device=x.device)
        told = state(
            absmax=parts["weight.absmax"].flatten(),
            shape=torch.Size(shape),
            code=parts["weight.quant_map"],
            blocksize=self.size,
            quant_type=self.kind,
            dtype=self.compute or dtype,
            offset=offset,
            state2=nested,
        )
        given = x if self.compute is None else x.to(self.compute)
        bias = None if bias is None else bias.to(given.dtype)
        packed = parts["weight"].reshape(-1, 1)
        return bitsandbytes.matmul_4bit(given, packed, bias=bias, quant_state=told).to(x.dtype)

    def stored(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        flat = {name: part.flatten() if part.dim() == 2 else part for name, part in parts.items()}
        return {**flat, "weight": parts["weight"].reshape(-1, 1)}


@dataclass(frozen=True)
class Rows:
    """8 bits, a scale for every row; activations quantised by the row, but for columns above `threshold`."""

    several: ClassVar[bool] = False
    threshold: float

    def product(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        import bitsandbytes

        state = bitsandbytes.MatmulLtState()
        state.threshold, state.has_fp16_weights, state.is_training = self.threshold, False, False
        state.CB, state.SCB = parts["weight"], parts["SCB"].flatten()
        bias = None if bias is None else bias.to(x.dtype)
        return bitsandbytes.matmul(x, state.CB, bias=bias, state=state)

    def stored(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**parts, "SCB": parts["SCB"].flatten()}


def _blocks(path: str, module: Any, dtype: torch.dtype) -> Found:
    state, data = module.weight.quant_state, module.weight.data
    linear = isinstance(module, nn.Linear)
    if not linear or data.dtype != torch.uint8 or module.in_features % 2:
        raise PlanError(
            f"{path} is quantised by bitsandbytes in a form that is not cut: only linears with an even "
            f"number of inputs are, whose 4-bit weight lies in uint8 (this one in {data.dtype})."
        )
    rows, columns = module.out_features, module.in_features
    if getattr(state, "packing_format_for_cpu", False):
        raise PlanError(
            f"{path} was packed anew for this CPU, as bitsandbytes does at a first call: split the model "
            "before it is called."
        )
    told = state.as_dict(packed=True)
    parts = {"weight": data.view(rows, -1)} | {f"weight.{name}": part for name, part in told.items()}
    per = {"weight.absmax": state.blocksize}
    if state.nested:
        per["weight.nested_absmax"] = state.blocksize * state.state2.blocksize
    for name, elements in per.items():  # along rows and columns where a block is part of a row
        parts[name] = parts[name].view(rows, -1) if columns % elements == 0 else parts[name].view(-1, 1)
    nested = state.state2.blocksize if state.nested else None
    offset = float(state.offset) if state.nested else 0.0
    compute = module.compute_dtype if module.compute_type_is_set else None
    return Found(parts, Blocks(state.quant_type, state.blocksize, compute, nested, offset), dtype)


def _rows(path: str, module: Any, dtype: torch.dtype) -> Found:
    linear = isinstance(module, nn.Linear)
    if not linear or module.state.has_fp16_weights:
        raise PlanError(f"{path} is quantised by bitsandbytes at each call, or is no linear: it is not cut.")
    scales = module.state.SCB if module.weight.SCB is None else module.weight.SCB
    parts = {"weight": module.weight.data, "SCB": scales.view(-1, 1)}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return Found(parts, Rows(module.state.threshold), dtype)
