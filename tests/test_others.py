"""Models that are not from transformers, split over simulated ranks and against themselves whole."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from models import randomise
from torch import nn
from whole import EXACT, FLOAT32, assert_close, assert_same_grads, forward_and_grads, on_ranks

import autotp
from autotp.comm import Comm, simulate
from autotp.plan import Plan

Built = tuple[nn.Module, dict[str, Any]]


def ids(batch: int = 2, seq: int = 12, vocab: int = 256, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def finished(model: nn.Module) -> nn.Module:
    return randomise(model.double().eval())


# --- a Llama in the style of Meta's own: complex rotary, a cache made by hand -------------------------------


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotary_table(dim: int, length: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(length).double(), 1e4 ** -(torch.arange(0, dim, 2).double() / dim))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None]).flatten(3).type_as(x)


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, seq, heads, dim = x.shape
    if times == 1:
        return x
    return x[:, :, :, None, :].expand(batch, seq, heads, times, dim).reshape(batch, seq, heads * times, dim)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.cache: list[torch.Tensor] | None = None

    def forward(
        self, x: torch.Tensor, start: int, table: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim)
        q, k = rotated(q, table), rotated(k, table)
        if self.cache is not None:
            self.cache = [
                torch.cat([old, new], 1) if start else new
                for old, new in zip(self.cache or (k, v), (k, v), strict=True)
            ]
            k, v = self.cache
        k, v = repeated(k, self.heads // self.kv_heads), repeated(v, self.heads // self.kv_heads)
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        mixed = torch.matmul(F.softmax(scores, dim=-1), v.transpose(1, 2))
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, seq, -1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = Norm(dim), Norm(dim)

    def forward(
        self, x: torch.Tensor, start: int, table: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), start, table, mask)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class ComplexLlama(nn.Module):
    table: torch.Tensor

    def __init__(self, heads: int = 4, kv_heads: int = 2, dim: int = 64, hidden: int = 96):
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, dim)
        self.layers = nn.ModuleList([Block(dim, heads, kv_heads, hidden) for _ in range(2)])
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, 256, bias=False)
        self.register_buffer("table", rotary_table(dim // heads, 64), persistent=False)

    def forward(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        seq = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        mask = None
        if seq > 1:
            mask = torch.full((seq, seq), float("-inf"), dtype=h.dtype).triu(diagonal=1)
        for layer in self.layers:
            h = layer(h, start, self.table[start : start + seq], mask)
        return self.output(self.norm(h))

    def greedy(self, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        """Greedy tokens with the cache made by hand."""
        for layer in self.layers:
            layer.attention.cache = []
        start = 0
        with torch.no_grad():
            for _ in range(steps):
                logits = self(tokens[:, start:], start)
                start = tokens.shape[1]
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        for layer in self.layers:
            layer.attention.cache = None
        return tokens


def double_complex(model: nn.Module) -> nn.Module:
    """In float64; `double()` would drop the imaginary part of nothing, but keep complex64 as it is."""
    for param in model.parameters():
        param.data = param.data.double()
    return randomise(model.eval())


def complex_llama(heads: int = 4, kv_heads: int = 2) -> Built:
    torch.manual_seed(0)
    return double_complex(ComplexLlama(heads, kv_heads)), {"tokens": ids()}


@pytest.mark.parametrize("tp", [2, 4])
def test_hand_made_cache_generates_the_same(tp: int) -> None:
    model, inputs = complex_llama()
    want = model.greedy(inputs["tokens"], 6)  # type: ignore[operator]
    for got in on_ranks(tp, complex_llama, lambda m, i: m.greedy(i["tokens"], 6)):
        assert torch.equal(got, want)


# --- torch's own --------------------------------------------------------------------------------------------


class Translator(nn.Module):
    """nn.Transformer, both halves, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(100, 64), nn.Embedding(120, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, dim_feedforward=128, batch_first=True, dropout=0.1)
        self.out = nn.Linear(64, 120)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.full((target.shape[1],) * 2, float("-inf"), dtype=self.out.weight.dtype).triu(1)
        return self.out(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


def translator() -> Built:
    torch.manual_seed(0)
    return finished(Translator()), {"source": ids(vocab=100), "target": ids(seq=9, vocab=120, seed=4)}


class Pooler(nn.Module):
    """nn.MultiheadAttention with key and value widths of their own, a padding mask, a query made of
    weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, 64))
        self.attention = nn.MultiheadAttention(64, 4, kdim=32, vdim=48, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        query = self.query.expand(keys.shape[0], -1, -1)
        mixed, _ = self.attention(query, keys, values, key_padding_mask=padding, need_weights=False)
        return mixed + self.mlp(mixed)


def pooler() -> Built:
    torch.manual_seed(0)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, -4:] = True
    return finished(Pooler()), {
        "keys": floats(2, 12, 32),
        "values": floats(2, 12, 48, seed=4),
        "padding": padding,
    }


# --- einops -------------------------------------------------------------------------------------------------


def einops_vit() -> Built:
    """A vision transformer as lucidrains writes it: rearrange as function and as layer, einsum, a fused
    to_qkv."""
    pytest.importorskip("einops", reason="einops is not installed")
    from einops import einsum, rearrange, repeat
    from einops.layers.torch import Rearrange

    class FeedForward(nn.Module):
        def __init__(self, dim: int, hidden: int):
            super().__init__()
            self.net = nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    class Attend(nn.Module):
        def __init__(self, dim: int, heads: int, dim_head: int):
            super().__init__()
            self.heads, self.scale = heads, dim_head**-0.5
            self.norm = nn.LayerNorm(dim)
            self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
            self.to_out = nn.Linear(heads * dim_head, dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                rearrange(t, "b n (h d) -> b h n d", h=self.heads)
                for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
            )
            attention = (einsum(q, k, "b h i d, b h j d -> b h i j") * self.scale).softmax(dim=-1)
            return self.to_out(
                rearrange(einsum(attention, v, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)")
            )

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_patch = nn.Sequential(
                Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=4, p2=4),
                nn.LayerNorm(48),
                nn.Linear(48, 64),
            )
            self.cls = nn.Parameter(torch.randn(1, 1, 64))
            self.positions = nn.Parameter(torch.randn(1, 17, 64))
            self.layers = nn.ModuleList(
                [nn.ModuleList([Attend(64, 4, 16), FeedForward(64, 128)]) for _ in range(2)]
            )
            self.head = nn.Linear(64, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.to_patch(image)
            x = torch.cat([repeat(self.cls, "1 1 d -> b 1 d", b=x.shape[0]), x], dim=1) + self.positions
            for attend, mlp in self.layers:  # type: ignore[misc]
                x = x + attend(x)
                x = x + mlp(x)
            return self.head(x.mean(dim=1))

    torch.manual_seed(0)
    return finished(ViT()), {"image": floats(2, 3, 16, 16)}


# --- x-transformers -----------------------------------------------------------------------------------------

X_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, rms norm, swiglu": dict(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True),
    "grouped heads": dict(attn_kv_heads=2),
    "alibi": dict(alibi_pos_bias=True, alibi_num_heads=4),
    "t5 bias": dict(rel_pos_bias=True),
    "qk norm": dict(attn_qk_norm=True),
    "sandwich norm, value gate": dict(sandwich_norm=True, attn_gate_values=True),
}


def x_transformer(options: str) -> Built:
    x = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    torch.manual_seed(0)
    layers = x.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **X_OPTIONS[options])
    return finished(x.TransformerWrapper(num_tokens=256, max_seq_len=32, attn_layers=layers)), {"x": ids()}


# --- fair-esm -----------------------------------------------------------------------------------------------


class Esm(nn.Module):
    """fair-esm's ESM-2, run as its own forward does where some token is padding."""

    def __init__(self) -> None:
        super().__init__()
        esm2 = pytest.importorskip("esm.model.esm2", reason="fair-esm is not installed")
        self.model = esm2.ESM2(num_layers=2, embed_dim=64, attention_heads=4, token_dropout=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens.eq(self.model.padding_idx)
        x = self.model.embed_tokens(tokens) * (1 - padding.unsqueeze(-1).type_as(self.model.lm_head.weight))
        x = x.transpose(0, 1)
        for layer in self.model.layers:
            x, _ = layer(x, self_attn_padding_mask=padding)
        return self.model.lm_head(self.model.emb_layer_norm_after(x).transpose(0, 1))


def esm() -> Built:
    torch.manual_seed(0)
    model = finished(Esm())
    tokens = ids(vocab=24).clamp(min=4)
    tokens[0, -3:] = model.model.padding_idx  # type: ignore[union-attr]
    return model, {"tokens": tokens}


def test_esm_by_itself_is_its_own_forward() -> None:
    model, inputs = esm()
    inner: Any = model.model
    assert_close(model(**inputs), inner(inputs["tokens"])["logits"])


@pytest.mark.parametrize("padded", [True, False])
def test_a_question_to_the_data_is_answered_both_ways(padded: bool) -> None:
    """Its own forward asks whether there is padding at all: split by either batch it is right for both."""
    model, inputs = esm()
    whole, tokens = cast(Any, model.model), inputs["tokens"]
    batches = [tokens, tokens.clamp(min=4)]
    given = {"tokens": batches[not padded]}

    def run(comm: Comm) -> Any:
        split: Any = esm()[0].model
        autotp.parallelize(split, comm=comm, example_inputs=given)
        return [split(batch)["logits"] for batch in batches]

    for outputs in simulate(2, run):
        for output, batch in zip(outputs, batches, strict=True):
            assert_close(output, whole(batch)["logits"], EXACT)


# --- curated-transformers -----------------------------------------------------------------------------------


def curated(cls: str, **settings: Any) -> Built:
    missing = "curated-transformers is not installed"
    models = pytest.importorskip("curated_transformers.models", reason=missing)
    from curated_transformers.layers import AttentionMask

    torch.manual_seed(0)
    sizes = dict(hidden_width=64, n_hidden_layers=2, n_pieces=256, dtype=torch.float64)
    config = getattr(models, cls.replace("CausalLM", "Config"))(**sizes, **settings)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :3] = False
    inputs = {"piece_ids": ids(), "attention_mask": AttentionMask(mask)}
    return finished(getattr(models, cls)(config)), inputs


CURATED: dict[str, Callable[[], Built]] = {
    "curated llama": lambda: curated(
        "LlamaCausalLM", n_query_heads=4, n_key_value_heads=2, rotary_embedding_fraction=1.0,
        intermediate_width=128,
    ),
    "curated falcon": lambda: curated(
        "FalconCausalLM", n_query_heads=4, n_key_value_heads=2, new_decoder_architecture=True
    ),
    "curated gpt-neox": lambda: curated("GPTNeoXCausalLM", n_attention_heads=4, intermediate_width=128),
    "curated mpt": lambda: curated("MPTCausalLM", n_attention_heads=4, intermediate_width_multiplier=2),
}  # fmt: skip


# --- all of them --------------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[], Built]] = {
    "complex llama": complex_llama,
    "complex llama, one key head": lambda: complex_llama(8, 1),
    "nn.Transformer": translator,
    "nn.MultiheadAttention": pooler,
    "einops vit": einops_vit,
    "esm": esm,
    **CURATED,
    **{f"x-transformers: {name}": (lambda name=name: x_transformer(name)) for name in X_OPTIONS},
}
# Where less than 0.9 of the block weights can be sharded: the share there is, and why.
PARTLY = {
    ("x-transformers: grouped heads", 4): 0.7,  # 2 key heads over 4 ranks: their groups are not split
    ("curated llama", 2): 0.8,  # its one rotary table turns keys and queries: keys stay whole
    **{("curated gpt-neox", tp): 0.5 for tp in (2, 4)},  # the heads of q and of k, v are counted apart
    **{("curated mpt", tp): 0.2 for tp in (2, 4)},  # the embedding is looked up, and multiplied as a head
}
IN_FLOAT32 = {"x-transformers: alibi"}  # its softmax is in float32 where there is a bias
BOTH_DEGREES = {name for name in OTHERS if ":" not in name} | {
    "x-transformers: plain",
    "x-transformers: grouped heads",
}
CASES = [(name, tp) for name in OTHERS for tp in (2, 4) if tp == 2 or name in BOTH_DEGREES]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_forward_and_gradients_equal(name: str, tp: int) -> None:
    build = OTHERS[name]
    model, inputs = build()
    plan: Plan = autotp.plan(model, tp=tp, example_inputs=inputs)
    assert plan.sharded_fraction >= PARTLY.get((name, tp), 0.9), plan.kept
    limit = FLOAT32 if name in IN_FLOAT32 else EXACT
    want, want_grads = forward_and_grads(model, inputs)
    assert torch.isfinite(want).all()
    for got, grads in on_ranks(tp, build, forward_and_grads):
        assert_close(got, want, limit)
        assert_same_grads(grads, want_grads, limit)
