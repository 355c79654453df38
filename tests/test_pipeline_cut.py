"""Stages are cut where the dataflow allows it: each stage, given only what it holds and what it receives,
computes its part of the whole, bit for bit."""

import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, Built, Inputs
from torch import fx, nn

import autotp
from autotp.capture import CapturedGraph, capture
from autotp.errors import AbsentError, PlanError, PolicyError
from autotp.graph import has_tensor
from autotp.nested import map_nodes, map_tensors, tensors_in
from autotp.pipeline import Stages, cut
from autotp.pipeline.absent import Home, Origin, absent
from autotp.pipeline.costs import balance, flops
from autotp.pipeline.install import install
from autotp.pipeline.units import find_units, sources

DECODERS = (
    "llama_tied gpt2 gpt_neox phi gemma2 gemma3 olmo2 bloom mpt falcon_new falcon_alibi qwen3 mixtral opt "
    "deepseek_v3 mamba gptj phi3 gpt_bigcode nanogpt torch_encoder"
).split()
FAMILIES = [*DECODERS, "granite", "t5", "bart", "bert", "vit", "whisper"]
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Built]:
    """A tiny model of so many layers, with labels where it takes them."""
    plain = models.hf

    def make(name: str, layers: int = 2, labels: bool = True) -> Built:
        def deeper(*args: Any, **config: Any) -> Built:
            return plain(*args, **{k: layers if k in LAYERS else v for k, v in config.items()})

        monkeypatch.setattr(models, "hf", deeper)
        model, inputs = granite() if name == "granite" else MODELS[name]()
        if labels and "labels" in inspect.signature(model.forward).parameters:
            ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
            inputs["labels"] = torch.tensor([1, 3]) if ids is None else ids.clone()
        return model, inputs

    return make


def granite() -> Built:
    """Its multipliers are glue: of the embedding, of the logits."""
    scales = dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0)
    config = {**models.GQA, **scales, "attention_multiplier": 0.1}
    return models.hf("GraniteConfig", "GraniteForCausalLM", dtype=torch.float64, **config)


# --- the proof: stage by stage ------------------------------------------------------------------------------


class Missing(Exception):
    """A stage needed a value that it does not have."""


def run_stages(captured: CapturedGraph, stages: Stages, model: nn.Module, inputs: Inputs) -> Any:
    """What the stages give together. Each runs the whole graph and has the inputs, the parameters it holds,
    the outputs of its own units, and in place of those of other units what the stage before sends; an
    operation outside of units runs where all its operands are there."""
    nodes = list(captured.graph.nodes)
    units, _ = find_units(captured)
    assert [(u.path, u.number) for u in units] == [(c.path, c.number) for c in stages.calls]
    home = {n: c for u, c in zip(units, stages.calls, strict=True) for n in nodes[u.start : u.end]}
    outputs = {(u.path, u.number): in_order(u.call.output) for u in units}
    tensors = dict(tensors_in(inputs))
    received: dict[fx.Node, torch.Tensor] = {}
    result: dict[fx.Node, torch.Tensor] = {}
    for stage in range(stages.count):
        crossings = stages.crossings[stage] if stage < stages.count - 1 else ()
        crossing = [outputs[c.path, c.number][c.leaf] for c in crossings]
        sent: dict[fx.Node, torch.Tensor] = {}
        values: dict[fx.Node, Any] = {}
        for node in nodes[:-1]:
            elsewhere = node in home and home[node].stage != stage and node.op != "get_attr"
            there = holds(node, model, captured, stages, stage)
            there = there and all(n in values for n in sources(node))
            if not has_tensor(node):  # a size: known everywhere
                values[node] = node.meta["val"]
            elif node in received:
                values[node] = received[node]
            elif there and not elsewhere:
                # of what is not there only the form is read: any values will do
                forms = {n: zeros(n) for n in node.all_input_nodes if n not in values}
                values[node] = captured._step(node, model, tensors, {**values, **forms}, torch.device("cpu"))
            elif node in home and not elsewhere and node.op != "get_attr":
                raise Missing(f"stage {stage} can't run {home[node].path}: {node.format_node()}")
            if node in crossing:  # sent at once: what changes it in place later must not matter
                sent[node] = values[node].clone()
        received = sent
        for node in set(in_order(captured.output)) & set(values):
            result[node] = values[node]
    return map_nodes(captured.output, result.__getitem__)


