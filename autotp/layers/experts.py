"""Experts split by expert: every rank runs the routes that chose its own, and the results are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Comm, ShapeComm
from ..errors import LayerError
from ..layouts import Layout
from .base import Parallel, Tp, subclass


class LocalExperts(Parallel):
    """In front of a module of experts; its forward gives the sum over this rank's experts `[tokens, width]`.

    hidden: `[tokens, width]`; numbers: `[tokens, k]`, of the whole model's experts; weights: `[tokens, k]`.
    The module's own forward is called with one route as one token that chose one expert. No route is masked:
    those of other ranks are not computed. A rank that no token chose runs one route and takes none of its
    result, so that its weights have gradients of zero, as in the whole model.
    """

    tp_axis = "experts"

    def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        ((start, stop),) = self.tp.ranges
        if isinstance(self.tp.comm, ShapeComm) or hidden.is_meta:
            # Only shapes are asked for (of another stage's, too): as if all routes were ours.
            tokens = torch.arange(numbers.shape[0], device=numbers.device).repeat_interleave(numbers.shape[1])
            local, chosen = numbers.reshape(-1), weights.reshape(-1)
        else:
            tokens, slots = torch.nonzero((numbers >= start) & (numbers < stop), as_tuple=True)
            local, chosen = numbers[tokens, slots] - start, weights[tokens, slots]
        given = hidden[tokens]
        if len(tokens) == 0:
            given, local, chosen = hidden[:1], numbers[0, :1] * 0, weights[0, :1]
        out = super().forward(given, local[:, None], chosen[:, None])  # type: ignore[misc]
        out = out[: len(tokens)]
        return out.new_zeros(hidden.shape[0], out.shape[-1]).index_add(0, tokens, out)


def make_experts(module: nn.Module, layout: Layout, comm: Comm) -> None:
    """Let `module` run its rank's experts. Its stacks and what counts its experts become local elsewhere."""
    module.tp = Tp(comm, layout)  # type: ignore[assignment]
    module.__class__ = subclass(LocalExperts, type(module), f"Local{type(module).__name__}")


@dataclass
class Trial:
    """Two tokens through whole experts, and what came out: split ones must give the same.

    The plan has proven it on the implementation that was recorded; a model may run another one.
    """

    name: str
    module: nn.Module
    comm: Comm
    given: tuple[Tensor, ...] = ()
    want: Tensor | None = None

    @classmethod
    def of(cls, name: str, module: nn.Module, sizes: Mapping[str, Any], comm: Comm) -> Trial:
        """Run whole experts. sizes: `experts`, the `width` of hidden states, `chosen` experts of a token."""
        trial, weight = cls(name, module, comm), next(module.parameters())
        if comm.size > 1 and not isinstance(comm, ShapeComm) and weight.device.type != "meta":
            draw = torch.Generator().manual_seed(0)  # alike on all ranks
            hidden = torch.randn(2, sizes["width"], generator=draw).to(weight)
            picks = [torch.randperm(sizes["experts"], generator=draw)[: sizes["chosen"]] for _ in range(2)]
            weights = torch.rand(2, sizes["chosen"], generator=draw).to(weight)
            trial.given = hidden, torch.stack(picks).to(weight.device), weights
            trial.want = trial.run()
        return trial

    def run(self) -> Tensor | None:
        """The result; None where the module does not run by itself on these."""
        modes = [(m, m.training) for m in self.module.modules()]
        try:
            self.module.eval()
            with torch.no_grad():
                return type(self.module).forward(self.module, *self.given)
        except Exception:  # noqa: BLE001 - whatever it lacks, nothing is found out
            return None
        finally:
            for module, mode in modes:
                module.training = mode

    def check(self) -> None:
        """LayerError, on every rank, if the split experts give another result."""
        if self.want is None:
            return
        part = self.run()
        got = self.comm.all_reduce(torch.full_like(self.want, float("nan")) if part is None else part)
        off = float((got - self.want).abs().max()) / max(float(self.want.abs().max()), 1e-30)
        if not off <= 1e3 * torch.finfo(self.want.dtype).eps:
            raise LayerError(
                f"{self.name}: split by expert it gives another result ({off:.1e} off): the implementation "
                "it runs counts experts by what the plan did not see. Leave ep out to split hidden units."
            )


__all__ = ["LocalExperts", "Trial", "make_experts"]
