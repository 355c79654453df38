"""What a plan hangs on, as one digest: two models of the same digest get the same plan.

A plan follows from the model's structure, from the code that runs in its forward, and from autotp and torch
themselves. So the digest is of: every module's class and attributes (tensors by shape, stride and dtype: of
data no plan knows); of the Python modules that the model's code comes from and those they import, of the same
packages, all functions by the place in the file where each begins (what was put there afterwards begins
elsewhere), all numbers, and the files' sizes and times; of the versions. Too much rather than too little:
what differs without need costs a new planning, what is left out would cost a wrong plan.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import marshal
import os
import pickle
import platform
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .source import codes_in

MOST = 400_000  # values looked at; a model that holds more than that is planned each time
_NUMBERS = (bool, int, float, complex, type(None))
_PLAIN = (*_NUMBERS, str, bytes)


class _NoKeyError(Exception):
    """The model holds something of which the digest can't tell whether it is the same."""


@dataclass(frozen=True)
class PlanKey:
    """digest: of all that a plan hangs on. codes: the model's functions by `code_name`; None where two have
    one name."""

    digest: str
    codes: Mapping[str, CodeType | None]


def plan_key(model: nn.Module, **asked: Any) -> PlanKey | None:
    """The key of the plan of `model` for what is `asked` (plain values). None where it has none: quantised
    weights (their cuts are tried on their data), more than `MOST` values."""
    digest = _Digest()
    try:
        digest.put(f"torch {torch.__version__} Python {platform.python_version()}")
        digest.put(f"{torch.get_default_dtype()} {sys.flags.optimize}")
        for file in sorted(Path(__file__).parent.rglob("*.py")):
            digest.file(str(file))
        for folder in sys.path:  # what is installed there decides which kernels a model's code takes
            if folder.endswith(("site-packages", "dist-packages")):
                digest.file(folder)
        for place in (torch, torch.nn.functional, Tensor):
            digest.replaced(place)
        digest.value(asked)
        digest.value(model)
        digest.modules()
    except Exception:  # besides _NoKeyError: objects of the user's may raise anything when looked at
        return None
    return PlanKey(digest.sha.hexdigest(), digest.codes)


def code_name(code: CodeType) -> str:
    """Where a function stands, as a name that the next process knows it by, too."""
    return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"


