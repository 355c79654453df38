"""Parameters that come to a model after it was split, or are put in place of its own.

The plan says what the gradient of each parameter needs. Of one that it does not know nobody would sum the
ranks' shares: it would be trained wrong, and on each rank otherwise. So a training forward looks whether the
model is still the one that was split.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from .errors import ShardStateError
from .pipeline.absent import Absent


class Watchman:
    """A forward pre-hook, on `model` and on the part of it with most parameters: what is wrapped around a
    model (peft's) calls its `forward`, past the hooks of the model itself.

    known: the names of every module's own parameters, when the model was split. seen: the submodules and
    parameters there were at the last look. A forward compares these (0.1 ms for a thousand modules).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module | None = model
        self.known = {module: frozenset(module._parameters) for module in model.modules()}
        self.dicts: list[Any] = []
        self.seen: list[Any] = []

    @classmethod
    def install(cls, model: nn.Module) -> None:
        watchman = cls(model)
        model.register_forward_pre_hook(watchman)
        part = max(_called(model), key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
        if part is not None:
            part.register_forward_pre_hook(watchman)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.model is None:
            return
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise ShardStateError(
                "torch.func's transforms (grad, vmap, jvp) and forward-mode AD don't go over ranks: what "
                "they give of a split model would be a rank's share. Use backward(), on every rank."
            )
        if not torch.is_grad_enabled():
            return
        now = list(chain.from_iterable(self.dicts))
        if not now or len(now) != len(self.seen) or not all(map(is_, now, self.seen)):
            with torch._C.DisableTorchFunction():  # a model being recorded does not see this
                self.look(self.model)

    def look(self, model: nn.Module) -> None:
        """Raise ShardStateError for parameters that the plan does not know. Those that were put in place of
        known ones (loaded ones, a deep copy's) get the gradients' hooks that they lack."""
        there = dict(model.named_modules())
        planned = {id(module._parameters.get(own)) for module, names in self.known.items() for own in names}
        late = []
        for path, module in there.items():
            for own, param in module._parameters.items():
                name = f"{path}.{own}".lstrip(".")
                if param is None:
                    continue
                if own not in self.known.get(module, ()) and id(param) not in planned:
                    late.append(name)
                elif not isinstance(param, (nn.Parameter, Absent)):
                    raise ShardStateError(
                        f"{name} is no Parameter in this call, but a tensor that was put in its place (by "
                        "torch.func.functional_call?): nobody would sum its gradient over the ranks. Call "
                        "the split model itself; torch.func's transforms don't go over ranks."
                    )
        if late:
            raise ShardStateError(_late(type(model).__name__, late))
        state: Any = model.autotp
        state.watch()
        # FSDP2 puts other parameters in their places by itself, and has no hooks to lose.
        cut = state.copies is not None and state.copies.cuts
        self.dicts = [module._modules.values() for module in there.values()]
        self.dicts += [m._parameters if cut else m._parameters.values() for m in there.values()]
        self.seen = list(chain.from_iterable(self.dicts))

    def __deepcopy__(self, memo: dict[int, Any]) -> Watchman:
        """Of a copy of the model, which needs a look. A part that is copied alone has none of it to watch."""
        twin = memo[id(self)] = Watchman.__new__(Watchman)
        twin.model = memo.get(id(self.model))
        twin.known = {} if twin.model is None else copy.deepcopy(self.known, memo)
        twin.dicts, twin.seen = [], []
        return twin


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The next modules inside `module` that are called: what a list of modules holds is, not the list."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        else:
            yield child


def _late(model: str, names: list[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"{listed}: not in this {model} when it was split. The plan does not know what their gradients need, "
        "and nobody would sum the ranks' shares of them. Add adapters (LoRA, and the like) before "
        "autotp.parallelize, which then plans them too; what works on the model's output can stay outside "
        "of it."
    )
