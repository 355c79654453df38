"""Roles found by dataflow: the same whatever the modules are called, and none where there is no such
thing."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from torch import nn

from autotp.capture import capture
from autotp.graph import GraphIndex
from autotp.match import roles, structure
from autotp.propagate import propagate


def index_of(model, **inputs):
    captured = capture(model, **inputs)
    return GraphIndex(captured, propagate(captured))


@functools.cache
def index_of_test_model(name):
    model, inputs = MODELS[name](dtype=torch.float32)
    return index_of(model, **inputs)


def short(found):
    """Roles by the last part of the path; a set where a name has several."""
    result = {}
    for path, role in found.items():
        result.setdefault(re.sub(r"\.\d+(?=\.|$)", "", path).rpartition(".")[2], set()).add(role)
    return {name: "/".join(sorted(group)) for name, group in result.items()}


LLAMA = dict(
    q_proj="q", k_proj="k", v_proj="v", o_proj="attn_out", gate_proj="mlp_in", up_proj="mlp_in",
    down_proj="mlp_out", embed_tokens="embed", lm_head="head", input_layernorm="norm",
    post_attention_layernorm="norm", norm="norm",
)  # fmt: skip
QK_NORM = dict(q_norm="norm", k_norm="norm")
EXPERTS = {
    **{k: v for k, v in LLAMA.items() if k not in ("gate_proj", "up_proj", "down_proj")},
    "experts": "experts",
}
BART = dict(
    q_proj="q", k_proj="k", v_proj="v", out_proj="attn_out", fc1="mlp_in", fc2="mlp_out",
    embed_positions="embed",
    self_attn_layer_norm="norm", encoder_attn_layer_norm="norm", final_layer_norm="norm",
)  # fmt: skip
EXPECTED = {
    "llama_mha": LLAMA,
    "llama_gqa": LLAMA,
    "llama_mqa": LLAMA,
    "llama_tied": LLAMA,
    "qwen3": {**LLAMA, **QK_NORM},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, **QK_NORM},
    "phi3": {
        **{k: v for k, v in LLAMA.items() if k not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
        "qkv_proj": "qkv",
        "gate_up_proj": "mlp_in",
    },
    # one module attends over shared latents, whose projections down feed no heads
    "deepseek_v3": {
        **{k: v for k, v in LLAMA.items() if k not in ("q_proj", "k_proj", "v_proj")},
        "q_b_proj": "q", "kv_b_proj": "kv", "q_a_layernorm": "norm", "kv_a_layernorm": "norm",
        "experts": "experts",
    },
    "gpt2": dict(
        wte="embed", wpe="embed", c_attn="qkv", c_proj="attn_out/mlp_out", c_fc="mlp_in", lm_head="head",
        ln_1="norm", ln_2="norm", ln_f="norm",
    ),
    "codegen": dict(
        wte="embed", qkv_proj="qkv", out_proj="attn_out", fc_in="mlp_in", fc_out="mlp_out", lm_head="head",
        ln_1="norm", ln_f="norm",
    ),
    "bloom": dict(
        word_embeddings="embed", query_key_value="qkv", dense="attn_out", dense_h_to_4h="mlp_in",
        dense_4h_to_h="mlp_out", lm_head="head", word_embeddings_layernorm="norm", input_layernorm="norm",
        post_attention_layernorm="norm", ln_f="norm",
    ),
    "mpt": dict(
        wte="embed", Wqkv="qkv", out_proj="attn_out", up_proj="mlp_in", down_proj="mlp_out", lm_head="head",
        norm_1="norm", norm_2="norm", norm_f="norm",
    ),
    "bert": dict(
        query="q", key="k", value="v", dense="attn_out/mlp_in/mlp_out", word_embeddings="embed",
        position_embeddings="embed", token_type_embeddings="embed", decoder="head", LayerNorm="norm",
    ),
    "t5": dict(
        q="q", k="k", v="v", o="attn_out", wi="mlp_in", wo="mlp_out", embed_tokens="embed",
        relative_attention_bias="embed", lm_head="head", layer_norm="norm", final_layer_norm="norm",
    ),
    "bart": {**BART, "shared": "embed", "layernorm_embedding": "norm", "lm_head": "head"},
    "vit": dict(
        q_proj="q", k_proj="k", v_proj="v", o_proj="attn_out", fc1="mlp_in", fc2="mlp_out", classifier="head",
        layernorm_before="norm", layernorm_after="norm", layernorm="norm",
    ),
    "nanogpt": {
        "c_attn": "qkv", "c_proj": "attn_out", "mlp": "mlp_in/mlp_out", "wte": "embed", "wpe": "embed",
        "lm_head": "head", "ln_1": "norm", "ln_2": "norm", "ln_f": "norm",
    },
    "torch_encoder": dict(
        self_attn="qkv", out_proj="attn_out", linear1="mlp_in", linear2="mlp_out", out="head", norm1="norm",
        norm2="norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_roles_of_known_architectures(name):
    assert short(roles(index_of_test_model(name))) == EXPECTED[name]


def test_what_has_no_role_gets_none():
    given = roles(index_of_test_model("deepseek_v3"))
    for path in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate"):
        assert f"model.layers.1.{path}" not in given
    assert "cls.predictions.transform.dense" not in roles(index_of_test_model("bert"))
    assert "vit.embeddings.patch_embeddings.projection" not in roles(index_of_test_model("vit"))


def test_both_attentions_of_a_decoder_layer_are_found():
    found = structure(index_of_test_model("bart"))
    outs = [attention.out[0].module for attention in found.attentions]
    assert len(outs) == len(set(outs)) == 6
    cross = next(a for a in found.attentions if "decoder.layers.0.encoder_attn" in a.out[0].module)
    assert [use.module.rpartition(".")[2] for use in (*cross.q, *cross.k, *cross.v)] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]


@pytest.mark.parametrize(
    "name, sizes", [("llama_mha", [4]), ("llama_gqa", [2, 2]), ("gpt2", [4]), ("t5", [4])]
)
def test_the_heads_of_an_attention(name, sizes):
    for attention in structure(index_of_test_model(name)).attentions:
        assert sorted(axis.size for axis in attention.heads) == sizes


class Plain(nn.Module):
    """Attention written out, with names that say the wrong thing."""

    def __init__(self, heads=4, width=8, hidden=24):
        super().__init__()
        inner = heads * width
        self.down_proj = nn.Linear(hidden, inner)  # queries
        self.lm_head = nn.Linear(hidden, inner)  # keys
        self.embed = nn.Linear(hidden, inner)  # values
        self.q_proj = nn.Linear(inner, hidden)  # out
        self.k_proj = nn.Parameter(torch.randn(40, hidden))  # the MLP's way in
        self.gate = nn.Linear(40, hidden)  # and out
        self.heads = heads

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.down_proj(x)), self.split(self.lm_head(x)), self.split(self.embed(x))
        weights = (q @ k.transpose(-1, -2) / 3).softmax(-1)
        x = x + self.q_proj((weights @ v).transpose(1, 2).flatten(2))
        return x + self.gate(F.gelu(x @ self.k_proj.t()))


def test_names_do_not_matter():
    found = roles(index_of(Plain(), x=torch.randn(2, 5, 24)))
    assert found == {
        "down_proj": "q", "lm_head": "k", "embed": "v", "q_proj": "attn_out", "": "mlp_in", "gate": "mlp_out",
    }  # fmt: skip


class Fused(nn.Module):
    """One weight for keys and values, read by another sequence's queries; values are multiplied from the
    left."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 32), nn.Linear(24, 64), nn.Linear(32, 24)

    def forward(self, x, memory):
        q = self.a(x).view(2, -1, 4, 8)
        k, v = self.b(memory).view(2, -1, 4, 16).chunk(2, dim=-1)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        mixed = torch.einsum("bkhd,bhqk->bqhd", v, weights)
        return self.c(mixed.flatten(2))


