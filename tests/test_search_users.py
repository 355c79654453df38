"""What users ask of predict and search that no published table has: odd numbers, other models"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GptOssConfig, LlamaConfig, MambaConfig

from autotp.errors import SearchError
from autotp.search.counts import _counted, count
from autotp.search.find import search
from autotp.search.predict import predict
from autotp.search.scans import extended, merged
from autotp.search.states import with_states


def counted(config, seq):
    with torch.device("meta"):
        return count(AutoModelForCausalLM.from_config(config), seq)


@pytest.fixture(scope="module")
def llama8():
    return counted(
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256,
        ),
        2048,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tp": 0}, "tp=0"),
        ({"batch": 0}, "batch=0"),
        ({"tp": "2"}, "whole number"),
        ({"cp": 2}, "training only"),
        ({"ep": 2}, "training only"),
        ({"pp": 40}, "32 layers"),
    ],
)
def test_serving_refuses_what_makes_no_sense(llama8, options, words):
    with pytest.raises(SearchError, match=words):
        predict(llama8, "dgx-h100", mode="generate", **({"batch": 8} | options))


@pytest.mark.parametrize("schedule", ["zero-bubble", "gpipe"])
def test_only_1f1b_is_interleaved(llama8, schedule):
    """Zero-bubble's puts off half of a backward: in an interleaved order nobody ever made it up."""
    with pytest.raises(SearchError, match="only 1F1B"):
        predict(llama8, "dgx-h100", pp=4, batch=16, virtual_stages=2, schedule=schedule)


def test_a_sequence_is_cut_evenly(llama8):
    with pytest.raises(SearchError, match="2048 tokens"):
        predict(llama8, "dgx-h100", cp=3, batch=8)
    assert search(llama8, "dgx-h100:3", batch=24, top=1).best.config.cp == 1


def test_ranks_of_a_wide_group_wait_for_each_other_within_reason(llama8):
    """Twice as many launch the same kernels: they don't take twice as long."""
    eight, sixteen, many = (
        predict(llama8, "dgx-h100:8", tp=tp, batch=8).breakdown["compute"] for tp in (8, 16, 64)
    )
    assert many < 1.2 * sixteen < 1.4 * eight


def test_memory_is_plain_numbers(llama8):
    found = predict(llama8, "dgx-h100", tp=2, pp=2, dp=2, batch=8).memory
    assert all(type(m) is float for m in found)


def test_serving_says_what_came_nearest(llama8):
    """Not the configuration with the shortest words."""
    with pytest.raises(SearchError, match="The least memory: 279 GB of 48 with tp=4 pp=2 "):
        _ = search(llama8, "l40s", batch=8192, mode="generate").best
    with pytest.raises(SearchError, match="no multiple of 8 replicas"):
        _ = search(llama8, "dgx-h100", batch=3, mode="generate", fixed={"tp": 1, "pp": 1}).best


def test_keys_that_are_made_transposed_are_found():
    """Bloom adds its positions in the product of queries and keys: three operands, and keys by size."""
    w = counted(BloomConfig(hidden_size=64, n_head=4, n_layer=1, vocab_size=64), 32)
    (attention,) = [a for u in w.units for a in u.attentions]
    assert (attention.heads, attention.kv_heads, attention.keys, attention.size) == (4, 4, 32, 16)
    assert (attention.queries, attention.value_size, attention.causal) == (32, 16, True)


def test_eager_attention_is_divided_by_heads():
    w = counted(
        LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=64, attn_implementation="eager",
        ),
        64,
    )  # fmt: skip
    assert w.head_ways == 8
    layer = next(u for u in w.units if u.layer)
    assert np.allclose([m.elements for m in layer.messages], 64 * 128)


def test_attention_sinks_hide_neither_queries_nor_keys():
    config = GptOssConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, intermediate_size=32,
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=128,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    workload = counted(config, 32)
    layer = workload.units[workload.order[1]]
    (found,) = layer.attentions
    assert (found.heads, found.kv_heads, found.size, found.keys) == (8, 2, 16, 32) and not found.dropout
    assert all(p.weight for p in layer.products)


def test_what_runs_once_a_token_is_counted_at_short_lengths():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)
        )
    got, want = count(model, 48), _counted(model, 48, None, None)
    assert got.flops() == want.flops() and got.logits == want.logits and got.parameters == want.parameters
    assert got.units == tuple(merged(u) for u in want.units)


def test_a_token_of_a_recurrence_costs_the_same_wherever_it_stands():
    config = MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64, state_size=8)
    first, later = (
        predict(counted(config, seq), "dgx-h100", mode="generate", batch=4).step_time for seq in (64, 1024)
    )
    assert later == pytest.approx(first, rel=0.02)


def test_tokens_that_do_different_things_are_refused(llama8):
    first, *others = llama8.units
    more = replace(first, products=[*first.products, replace(first.products[0], cols=7.0)])
    with pytest.raises(SearchError, match="once a token"):
        extended(llama8, replace(llama8, seq=4096, units=(more, *others)), 8192)


@pytest.mark.parametrize("kind", ["mamba2", "recurrent_gemma", "llama"])
def test_states_are_those_that_a_prefill_leaves(kind):
    """Bytes, against the tensors that a real run leaves in its cache or on its modules."""
    from transformers import AutoConfig

    small = {"vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    own = {
        "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "conv_kernel": 4},
        "recurrent_gemma": {"intermediate_size": 64, "num_key_value_heads": 1, "lru_width": 32},
        "llama": {"intermediate_size": 64},
    }[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **own)).eval().bfloat16()
    workload = with_states(count(model, 8), model)
    with torch.no_grad():
        output = model(torch.ones(1, 24, dtype=torch.long), use_cache=True)
    if kind == "mamba2":
        layers = output.cache_params.layers
        kept = [t for layer in layers for t in (layer.conv_states, layer.recurrent_states)]
        left = sum(t.numel() * t.element_size() for t in flat(kept))
    elif kind == "recurrent_gemma":
        blocks = [m for m in model.modules() if hasattr(m, "conv1d_state") or hasattr(m, "recurrent_states")]
        left = sum(
            t.numel() * t.element_size()
            for m in blocks
            for t in (getattr(m, "conv1d_state", None), getattr(m, "recurrent_states", None))
            if t is not None
        )
    else:
        left = 0
    assert sum(workload.units[i].state for i in workload.order) == left
    assert (left > 0) == (kind != "llama")


def flat(tensors):
    return [t for one in tensors for t in (one.values() if isinstance(one, dict) else [one])]
