"""Where in a model's own source an operation happened."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PASSED_THROUGH = (contextlib.__file__, functools.__file__, os.path.join(_TORCH_MODULES, "module.py"))

_AUTOGRAD_APPLY = inspect.unwrap(vars(torch.autograd.Function)["apply"].__func__).__code__


@dataclass(frozen=True)
class Frame:
    """One call in progress: `code` was at instruction `lasti` (a byte offset, see `CodeType.co_positions`),
    on `lineno`."""

    code: CodeType
    lasti: int
    lineno: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.lineno} in {self.code.co_name}"


@dataclass(frozen=True)
class Site:
    """The place of an operation. `module`: path of the module whose forward was running; `frames`: outermost
    first, from that module's forward to the caller of the operation."""

    module: str
    frames: tuple[Frame, ...]

    def __str__(self) -> str:
        where = str(self.frames[-1]) if self.frames else "unknown source"
        return f"{self.module or 'the root module'} ({where})"


@functools.cache
def is_internal(code: CodeType) -> bool:
    """Whether `code` is torch's, autotp's or a passing-through of the standard library's: not the model's
    own.

    The forwards of torch's own composite modules (`nn.TransformerEncoderLayer`) count as a model's code."""
    name = code.co_filename
    if name in _PASSED_THROUGH or name.startswith(_HERE) or name.startswith("<frozen"):
        return True
    return name.startswith(_TORCH) and not name.startswith(_TORCH_MODULES)


def frames_below(start: FrameType, boundary: CodeType, forward: CodeType | None) -> tuple[Frame, ...]:
    """The model's own frames, outermost first, from `start` out to the frame that runs `boundary` (left out).

    forward: the code of the forward that is running. Frames outside of it are decorators, and are dropped; it
    is kept even where it is library code.
    """
    found: list[Frame] = []
    outermost = 0
    frame: FrameType | None = start
    while frame is not None and frame.f_code is not boundary:
        code = frame.f_code
        if code is forward or not is_internal(code):
            found.append(Frame(code, frame.f_lasti, frame.f_lineno))
        if code is forward:
            outermost = len(found)
        frame = frame.f_back
    return tuple(reversed(found[:outermost] if outermost else found))


def autograd_function_frame(start: FrameType, boundary: CodeType) -> FrameType | None:
    """The frame of the `autograd.Function.apply` (its locals: cls, args) that is running between `start` and
    the frame that runs `boundary`; None: there is none."""
    found: FrameType | None = None
    frame: FrameType | None = start
    while frame is not None and frame.f_code is not boundary:
        if frame.f_code is _AUTOGRAD_APPLY:
            found = frame
        frame = frame.f_back
    return found


def frames_of(traceback: TracebackType | None) -> Iterator[Frame]:
    """The model's own frames of an exception, outermost first."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not is_internal(code):
            yield Frame(code, traceback.tb_lasti, traceback.tb_lineno)
        traceback = traceback.tb_next
