"""Which node of a growing graph a value is: tensors by their identity, numbers by the expression they carry.

Each tensor object is kept alive, so that no id is used twice. An in-place call gives back the object it
changed, and from then on that object stands for the new node.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .errors import CaptureError
from .ints import OPS, Bin, Dim, Expr, TrackedFloat, TrackedInt, dims_of, evaluate, plain
from .nested import has_tensor, map_parts, untracked, versions
from .sites import Site, frames_below
from .skeleton import Skeleton


class Lifter(TorchFunctionMode):
    """Knows the nodes of the values of one run of `skeleton`, and makes those of parameters, constants and
    numbers."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.scopes: list[tuple[str, CodeType | None]] = []  # modules whose forward runs, innermost last
        self.silent = False  # inside a leaf, or in bookkeeping of our own
        self._nodes: dict[int, fx.Node] = {}  # by id of the tensor
        # By storage, the tensors that look at it: keeps them alive.
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._computed: dict[Expr, fx.Node] = {}
        self._handed: dict[int, Any] = {}  # by id, objects given to calls that are no containers: caches
        self._last: fx.Node | None = None
        # By storage, what was made under torch.vmap, and of what.
        self._batched: dict[int, tuple[torch.Tensor, tuple[fx.Node, ...]]] = {}
        module = skeleton.module
        self._names: dict[int, str] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._names.setdefault(id(tensor), name)
        self._attributes = {
            id(value): f"{path}.{name}" if path else name
            for path, part in module.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor)
        }

    def _looking_at(self, changed: list[torch.Tensor]) -> tuple[fx.Node, ...]:
        """The nodes whose values an in-place change of `changed` also changes: all that share their
        storage."""
        tensors = [tensor for one in changed for tensor in self._sharing.get(_storage(one), [])]
        return tuple(dict.fromkeys(self._nodes[id(tensor)] for tensor in tensors))

    def _adopt(self, value: Any, node: fx.Node) -> None:
        """From here on `value` (a tensor, or nested tuples and lists of them) is what `node` gives."""
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                self._sharing.setdefault(_storage(value), []).append(value)
            self._nodes[id(value)] = node
            node.meta["grad"] = value.requires_grad
            return
        node.meta["grad"] = any(tensor.requires_grad for tensor, _ in versions(value))
        for i, part in enumerate(value if isinstance(value, (tuple, list)) else ()):
            if has_tensor(part):
                item = self.graph.create_node("call_function", operator.getitem, (node, i))
                item.meta.update(node.meta, args=(node, i), kwargs={}, mutates=())
                self._last = item
                self._adopt(part, item)

    def _lift(self, value: Any) -> Any:
        """`value` with nodes in place of tensors; tracked numbers stay, if they are of this run."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, (TrackedInt, TrackedFloat)):
            return value if value.log in (None, self.skeleton.log) else plain(value)
        lifted = map_parts(value, self._lift)
        if lifted is value and hasattr(value, "__dict__"):
            self._handed[id(value)] = value
        return lifted

    def _output(self, value: Any) -> Any:
        """An output with nodes for tensors; None for what is neither data nor a container."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        mapped = map_parts(value, self._output)
        if mapped is value and not isinstance(
            value, (int, float, complex, str, bytes, torch.dtype, torch.device)
        ):
            return None
        return plain(mapped)

    def _runnable(self, value: Any) -> Any:
        """Lifted arguments as the graph runs them: numbers that come from tensor sizes are computed by
        nodes."""
        if isinstance(value, (TrackedInt, TrackedFloat)):
            return self._computing(value.expr) if dims_of(value.expr) else plain(value)
        return map_parts(value, self._runnable)

    def _computing(self, expr: Expr) -> Any:
        if not dims_of(expr):
            return evaluate(expr, self.skeleton.attributes)
        if expr in self._computed:
            return self._computed[expr]
        if isinstance(expr, Dim):
            # Read where the tensor was made, not here: an in-place call since may have changed its shape.
            with self.graph.inserting_after(expr.node):
                node = self.graph.call_function(torch.Tensor.size, (expr.node, expr.index))
        else:
            assert isinstance(expr, Bin)
            operands = self._computing(expr.left), self._computing(expr.right)
            node = self._last = self.graph.call_function(OPS[expr.op], operands)
        path = self.scopes[-1][0]
        value = evaluate(expr, self.skeleton.attributes, _size_of)
        node.meta.update(val=value, scope=path, site=Site(path, ()), args=node.args, kwargs={}, expr=expr)
        node.meta.update(grad=False, grad_enabled=True, mutates=())
        self._computed[expr] = node
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        node = self._known(tensor)
        if node is not None:
            return node
        held = self.skeleton.fakes.get(id(tensor))
        if held is not None:  # the user's own tensor, reached around the clone (a closure)
            return self._node(held)
        constant = self.skeleton.originals.get(id(tensor))
        if constant is None and isinstance(tensor, FakeTensor):
            return self._same_view(tensor)
        name = f"_const{len(self.constants)}"
        self.constants[name] = tensor if constant is None else constant
        return self._get_attr(name, tensor, self._attributes.get(id(tensor)))

    def _known(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node of a tensor that was seen, or that is a parameter or buffer."""
        node = self._nodes.get(id(tensor))
        if node is None and id(tensor) in self._names:
            node = self._get_attr(self._names[id(tensor)], tensor, None)
        return node

    def _get_attr(self, target: str, tensor: torch.Tensor, attribute: str | None) -> fx.Node:
        node = self._last = self.graph.create_node("get_attr", target)
        path = self.scopes[-1][0] if self.scopes else ""
        node.meta.update(scope=path, site=Site(path, ()), args=(), kwargs={}, grad_enabled=True, mutates=())
        if attribute is not None:
            node.meta["attribute"] = attribute
        before, self.silent = self.silent, True
        self._adopt(tensor, node)
        self.silent = before
        return node

    def _same_view(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor object that torch made anew for a value that was seen (autograd functions
        do)."""

        def view_of(t: torch.Tensor) -> Any:
            return t.shape, t.stride(), t.storage_offset(), t.dtype

        before, self.silent = self.silent, True
        try:
            for other in reversed(self._sharing.get(_storage(tensor), [])):
                if view_of(other) == view_of(tensor):
                    return self._nodes[id(other)]
            shape = tuple(tensor.shape)
            made = self._from_vmap(tensor)
        finally:
            self.silent = before
        if made is not None:
            return made
        raise CaptureError(
            f"{self._where()} uses a tensor of shape {shape} that no recorded call made: it comes from code "
            "torch does not show to a tracer (TorchScript, a compiled extension). Use its plain PyTorch "
            "version."
        )

    # --- torch.vmap: what runs under it is one operation that nothing is known of ---

    @staticmethod
    def _is_batched(given: Any) -> bool:
        return any(torch._C._functorch.is_batchedtensor(tensor) for tensor, _ in versions(given))

    def _under_vmap(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = versions((args, kwargs))
        out = func(*untracked(args), **untracked(kwargs))
        if any(tensor._version != version for tensor, version in before):
            raise CaptureError(
                f"{self._where()} changes a tensor in place under torch.vmap, which can't be recorded. Use "
                "an operation that gives a new tensor."
            )
        sources: dict[fx.Node, None] = {}
        for tensor, _ in before:
            base = _unbatched(tensor)
            if _storage(base) in self._batched:
                sources.update(dict.fromkeys(self._batched[_storage(base)][1]))
            else:  # a view of one that is known, perhaps
                sharing = self._sharing.get(_storage(base), [])
                nodes = [self._nodes[id(other)] for other in sharing] or [self._node(base)]
                sources.update(dict.fromkeys(nodes))
        for tensor, _ in versions(out):
            base = _unbatched(tensor)
            if _storage(base) not in self._sharing:
                self._batched.setdefault(_storage(base), (base, tuple(sources)))
        return out

    def _from_vmap(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node of a tensor that was made under torch.vmap."""
        held = self._batched.get(_storage(tensor))
        if held is None:
            return None
        node = self._last = self.graph.create_node("call_function", under_vmap, held[1])
        path = self.scopes[-1][0]
        node.meta.update(scope=path, site=None, args=held[1], kwargs={}, grad_enabled=True, mutates=())
        before, self.silent = self.silent, True
        self._adopt(tensor, node)
        self.silent = before
        return node

    def _size_read(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What `func` reads of the tensor's sizes, tracked."""
        value = func(tensor, *untracked(args), **untracked(kwargs))
        node = self._known(tensor)
        if node is None:  # a constant's sizes are as good as written in the code
            return value
        log = self.skeleton.log
        sizes = [TrackedInt(size, Dim(node, i), log) for i, size in enumerate(tensor.shape)]
        if isinstance(value, torch.Size):
            return torch.Size(sizes)
        if func is torch.Tensor.__len__:  # Python makes a plain int of what this returns
            log.note(Dim(node, 0), depth=3)
            return value
        if func is torch.Tensor.size:
            return sizes[plain(args[0] if args else kwargs["dim"])]
        return math.prod(sizes)

    def _where(self) -> Site:
        """The module whose forward is running, and the line of the model's code: for error messages."""
        path, code = self.scopes[-1] if self.scopes else ("", None)
        return Site(path, frames_below(sys._getframe(1), BOUNDARY, code))


def intercepting(
    recorder: Any, path: str, leaf: bool, code: CodeType | None, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward that goes through `recorder`. Its frame is where a module's own frames end, for `Site`s."""

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(path, leaf, code, forward, args, kwargs)

    return intercepted


BOUNDARY = next(constant for constant in intercepting.__code__.co_consts if isinstance(constant, CodeType))


def under_vmap(*sources: torch.Tensor) -> torch.Tensor:
    """Stands for what a model's code made of `sources` under torch.vmap."""
    raise CaptureError(
        "A part of this graph was computed under torch.vmap, which is not recorded step by step: it can't be "
        "replayed. Run the model itself."
    )


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size_of(dim: Dim) -> int:
    return int(dim.node.meta["val"].shape[dim.index])


SIZE_READS = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.__len__,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.numel,
}
