"""Figures and comparisons of a search: what they show is what was found."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autotp.errors import SearchError
from autotp.search import figures
from autotp.search.counts import count
from autotp.search.find import search
from autotp.search.predict import predict

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def workload():
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        num_hidden_layers=32, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        return count(AutoModelForCausalLM.from_config(config), 2048)


@pytest.mark.parametrize("mode", ["train", "generate"])
def test_the_front_falls_and_nothing_that_fits_is_below_it(workload, mode):
    result = search(workload, "dgx-h100:2", batch=64, mode=mode)
    times, sizes = result.fitting()
    assert len(times) == min(result.fit, len(times)) > 0
    front = [(p.peak_memory, p.step_time) for p in result.pareto]
    assert all(a[0] > b[0] and a[1] <= b[1] for a, b in zip(front, front[1:], strict=False))
    for time, size in zip(times, sizes, strict=True):  # estimates: the closed form of the pipeline
        assert any(t <= time * 1.05 and m <= size * 1.1 for m, t in front)
    (axes,) = figures.pareto(result).axes
    drawn = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert list(drawn.get_xdata()) == sorted(m / 1e9 for m, _ in front)
    assert ("token" if mode == "generate" else "step") in axes.get_ylabel()


def test_bars_are_as_long_as_the_steps(workload):
    plans = search(workload, "dgx-h100:2", batch=64).plans
    (axes,) = figures.breakdown(plans, "here").axes
    bars = [(round(b.get_y() + 0.35), b.get_x() + b.get_width()) for b in axes.patches]
    ends = [max(end for row, end in bars if row == i) for i in range(3)]
    scale = 1.0 if min(p.step_time for p in plans) >= 0.5 else 1e3
    assert ends == pytest.approx([p.step_time * scale for p in plans[:3]], rel=0.01)


@pytest.mark.parametrize("pp", [1, 4])
def test_timelines_reach_the_predicted_peak(workload, pp):
    p = predict(workload, "dgx-h100:2", tp=4, pp=pp, dp=4 // pp, batch=32)
    (axes,) = figures.memory(p).axes
    lines = [line for line in axes.lines if line.get_label().startswith("pipeline rank")]
    for line in lines:
        rank = int(line.get_label().split()[-1])
        assert np.max(line.get_ydata()) == pytest.approx(p.memory[rank] / 1e9)
    (axes,) = figures.pipeline(p).axes
    assert len(axes.patches) == len(p.timeline.rows) > 0


def test_generation_has_no_schedule_to_draw(workload):
    p = predict(workload, "dgx-h100", tp=4, batch=8, mode="generate")
    with pytest.raises(SearchError, match="generation"):
        figures.pipeline(p)


def test_two_ways_to_serve_are_compared_in_readable_units(workload):
    result = search(workload, "dgx-h100", batch=64, mode="generate")
    text = result.why(result.plans[0], result.plans[1])
    assert "replicas=" in text and " ms" in text and "prefill" in text and "faster" in text


def test_what_is_not_looked_at_says_why(workload):
    train = search(workload, "dgx-h100:2", batch=64).coarse
    for start in ("tp=16", "pp=3", "cp > 1", "recompute=selective", "micro_batch", "zero=2"):
        assert any(rule.startswith(start) for rule in train)
    serve = search(workload, "dgx-h100:8", batch=64, mode="generate").coarse
    assert serve == ["tp=64: LlamaForCausalLM divides into 32 at most"]
