"""Counts against closed forms and torch's own counter, schedules against brute force"""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

import autotp
from autotp.errors import SearchError
from autotp.search.cluster import SHIPPED, collective, load, parse, spread
from autotp.search.cost import Setting, matmul
from autotp.search.counts import count
from autotp.search.find import candidates, choose_degrees, search
from autotp.search.generate import decode_units
from autotp.search.memory import cache, saved
from autotp.search.predict import cut, predict, train
from autotp.search.report import plans_table, trace
from autotp.search.schedule import balanced, in_flight, orders, simulate
from autotp.search.shorten import layer_lists, shortened
from autotp.search.table import evaluate
from autotp.search.workload import Shares, share


def gpt(hidden=128, heads=4, layers=4, seq=64, vocab=512, dropout=0.1, device="meta", **more):
    config = GPT2Config(
        n_embd=hidden, n_head=heads, n_layer=layers, vocab_size=vocab, n_positions=seq,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, **more,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def llama(hidden=128, heads=8, kv=2, ffn=352, layers=3, vocab=512, device="meta", **more):
    config = LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=ffn,
        num_hidden_layers=layers, vocab_size=vocab, **more,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def gpt3():
    return count(gpt(12288, 96, 96, 2048, 51200), 2048)


@pytest.fixture(scope="module")
def llama70():
    return count(llama(8192, 64, 8, 28672, 80, 128256), 4096)


# ---------------------------------------------------------------- counts
def test_gpt_keeps_34_bytes_per_token_and_hidden_unit(gpt3):
    traffic = gpt3.units[gpt3.order[1]].traffic
    kept = 2 * sum(traffic.saved.values()) + sum(traffic.masks.values())
    assert kept == 34 * 2048 * 12288


@pytest.mark.parametrize("tp, sp, expected", [(8, 0, 10 + 24 / 8), (8, 1, 34 / 8), (1, 0, 34)])
def test_tensor_and_sequence_parallelism_divide_what_korthikanti_says(gpt3, tp, sp, expected):
    one = np.ones(1)
    got = saved(gpt3.units[gpt3.order[1]], one * tp, one, one * sp, one, 2.0, True, "none").kept[0]
    assert got == pytest.approx(expected * 2048 * 12288)


def test_unfused_attention_adds_5as_over_h(gpt3):
    one = np.ones(1)
    args = (gpt3.units[gpt3.order[1]], one, one, one * 0, one, 2.0)
    assert saved(*args, False, "none").kept - saved(*args, True, "none").kept == 5 * 96 * 2048**2
    assert saved(*args, False, "selective").kept == saved(*args, True, "none").kept
    assert saved(*args, False, "full").kept == 2 * 2048 * 12288


def test_parameters_are_the_models_own():
    for model in (gpt(), llama(), gpt(tie_word_embeddings=False)):
        assert count(model, 32).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("build", [gpt, llama])
def test_flops_are_torchs(build):
    model = build(device="cpu", attn_implementation="eager").eval()  # torch counts no fused one on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 64, dtype=torch.long), use_cache=False)
    workload = count(model, 64)
    masked = sum(
        a.heads * a.queries * a.keys * (a.size + a.value_size)
        for i in workload.order
        for a in workload.units[i].attentions
    )  # torch counts the half that a causal mask hides
    got = workload.flops() + masked
    small = 2 * 64 * 32 * workload.layers  # rotary tables
    assert abs(got - counter.get_total_flops()) <= small + 0.001 * got


def test_attention_is_found_fused_or_written_out():
    fused, eager = (count(gpt(attn_implementation=a), 64) for a in ("sdpa", "eager"))
    assert [u.attentions for u in fused.units] == [u.attentions for u in eager.units]
    assert fused.flops() == eager.flops()


def test_grouped_heads_divide_into_groups_then_queries(llama70):
    products = {(p.cols, p.split): p.ways for p in llama70.units[llama70.order[1]].products}
    assert products[1024.0, "cols"] == 8 and products[8192.0, "cols"] == 64
    assert share(np.array(16), 8) == 1 / 8  # a rank holds one key/value head, and so does another


def test_saved_for_backward_is_what_autograd_saves():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).double()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        model(x)
    weights = {p.data_ptr() for p in model.parameters()}
    measured = sum(t.numel() for t in kept.values() if t.data_ptr() not in weights)
    traffic = count(model, example={"input": x.detach().requires_grad_()}).units[0].traffic
    assert sum(traffic.saved.values()) == measured == 4 * 16 + 4 * 64 * 2


