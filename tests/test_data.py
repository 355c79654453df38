"""Models whose code asks about values: how many rows a mask picks, which experts were hit, whether a mask is
true anywhere. The plan must hold for any data, also where it was captured on other."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomise
from torch import nn
from whole import assert_close, full_grads, on_ranks

import autotp
from autotp.errors import CaptureError, PlanError

WIDTH, EXPERTS = 24, 5


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Experts for tokens by the kind of each token (`kinds`, from EXPERTS on: none); `loop` visits them."""

    def __init__(self, loop: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.up = nn.Parameter(torch.empty(EXPERTS, 48, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 48))
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.loop = loop

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return x + self.loop(self, x.flatten(0, 1), kinds.flatten()).view(x.shape)


def hit_modules(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    chosen = F.one_hot(kinds, EXPERTS + 1)[:, :EXPERTS]
    for hit in chosen.sum(0).nonzero():
        number = hit.item()
        (rows,) = torch.where(chosen[:, number])
        result.index_add_(0, rows, self.experts[number](x[rows]))
    return result


def hit_slices(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The same, with the experts' weights in one parameter, and by the router's choice."""
    result = torch.zeros_like(x)
    score, chosen = self.router(x).softmax(-1).max(-1)
    chosen = torch.where(kinds == EXPERTS, EXPERTS, chosen)
    mask = F.one_hot(chosen, EXPERTS + 1).T[:EXPERTS]
    for hit in torch.greater(mask.sum(-1), 0).nonzero():
        (rows,) = torch.where(mask[hit[0]])
        h = F.linear(F.gelu(F.linear(x[rows], self.up[hit[0]])), self.down[hit[0]])
        result.index_add_(0, rows, h * score[rows, None])
    return result


def by_sizes(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, and cut as many as each has."""
    _, chosen = self.router(x).max(-1)
    chosen = torch.where(kinds == EXPERTS, 0, chosen)
    order = chosen.argsort()
    sizes = F.one_hot(chosen, EXPERTS).sum(0).tolist()
    parts = x[order].split(sizes)
    done = [F.linear(F.gelu(F.linear(parts[i], self.up[i])), self.down[i]) for i in range(EXPERTS)]
    return torch.zeros_like(x).index_add(0, order, torch.cat(done))


def masked(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        mask = kinds == number
        result[mask] = expert(x[mask])
    return result


def onto_the_input(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """What is added to is not zero where no expert is hit."""
    result = x * 2
    for hit in F.one_hot(kinds, EXPERTS + 1)[:, :EXPERTS].sum(0).nonzero():
        rows = (kinds == hit[0]).nonzero()[:, 0]
        h = F.linear(F.gelu(F.linear(x[rows], self.up[hit[0]])), self.down[hit[0]])
        result = result.index_add(0, rows, h)
    return result


def one_after_another(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """No expert hit: what follows gets what no expert made."""
    h = F.linear(x, self.up[0])
    for hit in F.one_hot(kinds, EXPERTS + 1)[:, 1:EXPERTS].sum(0).nonzero():
        h = h * 0.5 + F.linear(x, self.up[hit[0]])
    return F.linear(h, self.down[0])


def few_are_normed(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Another way where few tokens are picked: a norm over what is sharded."""
    rows = (self.router(x)[:, 0] > 0).nonzero()[:, 0]
    h = F.linear(x, self.up[0])
    h = h / h.norm(dim=-1, keepdim=True) if rows.shape[0] < 5 else h
    return F.linear(h, self.down[0])


def normed_if_any(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, self.up[0])
    if (kinds == EXPERTS).any():
        h = h / h.norm(dim=-1, keepdim=True)
    return F.linear(h, self.down[0])


def as_many_as_are_positive(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """A number read from what would be sharded, and a cut that hangs on it."""
    h = F.linear(x, self.up[0])
    count = (h[0] > 0).sum().item()
    return F.linear(torch.cat([h[:, :count] * 2, h[:, count:]], -1), self.down[0])


LOOPS: dict[Callable[..., Any], float] = {  # and the least share of the weights of the ways to be sharded
    hit_modules: 0.9, hit_slices: 0.9, by_sizes: 0.9, masked: 0.9, onto_the_input: 0, one_after_another: 0,
    few_are_normed: 0, normed_if_any: 0, as_many_as_are_positive: 0,
}  # fmt: skip


def built(loop: Callable[..., Any], scale: float = 1) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = randomise(Experts(loop).double())
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    return model, {"x": x * scale, "kinds": torch.arange(12).view(2, 6) % EXPERTS}


def batches() -> list[dict[str, Any]]:
    """All kinds, one kind, no kind, some; other sizes."""
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kinds = [
        torch.arange(21) % EXPERTS,
        torch.full((21,), 2),
        torch.full((21,), EXPERTS),
        torch.arange(21) % 7,
    ]
    given = [{"x": x, "kinds": kind.clamp(max=EXPERTS).view(3, 7)} for kind in kinds]
    return [*given, {"x": x[:1, :2], "kinds": kinds[0][:2].view(1, 2)}, {"x": -x, "kinds": given[3]["kinds"]}]


def outcome(model: nn.Module, inputs: dict[str, Any]) -> Any:
    model.zero_grad()
    x = inputs["x"].clone().requires_grad_()
    output = model(x, inputs["kinds"])
    output.square().sum().backward()
    return output.detach(), {"x": x.grad, **full_grads(model)}


@pytest.mark.parametrize("loop", LOOPS)
def test_any_data_give_what_the_whole_model_gives(loop: Callable[..., Any]) -> None:
    given = batches()
    model, inputs = built(loop)
    whole = [outcome(model, one) for one in given]

    def use(model: nn.Module, inputs: Any) -> Any:
        return model.autotp.plan, [outcome(model, one) for one in given]

    try:
        ranks = on_ranks(2, lambda: (copy.deepcopy(model), inputs), use)
    except PlanError as error:
        assert not LOOPS[loop], error
        return
    for plan, outcomes in ranks:
        assert not plan.unexamined
        used = {name for _, grads in whole for name in grads} - {"x"}
        sizes = {name: plan.params[name].shape for name in used if len(plan.params[name].shape) > 1}
        sharded = sum(torch.Size(s).numel() for n, s in sizes.items() if plan.params[n].layout is not None)
        assert sharded >= LOOPS[loop] * sum(torch.Size(s).numel() for s in sizes.values())
        for (want, grads), (got, local) in zip(whole, outcomes, strict=True):
            assert_close(got, want)
            assert set(local) == set(grads)
            for name, grad in grads.items():
                assert_close(local[name], grad)


def first_only(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    first = (self.router(x)[:, 0] > 0).nonzero()[0].item()
    return self.experts[0](x) if first == 0 else self.experts[1](x)


def stops(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    for hit in (self.router(x) > 0).any(0).nonzero():
        if hit.item() == 2:
            break
        x = self.experts[hit.item()](x)
    return x


def if_any(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    rows = (self.router(x)[:, 0] > 0).nonzero()
    return self.experts[0](x) if (rows > 3).any() else x


@pytest.mark.parametrize("way", [first_only, stops, if_any])
def test_a_branch_on_what_is_only_assumed_is_refused(way: Callable[..., Any]) -> None:
    model, inputs = built(way)
    with pytest.raises(CaptureError, match="needs the values of a tensor"):
        autotp.capture(model, **inputs)


def test_a_replay_is_refused_where_the_data_say_otherwise() -> None:
    model, inputs = built(hit_modules)
    captured = autotp.capture(model, **inputs)
    assert {a.told for a in captured.assumed} >= {"nonzero picks 5 of 5", "item gives 4"}
    assert_close(captured.run(model, **inputs), model(**inputs))
    with pytest.raises(CaptureError, match="nonzero picks 5 of 5 .* it is otherwise"):
        captured.run(model, **{**inputs, "kinds": inputs["kinds"] * 0})


def test_what_happens_on_other_data_is_told() -> None:
    plan = autotp.plan(built(normed_if_any)[0], 2, example_inputs=built(normed_if_any)[1])
    why = plan.kept["up"]
    assert "gives False (the opposite)" in why and "norm" in why, why
    assert any("gives False" in line for line in plan.assumed)


def test_what_the_code_tells_of_data_fails_alike_on_all_ranks() -> None:
    """A check that only raises is made by the model itself."""

    def checked(self: Experts, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        if (kinds > EXPERTS).any():
            raise ValueError("no such kind")
        return masked(self, x, kinds)

    def use(model: nn.Module, inputs: dict[str, Any]) -> Any:
        with pytest.raises(ValueError, match="no such kind"):
            model(**{**inputs, "kinds": inputs["kinds"] + 9})
        return model(**inputs).detach()

    model, inputs = built(checked)
    want = model(**inputs).detach()
    for got in on_ranks(2, lambda: (copy.deepcopy(model), inputs), use):
        assert_close(got, want)


class Masked(nn.Module):
    """Attention under a mask that torch.vmap makes, of positions and of what is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.heads = nn.Linear(WIDTH, WIDTH), 4

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def seen(b: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & padding.select(1, 0).gather(0, b[None])[0] | (k == q)

        positions = torch.arange(length)
        over_keys = torch.vmap(seen, in_dims=(None, None, 0))
        over_queries = torch.vmap(over_keys, in_dims=(None, 0, None))
        mask = torch.vmap(over_queries, in_dims=(0, None, None))(torch.arange(batch), positions, positions)
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.out(h.transpose(1, 2).reshape(batch, length, WIDTH))


def test_what_runs_under_vmap_is_one_unknown_operation() -> None:
    torch.manual_seed(0)
    model = randomise(Masked().double())
    inputs = {
        "x": torch.randn(3, 5, WIDTH, dtype=torch.float64),
        "padding": torch.tensor([[1] * 5, [0] * 5, [1] * 5]) > 0,
    }
    others = {
        "x": torch.randn(2, 7, WIDTH, dtype=torch.float64),
        "padding": torch.tensor([[0] * 7, [1] * 7]) > 0,
    }
    captured = autotp.capture(model, **inputs)
    (made,) = [n for n in captured.graph.nodes if getattr(n.target, "__name__", "") == "under_vmap"]
    assert {"padding"} <= {str(used.target) for used in made.all_input_nodes}
    with pytest.raises(CaptureError, match="under torch.vmap"):
        captured.run(model, **inputs)

    def use(local: nn.Module, given: Any) -> Any:
        return local.autotp.plan, local(**inputs).detach(), local(**others).detach()

    for plan, *got in on_ranks(2, lambda: (copy.deepcopy(model), inputs), use):
        assert plan.sharded_fraction == 1
        assert_close(got[0], model(**inputs).detach())
        assert_close(got[1], model(**others).detach())