@dataclass
class _Digest:
    sha: Any = field(default_factory=hashlib.sha256)
    codes: dict[str, CodeType | None] = field(default_factory=dict)
    _met: dict[int, tuple[int, Any]] = field(default_factory=dict)  # kept alive, or ids would come again
    _files: set[str] = field(default_factory=set)
    _own: set[str] = field(default_factory=set)  # the Python modules of the model's classes
    _modules: dict[str, None] = field(default_factory=dict)  # names of Python modules still to be looked at

    def put(self, text: str) -> None:
        self.sha.update(f"{text}\0".encode("utf-8", "surrogatepass"))

    # ------------------------------------------------------------ the model
    def value(self, value: Any) -> None:
        """An attribute of the model, all that it holds included."""
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return self.put(f"{type(value).__name__} {value!r}" if _is_stable(value) else "a hash")
        if id(value) in self._met:
            return self.put(f"again {self._met[id(value)][0]}")
        self._met[id(value)] = (len(self._met), value)
        if len(self._met) > MOST:
            raise _NoKeyError
        if isinstance(value, Tensor):
            self.tensor(value)
        elif isinstance(value, (list, tuple, deque)):
            self.put(f"{type(value).__name__} of {len(value)}")
            for part in value:
                self.value(part)
        elif isinstance(value, (set, frozenset)):
            self.put(f"{type(value).__name__} {sorted(map(_without_address, value))}")
        elif isinstance(value, (dict, MappingProxyType)):
            # As they lie there: a dict of another class may fetch what it is asked for.
            entries = list(dict.items(value) if isinstance(value, dict) else value.items())
            self.put(f"{type(value).__name__} of {len(entries)}")
            for key, part in entries:
                self.value(key)
                self.value(part)
            if type(value) not in (dict, OrderedDict, MappingProxyType) and hasattr(value, "__dict__"):
                self.object(value)
        elif isinstance(value, type):
            self.named(value)
        elif isinstance(value, ModuleType):
            self.put(f"module {value.__name__}")
        elif not self.function(value, held=True):
            self.object(value)

    def tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise _NoKeyError
        self.put(f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}")
        self.put(f"{tensor.requires_grad} {tensor.is_leaf}")
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            self.value(dict(hooks or {}))

    def object(self, value: Any) -> None:
        """Anything else: its class, and what it holds."""
        kind = type(value)
        self.named(kind)
        slots = [
            n for base in kind.__mro__ for n in _names(vars(base).get("__slots__", ())) if hasattr(value, n)
        ]
        if isinstance(value, enum.Enum):
            self.put(value.name)
        elif _package(kind.__module__) == "logging":
            return
        elif hasattr(value, "__dict__") or slots:
            if isinstance(value, nn.Module) and _ours(kind.__module__):
                self._own.add(kind.__module__)
            self.value(dict(getattr(value, "__dict__", {})))
            for name in slots:
                self.put(name)
                self.value(getattr(value, name))
        elif not _ours(kind.__module__):
            self.put(_without_address(value))  # torch.dtype, torch.device, a lock
        else:  # of a compiled extension, an array of NumPy's, say
            try:
                self.sha.update(pickle.dumps(value))
            except Exception as error:  # whatever its class raises
                raise _NoKeyError from error

    def named(self, kind: type) -> None:
        self.put(f"class {kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            if _ours(base.__module__):
                self._modules.setdefault(base.__module__)
                self.members(base)
            elif issubclass(base, nn.Module):
                self.members(base)

    # ------------------------------------------------------------ its code
    def function(self, value: Any, held: bool = False) -> bool:
        """A function, whatever it is wrapped in; False for what is none. held: by the model itself, so that
        all it is bound to counts."""
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            if held and isinstance(value, MethodType):
                self.value(value.__self__)
            return self.function(value.__func__, held)
        if isinstance(value, property):
            return any([self.function(f) for f in (value.fget, value.fset) if f is not None])
        if isinstance(value, functools.partial):
            self.put("partial")
            self.bound([*value.args, *value.keywords.items()], held)
            return self.function(value.func, held)
        if isinstance(value, FunctionType):
            self.code(value.__code__)
            if _ours(value.__module__ or ""):
                self._modules.setdefault(value.__module__)
            self.bound([*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()], held)
            for cell in value.__closure__ or ():
                try:
                    self.bound([cell.cell_contents], held)
                except ValueError:  # not filled yet
                    self.put("empty")
            return True
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None  # functools.cache
        if inspect.isfunction(wrapped):
            return self.function(wrapped, held)
        if inspect.isbuiltin(value) or inspect.ismethoddescriptor(value):
            self.put(f"built in {getattr(value, '__qualname__', '')}")
            return True
        return False

    def bound(self, values: list[Any], held: bool) -> None:
        """Defaults, arguments and closures of a function. Where the model does not hold it, only numbers,
        strings and functions among them are of account."""
        for value in values:
            if held:
                self.value(value)
            elif isinstance(value, _PLAIN):
                self.put(repr(value) if _is_stable(value) else "a hash")
            elif isinstance(value, tuple):
                self.bound(list(value), held)
            elif id(value) not in self._met:
                self._met[id(value)] = (len(self._met), value)
                self.function(value)

    def code(self, code: CodeType) -> None:
        if code.co_filename not in self._files:
            self.file(code.co_filename)
        name = code_name(code)
        if name not in self.codes:
            for inner in codes_in(code):
                known = self.codes.setdefault(code_name(inner), inner)
                if known is not inner:
                    self.codes[code_name(inner)] = None
        elif self.codes[name] is not code:
            self.codes[name] = None
        self.put(name)
        if code.co_filename.startswith("<"):  # of no file: made by a program, or typed in
            self.sha.update(marshal.dumps(code))

    def file(self, path: str) -> None:
        self._files.add(path)
        try:
            told = os.stat(path)
        except OSError:
            return self.put(f"{path} is no file")
        self.put(f"{path} {told.st_size} {told.st_mtime_ns}")

    def replaced(self, place: Any) -> None:
        """What others have put into torch's own names."""
        for name, value in sorted(vars(place).items()):
            if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(_TORCH):
                self.put(name)
                self.function(value)

    def modules(self) -> None:
        """The Python modules that the model's classes come from, and those that these use."""
        packages = {_package(name) for name in self._own}
        done: set[str] = set()
        while self._modules:
            name = next(iter(self._modules))
            del self._modules[name]
            module = sys.modules.get(name)
            if name in done or type(module) is not ModuleType:
                continue
            done.add(name)
            loose = _ours(name) and not _installed(name)
            if _package(name) not in packages and not loose:
                if _ours(name):
                    self.version(sys.modules.get(_package(name)))
                continue
            self.put(f"module {name}")
            self.file(getattr(module, "__file__", None) or "")
            for key, value in sorted(vars(module).items()):
                if not key.startswith("__"):
                    self.put(key)
                    self.part(value, strings=name in self._own, data=loose)

    def version(self, package: ModuleType | None) -> None:
        """A package that the model's code only uses."""
        file = getattr(package, "__file__", None)
        if package is not None and file is not None and file not in self._files:
            self.put(f"{package.__name__} {getattr(package, '__version__', '')}")
            self.file(file)

    def part(self, value: Any, strings: bool, data: bool = False) -> None:
        """What a Python module, or a class, has under a name. data: of a file that is not installed, where
        settings may be what a command line said."""
        if isinstance(value, _PLAIN if strings else _NUMBERS) and not isinstance(value, enum.Enum):
            self.put(repr(value) if _is_stable(value) else "a hash")
        elif isinstance(value, ModuleType):
            self._modules.setdefault(value.__name__)
        elif isinstance(value, type):
            self.put(f"class {value.__module__}.{value.__qualname__}")
            if _ours(value.__module__):
                self._modules.setdefault(value.__module__)
                self.members(value)
        elif data and not self.function(value):
            self.value(value)
        elif isinstance(value, (dict, tuple, list)):
            if strings and not isinstance(value, dict):
                self.bound(list(value), held=False)
            for entry in _functions_in(value):
                self.function(entry)
        elif not self.function(value) and _ours(type(value).__module__):
            self.put(type(value).__qualname__)  # a registry of functions, say
            for held in (*vars(type(value)).values(), *getattr(value, "__dict__", {}).values()):
                for entry in _functions_in(held):
                    self.function(entry)

    def members(self, kind: type) -> None:
        if id(kind) not in self._met:
            self._met[id(kind)] = (len(self._met), kind)
            loose = _ours(kind.__module__) and not _installed(kind.__module__)
            for key, value in sorted(vars(kind).items()):
                if not isinstance(value, type) and (not key.startswith("__") or inspect.isfunction(value)):
                    self.put(key)
                    self.part(value, strings=False, data=loose)


def _functions_in(held: Any) -> Iterator[Any]:
    entries = dict.values(held) if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    return (
        entry for entry in list(entries) if isinstance(entry, (FunctionType, MethodType, functools.partial))
    )


def _names(slots: Any) -> Iterator[str]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return (name for name in names if name not in ("__dict__", "__weakref__"))


def _package(name: str) -> str:
    return name.split(".")[0]


def _ours(module: str) -> bool:
    """Whether a Python module is not torch's, autotp's or the standard library's: those have versions."""
    return _package(module) not in _VERSIONED


def _installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_stable(value: Any) -> bool:
    """Whether the next process has the same: hashes of strings are other numbers each time."""
    return not isinstance(value, int) or abs(value) < 2**40


def _without_address(value: Any) -> str:
    told = repr(value)
    return "" if " at 0x" in told or " object " in told else told


_TORCH = os.path.dirname(torch.__file__) + os.sep
_VERSIONED = {"torch", "autotp", "builtins", *sys.stdlib_module_names} - {"__main__"}