def test_one_layer_of_each_kind_gives_what_all_give():
    short, whole = gpt(layers=5), gpt(layers=5)
    for i, block in enumerate(whole.transformer.h):
        block.tag = str(i)  # a setting that differs: five kinds
    a, b = count(short, 64), count(whole, 64)
    assert len(a.units) == 3 and len(b.units) == 7
    assert a.flops() == b.flops() and a.parameters == b.parameters and a.layers == b.layers == 5


def test_layers_are_numbered_not_of_different_kinds():
    model = llama(layers=6)
    (layers,) = layer_lists(model)
    assert layers.kinds == (0,) * 6
    assert len(shortened(model, [layers]).model.layers) == 1 and len(model.model.layers) == 6


def test_layers_of_two_sorts_are_numbered_by_where_they_stand():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"ab"[i % 3 == 2]: nn.Linear(4, 4)}) for i in range(6))
    for i, layer in enumerate(model.layers):
        next(layer.children()).layer_idx = i
    (layers,) = layer_lists(model)
    assert layers.kinds == (0, 0, 1, 0, 0, 1) and layers.first == (0, 2)
    model.layers[3]["a"].width = 7
    (layers,) = layer_lists(model)
    assert layers.kinds == (0, 0, 1, 2, 0, 1)


def test_encoder_decoder_runs_both_stacks():
    with torch.device("meta"):
        config = T5Config(d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=3, vocab_size=256)
        model = T5ForConditionalGeneration(config)
    workload = count(model, 32)
    assert workload.layers == 6
    assert workload.parameters == sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- schedules
@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 6), rounds=st.integers(1, 4), virtual=st.integers(1, 3), forward=st.floats(0.1, 2)
)
def test_even_stages_take_the_known_time(ranks, rounds, virtual, forward):
    count_ = ranks * rounds
    stages = ranks * virtual
    name = "interleaved" if virtual > 1 else "1f1b"
    length = simulate(name, [forward] * stages, [2 * forward] * stages, count_, ranks=ranks).length
    assert length == pytest.approx(3 * forward * (count_ * virtual + ranks - 1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_rank_computes_everything_once_and_in_order(schedule):
    line = simulate(schedule, [1.0, 2.0, 1.5], [2.0, 4.0, 3.0], 7, ranks=3, send=0.25)
    seen = {(a.kind, a.stage, a.microbatch): (start, end) for _, a, start, end in line.rows}
    assert len(seen) == len(line.rows) == 7 * 3 * (3 if schedule == "zero-bubble" else 2)
    for (kind, stage, i), (start, _) in seen.items():
        if kind == "F" and stage:
            assert start >= seen["F", stage - 1, i][1] + 0.25
        if kind == "B":
            assert start >= (seen["B", stage + 1, i][1] + 0.25 if stage < 2 else seen["F", stage, i][1])


def test_zero_bubble_is_shorter_than_1f1b():
    a, b = (simulate(s, [1.0] * 4, [2.0] * 4, 8, ranks=4).length for s in ("1f1b", "zero-bubble"))
    assert b < a - 4


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 6), rounds=st.integers(1, 3), virtual=st.integers(1, 3))
def test_in_flight_is_what_the_schedule_holds(ranks, rounds, virtual):
    name = "interleaved" if virtual > 1 else "1f1b"
    for rank, actions in enumerate(orders(name, ranks, ranks * rounds, virtual)):
        held = np.cumsum([1 if a.kind == "F" else -1 for a in actions]).max()
        assert in_flight(name, ranks, ranks * rounds, virtual)[rank] == held


@settings(max_examples=40, deadline=None)
@given(costs=st.lists(st.floats(0.1, 9), min_size=1, max_size=8), data=st.data())
def test_balanced_is_the_best_cut(costs, data):
    stages = data.draw(st.integers(1, len(costs)))

    def best(left, parts):
        if parts == 1:
            return sum(left)
        return min(max(sum(left[:i]), best(left[i:], parts - 1)) for i in range(1, len(left) - parts + 2))

    sizes = balanced(costs, stages)
    at = np.cumsum([0, *sizes])
    got = max(sum(costs[a:b]) for a, b in zip(at, at[1:], strict=False))
    assert sum(sizes) == len(costs) and min(sizes) >= 1 and got == pytest.approx(best(costs, stages))