def holds(node: fx.Node, model: nn.Module, captured: CapturedGraph, stages: Stages, stage: int) -> bool:
    """Whether a stage has the parameters and buffers that a node reads itself."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        names = [
            f"{node.target}.{n}" for n in (*dict(module.named_parameters()), *dict(module.named_buffers()))
        ]
        return all(stage in stages.params[name] for name in names)
    return (
        node.op != "get_attr" or node.target in captured.constants or stage in stages.params[str(node.target)]
    )


def zeros(node: fx.Node) -> torch.Tensor:
    return torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)


def in_order(output: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_nodes(output, found.append)
    return found


def same(a: Any, b: Any) -> bool:
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    map_tensors(a, ours.append)
    map_tensors(b, theirs.append)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


SHALLOW = {"nanogpt", "torch_encoder"}  # their depth is fixed


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_the_whole_model(family: str, count: int, build: Callable[..., Built]) -> None:
    if family in SHALLOW and count == 4:
        count = 3
    model, inputs = build(family, count)
    captured = capture(model, **inputs)
    stages = cut(captured, count)
    assert stages.count == count and all(stages.of(s) for s in range(count))
    with torch.no_grad():
        assert same(run_stages(captured, stages, model, inputs), model(**inputs))


def test_the_proof_fails_without_what_crosses(build: Callable[..., Built]) -> None:
    model, inputs = build("t5")
    captured = capture(model, **inputs)
    stages = cut(captured, 2, stages=["decoder.block.1"])
    assert len(stages.crossings[0]) == 4
    for left_out in range(4):
        fewer = stages.crossings[0][:left_out] + stages.crossings[0][left_out + 1 :]
        with pytest.raises((Missing, KeyError)), torch.no_grad():
            run_stages(captured, replace(stages, crossings=(fewer,)), model, inputs)


@pytest.mark.parametrize("family", [f for f in DECODERS if f not in SHALLOW])
def test_one_activation_crosses_between_decoder_layers(family: str, build: Callable[..., Built]) -> None:
    model, inputs = build(family, layers=4, labels=False)
    stages = cut(capture(model, **inputs), 4)
    for crossings in stages.crossings:
        (crossing,) = crossings
        assert crossing.shape == (2, 12, 64) and crossing.dtype == "float64"
        assert crossing.bytes == 2 * 12 * 64 * 8 and crossing.requires_grad
    blocks = [sum(c.path.rpartition(".")[2].isdigit() for c in stages.of(s)) for s in range(4)]
    assert blocks == [1, 1, 1, 1]


def crossing_names(stages: Stages, end: int = 0) -> list[str]:
    return [f"{c.path}:{c.number}[{c.leaf}]" for c in stages.crossings[end]]


def test_encoder_decoders_send_the_encoders_output_through_every_later_stage(
    build: Callable[..., Built],
) -> None:
    model, inputs = build("t5", layers=4)
    stages = cut(
        capture(model, **inputs),
        4,
        stages=["encoder.block.2", "decoder.block.0", "decoder.block.2"],
    )
    # In the encoder: the hidden states, and the position bias that its first block makes for all.
    assert crossing_names(stages, 0) == ["encoder.block.0:0[1]", "encoder.block.1:0[0]"]
    bias, hidden = stages.crossings[0]
    assert bias.also == (("encoder.block.1", 0, 1),) and bias.shape[1] == 4
    assert hidden.used_by == ("encoder.block.2",)
    assert crossing_names(stages, 1) == ["encoder.dropout:1[0]", "decoder.dropout:0[0]"]
    assert crossing_names(stages, 2) == [
        "encoder.dropout:1[0]",
        "decoder.block.0:0[1]",
        "decoder.block.0:0[2]",
        "decoder.block.1:0[0]",
    ]
    assert stages.owners("encoder.dropout") == (0, 1)
    for family, last in (("bart", "model.encoder.layers.1"), ("whisper", "model.encoder.layer_norm")):
        model, inputs = build(family)
        stages = cut(capture(model, **inputs), 2, stages=["model.decoder.layers.1"])
        assert crossing_names(stages) == [f"{last}:0[0]", "model.decoder.layers.0:0[0]"]


def test_parameters_are_held_where_they_are_used(build: Callable[..., Built]) -> None:
    model, inputs = build("llama_tied", layers=4)
    stages = cut(capture(model, **inputs), 4)
    assert set(stages.params) == {
        n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }
    assert stages.params["model.embed_tokens.weight"] == stages.params["lm_head.weight"] == (0, 3)
    assert stages.params["model.layers.2.mlp.up_proj.weight"] == (2,)
    assert stages.params["model.norm.weight"] == (3,)
    assert stages.params["model.rotary_emb.inv_freq"] == (0, 1, 2, 3)  # made again everywhere, not sent
    assert "model.rotary_emb" not in stages.units


# --- which calls are units ----------------------------------------------------------------------------------


def units_of(model: nn.Module, inputs: Inputs) -> list[str]:
    return [str(unit) for unit in find_units(capture(model, **inputs))[0]]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    """Experts beside each other in a list, and an MLP in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert(), Expert()])
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for expert in self.experts:
            total = total + expert(x)
        return x + self.mlp(total)


