"""What a capture gives: the graph of a model run, and the means to run it again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict

from .errors import CaptureError
from .ints import Attr, Dim
from .sites import Frame, Site


@dataclass
class ModuleCall:
    """One call of a submodule.

    path: its name. args, kwargs, output: pytrees with `fx.Node`s for tensors. first, last: the indices in the graph of
    the nodes recorded inside it (`last < first`: none). leaf: recorded as one node, `node`. site: where it was called.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    first: int
    last: int
    leaf: bool
    node: fx.Node | None
    site: Site


@dataclass
class CapturedGraph:
    """A model run, recorded.

    graph: every torch call, in order. skeleton: the fake clone that ran. inputs: the inputs used. calls: every submodule
    call, in the order they began. output: the model's output with nodes in place of tensors (what is neither data nor a
    container, such as a cache, is None). constants: by `get_attr` target, tensors made outside the model. escapes: by
    module attribute, where its bare value was read; size_escapes: the same by tensor size. training: the mode it ran in.
    """

    graph: fx.Graph
    skeleton: nn.Module
    inputs: dict[str, Any]
    calls: list[ModuleCall]
    output: Any
    constants: dict[str, torch.Tensor]
    escapes: dict[Attr, list[Frame]]
    size_escapes: dict[Dim, list[Frame]]
    training: bool

    def run(self, model: nn.Module, **inputs: Any) -> Any:
        """Replay the graph on `model`'s parameters; the batch and sequence length may differ from the capture's.

        Gives what `model(**inputs)` gives, bit for bit, caches left out. Raises CaptureError where `inputs` or the mode
        `model` is in would take the model's Python another way than the one recorded.
        """
        if model.training != self.training:
            raise CaptureError(
                f"The graph was captured in {'train' if self.training else 'eval'} mode and the model is in the other: "
                f"call model.{'train' if self.training else 'eval'}(), or capture again."
            )
        check_same_call(self.inputs, inputs)
        values: dict[fx.Node, Any] = {}
        given = dict(tensors_in(inputs))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        last_use = self._last_uses()
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and node.meta.get("grad_enabled", True)):
                values[node] = self._step(node, model, given, values, device)
            for done in last_use.get(node, ()):
                del values[done]
        return map_nodes(self.output, values.__getitem__)

    def _step(
        self,
        node: fx.Node,
        model: nn.Module,
        given: dict[str, Any],
        values: dict[fx.Node, Any],
        device: torch.device,
    ) -> Any:
        if node.op == "placeholder":
            return given[str(node.target)]
        if node.op == "get_attr":
            return (
                self._tensor(model, node).to(device)
                if node.target in self.constants
                else _get(model, node.target)
            )
        args = map_nodes(node.args, values.__getitem__, device)
        kwargs = map_nodes(node.kwargs, values.__getitem__, device)
        if node.op == "call_module":
            return model.get_submodule(str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _tensor(self, model: nn.Module, node: fx.Node) -> torch.Tensor:
        """A constant; where it is a plain attribute of a module, the one `model` has."""
        held = node.meta.get("attribute")
        constant = self.constants[str(node.target)]
        return constant if held is None else _get(model, held)

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        kept: set[fx.Node] = set()
        map_nodes(self.output, lambda node: kept.add(node))
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        uses: dict[fx.Node, list[fx.Node]] = {}
        for used, user in last.items():
            if used not in kept and user.op != "output":
                uses.setdefault(user, []).append(used)
        return uses


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value`, as a call that gives `tensor`: later uses refer to the value after the assignment."""
    tensor[index] = value
    return tensor


def map_nodes(value: Any, of: Callable[[fx.Node], Any], device: torch.device | None = None) -> Any:
    """`value` with every node replaced by `of(node)`, and the CPU, on which captures run, by `device`."""
    if isinstance(value, fx.Node):
        return of(value)
    if device is not None and isinstance(value, torch.device):
        return device if value.type == "cpu" else value
    if isinstance(value, slice):
        return slice(*(map_nodes(part, of, device) for part in (value.start, value.stop, value.step)))
    return map_parts(value, lambda part: map_nodes(part, of, device))


def map_parts(value: Any, of: Callable[[Any], Any]) -> Any:
    """`value` with `of` applied to each part of a tuple, list, mapping or dataclass, the container's type kept (but
    `torch.Size` becomes a tuple); any other value as it is."""
    if isinstance(value, tuple):
        parts = [of(part) for part in value]
        if isinstance(value, torch.Size) or type(value) is tuple:
            return tuple(parts)
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, list):
        return [of(part) for part in value]
    if type(value) in (dict, immutable_dict):
        return {key: of(part) for key, part in value.items()}
    if isinstance(value, Mapping):
        other = copy.copy(value)
        for key, part in value.items():
            other[key] = of(part)  # type: ignore[index]
        return other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for item in dataclasses.fields(value):
            object.__setattr__(other, item.name, of(getattr(value, item.name)))
        return other
    return value


def tensors_in(inputs: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested inputs, by placeholder name: `past_0_1` is `inputs["past"][0][1]`."""
    if isinstance(inputs, torch.Tensor):
        return [(name, inputs)]
    parts = (
        inputs.items()
        if isinstance(inputs, Mapping)
        else enumerate(inputs)
        if isinstance(inputs, (tuple, list))
        else ()
    )
    return [found for key, part in parts for found in tensors_in(part, f"{name}_{key}" if name else str(key))]


def check_same_call(captured: Any, given: Any, name: str = "inputs") -> None:
    """Raise CaptureError unless `given` has the structure of `captured`, and the same values for all but tensors."""
    if isinstance(captured, torch.Tensor) and isinstance(given, torch.Tensor):
        same = captured.dtype == given.dtype or (captured.is_floating_point() and given.is_floating_point())
        if not same or captured.dim() != given.dim():
            raise CaptureError(
                f"{name} was captured as {captured.dtype} with {captured.dim()} dims and is now {given.dtype} with "
                f"{given.dim()}. Capture again with inputs like these."
            )
        return
    if isinstance(captured, Mapping) and isinstance(given, Mapping):
        if set(captured) != set(given):
            raise CaptureError(
                f"{name} has the keys {sorted(map(str, given))}; the graph was captured with "
                f"{sorted(map(str, captured))}. Give those, or capture again."
            )
        for key in captured:
            check_same_call(captured[key], given[key], f"{name}[{key!r}]")
        return
    if (
        isinstance(captured, (tuple, list))
        and isinstance(given, (tuple, list))
        and len(captured) == len(given)
    ):
        for i, (a, b) in enumerate(zip(captured, given, strict=True)):
            check_same_call(a, b, f"{name}[{i}]")
        return
    if captured is not given and (type(captured) is not type(given) or captured != given):
        raise CaptureError(
            f"{name} was {captured!r} in the capture and is {given!r} now: what is not a tensor is fixed by the capture. "
            "Capture again with this value."
        )


def _get(model: nn.Module, target: Any) -> Any:
    value: Any = model
    for name in str(target).split("."):
        value = getattr(value, name)
    return value
