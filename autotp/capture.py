"""The recording tracer: a model's own Python runs once on fake tensors, and each torch call becomes an fx node.

    captured = capture(model, input_ids=ids)      # CapturedGraph
    captured.run(model, input_ids=other_ids)      # equal to model(input_ids=other_ids), bit for bit

Nothing symbolic runs, so Python control flow just happens. A `TorchFunctionMode` sees each torch call of the model's code
(the calls it makes inside are not seen: the mode is off while it runs); the clone's modules are intercepted by an
instance-level `forward`, so no class is changed and nothing needs restoring in the user's model.

How a value finds its node: by the identity of the tensor object, kept alive so that no id is used twice. An in-place
call gives back the object it changed, and from then on that object stands for the new node. A call that changed nothing
and gives back an operand (`x.contiguous()`) is given an object of its own, so that the two values stay apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode

from .captured import CapturedGraph, ModuleCall, map_parts, setitem, tensors_in
from .errors import CaptureError
from .ints import OPS, Attr, Const, Dim, Expr, TrackedFloat, TrackedInt, dims_of, evaluate, plain
from .sites import Frame, Site, frames_below, frames_of
from .skeleton import Skeleton, clone, fake_like, forward_code, is_leaf

__all__ = ["CapturedGraph", "Frame", "ModuleCall", "Site", "capture"]

_DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)


def capture(model: nn.Module, /, **inputs: Any) -> CapturedGraph:
    """Record one run of `model`, in the mode (train or eval) it is in, without touching it.

    inputs: what the model's forward takes, by name; of tensors only shape, dtype and requires_grad matter, and they may
    be nested in dicts, tuples and lists. Left out: made from the model's signature and config, see
    `autotp.inputs.example_inputs`. The model may be on the meta device.

    Raises CaptureError where the model's code needs the values of tensors, or fails.
    """
    if not inputs:
        from .inputs import example_inputs

        inputs = example_inputs(model)
    skeleton = clone(model)
    recorder = Recorder(skeleton)
    try:
        with torch.inference_mode(False), torch.enable_grad(), skeleton.mode:
            given = recorder.placeholders(inputs)
            with _intercepted(recorder), recorder:
                output = skeleton.module(**given)
            return recorder.finish(inputs, output)
    except CaptureError:
        raise
    except Exception as error:
        raise _explained(error, recorder) from error


class Recorder(TorchFunctionMode):
    """While active, records torch calls into `graph` and calls of the skeleton's modules into `calls`."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.graph = fx.Graph()
        self.calls: list[ModuleCall] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.scopes: list[
            tuple[str, CodeType | None]
        ] = []  # modules whose forward is running, innermost last
        self.silent = False  # inside a leaf
        self._nodes: dict[int, fx.Node] = {}  # by id of the tensor
        self._alive: list[torch.Tensor] = []
        self._sharing: dict[int, list[torch.Tensor]] = {}  # by storage, the tensors that look at it
        self._computed: dict[Expr, fx.Node] = {}
        self._last: fx.Node | None = None
        self._bounds: list[
            tuple[fx.Node | None, fx.Node | None]
        ] = []  # per call, the last node before and inside
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

    # -- the run ------------------------------------------------------------------------------------------------------

    def placeholders(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Fake inputs in the image of `inputs`, each tensor a placeholder."""
        fakes: dict[int, torch.Tensor] = {}
        for name, tensor in tensors_in(inputs):
            node = self.graph.placeholder(name)
            if id(tensor) in fakes:
                continue  # one tensor given twice is one value: the first placeholder stands for it
            fakes[id(tensor)] = fake_like(tensor, self.skeleton.mode)
            self._adopt(fakes[id(tensor)], node)

        def faked(value: Any) -> Any:
            return fakes[id(value)] if isinstance(value, torch.Tensor) else map_parts(value, faked)

        return faked(inputs)

    def finish(self, inputs: dict[str, Any], output: Any) -> CapturedGraph:
        result = self._output(output)
        self.graph.output(_plain_containers(result))
        index = {node: i for i, node in enumerate(self.graph.nodes)}
        for call, (before, last) in zip(self.calls, self._bounds, strict=True):
            call.first = 0 if before is None else index[before] + 1
            call.last = -1 if last is None else index[last]
        escapes = self.skeleton.log.frames
        return CapturedGraph(
            graph=self.graph,
            skeleton=self.skeleton.module,
            inputs=inputs,
            calls=self.calls,
            output=result,
            constants=self.constants,
            escapes={atom: frames for atom, frames in escapes.items() if isinstance(atom, Attr)},
            size_escapes={atom: frames for atom, frames in escapes.items() if isinstance(atom, Dim)},
            training=self.skeleton.module.training,
        )

    # -- torch calls --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return func(*args, **kwargs)
        if func in _SIZE_READS and isinstance(args[0], torch.Tensor):
            return self._size_read(func, args[0], *args[1:], **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._call(torch.unbind, (args[0], 0), {}))
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        versions = _versions((args, kwargs))
        out = func(*_untracked(args), **_untracked(kwargs))
        changed = [tensor for tensor, version in versions if tensor._version != version]
        if not changed and not _has_tensor(out):
            return out
        name = getattr(func, "__name__", "")
        if name == "__get__":  # x.T, x.real, …
            func, args = getattr, (args[0], func.__self__.__name__)
        elif name == "__set__":
            raise CaptureError(
                f"{self._where()} assigns to .{func.__self__.__name__} of a tensor, which can't be recorded."
            )
        elif func is torch.Tensor.__setitem__:
            func, out = setitem, args[0]
        return self._record("call_function", func, args, kwargs, out, changed, sys._getframe(2))[1]

    def _record(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        changed: list[torch.Tensor],
        caller: FrameType,
    ) -> tuple[fx.Node, Any]:
        """Make the node of a call that gave `out` and changed the tensors `changed` in place. Returns it, and `out`, in
        which unchanged operands are replaced by objects of their own."""
        lifted, named = self.lift(args), self.lift(kwargs)
        node = self.graph.create_node(op, target, self._runnable(lifted), self._runnable(named))
        path, code = self.scopes[-1]
        operands = {id(tensor) for tensor, _ in _versions((args, kwargs))} - {
            id(tensor) for tensor in changed
        }
        out = _own_objects(out, operands)
        node.meta.update(
            scope=path,
            site=Site(path, frames_below(caller, _BOUNDARY, code)),
            args=lifted,
            kwargs=named,
            grad_enabled=torch.is_grad_enabled(),
            mutates=self._mutated(changed),
        )
        self._last = node
        self._adopt(out, node)
        return node, out

    def _mutated(self, changed: list[torch.Tensor]) -> tuple[fx.Node, ...]:
        """The nodes whose values an in-place change of `changed` also changes: what shares their storage."""
        found = {
            self._nodes[id(t)]: None
            for c in changed
            for t in self._sharing.get(_storage(c), [c])
            if id(t) in self._nodes
        }
        return tuple(found)

    def _adopt(self, value: Any, node: fx.Node) -> None:
        """From here on `value` (a tensor, or nested tuples and lists of them) is what `node` gives."""
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                self._alive.append(value)
                self._sharing.setdefault(_storage(value), []).append(value)
            self._nodes[id(value)] = node
            node.meta["grad"] = value.requires_grad
            return
        node.meta["grad"] = any(t.requires_grad for t, _ in _versions(value))
        for i, part in enumerate(value if isinstance(value, (tuple, list)) else ()):
            if _has_tensor(part):
                item = self.graph.create_node("call_function", operator.getitem, (node, i))
                inherited = ("scope", "site", "grad_enabled")
                item.meta.update(
                    {key: node.meta[key] for key in inherited}, args=(node, i), kwargs={}, mutates=()
                )
                self._last = item
                self._adopt(part, item)

    # -- modules ------------------------------------------------------------------------------------------------------

    def call_module(
        self,
        path: str,
        leaf: bool,
        code: CodeType | None,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A call of the module at `path`, whose own forward is `forward`."""
        if self.silent:
            return forward(*args, **kwargs)
        if not self.scopes:  # the root
            self.scopes.append((path, code))
            return forward(*args, **kwargs)
        caller = sys._getframe(2)
        self.silent = True  # bookkeeping of our own is no part of the model
        try:
            scope, scope_code = self.scopes[-1]
            site = Site(scope, frames_below(caller, _BOUNDARY, scope_code))
            call = ModuleCall(path, self.lift(args), self.lift(kwargs), None, 0, -1, leaf, None, site)
            self.calls.append(call)
            position = len(self._bounds)
            self._bounds.append((self._last, None))
            if leaf:
                versions = _versions((args, kwargs))
                out = forward(*args, **kwargs)
                changed = [tensor for tensor, version in versions if tensor._version != version]
                call.node, out = self._record("call_module", path, args, kwargs, out, changed, caller)
        finally:
            self.silent = False
        if not leaf:
            self.scopes.append((path, code))
            out = forward(*args, **kwargs)
            self.scopes.pop()
        self._bounds[position] = (self._bounds[position][0], self._last)
        self.silent = True
        try:
            call.output = self._output(out)
        finally:
            self.silent = False
        return out

    # -- values -------------------------------------------------------------------------------------------------------

    def lift(self, value: Any) -> Any:
        """`value` with nodes in place of tensors; tracked numbers stay."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, slice):
            return slice(*(self.lift(part) for part in (value.start, value.stop, value.step)))
        return map_parts(value, self.lift)

    def _output(self, value: Any) -> Any:
        """An output with nodes for tensors; None for what is neither data nor a container."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        mapped = map_parts(value, self._output)
        if mapped is value and not isinstance(
            value, (int, float, complex, str, bytes, bool, torch.dtype, torch.device)
        ):
            return None
        return mapped

    def _runnable(self, value: Any) -> Any:
        """Lifted arguments as the graph runs them: numbers derived from tensor sizes are computed by nodes."""
        if isinstance(value, (TrackedInt, TrackedFloat)):
            return self._computing(value.expr) if dims_of(value.expr) else plain(value)
        if isinstance(value, slice):
            return slice(*(self._runnable(part) for part in (value.start, value.stop, value.step)))
        return map_parts(value, self._runnable)

    def _computing(self, expr: Expr) -> Any:
        if isinstance(expr, Const):
            return expr.value
        if isinstance(expr, Attr):
            return self.skeleton.attributes[expr.module, expr.name]
        if expr in self._computed:
            return self._computed[expr]
        if isinstance(expr, Dim):
            # Read where the tensor was made, not here: an in-place call since may have changed its shape.
            with self.graph.inserting_after(expr.node):
                node = self.graph.call_function(torch.Tensor.size, (expr.node, expr.index))
        else:
            node = self.graph.call_function(
                OPS[expr.op], (self._computing(expr.left), self._computing(expr.right))
            )
            self._last = node
        path = self.scopes[-1][0]
        node.meta.update(
            val=evaluate(expr, self.skeleton.attributes, _size_of), scope=path, site=Site(path, ()), args=node.args,
            kwargs={}, grad=False, grad_enabled=True, mutates=(), expr=expr,
        )  # fmt: skip
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
        if constant is None and isinstance(tensor, fake_tensor.FakeTensor):
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
        node = self.graph.create_node("get_attr", target)
        path = self.scopes[-1][0] if self.scopes else ""
        node.meta.update(scope=path, site=Site(path, ()), args=(), kwargs={}, grad_enabled=True, mutates=())
        if attribute is not None:
            node.meta["attribute"] = attribute
        self._last = node
        self._adopt(tensor, node)
        return node

    def _same_view(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor object that torch made anew for a value that was seen (as autograd functions do)."""
        for other in reversed(self._sharing.get(_storage(tensor), [])):
            if (
                other.shape == tensor.shape
                and other.stride() == tensor.stride()
                and other.dtype == tensor.dtype
            ):
                if other.storage_offset() == tensor.storage_offset():
                    return self._nodes[id(other)]
        raise CaptureError(
            f"{self._where()} uses a tensor of shape {tuple(tensor.shape)} that no recorded call made: it comes from code "
            "torch does not show to a tracer (a TorchScript function, a compiled extension, an autograd function's C++). "
            "Use its plain PyTorch version for the capture."
        )

    def _size_read(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What `func` reads of the tensor's sizes, tracked."""
        value = func(tensor, *_untracked(args), **_untracked(kwargs))
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

    def _where(self) -> str:
        """The module whose forward is running, and the line of the model's code, for error messages."""
        path, code = self.scopes[-1] if self.scopes else ("", None)
        return str(Site(path, frames_below(sys._getframe(1), _BOUNDARY, code)))


def _intercept(recorder: Recorder, path: str, module: nn.Module) -> Callable[..., Any]:
    leaf, code, forward = is_leaf(module), forward_code(module), module.forward

    @functools.wraps(forward)  # its signature is looked at by decorators and callers
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(path, leaf, code, forward, args, kwargs)

    return intercepted


_BOUNDARY = next(constant for constant in _intercept.__code__.co_consts if isinstance(constant, CodeType))


@contextmanager
def _intercepted(recorder: Recorder) -> Iterator[None]:
    """Within it, calls of the skeleton's modules go through `recorder`."""
    modules = dict(recorder.skeleton.module.named_modules())
    before = {path: vars(module).get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        vars(module)["forward"] = _intercept(recorder, path, module)
    try:
        yield
    finally:
        for path, module in modules.items():
            del vars(module)["forward"]
            if before[path] is not None:
                vars(module)["forward"] = before[path]


def _explained(error: Exception, recorder: Recorder) -> CaptureError:
    path = recorder.scopes[-1][0] if recorder.scopes else ""
    site = Site(path, tuple(frames_of(error.__traceback__))[-1:])
    if isinstance(error, _DATA_DEPENDENT):
        return CaptureError(
            f"{site} needs the values of a tensor ({error.func}), and a capture has only shapes and dtypes. Decide there on "
            "shapes or settings, compute it with torch.where or masks, or capture the model in a setting that avoids it."
        )
    return CaptureError(
        f"{site} raised {type(error).__name__} while the model was recorded on fake tensors: {error}. Check that "
        "the model runs on inputs of these shapes; pass others as example inputs."
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size_of(dim: Dim) -> int:
    return int(dim.node.meta["val"].shape[dim.index])


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_tensor(part) for part in value)
    return isinstance(value, torch.Tensor)


def _versions(value: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in nested arguments, each with its version: what an in-place change counts up."""
    if isinstance(value, torch.Tensor):
        return [(value, value._version)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [found for part in parts for found in _versions(part)]


def _untracked(value: Any) -> Any:
    """Arguments with plain numbers: torch's own Python code is no reader of the model's ints."""
    if isinstance(value, (tuple, list)):
        parts = [_untracked(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return parts if isinstance(value, list) else tuple(parts)
    if type(value) is dict:
        return {key: _untracked(part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(_untracked(value.start), _untracked(value.stop), _untracked(value.step))
    return plain(value)


def _own_objects(value: Any, operands: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in operands:
            return value
        with torch.enable_grad():
            return torch.ops.aten.alias.default(value)
    if _has_tensor(value):
        return map_parts(value, lambda part: _own_objects(part, operands))
    return value


def _plain_containers(value: Any) -> Any:
    """An output in the containers that fx knows: tuples, lists, dicts."""
    if isinstance(value, Mapping):
        return {str(key): _plain_containers(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain_containers(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain_containers, value)) if type(value) in (tuple, list) else tuple(value)
    return value


_SIZE_READS = {
    torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.__len__, torch.Tensor.numel, torch.Tensor.nelement,
    torch.numel,
}  # fmt: skip
