"""A structural clone of a model whose tensors are fake: what capture runs on, so the user's model is never
touched.

The clone has the model's classes, attributes, ties and instance-level forwards. Its tensors have the shapes,
strides and dtypes of the model's, on the (fake) CPU, and no data. Its int attributes, and those of the config
objects it keeps, are `TrackedInt`s that know which attribute of which module they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from .ints import Attr, EscapeLog, TrackedInt, plain

LEAVES: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm,
    nn.GroupNorm, nn.LocalResponseNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNN, nn.LSTM, nn.GRU, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.PixelShuffle,
    nn.PixelUnshuffle, nn.Unfold, nn.Fold, nn.Flatten, nn.Unflatten, nn.Identity, nn.ReLU, nn.ReLU6,
    nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU, nn.Sigmoid,
    nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    nn.Tanh, nn.Softplus, nn.Softsign, nn.Threshold, nn.Softmax, nn.LogSoftmax, nn.Softmin,
)  # fmt: skip
"""torch's own modules that are recorded as one `call_module` node each."""


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of the forward that a call of `module` ends up in, decorators unwrapped; None where it has
    none."""
    forward = inspect.unwrap(module.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    return getattr(forward, "__code__", None)


def leaf_class(module: nn.Module) -> type[nn.Module] | None:
    """The class in `LEAVES` whose forward `module` runs, or None.

    A module that computes one of its parameters (torch's weight norm and parametrizations) has no leaf class.
    """
    if "forward" in vars(module) or (module._modules and not isinstance(module, nn.MultiheadAttention)):
        return None
    if any(_belongs_to_torch(hook) for hook in module._forward_pre_hooks.values()):
        return None
    for cls in type(module).__mro__:
        if cls in LEAVES:
            return cls if type(module).forward is cls.forward else None
    return None


def linear_kind(module: nn.Module) -> Literal["linear", "transposed"] | None:
    """`"linear"`: `x @ weight.T + bias` (nn.Linear); `"transposed"`: `x @ weight + bias`, weight [in, out];
    else None.

    The second kind is recognised by what it does: the one operation of its forward that is not a change of
    shape is `addmm(bias, x, weight)`. Found out on fake tensors: nothing is computed.
    """
    if leaf_class(module) is nn.Linear:
        return "linear"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or bias is None or len(module._parameters) != 2 or module._modules or module._buffers:
        return None
    if weight.dim() != 2 or tuple(bias.shape) != (weight.shape[1],) or module._forward_pre_hooks:
        return None
    code = forward_code(module)
    if code is None or "addmm" not in code.co_names:
        return None
    return "transposed" if _is_one_addmm(module, weight, bias) else None


def is_leaf(module: nn.Module) -> bool:
    """Whether capture records a call of `module` as one node."""
    return leaf_class(module) is not None or linear_kind(module) is not None


class _Calls(TorchFunctionMode):
    """Lists the torch calls that give tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.calls.append((func, args, kwargs or {}))
        return result


def _is_one_addmm(module: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    mode = weight.fake_mode if isinstance(weight, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.no_grad(), mode, _Calls() as seen:
            result = type(module).forward(module, torch.empty(2, 3, weight.shape[0], dtype=weight.dtype))
    except Exception:  # whatever its forward needs, it is not x @ weight + bias
        return False
    work = [
        call for call in seen.calls if call[0] not in (torch.Tensor.view, torch.Tensor.reshape, torch.empty)
    ]
    if len(work) != 1 or tuple(result.shape) != (2, 3, weight.shape[1]):
        return False
    func, args, kwargs = work[0]
    return func is torch.addmm and len(args) == 3 and args[0] is bias and args[2] is weight and not kwargs


@dataclass
class Skeleton:
    """`module`: the clone. `originals`: by the id of a fake tensor, the model's tensor it stands for (kept
    alive by the clone). `fakes`: by the id of the model's own tensor, the fake one. `attributes`: what each
    tracked int is, by module path and attribute name. `log`: where they escaped."""

    module: nn.Module
    mode: FakeTensorMode
    originals: dict[int, torch.Tensor] = field(default_factory=dict)
    fakes: dict[int, torch.Tensor] = field(default_factory=dict)
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    log: EscapeLog = field(default_factory=EscapeLog)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake stand-in for `tensor`: the same one each time. Of its data nothing is read."""
        made = self.fakes.get(id(tensor))
        if made is None:
            made = fake_like(tensor, self.mode)
            self.fakes[id(tensor)] = made
            self.originals[id(made)] = tensor
        return made


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor with the shape, stride, dtype and requires_grad of `tensor`; a Parameter for a
    Parameter."""
    with torch.inference_mode(False), mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


class copying_as_fake(TorchFunctionMode):
    """Within it, `copy.deepcopy` of a tensor gives its fake stand-in."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self.skeleton = skeleton

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.skeleton.fake(args[0])
        return func(*args, **(kwargs or {}))


def clone(model: nn.Module) -> Skeleton:
    """A `Skeleton` of `model`. The user's hooks are left out; those that are part of what the model computes
    stay: torch's, autotp's, and those of the packages its classes come from. No data is copied, no random
    number drawn, `model` is not changed."""
    skeleton = Skeleton(model, FakeTensorMode(allow_non_fake_inputs=True))
    modules = dict(model.named_modules())
    memo: dict[int, Any] = {id(old): object.__new__(type(old)) for old in modules.values()}
    for old in modules.values():
        for tensor in (*old._parameters.values(), *old._buffers.values()):
            if tensor is not None:
                memo[id(tensor)] = skeleton.fake(tensor)
    packages = {_package(type(old)) for old in modules.values()} - {"torch", "__main__"} | {"autotp"}
    with copying_as_fake(skeleton):
        for old in modules.values():
            memo[id(old)].__dict__.update(_attributes(old, memo, packages))
    _choose_implementations(memo[id(old)] for old in modules.values())
    for path, old in modules.items():
        new = memo[id(old)]
        if leaf_class(new) is None and not isinstance(new, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            _track(skeleton, path, vars(new), "", {})
    skeleton.module = memo[id(model)]
    return skeleton


def _module_of(thing: Any) -> str:
    return getattr(thing, "__module__", None) or type(thing).__module__


def _package(thing: Any) -> str:
    return _module_of(thing).split(".")[0]


def _belongs_to_torch(hook: Any) -> bool:
    return _module_of(hook).startswith("torch.nn.utils.")


def _attributes(old: nn.Module, memo: dict[int, Any], packages: set[str]) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for name, value in vars(old).items():
        if name in ("_parameters", "_buffers", "_modules"):
            new[name] = {key: None if part is None else memo[id(part)] for key, part in value.items()}
        elif name == "_compiled_call_impl":
            new[name] = None
        elif name.endswith("_hooks") and isinstance(value, dict):
            new[name] = type(value)(
                (key, copy.deepcopy(hook, memo))
                for key, hook in value.items()
                if _belongs_to_torch(hook) or _package(hook) in packages
            )
        elif isinstance(value, (int, str, float, type(None))):
            new[name] = value
        elif isinstance(value, torch.Tensor):
            new[name] = memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo)
        else:
            known = len(memo)
            try:
                new[name] = copy.deepcopy(value, memo)
            except Exception:  # what cannot be copied (locks, streams, process groups) is shared
                new[name] = value
                while len(memo) > known:  # ids of what the attempt made and dropped: others may get them
                    memo.popitem()
    return new


def _is_config(value: Any) -> bool:
    """Whether `value` is a plain object that only holds settings: numbers, strings, lists of them, further
    configs."""
    if (
        isinstance(value, (nn.Module, torch.Tensor, type, Mapping))
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    if _package(type(value)) in ("torch", "autotp", "builtins", "functools", "collections", "enum"):
        return False
    held = vars(value).values()
    return not any(isinstance(part, (nn.Module, torch.Tensor)) for part in held) and bool(held)


def _choose_implementations(modules: Iterator[nn.Module]) -> None:
    """Pick the implementations that can be recorded, where a config chooses: of experts and of attention, the
    fastest ones read the data, or are one opaque kernel. They compute the same."""
    configs = {id(value): value for module in modules for value in vars(module).values() if _is_config(value)}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "batched_mm"
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str) and any(kind in attention for kind in ("flash", "flex", "paged")):
            config._attn_implementation = "sdpa"


def _track(skeleton: Skeleton, path: str, held: dict[str, Any], prefix: str, done: dict[int, Any]) -> None:
    """Turn the ints in `held` (attributes of the module at `path`, or of its config called `prefix`) into
    tracked ones. Configs become the module's own copies: modules share them, and what one of them reads says
    nothing of the others."""
    for key, value in list(held.items()):
        name = prefix + key
        if type(value) in (int, TrackedInt) and value > 1:
            value = plain(value)
            held[key] = TrackedInt(value, Attr(path, name), skeleton.log)
            skeleton.attributes[path, name] = value
        elif _is_config(value):
            if id(value) not in done:
                done[id(value)] = copy.copy(value)
                _track(skeleton, path, vars(done[id(value)]), f"{name}.", done)
            held[key] = done[id(value)]
