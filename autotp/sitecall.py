"""What is done at a patched call site when the model runs: arguments replaced, operands and result mapped.

Every helper made here stands in the place of one expression and is given that expression's operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autotp.errors import PatchError

Path = tuple[Any, ...]
"""Where an argument sits: `(2,)` is args[2], `("dim",)` is kwargs["dim"], `(1, 2)` is args[1][2]. For a
method of a tensor args[0] is the tensor. Inside a slice, "start", "stop" and "step" (or 0, 1, 2)."""


@dataclass(frozen=True)
class SitePatch:
    """The change at one site: `ints` replaces arguments, `before` maps operands, `after` maps the result."""

    ints: Mapping[Path, int] = field(default_factory=dict)
    before: Mapping[Path, Callable[[Any], Any]] = field(default_factory=dict)
    after: Callable[[Any], Any] | None = None

    def __str__(self) -> str:
        def name(f: Any) -> str:
            return getattr(f, "__name__", type(f).__name__)

        parts = [f"{_show(path)} = {value}" for path, value in self.ints.items()]
        parts += [f"{_show(path)} through {name(f)}" for path, f in self.before.items()]
        return ", ".join(parts + ([f"result through {name(self.after)}"] if self.after else [])) or "nothing"


def _show(path: Path) -> str:
    return (
        f"args[{path[0]}]" + "".join(f"[{p}]" for p in path[1:])
        if isinstance(path[0], int)
        else f"{path[0]}="
    )


def _edit(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of a nest of tuples, lists, dicts and slices, changed at one place."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, slice):
        names = ("start", "stop", "step")
        key = names[key] if isinstance(key, int) else key
        return slice(
            *[
                _edit(getattr(value, n), rest if n == key else (), change if n == key else _same)
                for n in names
            ]
        )
    if isinstance(value, dict):
        return {**value, key: _edit(value[key], rest, change)}
    items = list(value)
    items[key] = _edit(items[key], rest, change)
    return items if isinstance(value, list) else tuple(items)


def _same(value: Any) -> Any:
    return value


def _as_passed(path: Path, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    """The path of an argument as this call passes it: torch records some by name that came by position."""
    key = path[0]
    if key in kwargs or (isinstance(key, int) and key < len(args)):
        return path
    try:
        names = list(inspect.signature(function).parameters)
        other = names.index(key) if isinstance(key, str) else names[key]
    except (ValueError, TypeError, IndexError):
        other = None
    if other is None or (other not in kwargs and not (isinstance(other, int) and other < len(args))):
        raise PatchError(
            f"{getattr(function, '__name__', function)}(...) is called without {_show(path)}, which it had "
            "when it was recorded: the model took another branch than with the example inputs. Give example "
            "inputs like the real ones."
        )
    return (other, *path[1:])


def _apply(patch: SitePatch, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changes = [(path, lambda _, value=value: value) for path, value in patch.ints.items()]
    for path, change in [*changes, *patch.before.items()]:
        where = _as_passed(path, function, args, kwargs)
        if isinstance(where[0], int):
            args = _edit(args, where, change)
        else:
            kwargs = _edit(kwargs, where, change)
    result = function(*args, **kwargs)
    return result if patch.after is None else patch.after(result)


def call_helper(patch: SitePatch) -> Callable[..., Any]:
    def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _apply(patch, function, args, kwargs)

    return call


def method_helper(patch: SitePatch) -> Callable[..., Any]:
    def method(owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, torch.Tensor):
            return _apply(patch, getattr(type(owner), name), (owner, *args), kwargs)
        return _apply(patch, getattr(owner, name), args, kwargs)  # `torch.cat(...)` and the like

    return method


def operator_helper(patch: SitePatch, function: Callable[..., Any]) -> Callable[..., Any]:
    def operate(*operands: Any) -> Any:
        # torch records `2 * x` as x.__rmul__(2): the tensor comes first
        if (
            len(operands) == 2
            and isinstance(operands[1], torch.Tensor)
            and not isinstance(operands[0], torch.Tensor)
        ):
            return _apply(patch, lambda b, a: function(a, b), operands[::-1], {})
        return _apply(patch, function, operands, {})

    return operate


def plain_helper(patch: SitePatch, function: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    def plain(*operands: Any) -> Any:
        return _apply(patch, function, tuple(operands[i] for i in order), {})

    return plain


class Index:
    """`Index()[a:b, None]` is the index itself."""

    def __getitem__(self, index: Any) -> Any:
        return index
