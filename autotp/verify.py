"""A plan proven on the model itself: the parallel model against the unsharded one, number by number.

In one process the ranks are simulated by threads, so no launcher and no GPU is needed; under torchrun the
real processes are used. The model given is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .comm import Comm, ProcessComm, simulate
from .errors import VerifyError
from .graph import walk
from .nested import map_tensors
from .plan import Plan
from .planner import given_inputs, plan_and_analysis
from .quantised import components, is_packed
from .rewrite import rewrite
from .rules import OwnRules
from .state import full_state_dict

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Check:
    """One comparison: the largest difference relative to the largest value, or the number of tokens that
    differ."""

    name: str
    error: float
    limit: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass
class Report:
    """What `verify` found. `ok` if every check passed; printing it shows each figure with its limit."""

    plan: Plan
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(c.ok for c in self.checks)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_wrong(self) -> Report:
        """Raise VerifyError if a check failed."""
        if not self.ok:
            raise VerifyError(str(self))
        return self

    def __str__(self) -> str:
        share = f"{self.plan.sharded_fraction:.1%} of the block weights sharded"
        head = f"{self.plan.model} over tp={self.plan.tp}: {share}"
        rows = [
            f"  {'ok   ' if c.ok else 'WRONG'} {c.name:12} {c.error:.1e} (limit {c.limit:.0e}) {c.detail}"
            for c in self.checks
        ]
        return "\n".join([head, *rows])


def verify(
    model: nn.Module,
    tp: int = 2,
    policy: Any = None,
    *,
    ep: int = 1,
    example_inputs: Any = None,
    steps: int = 1,
    new_tokens: int = 8,
    progress: Callable[[str], None] = lambda what: None,
    rules: OwnRules = None,
) -> Report:
    """Run `model` whole and over `tp` ranks and compare: output, parameters after `steps` AdamW steps with
    gradient clipping, greedy generation (where the model generates), and the parameters gathered back bit
    for bit.

    Needs memory for the model and one more copy of it, plus its gradients and optimizer states when steps >
    0. Raises CaptureError, PlanError; a wrong number is reported, not raised (`Report.raise_if_wrong`).
    """
    progress("planning")
    if example_inputs is not None:
        example_inputs = given_inputs(model, example_inputs)
    decided, found = plan_and_analysis(model, tp, policy, ep=ep, example_inputs=example_inputs, rules=rules)
    inputs = example_inputs or map_tensors(found.captured.inputs, torch.Tensor.detach)
    del found
    report = Report(decided)
    progress("running the whole model")
    whole = _run(copy.deepcopy(model), inputs, steps, new_tokens)
    progress(f"running over {tp} ranks")

    def one_rank(comm: Comm) -> dict[str, Any]:
        local = copy.deepcopy(model)
        rewrite(local, decided, comm)
        return _run(local, inputs, steps, new_tokens)

    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if running and torch.distributed.get_world_size() == tp:
        ranks = [one_rank(ProcessComm())]
    else:
        ranks = simulate(tp, one_rank)
    report.checks += _compare(whole, ranks, TOLERANCE.get(getattr(torch, decided.precision), 1e-5))
    return report


def _copied(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of its tensors; of quantised ones, of what they are made of."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        inner = components(tensor) if is_packed(tensor) else {"": tensor}
        found |= {f"{name}.{part}".rstrip("."): t.detach().clone() for part, t in inner.items()}
    return found


def _run(model: nn.Module, inputs: dict[str, Any], steps: int, new_tokens: int) -> dict[str, Any]:
    """Everything that is compared, from one model: whole or one rank's."""
    was = model.training
    model.eval()
    found: dict[str, Any] = {"state": _copied(full_state_dict(model))}
    with torch.no_grad():
        found["output"] = [t.detach().clone() for t in tensors(model(**inputs))]
    ids = inputs.get("input_ids")
    if new_tokens and ids is not None and hasattr(model, "generate") and _can_generate(model):
        generate: Any = model.generate
        found["tokens"] = generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    if steps:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=1e-3, eps=1e-5
        )  # a zero gradient is noise: no step of full size for it
        norms = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = sum(
                t.float().pow(2).mean() if t.dtype.itemsize < 4 else t.pow(2).mean()
                for t in _differentiable(model(**inputs))
            )
            loss.backward()  # type: ignore[union-attr]
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
            optimizer.step()
        found["norm"] = torch.tensor(norms, dtype=torch.float64)
        found["step"] = _copied(full_state_dict(model))
    model.train(was)
    return found


def _can_generate(model: nn.Module) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(can()) if callable(can) else False


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, in order; caches and other objects are left out."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    for _, value in walk(output):
        if isinstance(value, torch.Tensor):
            yield value


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [t for t in tensors(output) if t.requires_grad]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the largest value of `want`; infinite where shapes or finiteness
    differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = got.double(), want.double()
    finite = torch.isfinite(want)
    if not finite.any() or not torch.equal(finite, torch.isfinite(got)):
        return float("inf")  # where the whole model gives no number, nothing is proven
    got, want = got[finite], want[finite]
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def _compare(whole: dict[str, Any], ranks: list[dict[str, Any]], limit: float) -> Iterator[Check]:
    yield Check("output", max(_worst(r["output"], whole["output"]) for r in ranks), limit)
    if "tokens" in whole:
        wrong = max(_different_tokens(r["tokens"], whole["tokens"]) for r in ranks)
        yield Check("generation", wrong, 0.0, "tokens that differ")
    if "norm" in whole:
        yield Check("norm", max(relative_error(r["norm"], whole["norm"]) for r in ranks), limit)
        moved, name = max(_worst_step(r, whole) for r in ranks)
        yield Check("step", moved, min(1e3 * limit, 0.05), f"of the largest change (at {name})")
    same = all(torch.equal(r["state"][k], v) for r in ranks for k, v in whole["state"].items())
    yield Check("state", 0.0 if same else 1.0, 0.0, "parameters gathered back, bit for bit")


def _worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    if len(got) != len(want):
        return float("inf")
    return max((relative_error(g, w) for g, w in zip(got, want, strict=False)), default=0.0)


def _different_tokens(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got != want).sum()) if got.shape == want.shape else float("inf")


def _worst_step(got: dict[str, Any], whole: dict[str, Any]) -> tuple[float, str]:
    """AdamW moves every weight by about its learning rate: compare the moves, not the weights."""
    stepped = {k: v for k, v in whole["step"].items() if v.numel()}
    moves = {k: (v.double() - whole["state"][k].double()).abs() for k, v in stepped.items()}
    scale = max(float(move.max()) for move in moves.values())
    worst = (0.0, "")
    for name in moves:
        difference = (got["step"][name].double() - whole["step"][name].double()).abs().max()
        error = float(difference) / max(scale, 1e-30)
        worst = max(worst, (error if error == error else float("inf"), name))  # NaN is no match
    return worst
