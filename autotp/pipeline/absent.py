"""Tensors whose values another stage has.

What a stage doesn't compute it still passes around: the model's own Python runs on every rank. An `Absent`
has the shape, dtype and device of the value that isn't here. Operations on it give Absents, whose shapes are
computed on the meta device; reading a value is an error that names the unit which has it. So a wrong value
can't come to be: there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, ShapeComm, T
from ..errors import AbsentError


@dataclass
class Home:
    """Where this rank's tensors lie: what Absents report as their device. stages: those this rank runs."""

    device: torch.device
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """Where a missing value is to be had. unit: the module path of the unit that made it."""

    unit: str
    stage: int
    home: Home

    def __str__(self) -> str:
        own = ", ".join(map(str, self.home.stages))
        return f"made by {self.unit or 'the model'} on stage {self.stage}; this rank has stage {own}"


class Absent(Tensor):
    """A tensor without values. Make it with `absent(meta, origin)`."""

    origin: Origin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _property(func, args[0])
        given = kwargs or {}
        if name in READS:
            raise _unknown(_origin(args, given), f"its value is read ({name.strip('_')})")
        if name in FACTORIES:
            if any(isinstance(value, Absent) for value in (*args[1:], *given.values())):
                raise _unknown(_origin(args, given), f"its value is put into a new tensor ({name})")
            return func(*map(_stand_in, args), **given)
        return _on_meta(func, name, args, given)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({list(self.shape)}, {self.dtype}, {self.origin})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        with torch._C.DisableTorchFunctionSubclass():
            twin = absent(self.detach(), self.origin, self.requires_grad)
        vars(twin).update(vars(self))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unknown(self.origin, "it is pickled: save with autotp.save or autotp.full_state_dict")


def absent(meta: Tensor, origin: Origin, requires_grad: bool = False) -> Absent:
    """`meta`, a tensor on the meta device, as one whose values are elsewhere."""
    made = Tensor._make_subclass(Absent, meta, requires_grad)
    made.origin = origin
    return made


def absent_like(tensor: Tensor, origin: Origin) -> Absent:
    """A parameter or tensor of this rank, without its values (and without their memory)."""
    made = absent(on_meta(tensor), origin, tensor.requires_grad)
    vars(made).update(vars(tensor))
    if isinstance(tensor, torch.nn.Parameter):
        made._is_param = True  # what isinstance(_, nn.Parameter) asks
    return made


def is_missing(value: Any) -> bool:
    """Whether a value is a tensor that this rank does not have."""
    return isinstance(value, Tensor) and (isinstance(value, Absent) or value.is_meta)


