"""Plans in transformers' words: what is said, what is left out, and that transformers runs it right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run
from models import TEXT, hf
from torch import nn

import autotp
from autotp.layouts import ParamLayout
from autotp.tp_plan import cuts, glob

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' own tensor parallelism loads with accelerate")


def built(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    config, cls, settings = TEXT[name]
    return hf(config, cls, dtype=torch.float64, **{**settings, **changes})


def loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    logits = model(**inputs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (logits * weights).mean()


Case = tuple[str, str, dict[str, str], dict[str, Any]]  # folder, class, plan, inputs


def loaded_by_transformers(rank: int, cases: dict[str, Case]) -> Any:
    """Per case the logits without gradients, every gradient, and which parameters are cut."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    def whole(value: torch.Tensor) -> torch.Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    found = {}
    for name, (folder, cls, plan, inputs) in cases.items():
        model = getattr(transformers, cls).from_pretrained(
            folder,
            dtype=torch.float64,
            distributed_config=DistributedConfig(tp_size=2, tp_plan=plan),
            experts_implementation="batched_mm",
        )
        with torch.no_grad():
            logits = model(**inputs).logits
        loss(model, inputs).backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        cut = {
            n
            for n, p in model.named_parameters()
            if isinstance(p, DTensor) and not all(one.is_replicate() for one in p.placements)
        }
        found[name] = (whole(logits), grads, cut)
    return found


RUN = [  # with plans of their own and without, of all kinds of layers
    "llama_gqa", "llama_3heads", "llama_mqa", "llama_tied", "phi3", "mixtral", "qwen3_moe", "deepseek_v3",
    "gpt_oss", "olmo2", "gpt_neox", "gpt2", "opt", "stablelm", "bert", "gemma3",
]  # fmt: skip


@pytest.fixture(scope="module")
def as_transformers_runs_it(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    cases = {}
    for name in RUN:
        model, inputs = built(name)
        plan = autotp.plan(model, tp=2, example_inputs=inputs)
        folder = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folder)  # type: ignore[operator]
        cases[name] = (folder, type(model).__name__, plan.to_tp_plan(), inputs)
    return run(2, loaded_by_transformers, cases, timeout=300)


@pytest.mark.parametrize("name", RUN)
def test_transformers_runs_it(name: str, as_transformers_runs_it: list[Any]) -> None:
    model, inputs = built(name)
    plan = autotp.plan(model, tp=2, example_inputs=inputs)
    with torch.no_grad():
        want = model(**inputs).logits
    loss(model, inputs).backward()
    want_grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in want_grads.values())
    said = {n for n, p in plan.params.items() if p.layout is not None and glob(n) not in plan.styles.left_out}
    for ranks in as_transformers_runs_it:
        logits, grads, cut = ranks[name]
        assert float((logits - want).abs().max()) <= 1e-6 * float(want.abs().max())
        assert set(grads) == set(want_grads)
        assert not [n for n, g in want_grads.items() if float((grads[n] - g).abs().max()) > 1e-6 * scale]
        assert cut == said and cut


def test_what_is_left_out_has_its_reason() -> None:
    plan = autotp.plan(built("stablelm")[0], tp=2)
    assert "model.layers.*.self_attn.q_proj.weight" in plan.styles.left_out
    assert "modeling_stablelm.py:" in plan.styles.left_out["model.layers.*.self_attn.q_proj.weight"]
    assert not any("self_attn" in name for name in plan.to_tp_plan())


def test_rules_of_the_shipped_plan_are_switched_off() -> None:
    model, inputs = built("llama_3heads")  # its own plan cuts heads in two
    said = autotp.plan(model, tp=2, example_inputs=inputs).to_tp_plan()
    assert model.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert said["model.layers.*.self_attn.q_proj"] == "replicate"
    assert said["model.layers.*.mlp.up_proj"] == "colwise"


class TwoNames(nn.Module):
    """A column and a row that go by one glob, `mlp.*`; beside it one whose names differ."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(x)
        return x + self.down(torch.relu(self.up(x)))


def test_one_glob_for_two_things_is_left_out() -> None:
    plan = autotp.plan(TwoNames(), tp=2, example_inputs={"x": torch.randn(2, 8)})
    assert plan.to_tp_plan() == {"up": "colwise", "down": "rowwise"}
    assert set(plan.styles.left_out) == {"mlp.*.weight", "mlp.*.bias"}
    assert "one name for what differs" in plan.styles.left_out["mlp.*.weight"]


class Scaled(nn.Module):
    """A replicated scale meets the sharded hidden units, or their sum."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.pre, self.gate = nn.Linear(8, 8), nn.Linear(8, 1)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pre(x)
        hidden, gate = torch.relu(self.up(x)), self.gate(x)
        return self.down(hidden * gate) if self.inside else self.down(hidden) * gate


def test_a_partial_gradient_that_nothing_sums_is_left_out() -> None:
    inputs = {"x": torch.randn(2, 8)}
    plan = autotp.plan(Scaled(False), 2, example_inputs=inputs)
    assert plan.to_tp_plan()["up"] == "colwise" and plan.to_tp_plan()["down"] == "rowwise"
    plan = autotp.plan(Scaled(True), 2, example_inputs=inputs)
    assert plan.params["up.weight"].layout is not None
    assert "up" not in plan.to_tp_plan() and "down" not in plan.to_tp_plan()
    assert "partial gradient" in plan.styles.left_out["up.weight"]


class InPlace(nn.Module):
    """Autograd refuses a change in place of what transformers' styles give: a view made by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).mul_(2)


def test_what_is_changed_in_place_is_left_out() -> None:
    plan = autotp.plan(InPlace(), 2, example_inputs={"x": torch.randn(2, 8)})
    assert plan.params["down.weight"].layout is not None and plan.to_tp_plan() == {}
    assert "mul_ (test_tp_plan.py:" in plan.styles.left_out["down.weight"]


def test_globs_are_those_of_transformers() -> None:
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    for name in ("model.layers.10.mlp.w1.weight", "h.0", "a.1.2.b", "experts.3.w2"):
        assert glob(name) == replace_layer_number_by_wildcard(name)


def test_cuts() -> None:
    def of(size: int, *ranks: Any) -> int:
        return cuts(ParamLayout((size, 3), {0: ranks}), len(ranks))

    assert of(8, ((0, 4),), ((4, 8),)) == 1
    assert of(7, ((0, 4),), ((4, 7),)) == 1  # as torch.chunk
    assert of(7, ((0, 3),), ((3, 7),)) == 0
    assert of(8, ((0, 2), (4, 6)), ((2, 4), (6, 8))) == 2
    assert of(12, ((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))) == 0


def test_dump_prints_what_can_be_pasted(tmp_path: Path) -> None:
    import yaml
    from typer.testing import CliRunner

    from autotp.cli import app

    model, _ = built("stablelm")
    model.config.save_pretrained(tmp_path)
    printed = CliRunner().invoke(app, ["dump", str(tmp_path), "--tp", "2", "--format", "tp_plan"])
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.stdout) == autotp.plan(model, tp=2).to_tp_plan()
    assert "# left out" in printed.stdout and "self_attn.q_proj.weight" in printed.stdout
