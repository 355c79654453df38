"""What each operation of a captured graph costs, and the fairest cut of a row of costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..captured import CapturedGraph
from ..graph import numel, tensors_of
from ..nested import map_nodes


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


# The counter of torch knows the fused attention of every device but the one that captures run on.
_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def flops(captured: CapturedGraph) -> dict[fx.Node, float]:
    """Forward FLOPs of each node at the captured sizes: 2 for a multiplication and addition of a product
    (counted by torch's `FlopCounterMode`), and 1 for each element of any result."""
    known: dict[str, int] = {}
    found = {}
    for node in captured.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        key = _key(node, captured.skeleton)
        if key not in known:
            known[key] = _products(node, captured.skeleton)
        found[node] = float(known[key] + numel(node))
    return found


def _products(node: fx.Node, skeleton: nn.Module) -> int:
    """FLOPs of the products in one call, run once more on its fake operands."""
    fakes = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val"))]
    mode = next((t.fake_mode for t in fakes if isinstance(t, FakeTensor)), None)
    if mode is None:
        return 0
    target: Any = skeleton.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    args, kwargs = (map_nodes(given, lambda n: n.meta["val"]) for given in (node.args, node.kwargs))
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    try:
        with mode, torch.no_grad(), counter:
            target(*args, **kwargs)
    except Exception:  # it needs values, or was made to run once: what was counted up to there stands
        pass
    return counter.get_total_flops()


def _key(node: fx.Node, skeleton: nn.Module) -> str:
    """The same for calls that cost the same."""

    def shape(n: fx.Node) -> str:
        return str([tuple(t.shape) for t in tensors_of(n.meta.get("val"))] or n.meta.get("val"))

    call: Any = node.target
    if node.op == "call_module":
        module = skeleton.get_submodule(str(node.target))
        call = type(module), module.extra_repr(), [tuple(p.shape) for p in module.parameters()]
    return repr((call, map_nodes((node.args, node.kwargs), shape)))


def balance(
    costs: Sequence[float], prices: Sequence[float | None], count: int, slack: float = 0.02
) -> tuple[int, ...] | None:
    """Cut a row of `costs` into `count` runs. Of the cuts whose dearest run is within `slack` (a share) of
    the cheapest there is, the one whose prices have the smallest sum, then the most even one.

    prices[i]: of a cut behind costs[i] (None: no cut there), for all but the last. Gives the index behind
    which each cut is, or None where there are too few. By dynamic programming, O(count * n²).
    """
    sums = list(accumulate(costs, initial=0.0))
    places = [i for i, price in enumerate(prices) if price is not None]
    ends = [*places, len(costs) - 1]
    if not costs or len(places) < count - 1:
        return None

    def run(start: int, end: int) -> float:  # the cost of those after `start`, up to `end`
        return sums[end + 1] - sums[start + 1]

    # lowest[k][end]: the dearest run at its cheapest, where k+1 runs end with `end`
    lowest = [{end: run(-1, end) for end in ends}]
    for _ in range(count - 1):
        before = lowest[-1]
        lowest.append(
            {
                end: min(max(before[cut], run(cut, end)) for cut in places if cut < end and cut in before)
                for end in ends
                if any(cut < end and cut in before for cut in places)
            }
        )
    last = len(costs) - 1
    if last not in lowest[-1]:
        return None
    limit = lowest[-1][last] * (1 + slack) * (1 + 1e-9)

    @functools.cache
    def best(runs: int, end: int) -> tuple[float, float, tuple[int, ...]] | None:
        """Prices, unevenness and the cuts of the best `runs` runs up to `end`, none above the limit."""
        if runs == 1:
            return (0.0, run(-1, end) ** 2, ()) if run(-1, end) <= limit else None
        found = []
        for cut in places:
            if cut < end and run(cut, end) <= limit and (so_far := best(runs - 1, cut)) is not None:
                price, uneven, cuts = so_far
                found.append((price + (prices[cut] or 0), uneven + run(cut, end) ** 2, (*cuts, cut)))
        return min(found, default=None)

    chosen = best(count, last)
    return chosen[2] if chosen else None