def test_uneven_layers_leave_the_head_the_smaller_stage(gpt3):
    costs = [1.0 if u.layer else 0.5 for u in gpt3.units]
    sizes = [sum(gpt3.units[i].layer for i in stage) for stage in cut(gpt3, 7, costs)]
    assert sum(sizes) == 96 and max(sizes) - min(sizes) <= 1


# ---------------------------------------------------------------- clusters and cost
@pytest.mark.parametrize("name", sorted(p.stem for p in SHIPPED.glob("*.yaml")))
def test_shipped_clusters_load(name):
    cluster = load(f"{name}:2")
    assert cluster.gpus == 2 * cluster.node and cluster.gpu.bandwidth > 0 and cluster.peak("bf16") > 0


def test_the_clusters_that_users_are_told_of_are_there():
    names = "dgx-2 dgx-a100 dgx-a100-4nic dgx-h100 hgx-h200 dgx-b200 gb200-nvl72 mi300x l40s cpu-host"
    assert set(names.split()) <= {p.stem for p in SHIPPED.glob("*.yaml")}


@pytest.mark.parametrize(
    "source, words",
    [("dgx-h1000", "Shipped: cpu-host"), ("dgx-h100:x", "number of nodes"), ("nothing.yaml", "No cluster")],
)
def test_cluster_errors_say_what_there_is(source, words):
    with pytest.raises(SearchError, match=words):
        load(source)


def test_cluster_files_are_strict():
    good = {
        "name": "x",
        "node": 1,
        "gpu": {"name": "g", "memory": 1, "bandwidth": 1, "peak": {}, "matmul": 1},
        "links": [],
    }
    parse(good, "here")
    with pytest.raises(SearchError, match="speed"):
        parse(good | {"gpu": {**good["gpu"], "speed": 2}}, "here")


def test_a_large_all_reduce_is_bound_by_bandwidth():
    link = load("dgx-a100").links[0]
    size = 2.0**34
    assert collective(link, "reduce", 8, size) == pytest.approx(
        2 * 7 / 8 * size / link.bandwidth / 1e9, rel=0.05
    )
    assert collective(link, "reduce", 1, size) == 0


def test_between_nodes_each_gpu_sends_its_part():
    cluster = load("dgx-a100:4")
    whole = spread(cluster, "reduce", 32, 1, 2.0**34)
    inside = collective(cluster.links[0], "reduce", 8, 2.0**34)
    assert whole - inside == pytest.approx(
        2 * 3 / 4 * 2.0**34 / 8 / cluster.links[1].bandwidth / 1e9, rel=0.05
    )


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 9000), n=st.integers(16, 9000), k=st.integers(16, 9000))
def test_no_product_beats_peak_or_bandwidth(m, n, k):
    cluster = load("dgx-h100")
    t = float(matmul(cluster, *(np.array(float(v)) for v in (m, n, k, 1)), "bf16"))
    assert t >= 2 * m * n * k / cluster.peak("bf16")
    assert t >= 2 * (m * k + k * n + m * n) / cluster.gpu.bandwidth / 1e9


# ---------------------------------------------------------------- predictions
def test_prediction_adds_up(gpt3):
    p = predict(gpt3, "dgx-a100:8", tp=8, pp=8, batch=64, seq=2048, recompute="full")
    assert sum(p.breakdown.values()) == pytest.approx(p.step_time, rel=1e-6)
    assert sum(p.memory_breakdown.values()) == pytest.approx(p.peak_memory)
    assert len(p.memory) == 8 and p.memory[0] > p.memory[4] and sum(p.stages) == 96


def test_memory_is_not_under_published_peaks():
    """SimuMax's B200 runs: the peak of torch's allocator, GiB."""
    for layers, tp, dp, measured in ((12, 8, 1, 28.29), (12, 2, 4, 60.68)):
        workload = count(llama(8192, 64, 8, 28672, layers, 128256), 4096)
        p = predict(workload, "dgx-b200:1", tp=tp, dp=dp, batch=8 * dp, zero=1, sequence_parallel=True)
        assert 0.99 < p.peak_memory / measured / 2**30 < 1.05