def test_keys_and_values_from_one_weight_and_einsum():
    found = structure(index_of(Fused(), x=torch.randn(2, 5, 24), memory=torch.randn(2, 7, 24)))
    assert found.roles == {"a": "q", "b": "kv", "c": "attn_out"}
    assert [axis.size for axis in found.attentions[0].heads] == [4]


class Gated(nn.Module):
    """A softmax that chooses, and no attention; the stream is scaled before it is added."""

    def __init__(self):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(24, 4), nn.Linear(24, 48), nn.Linear(48, 24)
        self.norm, self.last = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x):
        weight = self.router(x).softmax(-1).amax(-1, keepdim=True)
        h = self.down(torch.sigmoid(self.up(x)) * 2) * weight
        return self.last(self.norm(0.5 * x + h))


def test_a_router_is_no_attention_and_a_scaled_residual_ends_the_way():
    found = structure(index_of(Gated(), x=torch.randn(2, 5, 24)))
    assert found.attentions == []
    assert found.roles == {"up": "mlp_in", "down": "mlp_out", "last": "head", "norm": "norm"}


class Linear(nn.Module):
    """Attention without a softmax, and a softmax that mixes values without queries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(24))

    def forward(self, x):
        q, k, v = (p(x).view(2, -1, 3, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.o((q @ (k.transpose(-1, -2) @ v)).transpose(1, 2).flatten(2))
        both = torch.stack([x, y], 2)
        return x + (
            F.scaled_dot_product_attention(self.scale.expand(2, x.shape[1], 1, 24), both, both)
        ).squeeze(2)


def test_products_without_a_softmax_or_without_queries_are_no_attention():
    found = structure(index_of(Linear(), x=torch.randn(2, 5, 24)))
    assert found.attentions == []
    assert found.roles == {}


def test_a_plain_chain_pairs_its_widest_axis():
    chain = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    assert roles(index_of(chain, input=torch.randn(2, 8))) == {"0": "mlp_in", "2": "mlp_out", "4": "head"}
