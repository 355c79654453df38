"""Records torch calls and module calls into an fx graph while a model runs.

A `TorchFunctionMode` sees each torch call of the model's code; the calls it makes inside are not seen, since
the mode is off while it runs. How a value finds its node: `lifting.py`. A call that changed nothing and gives
back an operand (`x.contiguous()`) is given an object of its own, so that the two values stay apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from .assumed import (
    READERS,
    Answers,
    Assumptions,
    NotKnown,
    chosen,
    numbers_for_tensors,
    passed_by,
    picks_rows,
)
from .captured import CapturedGraph, FunctionCall, ModuleCall, setitem
from .errors import CaptureError
from .ints import Attr, Dim
from .known import Values
from .lifting import BOUNDARY, SIZE_READS, Lifter
from .nested import (
    fields_of,
    has_tensor,
    map_tensors,
    own_objects,
    plain_containers,
    unseen_parts,
    untracked,
    versions,
)
from .sites import Frame, Site, autograd_function_frame, frames_below, is_internal
from .skeleton import Skeleton


class Recorder(Lifter):
    """While active, records torch calls into `graph` and calls of the skeleton's modules into `calls`."""

    def __init__(self, skeleton: Skeleton, answers: Answers | None = None) -> None:
        super().__init__(skeleton)
        self.calls: list[ModuleCall] = []
        self.values = Values(self.graph, self.constants)
        self.assumptions = Assumptions(self.values, skeleton.log, answers or {})
        # Per call: the last node before it, the last inside.
        self._bounds: list[tuple[fx.Node | None, fx.Node | None]] = []
        self._functions: dict[FrameType, FunctionCall] = {}

    def placeholder(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """An input called `name`, and what was `given` for it."""
        node = self._last = self.graph.placeholder(name)
        node.meta.update(scope="", site=Site("", ()), args=(), kwargs={}, grad_enabled=True, mutates=())
        self._adopt(tensor, node)
        self.values.give(node, given)

    def finish(self, inputs: dict[str, Any], output: Any) -> CapturedGraph:
        """What was recorded. inputs: as the user gave them; output: what the skeleton gave."""
        self.assumptions.check()
        result = self._output(output)
        self._refuse_hidden(output)
        self.graph.output(plain_containers(result))
        index = {node: i for i, node in enumerate(self.graph.nodes)}
        for call, (before, last) in zip(self.calls, self._bounds, strict=True):
            call.first = 0 if before is None else index[before] + 1
            call.last = -1 if last is None else index[last]
        self._functions.clear()  # frames hold all that was local to them
        escapes = self.skeleton.log.frames
        attributes: dict[Attr, list[Frame]] = {
            a: frames for a, frames in escapes.items() if isinstance(a, Attr)
        }
        return CapturedGraph(
            graph=self.graph,
            skeleton=self.skeleton.module,
            inputs=inputs,
            calls=self.calls,
            output=result,
            constants=self.constants,
            attributes=self.skeleton.attributes,
            escapes=attributes,
            size_escapes={d: frames for d, frames in escapes.items() if isinstance(d, Dim)},
            comparisons=dict(self.skeleton.log.comparisons),
            training=self.skeleton.module.training,
            assumed=self.assumptions.made,
            asked=dict(self.skeleton.log.asked),
        )

    def _refuse_hidden(self, value: Any) -> None:
        """Refuse an output with tensors in an object that can't be looked into, as they could be a rank's
        part; a cache, which the model gave to its modules, is the model's own."""
        if isinstance(value, (torch.Tensor, nn.Module)) or id(value) in self._handed:
            return
        parts = list(value.values()) if isinstance(value, Mapping) else [*fields_of(value).values()]
        for part in value if isinstance(value, (tuple, list)) else parts:
            self._refuse_hidden(part)
        hidden: list[torch.Tensor] = []
        if not parts and not isinstance(value, (tuple, list)):
            map_tensors(unseen_parts(value), lambda t: hidden.append(t) or t)  # type: ignore[func-returns-value]
        if isinstance(value, Iterator) or any(id(tensor) in self._nodes for tensor in hidden):
            kind = type(value)
            raise CaptureError(
                f"the model returns an object of {kind.__module__}.{kind.__qualname__}, and autotp doesn't "
                "look for tensors in those: on a rank they could be parts. Return a dict, a tuple, a "
                "dataclass, or an object of a class that has attributes only and no methods."
            )

    # --- torch calls ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent or _in_fake_mode():
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None and self._is_batched((args, kwargs)):
            return self._under_vmap(func, args, kwargs)
        if func in SIZE_READS and isinstance(args[0], torch.Tensor):
            return self._size_read(func, args[0], *args[1:], **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._call(torch.unbind, (args[0], 0), {}, sys._getframe(1)))
        return self._call(func, args, kwargs, sys._getframe(1))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        if func is torch.tensor and isinstance(args[0], (list, tuple)) and _holds_tensor(args[0]):
            return self._stacked(args[0], kwargs.get("dtype"), caller)
        before = versions((args, kwargs))
        told: dict[str, Any] | None = None  # in the node's meta, of what hangs on values
        try:
            out = func(*untracked(args), **untracked(kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            passing = passed_by(func, args, caller)
            if passing is not None:
                return passing
            asked = (self._runnable(self._lift(args)), self._runnable(self._lift(kwargs)))
            site = Site(self.scopes[-1][0], frames_below(caller, BOUNDARY, self.scopes[-1][1]))
            out = chosen(func, untracked(args))
            if out is None and picks_rows(func, asked[0]):
                out, told = self.assumptions.rows(func, untracked(args), untracked(kwargs), asked, site)
            elif out is None and isinstance(error, DynamicOutputShapeException):
                out, told = self.assumptions.sized(func, asked, site), {}
            if out is None:
                return self._read(error, func, args, kwargs, asked, site, caller)
        changed = [tensor for tensor, version in before if tensor._version != version]
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__.__name__ not in ("requires_grad", "grad"):
            attribute = func.__self__.__name__
            raise CaptureError(
                f"{self._where()} assigns to .{attribute} of a tensor, which can't be recorded. Use an "
                "in-place operation (copy_) or a new tensor."
            )
        self._note_backward(func, name, args, out, caller)
        if not changed and not has_tensor(out):
            return out
        if name.endswith("_") and not name.endswith("__") and args and not changed:
            changed = [args[0]]  # requires_grad_, detach_: what is changed is not the data
        if name == "__get__":  # x.T, x.real, …
            func, args = getattr, (args[0], func.__self__.__name__)
        elif func is torch.Tensor.__setitem__:
            func, out = setitem, args[0]
        node, out = self._record("call_function", func, args, kwargs, out, changed, caller)
        if told is not None:
            node.meta.update(told)
            self.assumptions.at(node)
        return out

    def _stacked(self, parts: Any, dtype: torch.dtype | None, caller: FrameType) -> Any:
        """`torch.tensor` of numbers in tensors, which would read them: they are put together instead."""
        made = [
            part
            if isinstance(part, torch.Tensor)
            else self._stacked(part, None, caller)
            if isinstance(part, (list, tuple))
            else self._call(torch.tensor, (part,), {}, caller)
            for part in parts
        ]
        stacked = self._call(torch.Tensor.detach, (self._call(torch.stack, (made,), {}, caller),), {}, caller)
        return stacked if dtype is None else self._call(torch.Tensor.to, (stacked, dtype), {}, caller)

    def _note_backward(self, func: Any, name: str, args: Any, out: Any, caller: FrameType) -> None:
        """Mark the values whose gradients the model's code looks at or changes, which no graph shows, and
        those that it differentiates."""
        reads = name == "__get__" and func.__self__.__name__ == "grad_fn" and out is not None
        if name == "register_hook" or (reads and not is_internal(caller.f_code)):
            mark, tensors = "gradient_hook", versions(args[:1])
        elif func is torch.autograd.grad or name == "backward":
            mark, tensors = "differentiated", versions(args[:1])
        else:
            return
        for tensor, _ in tensors:
            if id(tensor) in self._nodes:
                self._nodes[id(tensor)].meta[mark] = True

    def note_kept(self, how: str, name: str, tensor: torch.Tensor) -> None:
        """`tensor`, made in the run, has become the buffer (`kept_as`) or attribute (`set_as`) `name`."""
        if id(tensor) in self._nodes:
            self._nodes[id(tensor)].meta[how] = name

    def _read(
        self,
        error: Exception,
        func: Any,
        args: Any,
        kwargs: Any,
        asked: Any,
        site: Site,
        caller: FrameType,
    ) -> Any:
        """What `func` reads of tensors' values, or gives when such values are its numbers (`x[:n]`)."""
        try:
            if func in READERS:
                return self._told(func, asked, site)

            def number(tensor: torch.Tensor) -> Any:
                return self._told(torch.Tensor.item, (self._runnable(self._lift((tensor,))), {}), site)

            changed = numbers_for_tensors(func, args, kwargs, number)
            if changed is None:
                return self._told(func, asked, site)
            return self._call(func, changed[0], changed[1], caller)
        except NotKnown:
            raise error from None

    def _told(self, func: Any, asked: tuple[Any, Any], site: Site) -> Any:
        before = len(self.assumptions.made)
        result, given = self.assumptions.read(func, asked, site)
        if len(self.assumptions.made) > before:
            # A node without a place in the code: nothing can be put there.
            node = self._last = self.graph.create_node("call_function", func, *asked)
            node.meta.update(val=result, scope=site.module, site=None, args=asked[0], kwargs=asked[1])
            node.meta.update(grad=False, grad_enabled=True, mutates=(), reads=True)
            self.assumptions.at(node)
        return given

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
        """Make the node of a call that gave `out` and changed the tensors `changed` in place. Returns it, and
        `out`, in which unchanged operands are replaced by objects of their own."""
        lifted, named = self._lift(args), self._lift(kwargs)
        node = self.graph.create_node(op, target, self._runnable(lifted), self._runnable(named))
        self._last = node
        path, code = self.scopes[-1]
        operands = {id(tensor) for tensor, _ in versions((args, kwargs))} - {id(tensor) for tensor in changed}
        out = own_objects(out, operands)
        node.meta.update(
            scope=path,
            # What torch's own Python calls to list a tensor's numbers has no place in the model's code.
            site=None if caller.f_code is _LISTING else Site(path, frames_below(caller, BOUNDARY, code)),
            args=lifted,
            kwargs=named,
            grad_enabled=torch.is_grad_enabled(),
            mutates=self._looking_at(changed),
        )
        if changed:
            self.values.writers.append(node)
        if not torch.is_grad_enabled():
            self._note_function(node, autograd_function_frame(caller, BOUNDARY))
        self._adopt(out, node)
        return node, out

    def _note_function(self, node: fx.Node, frame: FrameType | None) -> None:
        """Add `node` to the call of an autograd function that `frame` runs, if it runs one."""
        if frame is None:
            return
        if frame not in self._functions:
            given = frame.f_locals
            args = self._runnable(self._lift(given["args"]))
            self._functions[frame] = FunctionCall(given["cls"], args, [])
        self._functions[frame].nodes.append(node)
        node.meta["custom_grad"] = self._functions[frame]

    # --- module calls ---

    def call_module(
        self,
        path: str,
        leaf: bool,
        code: CodeType | None,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of the module at `path`, whose own forward is `forward`."""
        if self.silent:
            return forward(*args, **kwargs)
        caller = sys._getframe(2)
        position = len(self.calls)
        root = not self.scopes
        if not root or leaf:
            self.scopes = self.scopes or [("", code)]
            scope, scope_code = self.scopes[-1]
            site = Site(scope, frames_below(caller, BOUNDARY, scope_code))
            call = ModuleCall(path, self._lift(args), self._lift(kwargs), None, 0, -1, leaf, None, site)
            self.calls.append(call)
            self._bounds.append((self._last, None))
        if leaf:
            self.silent = True
            try:
                before = versions((args, kwargs))
                out = forward(*args, **kwargs)
                changed = [tensor for tensor, version in before if tensor._version != version]
                call.node, out = self._record("call_module", path, args, kwargs, out, changed, caller)
            finally:
                self.silent = False
        else:
            self.scopes.append((path, code))
            out = forward(*args, **kwargs)
            if root:  # its scope stays open for what is read off its output
                return out
            self.scopes.pop()
        self._bounds[position] = (self._bounds[position][0], self._last)
        call.output = self._output(out)
        return out


def _in_fake_mode() -> bool:
    """Whether fake tensors are at work on a call: what they call for it is none of the model's.

    An autograd function that saves a tensor gets there without a torch call; what is called hangs on their
    cache. If torch's private name changes, such calls are recorded: an operation more, in one capture of two.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


_LISTING = FakeTensor.tolist.__code__


def _holds_tensor(value: Any) -> bool:
    """Whether a tensor is among nested lists of numbers."""
    parts = value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(map(_holds_tensor, parts))
