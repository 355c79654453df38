"""Values that a model's code reads while it is recorded, where they do not depend on data.

A run on fake tensors has no values. But what a model makes of sizes alone (a causal mask, which torch's own
decoder then recognises by looking at it) is the same in every run at these sizes, so it can be computed for
real from the graph recorded so far.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .errors import PatchError
from .source import definition_of


def known_result(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    caller: FrameType,
) -> tuple[bool, Any]:
    """(True, what `function(*args, **kwargs)` gives), or (False, None) where that depends on more than sizes.

    args, kwargs: with nodes of `graph` for tensors. constants: the tensors of `get_attr` nodes that are
    neither parameters nor buffers. caller: the code that asks; where it only makes a check, the check passes.
    Nothing is known of inputs, parameters, buffers and random numbers.
    """
    if _in_a_check(caller):
        number = function is torch.Tensor.item and args[0].meta["val"].dtype is not torch.bool
        return True, Passing(1) if number else True
    needed = _ancestors([n for n in _nodes((args, kwargs))])
    if needed is None or not all(_is_known(node, constants) for node in needed):
        return False, None
    if any(set(node.meta.get("mutates", ())) & needed and node not in needed for node in graph.nodes):
        return False, None  # changed in place by something that is not in their history
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=()):
        values, again = (_values(graph, needed, constants, seed) for seed in (0, 1))
        random = any(not _equal(value, again[node]) for node, value in values.items())
        return (
            (False, None) if random else (True, function(*_filled(args, values), **_filled(kwargs, values)))
        )


def _values(
    graph: fx.Graph, needed: set[fx.Node], constants: Mapping[str, torch.Tensor], seed: int
) -> dict[fx.Node, Any]:
    torch.manual_seed(seed)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in needed:
            values[node] = _value(node, constants, values)
    return values


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


_CHECKS = {
    getattr(getattr(torch, name, None), "__code__", None)
    for name in ("_check_tensor_all_with", "_check_tensor_all", "_check_with", "_check")
}


class Passing(int):
    """A number that is only looked at by an `assert`: it is all that it is compared with."""

    def _holds(self, other: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _holds
    __hash__ = int.__hash__


def _in_a_check(caller: FrameType) -> bool:
    """Whether `caller` is at an `assert`, or is one of torch's functions that only raise where a condition
    does not hold. A run that goes on has passed them, and the real model makes them itself."""
    return caller.f_code in _CHECKS or caller.f_lineno in _asserted_lines(caller.f_code)


@functools.lru_cache(maxsize=256)
def _asserted_lines(code: CodeType) -> frozenset[int]:
    try:
        body = ast.walk(definition_of(code).statement)
    except PatchError:  # no source
        return frozenset()
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in body if isinstance(node, ast.Assert)]
    return frozenset(line for first, last in spans for line in range(first, last + 1))


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node] | None:
    """The nodes and all they are made of; None where an input of the model is among them."""
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "placeholder":
            return None
        if not isinstance(
            node.meta.get("val"), (int, float)
        ):  # a size is known without what it is the size of
            nodes += node.all_input_nodes
    return found


def _is_known(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> bool:
    if node.op == "get_attr":
        held = constants.get(str(node.target))
        return held is not None and not held.is_meta
    return node.op == "call_function" and "custom_grad" not in node.meta


def _value(node: fx.Node, constants: Mapping[str, torch.Tensor], values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return constants[str(node.target)].clone()  # an operation may change it in place
    if isinstance(node.meta.get("val"), (int, float)):
        return node.meta["val"]
    return node.target(*_filled(node.args, values), **_filled(node.kwargs, values))  # type: ignore[operator]


def _filled(value: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(value, lambda node: values[node])
