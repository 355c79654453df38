"""What is planned is what runs: the rewritten model, captured again; and plans that lie are caught."""

from dataclasses import replace

import pytest
import torch
from models import MODELS
from torch import nn

from autotp.errors import AutotpError
from autotp.planner import plan_and_analysis
from autotp.recapture import check_plan, hollow

CASES = ["llama_gqa", "gpt2", "falcon_new", "bloom", "t5", "nanogpt", "mixtral", "olmo2"]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_rewritten_model_gives_the_planned_shapes_on_every_rank(name: str, tp: int) -> None:
    model, inputs = MODELS[name]()
    plan, found = plan_and_analysis(model, tp, example_inputs=inputs, check=False)
    captures = check_plan(hollow(model).eval(), plan, found).captures
    for again in captures:
        local = {n: tuple(p.shape) for n, p in again.skeleton.named_parameters()}
        assert local
        assert any(local == {n: plan.params[n].local_shape(r) for n in local} for r in range(tp))


@pytest.mark.parametrize("name", ["gpt2", "opt", "codegen", "nanogpt", "bloom"])
def test_a_plan_that_forgets_a_local_number_is_found_out(name: str) -> None:
    model, inputs = MODELS[name]()
    plan, found = plan_and_analysis(model, 2, example_inputs=inputs)
    forgotten = []
    if plan.ints:
        forgotten.append(replace(plan, ints=plan.ints[1:]))
    if plan.arguments:
        forgotten.append(replace(plan, arguments=plan.arguments[1:]))
    assert forgotten, "this model was chosen because it needs local numbers"
    for lie in forgotten:
        with pytest.raises(AutotpError):
            check_plan(hollow(model).eval(), lie, found)


@pytest.mark.parametrize("name", ["llama_gqa", "bert", "mixtral", "mamba"])
def test_a_plan_that_forgets_or_doubles_an_arrow_is_found_out(name: str) -> None:
    model, inputs = MODELS[name]()
    plan, found = plan_and_analysis(model, 2, example_inputs=inputs)
    hooks = [c for c in plan.collectives if all(w.kind != "layer" for w in c.where)]
    assert hooks
    rest = tuple(c for c in plan.collectives if c is not hooks[0])
    for lie in (replace(plan, collectives=rest), replace(plan, collectives=(*plan.collectives, hooks[0]))):
        with pytest.raises(AutotpError):
            check_plan(hollow(model).eval(), lie, found)


def test_the_check_does_not_grow_with_the_depth() -> None:
    import transformers

    sizes = []
    for layers in (2, 6):
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
        model = transformers.LlamaForCausalLM(config)
        plan, found = plan_and_analysis(model, 2, check=False)
        (again,) = check_plan(hollow(model).eval(), plan, found).captures
        sizes.append(sum(n.op == "call_module" for n in again.graph.nodes))
    assert sizes[0] == sizes[1]


class WithStatistics(nn.Module):
    """A norm and a maximum over the sharded axis between the linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.more = (nn.Linear(24, 48) for _ in range(3))
        self.norm, self.down = nn.LayerNorm(48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x) * self.gate(x) * self.more(x))
        return self.down(h / h.amax(-1, keepdim=True))


def test_arrows_are_counted_beside_statistics() -> None:
    x = torch.randn(2, 5, 24)
    model = WithStatistics()
    plan, found = plan_and_analysis(model, 2, example_inputs=(x,))
    kinds = {c.kind for c in plan.collectives}
    assert plan.params["up.weight"].layout is not None and {"norm", "max"} <= kinds, kinds
    for forgotten in (c for c in plan.collectives if all(w.kind != "layer" for w in c.where)):
        lie = replace(plan, collectives=tuple(c for c in plan.collectives if c is not forgotten))
        with pytest.raises(AutotpError, match="ran where"):
            check_plan(hollow(model).eval(), lie, found)