def on_meta(tensor: Tensor) -> Tensor:
    """The shape, strides and dtype of a tensor, on the meta device. It counts its changes in place, also
    under inference mode."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


READS = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ item tolist numpy equal "
    "allclose is_nonzero nonzero nonzero_static argwhere unique unique_consecutive masked_select histc "
    "bincount __dlpack__ data_ptr".split()
)
"""Functions that give values, or shapes that depend on values."""

FACTORIES = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full "
    "new_empty new_tensor new_empty_strided".split()
)
"""Functions that take the form of a tensor only: what they give is known everywhere."""

_OWN = {"is_meta": False, "grad": None, "grad_fn": None, "is_leaf": True}
MOVES = frozenset("to cpu cuda type pin_memory".split())
"""Functions that give a tensor on another device."""



def is_device(value: Any) -> bool:
    """Whether an argument of one of MOVES says where to."""
    if isinstance(value, str):
        return value.split(":")[0] in ("cpu", "cuda", "meta")
    return isinstance(value, torch.device)


def _property(func: Any, tensor: Absent) -> Any:
    """A property of an Absent."""
    name = getattr(func.__self__, "__name__", "")
    if name == "device":
        return tensor.origin.home.device
    if name in _OWN:
        return _OWN[name]
    if name in ("is_cuda", "is_cpu"):
        return tensor.origin.home.device.type == name[3:]
    with torch._C.DisableTorchFunctionSubclass():
        value = func(tensor)
    return absent(value, tensor.origin) if isinstance(value, Tensor) else value


def _on_meta(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` for its shapes."""
    known: list[tuple[Tensor, Tensor, int]] = []
    moves = name in MOVES

    def hollow(value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, Absent) or value.is_meta:
                return value
            meta = on_meta(value)
            known.append((value, meta, meta._version))
            return meta
        if isinstance(value, torch.device) or moves and is_device(value):
            return _META
        if isinstance(value, (list, tuple)):
            parts = [hollow(part) for part in value]
            return parts if isinstance(value, list) else _tuple_like(value, parts)
        return value

    origin = _origin(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        masks = name == "__getitem__"
        hollowed = tuple(known_beside(a, hollow, masks) if i else hollow(a) for i, a in enumerate(args))
        device = _META if kwargs.get("device") is not None else None
        named = {k: device if k == "device" else known_beside(v, hollow, masks) for k, v in kwargs.items()}
        if name in ("cpu", "cuda", "pin_memory"):
            return hollowed[0]
        try:
            result = func(*hollowed, **named)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                raise _unknown(origin, f"{name} needs its values") from error
            raise
        for _, meta, version in known:
            if meta._version != version:
                raise _unknown(origin, f"{name} would write it into a tensor whose values this rank has")
        return _wrapped(result, origin)


def known_beside(value: Any, hollow: Callable[[Any], Any], masks: bool) -> Any:
    """An argument beside a tensor without values, of which shapes may follow: numbers in tensors stay what
    they are, where this rank knows them, and (masks) so do masks that pick rows. Else `hollow(value)`."""
    if isinstance(value, (tuple, list)):
        return type(value)(known_beside(part, hollow, masks) for part in value)
    if isinstance(value, Tensor) and not is_missing(value):
        if (masks and value.dtype in MASKS) or not (value.dim() or value.is_floating_point()):
            return value.cpu()
    return hollow(value)


MASKS = (torch.bool, torch.uint8)
_META = torch.device("meta")


def _tuple_like(value: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _wrapped(result: Any, origin: Origin) -> Any:
    if isinstance(result, Tensor):
        return result if isinstance(result, Absent) else absent(result, origin)
    if isinstance(result, list):
        return [_wrapped(part, origin) for part in result]
    if isinstance(result, tuple) and any(isinstance(part, (Tensor, tuple, list)) for part in result):
        parts = [_wrapped(part, origin) for part in result]
        # torch's named results (`torch.return_types.topk`) are made from one sequence
        return type(result)(parts) if type(result) is not tuple else tuple(parts)
    return result


def _stand_in(value: Any) -> Any:
    """A real tensor of an Absent's form that takes one element's memory."""
    if isinstance(value, Absent):
        device = value.origin.home.device
        return torch.zeros((), dtype=value.dtype, device=device).expand(tuple(value.shape))
    return value


def _origin(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin:
    """The latest origin of the Absents in the arguments: what has been computed last has what is derived."""
    found: Origin | None = None
    todo = [*args, *kwargs.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, Absent):
            if found is None or value.origin.stage > found.stage:
                found = value.origin
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
    assert found is not None
    return found


def _unknown(origin: Origin, what: str) -> AbsentError:
    return AbsentError(
        f"a value that this rank does not have is needed: {what}. It was {origin}. Code between the units "
        "of a pipeline can only read values that are sent to every stage: cut the model elsewhere "
        "(`stages=`), or compute this inside of the unit."
    )


class QuietComm(Comm):
    """A communicator that does not talk about values nobody has: for Absents and meta tensors it gives
    shapes. Every rank of it must miss the same values (tensor-parallel peers of one stage do)."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._shapes = ShapeComm(comm.rank, comm.size)

    def _for(self, x: Tensor) -> Comm:
        return self._shapes if is_missing(x) else self.comm

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return self._for(x).all_reduce(x, op)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return self._for(x).all_gather(x, dim, sizes)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return self._for(x).reduce_scatter(x, dim, sizes)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._for(x).broadcast(x, src)

    def exchange(self, obj: T) -> list[T]:
        return self.comm.exchange(obj)


__all__ = ["Absent", "Home", "Origin", "QuietComm", "absent", "absent_like", "is_missing",
           "on_meta"]
