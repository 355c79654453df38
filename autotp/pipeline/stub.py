"""A unit of another stage: it takes and gives what the unit does, and computes nothing.

The unit's own forward runs on meta tensors. So the shapes are right for any model, and a cache that it
updates grows by entries without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..assumed import picked_rows
from ..errors import AbsentError, AutotpError
from ..nested import map_parts, map_tensors, tensors_in
from ..sites import frames_of
from .absent import MASKS, MOVES, Absent, Origin, absent, is_device, known_beside, on_meta


class Hollow(TorchFunctionMode):
    """Operations inside of a stub: what meets a meta tensor becomes one.

    Integers and masks that the rank knows stay real, even where the model moves them to the device of what it
    does not know (a static cache's length is moved to the device of the keys): code here or outside reads
    them.
    forms: what is known of operations' results, kept from run to run: shape functions of the meta device are
    Python and take longer than a small layer's products on real tensors.

    Rows that a mask without values picks: there are none (a loop over the experts that were hit does not
    run). unsure: the tensors made of them, whose sizes are not those of the unit on its own stage.
    """

    def __init__(self, forms: Forms) -> None:
        super().__init__()
        self.forms = forms
        self.unsure: WeakIdKeyDictionary | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PICKING and _picks(name, args):
                self.unsure = self.unsure or WeakIdKeyDictionary()
                count = len(args[1]) if name == "__getitem__" and isinstance(args[1], tuple) else 1
                rows = picked_rows(func, args, given, [0] * count)
                return self._note(map_tensors(rows, _as_meta), ())
            result = self._run(func, name, args, given)
            if self.unsure:
                operands = list(_tensors((*args, *given.values())))
                if any(x in self.unsure for x in operands):
                    if name == "__iter__":
                        return iter(self._note(list(result), operands))
                    self._note(result, operands)
            return result

    def _note(self, result: Any, operands: Sequence[Tensor]) -> Any:
        """The sizes of the new tensors in `result` hang on values. One changed in place keeps its own."""
        for tensor in _tensors((result,)):
            if not any(tensor is x for x in operands):
                self.unsure[tensor] = True  # type: ignore[index]
        return result

    def _run(self, func: Any, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        if name == "__get__":
            return func(*args)
        if name in MOVES and isinstance(args[0], Tensor) and args[0].is_meta:
            if name in ("cpu", "cuda", "pin_memory"):
                return args[0]
            args = [_to_meta(a) for a in args]
            given = {k: _to_meta(v) for k, v in given.items()}
        known = self.forms.known(func, args, given)
        if known is not None:
            return known
        meta, real = _kinds((*args, *given.values()))
        if not real:
            return self.forms.found(func, args, given)
        if meta:
            return _converted(func, name, args, given)
        if name == "to" and not args[0].is_floating_point():
            if any(_is_meta_device(a) for a in (*args[1:], *given.values())):
                return args[0]
        return func(*args, **given)


class Forms:
    """Shapes, strides and dtypes of the results of operations, by those of their operands.

    Only of operations that give one new tensor: not a view, not an operand, none changed in place. Their
    results follow from the key; on meta tensors there is nothing else that they could follow from, but for
    autocast, under which nothing is looked up.
    """

    MOST = 1024  # entries: a cache's operations have other shapes for each token

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._never: set[Any] = set()  # functions that give anything else
        self._key: Any = None  # of the call that `known` was asked for

    def known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What `func` gives, where that is known."""
        self._key = None
        if func in self._never or torch._C._is_any_autocast_enabled():
            return None
        parts: list[Any] = [func]
        if not _describe(args, parts) or kwargs and not _describe((*kwargs, *kwargs.values()), parts):
            return None
        self._key = key = (torch.get_default_dtype(), *parts)
        form = self._known.get(key)
        return None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")

    def found(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func`, whose tensors are all on meta, and whose result is not known."""
        key, self._key = self._key, None
        if key is None:
            return func(*args, **kwargs)
        quick = _QUICK.get(func)
        form = quick(*args, **kwargs) if quick is not None else None
        if form is not None:
            return form
        operands = list(_tensors((*args, *kwargs.values())))
        versions = [_changes(x) for x in operands]
        result = func(*args, **kwargs)
        if (
            not operands
            or not isinstance(result, Tensor)
            or not result.is_meta
            or result._is_view()
            or any(result is x for x in operands)
            or versions != [_changes(x) for x in operands]
        ):
            self._never.add(func)
            return result
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[key] = result.shape, result.stride(), result.dtype
        return result


_PICKING = frozenset(("__getitem__", "nonzero", "argwhere", "masked_select", "where"))


def _picks(name: str, args: Sequence[Any]) -> bool:
    """Whether a call picks rows by a mask whose values are not here."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, Tensor) and i.is_meta and i.dtype in MASKS for i in index)
    if name == "where" and len(args) > 1:
        return False
    return any(isinstance(x, Tensor) and x.is_meta for x in args[-1:])


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else on_meta(tensor)


def _joined(tensors: Any, dim: Any = 0, **other: Any) -> Tensor | None:
    """What torch.cat gives, in the plain case: a cache's keys have another length for each token."""
    first = tensors[0] if tensors else None
    if first is None or not isinstance(dim, int) or other or not -first.dim() <= dim < first.dim():
        return None
    dim %= first.dim()
    rest = (*first.shape[:dim], *first.shape[dim + 1 :])
    for x in tensors:
        if x.dtype != first.dtype or x.dim() != first.dim() or not x.is_contiguous():
            return None
        if (*x.shape[:dim], *x.shape[dim + 1 :]) != rest:
            return None
    shape = (*first.shape[:dim], sum(x.shape[dim] for x in tensors), *first.shape[dim + 1 :])
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _attended(q: Any, k: Any, v: Any, *_: Any, **other: Any) -> Tensor | None:
    """What attention gives, in the plain case."""
    if q.dim() != 4 or k.dim() != 4 or q.dtype != v.dtype or not q.shape[0] == k.shape[0] == v.shape[0]:
        return None
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        return None
    if q.shape[1] != k.shape[1] and not (other.get("enable_gqa") and q.shape[1] % k.shape[1] == 0):
        return None
    return torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="meta")


def _grouped(rows: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """What rows times the matrix of their group give: the shape function knows of bfloat16 alone."""
    if rows.dim() != 2 or weights.dim() != 3 or rows.shape[1] != weights.shape[1]:
        return None
    dtype = out_dtype or rows.dtype
    return torch.empty(rows.shape[0], weights.shape[2], dtype=dtype, device="meta")


_QUICK: dict[Any, Callable[..., Tensor | None]] = {
    torch.cat: _joined,
    torch.nn.functional.scaled_dot_product_attention: _attended,
    getattr(torch, "_grouped_mm", None): _grouped,
}
"""Forms by rule, of what would be another one for each token: their shape functions are slow."""


def _changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def _describe(values: Sequence[Any], parts: list[Any]) -> bool:
    """Add to `parts` all that a result's form can follow from; False where there is something else."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            parts += (kind, value)
        elif isinstance(value, Tensor):
            if not value.is_meta:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif kind is tuple or kind is list or kind is torch.Size:
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        else:
            return False
    return True


_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _kinds(values: Sequence[Any]) -> tuple[bool, bool]:
    """Whether there are meta tensors in the arguments of a call, and real ones."""
    meta = real = False
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                meta = True
            else:
                real = True
        elif isinstance(value, (list, tuple)):
            inner = _kinds(value)
            meta, real = meta or inner[0], real or inner[1]
    return meta, real


def _is_meta_device(value: Any) -> bool:
    return isinstance(value, (torch.device, str)) and str(value) == "meta"


def _to_meta(value: Any) -> Any:
    """The argument of a move, so that what has no values stays where it is."""
    return torch.device("meta") if is_device(value) else value


def _converted(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call that mixes meta tensors and real ones on meta tensors."""
    made: list[tuple[Tensor, int]] = []

    def hollow(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta:
            meta = on_meta(value)
            made.append((meta, meta._version))
            return meta
        return map_parts(value, hollow) if isinstance(value, (list, tuple)) else value

    masks = name == "__getitem__"
    hollowed = [known_beside(a, hollow, masks) if i else hollow(a) for i, a in enumerate(args)]
    named = {k: known_beside(v, hollow, masks) for k, v in kwargs.items()}
    quick = _QUICK.get(func)
    form = quick(*hollowed, **named) if quick is not None else None
    if form is not None:  # a new tensor, and no operand is changed
        return form
    result = func(*hollowed, **named)
    if any(meta._version != version for meta, version in made):
        raise AbsentError(f"{name} would write a missing value into a tensor whose values this rank has")
    return result


class Stub:
    """The forward of a unit that this rank does not own. path: of its module. forward: the unit's own.
    forms: alike layers share them."""

    def __init__(self, path: str, forward: Callable[..., Any], forms: Forms | None = None) -> None:
        self.path, self.forward = path, forward
        self.forms = forms if forms is not None else Forms()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin) -> Any:
        """The unit's output, with Absents for tensors; arguments that it gives on are given on.

        Raises AbsentError where the unit can't run without values, or changes an argument that this rank has
        in place.
        """
        arguments: dict[int, Tensor] = {}        # by id of what the forward sees
        changed: list[tuple[Tensor, int]] = []

        def hollow(tensor: Tensor) -> Tensor:
            seen = tensor
            # Integers stay: a unit may read them as it does on its own stage.
            if not isinstance(tensor, Absent) and (tensor.is_floating_point() or tensor.is_complex()):
                seen = on_meta(tensor)
                changed.append((seen, seen._version))
            arguments[id(seen)] = tensor
            return seen

        def wrap(tensor: Tensor) -> Tensor:
            if id(tensor) in arguments:
                return arguments[id(tensor)]
            return absent(tensor, origin) if tensor.is_meta else tensor

        containers: list[tuple[Any, Any, Any]] = []  # as they were given, as the forward sees them, before it

        def see(value: Any) -> Any:
            if isinstance(value, Tensor):
                return hollow(value)
            seen = map_parts(value, see)
            if isinstance(value, (MutableMapping, list)):
                seen = copy.copy(value) if seen is value else seen
                containers.append((value, seen, copy.copy(seen)))
            return seen

        args, kwargs = tuple(map(see, args)), {name: see(value) for name, value in kwargs.items()}
        try:
            with torch.no_grad(), Hollow(self.forms) as mode:
                result = self.forward(*args, **kwargs)
        except AutotpError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error).lower():
                raise
            told = str(error).splitlines()[0].rstrip(".")
            where = next((f" ({frame})" for frame in reversed([*frames_of(error.__traceback__)])), "")
            raise AbsentError(
                f"{self.path} runs on stage {origin.stage}; the shapes of its output can't be found here, "
                f"since it looks at values{where}: {told}. Cut the model so that fewer ranks need them, or "
                "use another implementation of this module (for experts: one without loops over them)."
            ).at(self.path) from error
        if mode.unsure is not None:
            # What outlives the forward is in its output, or in a state that it keeps.
            empty = [t for _, t in tensors_in(result) if not t.numel() and id(t) not in arguments]
            if empty or len(mode.unsure):
                raise AbsentError(
                    f"{self.path} runs on stage {origin.stage}; the shapes of what it gives or keeps can't "
                    "be found here: they hang on how many rows a mask picks. Cut the model so that fewer "
                    "ranks need them (`stages=`), or keep all rows and mask them."
                ).at(self.path)
        if any(seen._version != version for seen, version in changed):
            raise AbsentError(
                f"{self.path} runs on stage {origin.stage} and changes an argument in place: here it would "
                "keep its old value. Cut the model elsewhere (`stages=`), let the module give a new one, or "
                "call the model without this state (use_cache=False), where it is one."
            ).at(self.path)
        for own, seen, before in containers:     # what the forward put into them
            _catch_up(own, seen, before, lambda value: map_tensors(value, wrap))
        return map_tensors(result, wrap)


def _catch_up(own: Any, seen: Any, before: Any, wrap: Callable[[Any], Any]) -> None:
    """Change the mapping or list `own` as `seen`, which was `before`, has been changed."""
    if isinstance(own, MutableMapping):
        for key in before.keys() - seen.keys():
            del own[key]
        for key, value in seen.items():
            if key not in before or before[key] is not value:
                own[key] = wrap(value)
    elif len(seen) != len(before) or any(a is not b for a, b in zip(seen, before, strict=True)):
        own[:] = [wrap(value) for value in seen]
