"""The faults of other tensor-parallel tools, each of which a user met without an error: here they are absent.

Others of the kind are in test_features*.py (attention weights, caches, adapters, copies) and test_errors.py.
"""

import copy
import warnings
from typing import Any

import distributed
import pytest
import torch
from models import MODELS, token_ids
from torch import nn
from whole import (
    EXACT,
    FLOAT32,
    assert_close,
    assert_same_grads,
    forward_and_grads,
    full_grads,
    logits_of,
    loss_of,
    on_ranks,
)

import autotp
from autotp.errors import PlanError, PolicyError
from autotp.gradients import plain


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return MODELS[name](dtype=torch.float64)


def trained(model: nn.Module, inputs: dict[str, Any], steps: int = 3, **options: Any) -> dict[str, Any]:
    """Three AdamW steps with clipping: the norms seen and how far every weight moved."""
    before = {k: v.clone() for k, v in autotp.full_state_dict(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (100 * loss_of(model, inputs)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    after = autotp.full_state_dict(model)
    moved = {k: after[k] - v for k, v in before.items() if v.is_floating_point()}
    return {
        "norms": torch.tensor(norms, dtype=torch.float64),
        "moved": {k: m.clone() for k, m in moved.items()},
    }


def assert_trains_alike(name: str, tp: int, limit: float, **options: Any) -> dict[str, torch.Tensor]:
    """The split model trains as the whole one does; returns the moves of the whole one."""
    want = trained(*built(name), **options)
    for rank in on_ranks(tp, lambda: built(name), lambda m, i: trained(m, i, **options)):
        assert_close(rank["norms"], want["norms"], limit)
        assert_same_grads(rank["moved"], want["moved"], limit)
    return want["moved"]


# --- silently wrong elsewhere


@pytest.mark.parametrize(("name", "tp"), [("bloom", 4), ("mpt", 2), ("t5", 2)])
def test_position_biases_are_those_of_the_whole_models_heads(name: str, tp: int) -> None:
    """ALiBi slopes and relative biases depend on how many heads there are and on which head it is: built
    anew for the local heads they have the right shape and wrong numbers."""
    model, inputs = built(name)
    want = forward_and_grads(model, inputs)
    for logits, grads in on_ranks(tp, lambda: built(name), forward_and_grads):
        assert_close(logits, want[0], FLOAT32)
        assert_same_grads(grads, want[1], FLOAT32)


@pytest.mark.parametrize(
    ("name", "tp", "weights"),
    [
        ("qwen3", 2, ("q_norm.weight", "k_norm.weight")),  # norms on heads
        ("llama_mqa", 2, ("k_proj.weight", "v_proj.weight")),  # one key head for all ranks
        ("gpt_bigcode", 2, ("c_attn.weight", "c_attn.bias")),  # the same, fused with the queries
        ("mixtral", 2, ("mlp.gate.weight",)),  # the router
    ],
)
def test_replicated_weights_in_sharded_regions_do_not_drift(
    name: str, tp: int, weights: tuple[str, ...]
) -> None:
    """Each rank sees a share of the uses of such a weight: its gradient is the sum, and it stays equal on
    all ranks."""
    moved = assert_trains_alike(name, tp, 10 * FLOAT32)
    for weight in weights:
        found = [m for k, m in moved.items() if k.endswith(weight)]
        assert found and all(float(m.abs().max()) > 1e-4 for m in found), weight


class Activated(nn.Module):
    """An MLP with parameters in its activation, as Apertus has, and a row bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.alpha = nn.Parameter(torch.tensor(0.8))
        self.slope = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(torch.where(h > 0, self.alpha * h * h, self.slope * h))


def activated() -> tuple[nn.Module, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    model = Activated().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model, {"x": torch.randn(3, 16, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("tp", [2, 3])
def test_parameters_of_an_activation_and_a_row_bias(tp: int) -> None:
    """Learnable activations get the gradient of all ranks. A row's bias is added once, and its gradient is
    not divided; with biases of zero neither would show."""
    model, inputs = activated()
    assert float(model.down.bias.detach().abs().min()) > 0  # type: ignore[union-attr, operator]
    want = forward_and_grads(model, inputs)
    for logits, grads in on_ranks(tp, activated, forward_and_grads):
        assert_close(logits, want[0])
        assert_same_grads(grads, want[1])


@pytest.mark.parametrize("name", ["opt", "llama_bias"])
def test_row_biases_of_whole_models(name: str) -> None:
    model, inputs = built(name)
    biases = {n: p for n, p in model.named_parameters() if n.endswith(("out_proj.bias", "o_proj.bias"))}
    assert biases and all(float(b.abs().max()) > 0.1 for b in biases.values())
    want = forward_and_grads(model, inputs)
    for logits, grads in on_ranks(2, lambda: built(name), forward_and_grads):
        assert_close(logits, want[0])
        assert_same_grads(grads, want[1])


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3", "codegen"])
def test_a_fused_checkpoint_loaded_into_a_split_model(name: str) -> None:
    """[Q|K|V], heads of (q, k, v), blocks of both, [gate|up]: cut by the axes inside, also when loaded
    later."""
    other, inputs = built(name)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    state = copy.deepcopy(other.state_dict())
    want = logits_of(other(**inputs)).detach()
    assert float((want - logits_of(built(name)[0](**inputs))).abs().max()) > 0.1

    def use(model: nn.Module, inputs: dict[str, Any]) -> Any:
        model.load_state_dict(state)
        back = autotp.full_state_dict(model)
        return logits_of(model(**inputs)).detach(), all(torch.equal(back[k], v) for k, v in state.items())

    for logits, same in on_ranks(2, lambda: built(name), use):
        assert_close(logits, want)
        assert same


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_the_sharded_fraction_is_what_a_rank_holds(name: str) -> None:
    """Not a number of modules matched: the block weights that a rank really has. Linears with [in, out]
    weights (gpt2) and experts as 3-d parameters (mixtral) count."""

    def use(model: Any, _: Any) -> tuple[float, float]:
        plan = model.autotp.plan
        block = {n: p for n, p in plan.params.items() if p.block}
        whole = sum(torch.Size(p.shape).numel() for p in block.values())
        local = sum(model.get_parameter(n).numel() for n in block)
        return plan.sharded_fraction, local / whole

    for fraction, held in on_ranks(2, lambda: built(name), use):
        assert fraction > 0.9
        assert held == pytest.approx(1 - fraction / 2, abs=1e-3)


class Mixed(nn.Module):
    """Two weights that can be split, and one that is sorted as a whole before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[2].weight
        x = x + self.blocks[1](torch.relu(self.blocks[0](x)))
        return x @ torch.sort(weight.flatten()).values.view_as(weight)


def test_what_stays_whole_is_said_and_strict_makes_it_an_error() -> None:
    model, inputs = Mixed().double(), {"x": torch.randn(2, 16, dtype=torch.float64)}
    stays = r"1 block weights of Mixed stay whole .*\n"
    with pytest.warns(
        UserWarning, match=stays + r"  blocks.2.weight: .*the model: sort \(test_peers.py:\d+\)"
    ):
        split = on_ranks(
            2, lambda: (copy.deepcopy(model), inputs), lambda m, i: (m(**i).detach(), m.autotp.plan)
        )
    for result, plan in split:
        assert_close(result, model(**inputs).detach())
        assert plan.sharded_fraction == pytest.approx(2048 / 2304)
        assert "blocks.2.weight" in plan.kept
    with pytest.raises(PlanError, match="blocks.2.weight"):
        on_ranks(2, lambda: (copy.deepcopy(model), inputs), lambda m, i: None, strict=True)


def test_a_policy_pattern_that_matches_nothing_is_an_error() -> None:
    policy = {"schema": 1, "modules": {"model.layers.*.self_attention.*": "column"}}
    with pytest.raises(PolicyError, match="self_attention"):
        model, inputs = built("llama_gqa")
        autotp.plan(model, tp=2, policy=policy, example_inputs=inputs)


def _seeds_differ(rank: int) -> dict[str, Any]:
    model, inputs = MODELS["gpt2"](dtype=torch.float64)
    torch.manual_seed(100 + rank)
    model.transformer.h[0].attn.attn_dropout.p = 0.3
    model.transformer.drop.p = model.transformer.h[1].mlp.dropout.p = 0.2
    nn.init.normal_(model.transformer.ln_f.weight)  # differs by rank, as a new head does
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        autotp.parallelize(model, example_inputs=inputs)
    sampled = model.generate(token_ids(), max_new_tokens=6, do_sample=True, temperature=2.0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    held = model.autotp.held
    own = {
        n: plain(p.detach()) for n, p in model.named_parameters() if n not in held or held[n].layout is None
    }
    return {"said": [str(w.message) for w in said], "sampled": sampled, "losses": losses, "own": own,
            "once": {n for n, h in held.items() if h.once}}  # fmt: skip


def test_ranks_with_different_seeds_stay_one_model() -> None:
    """Real processes: a part initialised differently is made equal and told; sampling draws one token, not
    one a rank; dropout leaves the replicated parameters equal after three steps."""
    first, second = distributed.run(2, _seeds_differ, timeout=90)
    assert any("differed between the ranks (first: transformer.ln_f.weight" in s for s in first["said"])
    assert torch.equal(first["sampled"], second["sampled"])
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-12)
    assert len(set(first["losses"])) == 3
    assert len(first["own"]) > 5
    for name, value in first["own"].items():
        if name not in first["once"]:
            assert torch.equal(value, second["own"][name]), name


@pytest.mark.parametrize("name", ["llama_gqa", "llama_vocab257", "llama_tied", "t5"])
def test_every_rank_gives_the_whole_output(name: str) -> None:
    """The type, the keys and all of the vocabulary: not a rank's half of it."""
    model, inputs = built(name)
    want = model(**inputs)
    for got in on_ranks(2, lambda: built(name), lambda model, inputs: model(**inputs)):
        assert type(got) is type(want) and list(got) == list(want)
        assert_close(got.logits.detach(), want.logits.detach(), FLOAT32)


# --- loud elsewhere


def test_what_does_not_divide_is_decided_when_planning() -> None:
    """3 heads over 2, one key head over 4, 257 tokens over 4: planned, with local sizes that add up; no
    error in a view in the middle of a forward."""
    for name, tp in (("llama_3heads", 2), ("llama_mqa", 4), ("llama_vocab257", 4)):
        model, inputs = built(name)
        plan = autotp.plan(model, tp=tp, example_inputs=inputs)
        head = plan.params["lm_head.weight"]
        assert sum(head.local_shape(r)[0] for r in range(tp)) == head.shape[0]
        query = plan.params["model.layers.0.self_attn.q_proj.weight"]
        assert sum(query.local_shape(r)[0] for r in range(tp)) == query.shape[0]
        assert all(query.local_shape(r)[0] % 16 == 0 and query.local_shape(r)[0] for r in range(tp))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_clipping_and_every_form_of_adamw(options: dict[str, bool]) -> None:
    """The norm counts each weight once, and the optimizer sees plain tensors."""
    assert_trains_alike("llama_gqa", 2, 10 * EXACT, **options)


def test_gradients_of_a_half_frozen_model() -> None:
    """Only the last block is trained, as in fine-tuning."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = built("llama_gqa")
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("model.layers.1."))
        return model, inputs

    model, inputs = build()
    loss_of(model, inputs).backward()
    want = full_grads(model)
    assert 0 < len(want) < 12
    for grads in on_ranks(2, build, lambda m, i: (loss_of(m, i).backward(), full_grads(m))[1]):
        assert_same_grads(grads, want)
