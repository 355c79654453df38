"""What would help where something stays whole: one line for each kind of reason.

Reasons are sentences for people, made where the doubt arises. Here each kind is known by words of its own;
`tests/test_advice.py` holds these words against the code that writes them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .errors import PlanError

if TYPE_CHECKING:
    from .plan import Plan

A_RULE = "a rule for the operation, one line: `autotp.rule(function)` (docs/architecture.md)"
THE_HOOK = "the hook put on after parallelize, or on a value that stays whole"
A_POLICY_LINE = "another line in the policy"
TOO_DEAR = "nothing: sharding it would send more than it saves"
HELP: tuple[tuple[str, str], ...] = (
    ("without a rule", A_RULE),
    ("no rule for", A_RULE),
    ("the captured run uses it", "example_inputs that use it"),
    ("forbids uneven splits", A_POLICY_LINE),
    ("forbids replicated heads", A_POLICY_LINE),
    ("not this axis", A_POLICY_LINE),
    (" replicated", A_POLICY_LINE),
    ("below the", "a smaller tp"),
    ("are fewer than the", "a smaller tp"),
    ("depends on the batch or length", "-1 for that size in the code, or the size of a tensor that is there"),
    ("does not decode with a cache", "sizes in the cached branch that come from tensors or from attributes"),
    ("another way through the model's code", "example_inputs like the real ones (mask, cache)"),
    ("no place for the", "that value as the result of a module of its own: a collective can stand there"),
    ("no parallel form of", "a layer that has one: nn.Linear, nn.Embedding, a norm, a depthwise convolution"),
    ("outside of an nn.Embedding", "an nn.Embedding for the table"),
    ("it has buffers along the axis", "a norm without running statistics"),
    ("would see a part of it", THE_HOOK),
    ("would see a part of what it sees now", THE_HOOK),
    ("on parts is not a part of its backward", "torch's own operations in place of the autograd.Function"),
    ("both inside and outside of sharded", "two parameters, or a policy line that replicates one user"),
    ("already sharded over another axis", "a policy line `replicate` for the others, if this matters more"),
    ("a part of a sharded value is an output", "an output that is not a part of a fused value"),
    ("split by expert (ep)", "nothing is amiss: without ep hidden units are split instead"),
    ("collectives for", TOO_DEAR),
    ("a small table", TOO_DEAR),
    ("only vectors carry it", "nothing: there is no matrix to split"),
)
NEEDED_WHOLE = "nothing at this axis: the operation needs all of it"


def advice(why: str) -> str:
    """What would help where `why` keeps something whole; it may begin with `nothing`."""
    return next((help for words, help in HELP if words in why), NEEDED_WHOLE)


def warn_unexamined(result: Plan) -> None:
    """Say which ways through the model's code nobody has looked at."""
    if result.unexamined:
        lines = "\n".join(f"  {way}" for way in result.unexamined)
        warnings.warn(
            f"What {result.model} does in some cases is not examined, and may be wrong when it is split "
            f"(keep the modules whole that do something else then):\n{lines}",
            stacklevel=4,
        )


def warn_replicated(result: Plan, strict: bool) -> None:
    """Say which weights of the blocks stay whole, and why; an error under `strict`."""
    kept = {n: why for n, why in result.kept.items() if result.params[n].block}
    if not kept:
        return
    lines = [f"  {name}: {why}" for name, why in kept.items()]
    text = f"{len(kept)} block weights of {result.model} stay whole on every rank:\n" + "\n".join(lines[:12])
    if len(lines) > 12:
        text += f"\n  … and {len(lines) - 12} more (print the plan)"
    helps = [advice(part) for why in kept.values() for part in why.split("; axis of ")]
    useful = [line for line in dict.fromkeys(helps) if not line.startswith("nothing")]
    if useful:
        text += "\nWhat would help: " + "; or ".join(useful[:3])
    if strict:
        raise PlanError(text + "\nPass strict=False to run with them replicated.")
    warnings.warn(text, stacklevel=4)


__all__ = ["HELP", "NEEDED_WHOLE", "advice", "warn_replicated", "warn_unexamined"]
