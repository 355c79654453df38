"""Attention weights with all heads, for whoever looks at them.

A module of a sharded region may return a value that no operation outside it uses: attention weights. The
model runs without them being whole, so no arrow makes them so; but a forward hook may record them (those of
transformers' `output_attentions` do), or another branch of the model may return them. Then each rank would
show its own heads. So such a part is gathered when somebody looks: where the module has hooks that are not
autotp's, where attention weights were asked for, or where the part was not there when the model was
captured. Else nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from .graph import GraphIndex, walk
from .realise import Where

if TYPE_CHECKING:
    from .place import Placement
    from .rewrite import Conversion

WEIGHTS = (torch.softmax, F.softmax, Tensor.softmax)


def seen_from_outside(index: GraphIndex, placement: Placement) -> Iterator[tuple[fx.Node, Where]]:
    """The sharded values that only an observer would see, each with the module that returns it, and where.

    kind `seen`: a part of the captured result. kind `new`: attention weights that the captured forward does
    not return (a fused kernel, another branch), expected at the first place of the result that had no tensor;
    then the node is the one with their dims: the softmax, or the fused attention, whose dims but the last are
    those of its weights.
    """
    shown: set[str] = set()
    for call in index.captured.calls:
        if call.leaf or not call.path:
            continue
        for path, value in walk(call.output):
            if not isinstance(value, fx.Node) or value not in placement.sharded:
                continue
            inside = [call.first <= index.order[user] <= call.last for user, _ in index.uses[value]]
            if index.enclosing[value] is call and all(inside):
                shown.add(call.path)
                yield value, Where("seen", call.path, path)
    for node in index.nodes:
        home = index.enclosing[node]
        if home is None or not home.path or home.path in shown or node not in placement.sharded:
            continue
        if node.target is F.scaled_dot_product_attention or _is_softmax(index, node):
            shown.add(home.path)
            parts = list(home.output) if isinstance(home.output, (tuple, list)) else [home.output]
            yield node, Where("new", home.path, ((*parts, None).index(None),))


def _is_softmax(index: GraphIndex, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(index.captured.skeleton.get_submodule(str(node.target)), nn.Softmax)
    return node.target in WEIGHTS


def unasked(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make `model`, a copy to be planned, show no attention weights; gives inputs that ask for none.

    As outputs of the captured graph they would need their heads whole, and the heads would stay unsplit.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "output_attentions", False) is True:
            config.output_attentions = False  # type: ignore[union-attr]
    return {k: v for k, v in inputs.items() if k != "output_attentions"}


@dataclass
class Request:
    """Whether the forward of the whole model that is running was asked for attention weights."""

    asked: bool = False

    def watch(self, model: nn.Module) -> None:
        """Note what every forward of `model` is asked for."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # transformers' word for it, as an argument or else in the config
        by_default = getattr(getattr(model, "config", None), "output_attentions", False)
        wanted = kwargs.get("output_attentions")
        self.asked = bool(by_default if wanted is None else wanted)

    def _after(self, model: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.asked = False


@dataclass
class LookedAt:
    """When a part of a module's result is made whole: `always`, or when somebody looks at it."""

    always: bool
    request: Request

    def __call__(self, module: nn.Module, result: Any) -> bool:
        if not isinstance(result, (tuple, list, dict)):
            return False
        return self.always or self.request.asked or any(map(_not_ours, module._forward_hooks.values()))


def _not_ours(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("autotp.")


@dataclass
class ShowWhole:
    """Gathers a part that is what the plan expected there: a tensor of its dims, of the local sizes."""

    gather: Conversion
    ndim: int

    def __call__(self, part: Any) -> Any:
        if not isinstance(part, Tensor) or isinstance(part, FakeTensor):
            return part  # a model that is being recorded shows what it has
        return self.gather(part) if part.ndim == self.ndim and self.gather.fits(part) else part
