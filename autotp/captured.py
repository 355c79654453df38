"""What a capture gives: the graph of a model run, and the means to run it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .assumed import Assumption
from .errors import CaptureError
from .ints import Attr, Comparison, Dim
from .nested import map_nodes, tensors_in
from .sites import Frame, Site


@dataclass
class ModuleCall:
    """One call of a submodule.

    path: its name. args, kwargs, output: pytrees with `fx.Node`s for tensors. first, last: the indices in the
    graph of the nodes recorded inside it (`last < first`: none). leaf: recorded as one node, `node`. site:
    the call itself.
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
class FunctionCall:
    """A call `function.apply(*args)` of an `autograd.Function`: `nodes` (`getitem`s left out) are what its
    forward did. Its backward is its own, and may be another than that of its forward."""

    function: Any
    args: tuple[Any, ...]
    nodes: list[fx.Node]

    def result(self) -> fx.Node | None:
        """The node that gives the call's result; None where that is not one tensor."""
        inside = set(self.nodes)
        used = [node for node in self.nodes if any(user not in inside for user in node.users)]
        return used[0] if len(used) == 1 else None


@dataclass
class CapturedGraph:
    """A model run, recorded.

    graph: every torch call, in order. skeleton: the fake clone that ran, as it was before the run. inputs:
    the inputs used. calls: every submodule call, in the order they began. output: the model's output with
    nodes in place of tensors (what is neither data nor a container, such as a cache, is None). constants: by
    `get_attr` target, tensors made outside the model. attributes: what each tracked attribute is, by module
    path and name. escapes: by module attribute, where its bare value was read; size_escapes: the same
    by tensor size; comparisons: what the
    code asked of attributes and tensor sizes, and where. training: the mode it ran in.
    leaves: the caller's classes that were recorded as one call. assumed: what it was told of data; asked: by
    place, the comparisons of sizes and of numbers that were read.
    """

    graph: fx.Graph
    skeleton: nn.Module
    inputs: dict[str, Any]
    calls: list[ModuleCall]
    output: Any
    constants: dict[str, torch.Tensor]
    attributes: dict[tuple[str, str], int]
    escapes: dict[Attr, list[Frame]]
    size_escapes: dict[Dim, list[Frame]]
    comparisons: dict[Comparison, Frame]
    training: bool
    leaves: tuple[type[nn.Module], ...] = ()
    assumed: list[Assumption] = field(default_factory=list)
    asked: dict[Frame, list[Comparison]] = field(default_factory=dict)
    _checked: set[Any] = field(default_factory=set, repr=False)

    def run(self, model: nn.Module, /, **inputs: Any) -> Any:
        """Replay the graph on `model`'s parameters; batch and sequence length may differ from the capture's.

        Gives what `model(**inputs)` gives, bit for bit, caches left out. At sizes not seen before the
        skeleton is captured once more and compared. Raises CaptureError where the inputs, their sizes, dtypes
        or the model's mode would take its Python another way than the one recorded, and under autograd where
        an `autograd.Function` gives several tensors.
        """
        if model.training != self.training:
            mode = "train" if self.training else "eval"
            raise CaptureError(
                f"The graph was captured in {mode} mode, the model is in the other. Call model.{mode}(), or "
                "capture again."
            )
        self._check_dtypes(model)
        self._check_call(inputs)
        given = dict(tensors_in(inputs))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        values: dict[fx.Node, Any] = {}
        last_uses = self._last_uses()
        told = {assumption.node: assumption for assumption in self.assumed}
        for node in self.graph.nodes:
            if node.op == "output":
                break
            function = node.meta.get("custom_grad")
            if function is not None and torch.is_grad_enabled():
                if node is function.nodes[-1]:
                    values[_only_result(function)] = function.function.apply(
                        *map_nodes(function.args, values.__getitem__, device)
                    )
                continue
            # Each call runs as it was made, under no_grad or not.
            with torch.set_grad_enabled(torch.is_grad_enabled() and node.meta.get("grad_enabled", True)):
                values[node] = self._step(node, model, given, values, device)
            assumption = told.get(node)
            if assumption is not None and not assumption.holds(values[node]):
                raise CaptureError(
                    f"When the graph was captured, {assumption.told} at {assumption.site}; on these inputs "
                    "it is otherwise, and the model may take another way. Capture again with inputs like "
                    "these, or run the model itself."
                ).at(assumption.site.module)
            for used in last_uses.get(node, ()):
                values.pop(used, None)
        return map_nodes(self.output, values.__getitem__)

    def _step(
        self,
        node: fx.Node,
        model: nn.Module,
        given: dict[str, torch.Tensor],
        values: dict[fx.Node, Any],
        device: torch.device,
    ) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            return given[target]
        if node.op == "get_attr":
            if target in self.constants and "attribute" not in node.meta:
                return self.constants[target].to(device)
            return _reach(model, node.meta.get("attribute", target))
        args = map_nodes(node.args, values.__getitem__, device)
        kwargs = map_nodes(node.kwargs, values.__getitem__, device)
        function = model.get_submodule(target) if node.op == "call_module" else target
        return function(*args, **kwargs)

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """By node, the values that nothing after it needs."""
        kept: set[fx.Node] = set()
        map_nodes(self.output, kept.add)
        last = {used: node for node in self.graph.nodes for used in node.all_input_nodes}
        uses: dict[fx.Node, list[fx.Node]] = {}
        for used, user in last.items():
            if used not in kept:
                uses.setdefault(user, []).append(used)
        return uses

    def _check_dtypes(self, model: nn.Module) -> None:
        now = {name: parameter.dtype for name, parameter in model.named_parameters()}
        for name, parameter in self.skeleton.named_parameters():
            if now.get(name, parameter.dtype) != parameter.dtype:
                raise CaptureError(
                    f"{name} was {parameter.dtype} in the capture and is {now[name]} now; a capture fixes "
                    "dtypes. Capture the model again as it is."
                )

    def _check_call(self, inputs: dict[str, Any]) -> None:
        _check_same(self.inputs, inputs, "inputs")
        sizes = _sizes(inputs)
        if sizes == _sizes(self.inputs) or sizes in self._checked:
            return
        from .capture import record

        _check_same_graph(self.graph, record(self.skeleton, inputs, self.leaves).graph)
        self._checked.add(sizes)


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value`, as a call that gives `tensor`: later uses refer to the value after the
    assignment."""
    tensor[index] = value
    return tensor


def _only_result(call: FunctionCall) -> fx.Node:
    node = call.result()
    if node is None:
        raise CaptureError(
            f"{call.nodes[0].meta['site']} is inside {call.function.__name__}, an autograd.Function that "
            "gives several tensors: a replay has its values, not its backward. Run the graph under "
            "torch.no_grad()."
        )
    return node


def _sizes(inputs: dict[str, Any]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for _, tensor in tensors_in(inputs))


def _check_same(captured: Any, given: Any, name: str) -> None:
    """Raise CaptureError unless `given` has the structure of `captured`, and the same values for all but
    tensors."""
    if isinstance(captured, torch.Tensor) and isinstance(given, torch.Tensor):
        if captured.dim() != given.dim() or captured.dtype != given.dtype:
            raise CaptureError(
                f"{name} was captured as {captured.dtype} with {captured.dim()} dims and is now "
                f"{given.dtype} with {given.dim()}. Capture again with inputs like these."
            )
    elif isinstance(captured, dict) and isinstance(given, dict):
        if set(captured) != set(given):
            raise CaptureError(
                f"{name} has the keys {sorted(map(str, given))}, the graph was captured with "
                f"{sorted(map(str, captured))}. Give those, or capture again."
            )
        for key in captured:
            _check_same(captured[key], given[key], f"{name}[{key!r}]")
    elif (
        isinstance(captured, (tuple, list))
        and isinstance(given, (tuple, list))
        and len(captured) == len(given)
    ):
        for i, (before, now) in enumerate(zip(captured, given, strict=True)):
            _check_same(before, now, f"{name}[{i}]")
    elif captured is not given and (type(captured) is not type(given) or captured != given):
        raise CaptureError(
            f"{name} was {captured!r} in the capture and is {given!r} now: what is not a tensor is fixed by "
            "the capture. Capture again with this value."
        )


def _check_same_graph(recorded: fx.Graph, now: fx.Graph) -> None:
    """Raise CaptureError unless both have the same calls, with the same numbers written into them."""
    index = {node: i for graph in (recorded, now) for i, node in enumerate(graph.nodes)}

    def call(node: fx.Node) -> Any:
        if (
            node.op == "get_attr"
        ):  # of a clone of the skeleton: a constant of either may be a parameter of the other
            return node.op, node.meta["val"].shape
        return node.op, node.target, map_nodes((node.args, node.kwargs), lambda used: f"#{index[used]}")

    for before, after in zip(recorded.nodes, now.nodes, strict=False):
        if call(before) != call(after):
            site = (after if before.op == "output" else before).meta.get("site", "the output")
            raise CaptureError(
                f"At these input sizes the model takes another way than in the capture: {site} called "
                f"{before.format_node()} and now {after.format_node()}. A loop over a size, or a size made a "
                "plain int, is fixed by a capture: capture again with inputs of these sizes."
            )


def _reach(model: nn.Module, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value
