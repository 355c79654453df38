"""Random initialisation of shards to the values that the whole model would have had.

The model is built once more on meta, and every operation on its tensors is recorded, with the state of the
random
generator before it. Nothing but the random draws is computed, one at a time, to move the generator on. Then
each tensor
is made alone, from its own operations, and cut: no more than one whole tensor is held. (The idea is
torchdistX's
`deferred_init`, https://github.com/pytorch/torchdistx.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .errors import CheckpointError
from .layouts import take_dim
from .lazy import lazy
from .pretrained import alone
from .save import as_whole
from .tensorfiles import Region
from .weights import default_device, fill_shards


def initialise(
    model: nn.Module,
    build: Callable[[], nn.Module] | None = None,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Fill the meta tensors of a parallelized model with the values of `torch.manual_seed(seed); build()`,
    and return it.

    build: makes the whole model, as on the CPU; None: the model's class called with its config. seed: None
    continues
    from the random state, which must be the same on every rank. device: where the shards go; None as for
    `load`.

    Raises CheckpointError where the values can't be had this way: code that reads values while it builds
    (`.item()`),
    a model of other parameters.
    """
    state: Any = getattr(model, "autotp", None)
    if state is None:
        raise CheckpointError(
            "initialise fills the shards of a model on meta: call autotp.parallelize(model) first."
        )
    if seed is not None:
        torch.manual_seed(seed)
    with as_whole(model):
        recorded = _recorded(build or _builder(model))
    found = {
        name: lazy(tuple(tensor.shape), tensor.dtype, _Deferred(recorded, tensor))
        for name, tensor in (
            *recorded.module.named_parameters(remove_duplicate=False),
            *recorded.module.named_buffers(remove_duplicate=False),
        )
        if isinstance(tensor, _Pending)
    }
    where = torch.device(device) if device is not None else default_device(state.comm)
    with torch.random.fork_rng(devices=()):
        fill_shards(model, found, where, lambda now, total: None, cut=False)
    return model


def _builder(model: Any) -> Callable[[], nn.Module]:
    if getattr(model, "config", None) is None:
        raise CheckpointError(
            f"how {type(model).__name__} is made is not known: give build=, a function that makes it."
        )
    config, dtype = copy.deepcopy(model.config), next(model.parameters()).dtype

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return type(model)(config)
        finally:
            torch.set_default_dtype(before)

    return build