def test_what_costs_more_takes_longer(gpt3):
    base = dict(tp=8, pp=8, batch=64, seq=2048)
    plain, again = (predict(gpt3, "dgx-a100:8", **base, recompute=r) for r in ("none", "full"))
    assert 1.2 < again.step_time / plain.step_time < 1.4 and again.peak_memory < plain.peak_memory
    interleaved = predict(gpt3, "dgx-a100:8", **base, recompute="full", virtual_stages=3)
    assert interleaved.step_time < again.step_time and interleaved.peak_memory > again.peak_memory
    zero = [predict(gpt3, "dgx-a100:64", tp=8, pp=8, dp=8, batch=64, seq=2048, zero=z) for z in (0, 1)]
    assert zero[0].memory_breakdown["optimizer"] == 8 * zero[1].memory_breakdown["optimizer"]


def test_published_runs_come_out_near():
    """The whole comparison is `python -m tools.validate`; this holds its middle."""
    sc21 = dict(tp=8, dp=32, batch=1024, micro_batch=8, recompute="full")  # table 1, 18.4B
    korthikanti = dict(tp=8, batch=4, micro_batch=4, recompute="full")  # table 5, 22B
    cases = [
        (count(gpt(6144, 48, 40, 2048, 51200), 2048), "dgx-a100:32", sc21, 9.40),
        (count(gpt(6144, 64, 48, 2048, 51200), 2048), "dgx-a100:1", korthikanti, 1.42),
    ]
    for workload, cluster, options, measured in cases:
        assert predict(workload, cluster, **options).step_time == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(batch=7, dp=2), "no multiple"), (dict(batch=4, recompute="some"), "none, selective, full"),
        (dict(batch=4, pp=200), "96 layers"), (dict(batch=4, tp=0), "at least 1"),
        (dict(batch=4, zero=5), "0, 1, 2 or 3"),
        (dict(batch=6, pp=4, virtual_stages=2), "multiple"), (dict(batch=4, dtype="int3"), "bf16"),
        (dict(batch=4, mode="dream"), "train or generate"), (dict(batch=4, seq=5), "counted at 2048"),
        (dict(batch=4, schedule="best"), "1f1b"), (dict(batch=4, attention="odd"), "unfused"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_what_to_do(gpt3, options, words):
    with pytest.raises(SearchError, match=words):
        predict(gpt3, "dgx-a100:8", **options)


def test_generation_reads_weights_and_cache(llama70):
    one = np.ones(1)
    per_sequence = sum(float(cache(llama70.units[i], one, one, 4096.0, "bf16")[0]) for i in llama70.order)
    assert per_sequence == 2 * 80 * 8 * 128 * 4096 * 2
    p = predict(llama70, "hgx-h200", tp=4, batch=1, seq=4096, mode="generate")
    at_least = 70e9 * 2 / 4 / 4.8e12
    assert at_least < p.step_time < 2 * at_least
    assert p.prefill_time > 2 * 70e9 * 4096 / 4 / 989e12
    assert predict(llama70, "hgx-h200", tp=4, batch=64, seq=4096, mode="generate").step_time > p.step_time


def test_over_pcie_eight_ranks_are_no_twice_as_fast_as_four(llama70):
    """On L40S without NVLink published throughput hardly rises from 4 to 8 ranks; with NVLink it does."""

    def gain(cluster):
        four, eight = (
            predict(llama70, cluster, tp=t, batch=64, seq=4096, mode="generate", dtype="fp8") for t in (4, 8)
        )
        return four.prefill_time / eight.prefill_time

    assert gain("l40s") < 1.1 < 1.5 < gain("hgx-h200")


def test_megatrons_softmax_gives_way_for_few_heads():
    """Two heads of one sequence are no group of four: more kernels; two sequences are one again."""
    workload = count(gpt(1024, 16, 4, 256, 51200), 256)

    def step(cluster, size):
        return predict(workload, cluster, tp=8, batch=size, micro_batch=size).step_time

    assert step("dgx-a100", 1) > step("dgx-a100", 2)
    assert step("dgx-h100", 1) <= step("dgx-h100", 2)


def test_short_messages_go_in_one_shot(llama70):
    """Serving's all-reduce helps few sequences, and never costs more than NCCL's."""
    plain = load("dgx-h100")
    without = replace(plain, software=replace(plain.software, decode_reduce_us=0.0))

    def sent(cluster, batch):
        p = predict(llama70, cluster, tp=8, batch=batch, mode="generate")
        return p.breakdown["tensor-parallel communication"]

    assert sent(plain, 1) < 0.8 * sent(without, 1)
    assert all(sent(plain, b) <= sent(without, b) for b in (8, 64, 512, 4096))
    assert sent(plain, 8) < sent(plain, 512)


def test_a_token_is_one_row_of_everything(llama70):
    for unit, token in zip(llama70.units, decode_units(llama70), strict=True):
        assert [p.rows for p in token.products] == [p.rows / 4096 for p in unit.products]


# ---------------------------------------------------------------- search
def test_the_table_agrees_with_single_predictions(gpt3):
    cluster = load("dgx-a100:8")
    table, _ = candidates(gpt3, cluster, 64, {})
    good = np.flatnonzero((64 % (table.dp * table.micro_batch) == 0) & (table.virtual == 1) & (table.pp < 64))
    rows = np.random.default_rng(0).choice(good, 25, replace=False)
    costs = evaluate(gpt3, cluster, table.take(rows), 64, "bf16")
    for i, row in enumerate(rows):
        p = train(gpt3, cluster, table.config(int(row), 64, "bf16", "1f1b"))
        assert costs.time[i] == pytest.approx(p.step_time, rel=0.03)
        assert costs.memory[i] == pytest.approx(p.peak_memory, rel=0.06)


def test_search_explains_itself(gpt3):
    result = search(gpt3, "dgx-a100:8", batch=64, seq=2048)
    assert result.best.fits and result.best.config.gpus == 64
    times = [p.step_time for p in result.plans]
    assert times == sorted(times)
    front = [(p.step_time, p.peak_memory) for p in result.pareto]
    assert all(a[0] <= b[0] * 1.001 and a[1] > b[1] for a, b in zip(front, front[1:], strict=False))
    rejected = list(result.rejected())
    assert len(rejected) == result.considered - result.fit
    assert any("GB of 84" in r.reason or "GB of 85" in r.reason for r in rejected)
    assert any(r.startswith("tp=16") for r in result.coarse)
    assert "is better" in result.why(result.plans[0], result.plans[-1])
    json.dumps(result.to_dict(), default=float)
    assert plans_table(result.plans, "x").row_count == len(result.plans)


def test_what_is_held_is_held(gpt3):
    result = search(gpt3, "dgx-a100:8", batch=64, seq=2048, fixed={"tp": 8, "recompute": "full"})
    assert {(p.config.tp, p.config.recompute) for p in result.plans} == {(8, "full")}
    with pytest.raises(SearchError, match="can't be held"):
        search(gpt3, "dgx-a100:8", batch=64, fixed={"colour": 1})


def test_nothing_fits_says_by_how_much(gpt3):
    with pytest.raises(SearchError, match="The least memory: .* GB of 85"):
        _ = search(gpt3, "dgx-a100:1", batch=8, seq=2048).best


def test_a_175b_model_on_4096_gpus_takes_a_second(gpt3):
    start = time.process_time()
    result = search(gpt3, "dgx-h100:512", batch=4096, seq=2048)
    assert time.process_time() - start < 1.0
    assert result.best.config.gpus == 4096 and result.considered > 5000


def test_replicas_or_wider(llama70):
    result = search(llama70, "hgx-h200", batch=64, seq=4096, mode="generate", dtype="fp8")
    assert {p.config.tp * p.config.pp * p.config.dp for p in result.plans} == {8}
    assert result.best.config.tp == 8
    assert max(result.plans, key=lambda p: p.sequences).sequences > 0


def test_degrees_for_the_processes_there_are():
    model = llama(layers=4)
    found = choose_degrees(model, 4, cluster="dgx-h100", seq=64)
    assert found["tp"] * found["pp"] * found["dp"] == 4
    assert choose_degrees(model, 4, cluster="dgx-h100", seq=64, tp=2)["tp"] == 2


def test_front_doors():
    assert callable(autotp.search) and callable(autotp.predict)
    model = llama()
    p = autotp.predict(
        model, cluster="dgx-a100:1", tp=2, pp=1, dp=4, batch=16, micro_batch=2, seq=64, recompute="none",
        zero=1,         virtual_stages=1, sequence_parallel=True, schedule="1f1b", dtype="bf16", mode="train",
    )  # fmt: skip
    assert p.step_time > 0 and p.memory and p.breakdown


def test_traces_open_in_perfetto(gpt3):
    p = predict(gpt3, "dgx-a100:8", tp=8, pp=8, batch=16, seq=2048)
    events = json.loads(trace(p))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 8 * 16 and all(e["dur"] > 0 for e in spans)


def test_shares_and_settings():
    assert Shares({1: 4.0, 8: 8.0}).local(4) == 4 + 2
    assert Shares({1: 4.0, 3: 9.0}).local(2, 2) == 2 + 6  # three pieces over two: the fuller rank has two
    one = np.ones(1)
    assert Setting(one * 8, one, one, one).divide == 8 and Setting(one * 8, one, one * 0, one).divide == 1


def test_experts_are_products_by_expert():
    config = MixtralConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        num_hidden_layers=2, vocab_size=128, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    workload = count(model, 32)
    stacks = [p for p in workload.units[workload.order[1]].products if p.weight > p.cols * p.inner]
    assert sum(p.weight for p in stacks) == 4 * 3 * 64 * 96
    assert sum(2 * p.rows * p.cols * p.inner for p in stacks) == 2 * (32 * 2) * 3 * 64 * 96
    assert {p.split for p in stacks} == {"cols", "inner"}


@pytest.fixture(scope="module")
def mixtral():
    config = MixtralConfig(hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, vocab_size=32000)
    with torch.device("meta"):
        return count(AutoModelForCausalLM.from_config(config), 1024)


def test_expert_parallelism_shares_out_the_experts(mixtral):
    """Eight experts over eight ranks: an eighth of their parameters, tokens sent, none of them reduced."""
    whole = predict(mixtral, "dgx-h100", dp=8, batch=64)
    shared = predict(mixtral, "dgx-h100", dp=8, ep=8, batch=64)
    experts = 8 * 8 * 3 * 1024 * 3584
    saved = whole.memory_breakdown["weights"] - shared.memory_breakdown["weights"]
    assert saved == pytest.approx(2 * experts * 7 / 8)
    assert shared.breakdown["tensor-parallel communication"] > 0
    assert shared.breakdown["data-parallel communication"] <= whole.breakdown["data-parallel communication"]
    # All the state is an eighth, whichever of ZeRO and experts it is divided by.
    zero = predict(mixtral, "dgx-h100", dp=8, ep=8, zero=1, batch=64).memory_breakdown["optimizer"]
    assert zero == pytest.approx(12 * mixtral.parameters / 8)


def test_expert_parallelism_over_slow_links_is_slow(mixtral):
    near = predict(mixtral, "dgx-h100:4", dp=32, ep=4, batch=64)
    far = predict(mixtral, "dgx-h100:4", tp=8, dp=4, ep=4, batch=64)
    kind = "tensor-parallel communication"
    assert far.breakdown[kind] > near.breakdown[kind]


def test_expert_parallelism_is_searched_and_refused(mixtral, gpt3):
    result = search(mixtral, "dgx-h100", batch=64)
    seen = {p.config.ep for p in result.plans} | {r.config.ep for r in result.rejected()}
    assert {1, 2, 4, 8} <= seen
    for plan in result.plans:
        again = predict(
            mixtral, "dgx-h100", **{k: v for k, v in vars(plan.config).items() if k != "schedule"}
        )
        assert again.step_time == pytest.approx(plan.step_time)
    table, _ = candidates(mixtral, load("dgx-h100"), 64, {"ep": 8, "pp": 1, "zero": 1, "micro_batch": 1})
    costs = evaluate(mixtral, load("dgx-h100"), table, 64, "bf16")
    for row in range(len(table)):
        one = train(mixtral, load("dgx-h100"), table.config(row, 64, "bf16", "1f1b"))
        assert costs.time[row] == pytest.approx(one.step_time, rel=0.02)
        assert costs.memory[row] == pytest.approx(one.peak_memory, rel=0.05)
    with pytest.raises(SearchError, match="8 experts over dp=2"):
        predict(mixtral, "dgx-h100", dp=2, ep=4, batch=8)
    with pytest.raises(SearchError, match="no experts"):
        predict(gpt3, "dgx-h100", dp=2, ep=2, batch=8)


def test_dtypes_by_any_name(gpt3):
    short, long = (predict(gpt3, "dgx-a100", tp=8, dtype=d).step_time for d in ("bf16", torch.bfloat16))
    assert short == long
    for mode in ("train", "generate"):
        with pytest.raises(SearchError, match="int3.*choose one of"):
            search(gpt3, "dgx-a100", batch=8, mode=mode, dtype="int3")
