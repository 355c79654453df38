"""The recording tracer: a model's own Python runs once on fake tensors, each torch call becomes an fx node.

    captured = capture(model, input_ids=ids)      # CapturedGraph
    captured.run(model, input_ids=other_ids)      # equal to model(input_ids=other_ids), bit for bit

Nothing symbolic runs, so Python control flow just happens. The run is that of a clone (`skeleton.py`) under a
`Recorder` (`recorder.py`); the clone's modules are intercepted by an instance-level `forward`, so no class is
changed and there is nothing to restore in the user's model.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from .assumed import Answers
from .captured import CapturedGraph, ModuleCall
from .errors import AutotpError, CaptureError
from .inputs import example_inputs
from .lifting import intercepting
from .nested import map_parts, tensors_in
from .recorder import Recorder
from .sites import Frame, Site, frames_of
from .skeleton import Skeleton, clone, copying_as_fake, fake_like, forward_code, is_leaf

__all__ = ["CapturedGraph", "Frame", "ModuleCall", "Site", "capture", "record"]


def capture(model: nn.Module, /, **inputs: Any) -> CapturedGraph:
    """Record one run of `model`, in the mode (train or eval) it is in, without touching it.

    inputs: what the model's forward takes, by name; of tensors only shape, dtype and requires_grad matter,
    and they may be nested in dicts, tuples and lists. None at all: made from the model's signature and
    config, see `autotp.inputs.example_inputs`. The model may be on the meta device.

    Raises CaptureError where the model's code needs the values of tensors, or fails.
    """
    return record(model, inputs or example_inputs(model))


def record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    leaves: Iterable[type[nn.Module]] = (),
    answers: Answers | None = None,
) -> CapturedGraph:
    """`capture`, with the inputs in a mapping. leaves: classes of modules that are recorded as one call as
    well, for which the caller has rules. answers: what the code is told of data, where not what is known."""
    given, own = dict(inputs), tuple(leaves)
    skeleton = clone(model)
    recorder = Recorder(skeleton, answers)
    try:
        with quietly(), undisturbed(), torch.inference_mode(False), torch.enable_grad(), skeleton.mode:
            faked = _placeholders(recorder, given)
            with _intercepted(recorder, own), recorder:
                output = skeleton.module(**faked)
            return replace(recorder.finish(given, output), leaves=own)
    except CaptureError:
        raise
    except Exception as error:
        raise _explained(error, recorder) from error


@contextmanager
def answering(
    skeleton: Skeleton, inputs: Mapping[str, Any], leaves: tuple[type[nn.Module], ...] = ()
) -> Iterator[dict[str, Any]]:
    """Within it the skeleton's code may ask of data, and is told what it is told in a capture. Gives the
    inputs, fake."""
    recorder = Recorder(skeleton)
    with skeleton.mode:
        faked = _placeholders(recorder, dict(inputs))
        with _intercepted(recorder, leaves), recorder:
            yield faked


@contextmanager
def quietly() -> Iterator[None]:
    """Within it, torch does not print what it raises anyway: a failure of an operation on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


_ALONE = threading.RLock()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within it no other thread records or plans, and Python's cyclic garbage collector rests.

    What torch and transformers keep while a model runs on fake tensors is made for one thread. And graphs are
    many small objects that live on: to look through them again and again finds nothing and takes a third of
    the time of planning a deep model.
    """
    with _ALONE:
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()


def _placeholders(recorder: Recorder, inputs: dict[str, Any]) -> dict[str, Any]:
    """Fake inputs in the image of `inputs`, each tensor a placeholder."""
    fakes: dict[int, torch.Tensor] = {}
    for name, tensor in tensors_in(inputs):
        # One tensor given twice is one value: the last placeholder stands for it.
        fakes.setdefault(id(tensor), fake_like(tensor, recorder.skeleton.mode))
        recorder.placeholder(name, fakes[id(tensor)], tensor)

    def faked(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return fakes[id(value)]
        if isinstance(value, (dict, list, tuple)):
            return map_parts(value, faked)
        with copying_as_fake(recorder.skeleton):  # a cache, say, which the run would write to
            return copy.deepcopy(value)

    return faked(inputs)


def _intercept(
    recorder: Recorder, path: str, module: nn.Module, leaves: tuple[type[nn.Module], ...]
) -> Callable[..., Any]:
    leaf = is_leaf(module) or type(module) in leaves
    code, forward = forward_code(module), module.forward
    # Its signature is looked at by decorators and callers.
    return functools.wraps(forward)(intercepting(recorder, path, leaf, code, forward))


@contextmanager
def _intercepted(recorder: Recorder, leaves: tuple[type[nn.Module], ...]) -> Iterator[None]:
    """Within it, calls of the skeleton's modules go through `recorder`. After it the skeleton is as it was
    before: what a run caches on the modules (tables, flags) is no part of the model."""
    modules = dict(recorder.skeleton.module.named_modules())
    before = {path: _state(module) for path, module in modules.items()}
    for path, module in modules.items():
        module.__dict__["forward"] = _intercept(recorder, path, module, leaves)
    try:
        yield
        for path, module in modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer is not before[path]["_buffers"].get(name):
                    recorder.note_kept("kept_as", f"{path}.{name}" if path else name, buffer)
            for name, value in vars(module).items():
                if value is not before[path].get(name) and not name.startswith("_"):
                    for _, tensor in tensors_in({name: value}):
                        recorder.note_kept("set_as", f"{path}.{name}" if path else name, tensor)
    finally:
        for path, module in modules.items():
            module.__dict__.clear()
            module.__dict__.update(before[path])


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After it the modules are as they were before, also what a model's own `train` clears or keeps."""
    before = {module: _state(module) for module in model.modules()}
    try:
        yield
    finally:
        for module, state in before.items():
            module.__dict__.clear()
            module.__dict__.update(state)


def _state(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module`; its tables (parameters, hooks, ...) are copies."""
    return {
        name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()
    }


def _explained(error: Exception, recorder: Recorder) -> AutotpError:
    path = getattr(error, "module", None) or (recorder.scopes[-1][0] if recorder.scopes else "")
    site = Site(path, tuple(frames_of(error.__traceback__))[-1:])
    if isinstance(error, (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)):
        return CaptureError(
            f"{site} needs the values of a tensor ({error.func}); a capture has only shapes and dtypes. "
            "Decide there on shapes or settings, use torch.where or masks, or set the model so that it does "
            "not go this way."
        ).at(path)
    return CaptureError(
        f"{site} raised {type(error).__name__} while the model was recorded on fake tensors: {error}. Check "
        "that the model runs on inputs of these shapes; pass others as example inputs."
    ).at(path)