class Stack(nn.Module):
    """`between` is what its code does to the hidden states before each layer; `first` what it makes of the
    embedding, for all layers."""

    def __init__(self, depth: int = 4, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([layer() for _ in range(depth)])
        self.head = nn.Linear(8, 32)

    def first(self, h: torch.Tensor) -> Any:
        return None

    def between(self, h: torch.Tensor, first: Any) -> torch.Tensor:
        return h

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        first = self.first(h)
        for layer in self.layers:
            h = layer(self.between(h, first))
        return self.head(h)


IDS: Inputs = {"ids": torch.arange(10).view(2, 5)}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad


class OwnBackward(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))


def test_a_gradient_comes_back_to_an_autograd_function() -> None:
    """In whose forward, which is what is recorded, nothing requires one."""
    for layer in (Layer, OwnBackward):
        stages = cut(capture(Stack(layer=layer), **IDS), 2)
        assert [c.requires_grad for c in stages.crossings[0]] == [True]


def test_layers_are_units_and_experts_are_not() -> None:
    expected = ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert units_of(Stack(), IDS) == expected


def test_a_single_layer_and_a_model_inside_of_a_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"text": Stack(3)})
            self.score = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.score(self.body["text"](ids))

    text = [f"body.text.{name}" for name in ("embed", "layers.0", "layers.1", "layers.2", "head")]
    assert units_of(Outer(), IDS) == [*text, "score"]
    assert units_of(Stack(1), IDS)[0] == "embed" and units_of(Stack(1), IDS)[-1] == "head"


