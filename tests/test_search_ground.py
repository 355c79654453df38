"""Predictions on other grounds than published runs: what must not be slower, larger or cheaper than what."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_alone import Mixed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from autotp.search.cluster import Cluster, load
from autotp.search.counts import count
from autotp.search.find import search
from autotp.search.predict import predict
from autotp.search.workload import Message, Workload


def meta(config, kind=AutoModelForCausalLM):
    with torch.device("meta"):
        return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def gpt(vocab=50304, layers=8, hidden=2048) -> Workload:
    config = GPT2Config(n_embd=hidden, n_head=16, n_layer=layers, vocab_size=vocab, n_positions=1024)
    return count(meta(config), 1024)


@pytest.fixture(scope="module")
def models() -> dict[str, Workload]:
    sizes = dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000)
    llama = LlamaConfig(**sizes, intermediate_size=5632, num_hidden_layers=8)
    moe = MixtralConfig(**sizes, intermediate_size=2816, num_hidden_layers=8, num_local_experts=8)
    t5 = T5Config(d_model=1024, d_kv=64, num_heads=16, d_ff=4096, num_layers=4, vocab_size=32128)
    return {
        "gpt": gpt(),
        "llama": count(meta(llama), 1024),
        "mixtral": count(meta(moe), 1024),
        "t5": count(meta(t5, T5ForConditionalGeneration), 512),
    }


NAMES = st.sampled_from(["gpt", "llama", "mixtral", "t5"])
CLUSTERS = st.sampled_from(["dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "mi300x", "l40s", "dgx-2"])
DTYPE = {"dgx-2": "fp16"}
STEPS = dict(
    name=NAMES, where=CLUSTERS, tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2, 4]), zero=st.integers(0, 1), again=st.sampled_from(["none", "full"]),
)  # fmt: skip


def run(workload, where, **options):
    options = dict(batch=32, dtype=DTYPE.get(str(where).partition(":")[0], "bf16")) | options
    return predict(workload, where, **options)


@settings(max_examples=40, deadline=None)
@given(**STEPS)
def test_steps_and_memory_go_the_way_they_must(models, name, where, tp, pp, micro, zero, again):
    workload = models[name]
    base = dict(tp=tp, pp=pp, micro_batch=micro, zero=zero, recompute=again)
    one = run(workload, where, **base)
    assert one.step_time > 0 and all(m > 0 for m in one.memory)
    twice = run(workload, where, **base, dp=2)  # twice the GPUs, the same batch
    assert twice.step_time < one.step_time * 1.05
    assert twice.peak_memory <= one.peak_memory * 1.001
    more = run(workload, where, **base, batch=64)
    assert more.step_time > one.step_time and more.peak_memory >= one.peak_memory
    if micro < 4:
        larger = run(workload, where, **(base | {"micro_batch": 2 * micro}))
        assert larger.memory_breakdown["activations"] >= one.memory_breakdown["activations"]
    kept = run(workload, where, **(base | {"recompute": "none"}))
    made = run(workload, where, **(base | {"recompute": "full"}))
    assert made.step_time > kept.step_time and made.peak_memory <= kept.peak_memory
    ops = sum(one.breakdown.values())
    assert ops == pytest.approx(one.step_time, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(name=NAMES, where=CLUSTERS, tp=st.sampled_from([1, 2, 4, 8]), zero=st.integers(0, 3))
def test_better_machines_are_never_slower(models, name, where, tp, zero):
    machine = load(where)
    fast: list[Cluster] = [
        replace(machine, gpu=replace(machine.gpu, bandwidth=2 * machine.gpu.bandwidth)),
        replace(machine, gpu=replace(machine.gpu, peak={k: 2 * v for k, v in machine.gpu.peak.items()})),
        replace(machine, links=tuple(replace(x, bandwidth=2 * x.bandwidth) for x in machine.links)),
        replace(machine, links=tuple(replace(x, latency_us=0.0) for x in machine.links)),
    ]
    options = dict(tp=tp, dp=8 // tp, zero=zero, dtype=DTYPE.get(where, "bf16"), batch=32)
    slow = predict(models[name], machine, **options).step_time
    assert all(predict(models[name], f, **options).step_time <= slow * (1 + 1e-9) for f in fast)


@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral", "t5"])
def test_twice_the_ranks_hold_half_of_the_layers(models, name):
    for unit in (u for u in models[name].units if u.layer):
        held = [float(unit.params.local(tp)) for tp in (1, 2, 4)]
        assert all(0.5 <= b / a < 0.502 for a, b in zip(held, held[1:], strict=False))


def test_serving_goes_the_way_it_must(models):
    for name in ("gpt", "llama", "mixtral"):
        steps = [
            predict(models[name], "dgx-h100", tp=1, batch=b, mode="generate").step_time
            for b in (1, 8, 64, 512)
        ]
        assert steps == sorted(steps) and steps[-1] < 512 * steps[0]
        fits = [
            predict(models[name], "dgx-h100", tp=t, batch=8, mode="generate").sequences for t in (1, 2, 4)
        ]
        assert fits == sorted(fits) and fits[0] > 0
        result = search(models[name], "dgx-h100", batch=64, mode="generate")
        tried = {(p.config.tp, p.config.dp) for p in result.plans} | {
            (r.config.tp, r.config.dp) for r in result.rejected()
        }
        assert {(1, 8), (2, 4), (4, 2), (8, 1)} <= tried
        most = max(result.plans, key=lambda p: p.tokens_per_second)
        assert most.step_time == result.best.step_time  # one batch: the fastest token is the most tokens


def test_fewer_key_value_heads_hold_more_sequences():
    """The cache is of key/value heads; over more ranks than there are, it is repeated."""

    def fits(kv, tp):
        config = LlamaConfig(
            hidden_size=2048, num_attention_heads=16, num_key_value_heads=kv, intermediate_size=5632,
            num_hidden_layers=8, vocab_size=32000,
        )  # fmt: skip
        return predict(count(meta(config), 1024), "dgx-h100", tp=tp, batch=8, mode="generate").sequences

    assert fits(4, 4) > 3.5 * fits(16, 4) and fits(4, 4) > 3.5 * fits(4, 1)
    assert fits(4, 8) < 1.2 * fits(4, 4)


def test_an_odd_vocabulary_is_slow_whole_and_padded_in_parts():
    odd, even = gpt(50257), gpt(50304)
    for where in ("dgx-a100", "dgx-h100"):
        slower = [
            predict(odd, where, tp=tp, batch=8, micro_batch=8).step_time
            / predict(even, where, tp=tp, batch=8, micro_batch=8).step_time
            for tp in (1, 2)
        ]
        assert slower[0] > 1.03 and slower[1] == pytest.approx(1.0, abs=0.005)
    same = [predict(w, "dgx-h100", batch=8, dtype="fp32").step_time for w in (odd, even)]
    assert same[0] == pytest.approx(same[1], rel=0.005)


@pytest.mark.parametrize(
    "config, kind, layers",
    [
        (GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=128), AutoModelForCausalLM, 1),
        (
            T5Config(d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=1, vocab_size=128),
            T5ForConditionalGeneration,
            2,
        ),
    ],
)
def test_a_single_layer_is_a_layer(config, kind, layers):
    model = meta(config, kind)
    workload = count(model, 32)
    assert workload.layers == layers
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    kept, made = (predict(workload, "dgx-h100", batch=8, recompute=r) for r in ("none", "full"))
    assert made.memory_breakdown["activations"] < kept.memory_breakdown["activations"]


def test_one_layer_costs_what_each_of_many_does():
    one, two, three = (gpt(layers=n, hidden=512) for n in (1, 2, 3))
    assert two.flops() - one.flops() == three.flops() - two.flops() > 0
    assert two.parameters - one.parameters == three.parameters - two.parameters


def test_what_is_split_alone_is_divided_and_gathered():
    x = {"x": torch.empty(1, 5, 16, dtype=torch.float64, device="meta")}
    with torch.device("meta"):
        model = Mixed().double()
    workload = count(model, example=x)
    unit = next(u for u in workload.units if u.name == "layers.1")
    assert sorted((p.split, p.ways) for p in unit.products) == [("cols", 16), ("cols", 24), ("cols", 24)]
    assert set(unit.params) == {1, 16, 24} and unit.params[1] == 32  # the norm alone is whole
    sent = [m for m in unit.messages if m.kind == "gather"]
    assert sorted(m.elements for m in sent) == [5 * 16, 5 * 24, 5 * 24]
    assert Message("reduce", "backward", 5 * 16.0) in unit.messages
    assert workload.head_ways > 1


class Heads(nn.Module):
    """A list of one that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in "ab"]
        )
        self.heads = nn.ModuleList([nn.Linear(16, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.heads[0](x)


def test_a_single_head_is_no_layer():
    x = {"x": torch.empty(1, 5, 16, device="meta")}
    with torch.device("meta"):
        assert count(Heads(), example=x).layers == 2


def test_a_convolution_multiplies_with_its_whole_kernel():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
    x = torch.randn(1, 4, 15, 15)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert count(model, example={"input": x}).flops() == counter.get_total_flops()
