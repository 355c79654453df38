"""Quantised weights in the files of a model: whole, and taken apart as their package names the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .coded import as_stored
from .errors import CheckpointError
from .lazy import LazyTensor, Source, lazy
from .pipeline.absent import Absent
from .quantised import components, is_packed, laid_out, outline, rebuilt
from .state import Held


def whole_packed(tensor: Tensor, how: Held, gathered: Callable[[Tensor, Held], Source]) -> Tensor:
    """The whole of a packed tensor, made of lazy ones. gathered: the source of one, of this rank's part of it
    and how it lies over the ranks."""
    whole = outline(tensor) if how.whole is None else how.whole
    laid = laid_out(whole, how.layout) if how.layout is not None else {}
    mine = {} if isinstance(tensor, Absent) else components(tensor)
    names = {id(part): name for name, part in components(whole).items()}

    def gathering(part: Tensor) -> Tensor:
        name = names[id(part)]
        layout = laid[name] if laid and laid[name].dims else None
        return lazy(tuple(part.shape), part.dtype, gathered(mine.get(name, tensor), Held(layout)))

    return rebuilt(whole, gathering)


def taken_apart(model: Any, whole: Mapping[str, Tensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The tensors by the names that files have for them, and the metadata that goes with these.

    Raises CheckpointError where the package of a quantised one has no form for files."""
    found: dict[str, Any] = {}
    for name, tensor in whole.items():
        found |= as_stored(name, tensor)
    packed = next((name for name, tensor in found.items() if is_packed(tensor)), None)
    if packed is None:
        return found, {}
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        raise CheckpointError(
            f"{packed} is quantised (a {type(found[packed]).__name__}), and the model does not say how "
            "that is stored (nor for the whole). Quantise by from_pretrained(quantization_config=...)."
        )
    meta = torch.empty((), device="meta")
    plain = {name: tensor if is_packed(tensor) else meta for name, tensor in found.items()}
    try:
        flat, metadata = quantizer.get_state_dict_and_metadata(SimpleNamespace(state_dict=lambda: plain))
    except Exception as error:  # whatever its package can't store
        raise CheckpointError(f"{packed} is quantised, and can't be stored: {error}") from error
    if flat is None:
        raise CheckpointError(f"{packed} is quantised, and its package has no form for files.")
    return {name: found.get(name, tensor) for name, tensor in flat.items()}, metadata