# ---------------------------------------------------------------- recording
@dataclass(frozen=True)
class _View:
    """A meta tensor at one moment: which storage, which part of it, after how many steps."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    steps: int

    def blank(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _Step:
    op: Any
    args: Any
    kwargs: Any
    random: Tensor | None  # the generator's state before it
    makes: int | None  # which of its results made the storage; None where it changed it


@dataclass
class _Recorded:
    """The model as built, and by storage what was done to it."""

    module: nn.Module = field(default_factory=nn.Module)
    steps: dict[int, list[_Step]] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # a freed storage's number would be given to another

    def view(self, tensor: Tensor) -> _View:
        key = tensor.untyped_storage()._cdata
        done = len(self.steps.get(key, ()))
        return _View(key, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, done)

    def values(self, view: _View, made: dict[int, tuple[int, Tensor]]) -> Tensor:
        """The real tensor that `view` stood for. `made`: storages computed so far, and after how many
        steps."""
        steps = self.steps.get(view.storage, [])[: view.steps]
        begin, flat = made.get(view.storage, (0, torch.empty(0)))
        if begin > len(steps):  # it has been changed since: make it anew
            begin, flat = 0, torch.empty(0)
        for number in range(begin, len(steps)):
            step = steps[number]
            own = {**made, view.storage: (number, flat)} if number else dict(made)
            if step.random is not None:
                torch.set_rng_state(step.random)
            out = step.op(*self._real(step.args, own), **self._real(step.kwargs, own))
            if step.makes is not None:
                results = out if isinstance(out, (tuple, list)) else [out]
                flat = results[step.makes]
                flat = flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
            made[view.storage] = (number + 1, flat)
        if not steps:
            raise CheckpointError(
                "a tensor that no operation made can't be initialised: give build= all that makes it."
            )
        return flat.view(view.dtype).as_strided(view.shape, view.stride, view.offset)

    def _real(self, arguments: Any, made: dict[int, tuple[int, Tensor]]) -> Any:
        return tree_map(lambda x: self.values(x, made) if isinstance(x, _View) else x, arguments)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do `func` on the shapes, and note it down; where it gives no tensor, on the values."""
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, _Pending)]
        views = tree_map(self._kept, (args, kwargs))
        if any(isinstance(r.type, (torch.NumberType, torch.BoolType)) for r in func._schema.returns):
            before = torch.get_rng_state()
            real = self._real(views, {})
            torch.set_rng_state(before)
            return func(*real[0], **real[1])
        random = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        if random is not None:  # the generator moves on as for the real values: those do not matter for that
            blank = tree_map(lambda x: x.blank() if isinstance(x, _View) else x, views)
            func(*blank[0], **blank[1])
        shells = tree_map(lambda x: x.shell if isinstance(x, _Pending) else _on_meta(x), (args, kwargs))
        if not given:
            shells[1]["device"] = torch.device("meta")
        out = func(*shells[0], **shells[1])
        if any(x.shape != x.shell.shape or x.stride() != x.shell.stride() for x in given):
            raise CheckpointError(
                f"{func} changes the shape of a tensor in place, which can't be followed. Build it whole "
                "on every rank with the same seed, then parallelize it."
            )
        if func._schema.is_mutable:
            key = given[0].shell.untyped_storage()._cdata
            self.steps.setdefault(key, []).append(_Step(func, views[0], views[1], random, None))
            return args[0]
        known = {x.shell.untyped_storage()._cdata for x in given}
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        for index, result in enumerate(results):
            key = result.untyped_storage()._cdata
            self.alive.append(result)
            if key not in known:
                self.steps[key] = [_Step(func, views[0], views[1], random, index)]
        wrapped = [_Pending(result, self) for result in results]
        return type(out)(wrapped) if isinstance(out, (tuple, list)) else wrapped[0]

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _Pending):
            return self.view(value.shell)
        return value.detach().clone() if isinstance(value, Tensor) else value


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value


class _Pending(Tensor):
    """A CPU tensor to all who look at it, with a meta tensor inside: its values can be worked out from the
    record."""

    shell: Tensor
    recorded: _Recorded

    @staticmethod
    def __new__(cls, shell: Tensor, recorded: _Recorded) -> _Pending:
        made = Tensor._make_wrapper_subclass(
            cls,
            shell.shape,
            strides=shell.stride(),
            storage_offset=shell.storage_offset(),
            dtype=shell.dtype,
            device=torch.device("cpu"),
        )
        made.shell, made.recorded = shell, recorded
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"_Pending({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        pending = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, _Pending))
        return pending.recorded.run(func, args, kwargs or {})


class _Recorder(TorchDispatchMode):
    """Makes every tensor that is created while a model is built a pending one."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = _Recorded()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        creates = not tensors and "device" in {a.name for a in func._schema.arguments}
        if creates or any(isinstance(x, _Pending) for x in tensors):
            return self.recorded.run(func, args, kwargs)
        return func(*args, **kwargs)


def _recorded(build: Callable[[], nn.Module]) -> _Recorded:
    recorder = _Recorder()
    with alone(), recorder:
        recorder.recorded.module = build()
    return recorder.recorded


@dataclass(frozen=True)
class _Deferred:
    """The value of one tensor of the recorded model."""

    recorded: _Recorded
    tensor: _Pending

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def fill(self, dest: Tensor, region: Region) -> None:
        with torch.no_grad():
            part = self.recorded.values(self.recorded.view(self.tensor.shell), {})
            for dim, ranges in enumerate(region):
                part = take_dim(part, dim, ranges)
            dest.copy_(part)
