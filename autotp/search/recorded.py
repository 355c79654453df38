"""A model recorded at the size to be counted, with the axes that `parallelize` would choose."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..capture import capture
from ..errors import AutotpError, SearchError
from ..graph import tensors_of
from ..inputs import example_inputs
from ..planner import Analysis, analyse
from ..recapture import hollow
from .scans import Unrolled


def inputs_of(model: nn.Module, seq: int | None) -> dict[str, Any]:
    made = example_inputs(model)
    names = [n for n in ("input_ids", "decoder_input_ids") if n in made]
    if seq is not None and not names:
        raise SearchError(
            f"{type(model).__name__} takes no token ids, so seq={seq} can't be laid on it. Give "
            "`example_inputs` of batch 1 and of the size you mean."
        )
    parameters = inspect.signature(model.forward).parameters
    result = {k: v for k, v in made.items() if not isinstance(v, torch.Tensor)}
    for name, value in made.items():
        if isinstance(value, torch.Tensor):
            if seq is not None and value.ndim == 2 and not value.is_floating_point():
                result[name] = torch.empty(1, seq, dtype=value.dtype, device="meta")
            else:
                result[name] = torch.empty_like(value[:1], device="meta")
    if "use_cache" in parameters:
        result["use_cache"] = False
    return result


def analysed(model: nn.Module, inputs: Mapping[str, Any], small: Mapping[str, Any] | None) -> Analysis:
    """The graph at the size of `inputs`, with the axes chosen on `small` ones: those `parallelize` would
    choose. Raises Unrolled where the graph has operations for each token.
    """
    twin = hollow(model)
    try:
        found = analyse(twin.train(), 2, small or inputs)  # in training, dropout is part of the run
    except AutotpError:
        found = analyse(twin.eval(), 2, small or inputs)
    if small is None:
        return found
    if _unrolled(twin, small, len(found.captured.graph.nodes)):
        raise Unrolled
    large = list(capture(twin, **inputs).graph.nodes)
    nodes = list(found.captured.graph.nodes)
    if [n.target for n in large] != [n.target for n in nodes] and [str(n) for n in large] != [
        str(n) for n in nodes
    ]:
        return analyse(twin, 2, inputs)  # another way through its code: another graph
    for node, sized in zip(nodes, large, strict=True):
        if "val" in sized.meta:
            node.meta["val"] = sized.meta["val"]
    return found


def _unrolled(model: nn.Module, small: Mapping[str, Any], operations: int) -> bool:
    """Whether the graph, of so many operations at the tokens of `small`, has more of them for each of twice
    as many."""
    tokens = max((t.shape[1] for t in tensors_of(tuple(small.values())) if t.ndim == 2), default=0)
    return tokens > 0 and (
        len(capture(model, **inputs_of(model, 2 * tokens)).graph.nodes) >= operations + tokens
    )