def test_chains_of_chains_are_opened_down_to_the_blocks(build: Callable[..., Built]) -> None:
    model, _ = models.hf(
        "SwinConfig", "SwinForImageClassification", dtype=torch.float64, image_size=32, patch_size=2,
        embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5,
    )  # fmt: skip
    inputs: Inputs = {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    units = units_of(model, inputs)
    blocks = [u for u in units if ".blocks." in u]
    assert len(blocks) == 4 and all(u.count("blocks") == 1 and u[-1].isdigit() for u in blocks)
    captured = capture(model, **inputs)
    stages = cut(captured, 4)
    assert all(len(c) == 1 for c in stages.crossings)
    with torch.no_grad():
        assert same(run_stages(captured, stages, model, inputs), model(**inputs))


def test_one_layer_called_again_and_again_is_cut_by_its_calls() -> None:
    model, inputs = models.hf(
        "AlbertConfig", "AlbertForMaskedLM", dtype=torch.float64, vocab_size=256, embedding_size=16,
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    )  # fmt: skip
    captured = capture(model, **inputs)
    stages = cut(captured, 2)
    (shared,) = [path for path in stages.units if stages.owners(path) == (0, 1)]
    assert [c.number for c in stages.calls if c.path == shared] == [0, 1, 2, 3]
    names = [name for name in stages.params if name.startswith(f"{shared}.")]
    assert names and all(stages.params[name] == (0, 1) for name in names)
    with torch.no_grad():
        assert same(run_stages(captured, stages, model, inputs), model(**inputs))
    (start,) = stages.starts
    assert start.startswith(f"{shared}:") and cut(captured, 2, stages=[start]) == stages


# --- what glue does with the outputs of units ---------------------------------------------------------------


def staged(model: nn.Module, *starts: str) -> Stages:
    """Cut by hand, and proven."""
    captured = capture(model, **IDS)
    stages = cut(captured, len(starts) + 1, stages=starts)
    with torch.no_grad():
        assert same(run_stages(captured, stages, model, IDS), captured.run(model, **IDS))
    return stages


class Skips(Stack):
    def first(self, h: torch.Tensor) -> torch.Tensor:
        return (h * 2).transpose(0, 1)

    def between(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return h + first.transpose(0, 1)


def test_what_glue_makes_of_a_units_output_is_made_again_where_it_is_used() -> None:
    model = Skips()
    stages = staged(model, "layers.1", "layers.3")
    assert crossing_names(stages, 0) == ["embed:0[0]", "layers.0:0[0]"]
    assert crossing_names(stages, 1) == ["embed:0[0]", "layers.2:0[0]"]
    made: Any = {}
    with torch.no_grad():
        for stage in range(3):  # the model's own Python, on each rank
            part = copy.deepcopy(model)
            pipeline = install(part, stages, stage, 3, None, f"rank {stage}")
            made = pipeline.run_stage(part, stage, made, (), IDS)
        assert torch.equal(made, model(**IDS))


class Table(nn.Module):
    """Positions as a table: of its input it reads the shape."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.arange(h.shape[1])[:, None] * torch.tensor(0.1)


def test_a_module_that_reads_shapes_alone_runs_on_every_stage() -> None:
    class Positions(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def first(self, h: torch.Tensor) -> torch.Tensor:
            return self.table(h)

        def between(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            return h + first

    stages = staged(Positions(), "layers.2")
    assert crossing_names(stages) == ["layers.1:0[0]"] and "table" not in stages.units


def test_only_the_form_of_a_value_is_no_value() -> None:
    class Masked(Stack):
        def first(self, h: torch.Tensor) -> torch.Tensor:
            return torch.tril(h.new_ones(h.shape[1], h.shape[1])) + torch.zeros_like(h)[0, :, :1]

        def between(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            return first @ h

    assert crossing_names(staged(Masked(), "layers.2")) == ["layers.1:0[0]"]


def test_a_missing_value_fills_no_new_tensor() -> None:
    origin = Origin("layers.0", 0, Home(torch.device("cpu"), (1,)))
    missing = absent(torch.empty((), device="meta"), origin)
    assert torch.equal(torch.zeros_like(missing), torch.zeros(()))
    with pytest.raises(AbsentError, match="made by layers.0 on stage 0"):
        missing.new_tensor(missing)


def refused(model: nn.Module, start: str) -> str:
    with pytest.raises(PlanError, match=r"test_pipeline_cut.py:\d+") as caught:
        staged(model, start)
    return str(caught.value)


def test_random_numbers_are_not_drawn_twice() -> None:
    class Noisy(Stack):
        def first(self, h: torch.Tensor) -> torch.Tensor:
            return torch.rand(5, 1)

        def between(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            return h * first

    text = refused(Noisy(), "layers.1")
    assert "a value of 5x1 made by the model: rand" in text and "can't be made twice" in text
    with pytest.raises(PlanError, match="into 3 stages at most") as caught:
        cut(capture(Noisy(), **IDS), 4)
    assert "no cut before layers.1" in str(caught.value) and "pp=3 or less" in str(caught.value)


def test_changes_in_place_are_not_cut_from_what_they_change() -> None:
    class InPlace(Stack):
        def between(self, h: torch.Tensor, first: None) -> torch.Tensor:
            return h.mul_(2.0)

    assert "mul_" in (text := refused(InPlace(), "layers.1")) and "in place" in text


def test_what_a_unit_keeps_for_another_can_only_stay_on_its_stage() -> None:
    memory: dict[str, torch.Tensor] = {}

    class Remembers(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory.setdefault("keys", x * 3)
            return super().forward(x + memory["keys"])

    text = refused(Stack(layer=Remembers), "layers.1")
    assert "made by layers.0: mul" in text and "not among its outputs" in text
    memory.clear()


# --- cuts by hand, and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "starts,message",
    [
        (["nowhere"], "'nowhere' is no unit of the model. Its units: embed, layers.0"),
        (["layers.1.mlp"], "'layers.1.mlp' is inside 'layers.1', which runs as a whole"),
        (["embed"], "nothing is left for stage 0"),
        (["layers.1", "head"], "a list of 1 module paths"),
        ("layers.1", "a list of 1 module paths"),
    ],
)
def test_a_stated_cut_that_is_none_is_explained(starts: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cut(capture(Stack(), **IDS), 2, stages=starts)


def test_stated_cuts_are_in_order_and_may_name_what_is_around_the_units() -> None:
    captured = capture(Stack(), **IDS)
    assert cut(captured, 2, stages=["layers"]).starts == ("layers.0",)
    with pytest.raises(PlanError, match="does not run after 'layers.2'"):
        cut(captured, 3, stages=["layers.2", "layers.1"])
    for count in (0, -1, 2.0):
        with pytest.raises(PlanError, match="number of stages"):
            cut(captured, count)  # type: ignore[arg-type]


def test_stages_are_in_the_plan_its_digest_and_its_policy(build: Callable[..., Built]) -> None:
    model, _ = build("llama_gqa", layers=4)
    one = autotp.plan(model, 2)
    two = autotp.plan(model, 2, pp=2)
    assert one.stages is None and two.stages is not None and two.stages.count == 2
    assert one.digest != two.digest and (one.params, one.layers) == (two.params, two.layers)
    by_hand = autotp.plan(model, 2, pp=2, stages=["model.layers.3"])
    assert by_hand.stages is not None and by_hand.stages.starts == ("model.layers.3",)
    again = autotp.plan(model, 2, yaml.safe_load(by_hand.to_yaml()), pp=2)
    assert again.digest == by_hand.digest and again.stages == by_hand.stages
    with pytest.raises(PolicyError, match=r"'stages'\].*a list of 2 module paths"):
        autotp.plan(model, 2, yaml.safe_load(by_hand.to_yaml()), pp=3)
    with pytest.raises(PolicyError, match="stages is a list of module paths"):
        autotp.plan(model, 2, {"stages": 3}, pp=2)
    whole = sum(p.numel() for p in model.parameters())
    plain = autotp.plan(model, 1, pp=2)
    assert plain.local_bytes(0, 1, stage=0) + plain.local_bytes(0, 1, stage=1) == whole


# --- costs and balance --------------------------------------------------------------------------------------


def test_flops_of_products_and_attention(build: Callable[..., Built]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.up(x).unsqueeze(1)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    captured = capture(Two(), x=torch.randn(3, 5, 8))
    by_name = {str(getattr(n.target, "__name__", n.target)): cost for n, cost in flops(captured).items()}
    assert by_name["up"] == 2 * 15 * 8 * 16 + 15 * 16
    assert by_name["scaled_dot_product_attention"] == 2 * 2 * 3 * 5 * 5 * 16 + 15 * 16


def by_brute_force(
    costs: list[float], prices: list[float | None], count: int, slack: float
) -> tuple[int, ...] | None:
    places = [i for i, price in enumerate(prices) if price is not None]
    found = []
    for cuts in itertools.combinations(places, count - 1):
        bounds = [0, *(c + 1 for c in cuts), len(costs)]
        runs = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        found.append((max(runs), sum(prices[c] or 0 for c in cuts), sum(r * r for r in runs), cuts))
    if not found:
        return None
    limit = min(found)[0] * (1 + slack)
    return min(entry[1:] for entry in found if entry[0] <= limit)[-1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 3))), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.25]),
)
def test_the_fairest_cut_is_that_of_brute_force(
    row: list[tuple[int, int | None]], count: int, slack: float
) -> None:
    costs = [float(cost) for cost, _ in row]
    prices = [None if price is None else float(price) for _, price in row][:-1]
    assert balance(costs, prices, count, slack) == by_brute_force(costs, prices, count, slack)
