"""The axes found in whole models: fused layouts, grouped heads, what ties what, and what is forbidden
where."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from torch import nn

from autotp.axes import Axis, leaves, same, show
from autotp.capture import capture
from autotp.propagate import Axes, propagate


def found(name: str) -> Axes:
    model, inputs = MODELS[name]()
    return propagate(capture(model, **inputs))


def block(axes: Axes, layer: str = r"\.0\.") -> dict[str, str]:
    """The axes of the weights of the first block, by the last parts of their names; letters in order of
    appearance."""
    names: dict[Axis, str] = {}
    shown = {n: ", ".join(show(a, names) for a in dims) for n, dims in axes.params.items()}
    first: dict[str, str] = {}
    for name, text in shown.items():
        if re.search(layer, name):
            first.setdefault(".".join(name.split(".")[-3:]), text)
    return first


LAYOUTS = {
    "llama_gqa": {
        "self_attn.q_proj.weight": "2c*2d*(8e|8e), 64b",
        "self_attn.k_proj.weight": "2c*(8e|8e), 64b",
        "self_attn.v_proj.weight": "2c*16f, 64b",
        "self_attn.o_proj.weight": "64b, 2c*2d*16f",
        "mlp.gate_proj.weight": "128g, 64b",
        "mlp.up_proj.weight": "128g, 64b",
        "mlp.down_proj.weight": "64b, 128g",
    },
    "gpt2": {
        "attn.c_attn.weight": "64b, 4d*16e|4d*16e|4d*16f",
        "attn.c_attn.bias": "4d*16e|4d*16e|4d*16f",
        "attn.c_proj.weight": "4d*16f, 64b",
    },
    "gpt_neox": {"attention.query_key_value.weight": "4c*(2d|2d|12e|2d|2d|12e|16f), 64b"},
    "bloom": {"self_attention.query_key_value.weight": "4c*3d*16e, 64b"},
    "falcon_mqa": {"self_attention.query_key_value.weight": "(4c|1|1)*(8d|8d), 64b"},
    "falcon_new": {"self_attention.query_key_value.weight": "2c*(2d|1|1)*(8e|8e), 64b"},
    "gpt_bigcode": {"attn.c_attn.weight": "4d*16e|16e|16f, 64b"},
    "phi3": {
        "self_attn.qkv_proj.weight": "2c*2d*(8f|8f)|2c*(8f|8f)|2c*16e, 64b",
        "mlp.gate_up_proj.weight": "128g|128g, 64b",
    },
    "codegen": {"attn.qkv_proj.weight": "4c*(2d*(2e*2f|4g)|2d*8h|2d*(2e*2f|4g)), 64b"},
    "mixtral": {"mlp.experts.gate_up_proj": "4h, 128i|128i, 64b", "mlp.experts.down_proj": "4j, 64b, 128i"},
    "gpt_oss": {"mlp.experts.gate_up_proj": "4h, 64b, 128i*2j", "0.self_attn.sinks": "2c*2d"},
    "mamba": {"mixer.in_proj.weight": "128c|128c, 64b", "mixer.conv1d.weight": "128c, 1, 4e"},
    "t5": {"SelfAttention.relative_attention_bias.weight": "32f, 4c"},
    "torch_encoder": {"0.self_attn.in_proj_weight": "4a*16b|4a*16b|4a*16b, 64c"},
    "nanogpt": {"attn.c_attn.weight": "4d*16e|4d*16e|4d*16f, 64b"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_the_weights(name: str) -> None:
    axes = found(name)
    assert not axes.unknown
    shown = block(axes)
    assert {key: shown.get(key) for key in LAYOUTS[name]} == LAYOUTS[name]


def stuck(axes: Axes) -> set[Axis]:
    return {
        below for facts in axes.facts.values() for forbid in facts.forbids for below in leaves(forbid.axis)
    }


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gpt2", "falcon_new", "bert", "bart", "mpt", "gemma3", "qwen3", "mamba"]
)
def test_heads_and_hidden_are_free_and_head_dim_is_not(name: str) -> None:
    """The axis to shard is an output of some weights, reduced by others, and whole nowhere inside the
    block."""
    axes = found(name)
    forbidden = stuck(axes)
    produced: set[Axis] = set()
    reduced: set[Axis] = set()
    for facts in axes.facts.values():
        for contract in facts.contracts:
            if contract.weight is not None and contract.how == "sum":
                reduced |= set(leaves(contract.axis))
                weight = [a for a in axes.params[contract.weight] if not same(a, contract.axis)]
                produced |= {below for a in weight for below in leaves(a)}
    shardable = {a.size for a in (produced & reduced) - forbidden}
    assert max(shardable) >= 128, "no MLP axis"
    if name != "mamba":
        assert shardable & {2, 4}, "no heads axis"


def test_layers_share_only_the_residual_stream() -> None:
    axes = found("llama_gqa")
    first, second = (
        {b for n, dims in axes.params.items() if f".{i}." in n for a in dims for b in leaves(a)} for i in "01"
    )
    rotary = set(leaves(axes.params["model.rotary_emb.inv_freq"][0]))
    assert first & second == set(leaves(axes.params["model.norm.weight"][0])) | rotary


def test_tied_embeddings_are_one() -> None:
    axes = found("llama_tied")
    assert axes.params["lm_head.weight"] is axes.params["model.embed_tokens.weight"]
    how = {c.how for f in axes.facts.values() for c in f.contracts if c.weight == "model.embed_tokens.weight"}
    assert how == {"lookup", "sum"}


def test_experts_are_picked_by_index_so_their_axis_is_whole_there() -> None:
    axes = found("mixtral")
    gate_up = axes.params["model.layers.0.mlp.experts.gate_up_proj"]
    forbidden = stuck(axes)
    assert set(leaves(gate_up[0])) <= forbidden
    assert not set(leaves(gate_up[1])) & forbidden


def test_position_tables_are_positional_and_masks_of_one_value_fill() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = torch.arange(x.shape[-1], dtype=x.dtype)
            return x + bias + torch.zeros(x.shape[-1])

    captured = capture(Masked(), x=torch.zeros(2, 5))
    axes = propagate(captured)
    by_name = {getattr(n.target, "__name__", ""): n for n in captured.graph.nodes}
    arange, zeros = axes.facts[by_name["arange"]], axes.facts[by_name["zeros"]]
    last = axes.of[captured.output][-1]
    assert same(arange.positional[0], last) and not arange.fill
    assert same(zeros.fill[0], last) and not zeros.positional


def test_two_axes_of_one_size_stay_apart() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.relu(self.up(x)))

    axes = propagate(capture(Square(), x=torch.zeros(4, 4)))
    up, down = axes.params["up.weight"], axes.params["down.weight"]
    assert same(up[0], down[1]) and same(up[1], down[0]) and not same(up[0], up[1])


def test_an_operation_that_does_not_fit_is_reported_and_stays_whole() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.view(2, 3).tanh().view(6) + y.view(3, 2).tanh().view(6)

    captured = capture(Odd(), x=torch.zeros(6), y=torch.zeros(6))
    axes = propagate(captured)
    assert axes.unknown, "two threes are not three twos"
    node, why = axes.unknown[0]
    assert "does not" in why or "cannot" in why
    assert axes.facts[node].forbids
    assert [a.size for a in axes.of[captured.output]] == [6]


def test_autotp_does_not_import_transformers() -> None:
    code = "import sys, autotp, autotp.propagate, autotp.rules; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
