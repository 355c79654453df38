"""The forms in which packages keep a quantised weight beside its scales. All that is particular to a package
stands here; nothing says where its tensors may be cut: that is tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import PlanError


class Coding(Protocol):
    """What a package makes of the tensors that are a weight."""

    def product(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """`x @ weight.T + bias`, with all that the package does to its activations. shape: [out, in]."""


@dataclass(frozen=True)
class Found:
    """Of a linear: the tensors that are its weight, what is made of them, and the attributes that made its
    own forward of them. dtype: of the weight when unpacked."""

    parts: Mapping[str, Tensor]
    coding: Coding
    dtype: torch.dtype
    attributes: tuple[str, ...] = ()


def found_in(path: str, module: nn.Module) -> Found | None:
    """How the weight of the linear at `path` is kept; None where in no form that is known here. PlanError,
    with its path, for a module that is quantised so that it can't be split."""
    return _compressed(path, module)


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


def _compressed(path: str, module: nn.Module) -> Found | None:
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
    return Found(parts, Compressed(scheme), parts["weight_scale"].dtype, taken)
