"""Every parallel leaf against the module it was made from: outputs and all gradients, in float64."""
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layouts import layouts
from torch import nn

from autotp import layers as make
from autotp.comm import ShapeComm, simulate
from autotp.errors import LayerError, LayoutError
from autotp.layouts import expand, fuse, split, take, take_dim


class Conv1D(nn.Module):
    """transformers' transposed linear."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class OwnForwardLinear(nn.Linear):
    def forward(self, x):
        y = x @ self.weight.T
        return 3 * (y if self.bias is None else y + self.bias)


class PlainSubclass(nn.Linear):
    pass


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 7.0


class OffsetEmbedding(nn.Embedding):
    """OPT's positions: shifts the ids."""

    def forward(self, ids, offset=2):
        return super().forward(ids + offset)


def randomise(module):
    """Biases that are not zero, norms that are not one."""
    for p in module.parameters():
        nn.init.normal_(p, 0.3)
    return module.double()


def copy_of(x):
    return x.detach().clone().requires_grad_(x.is_floating_point())


def compare(module, x, size, shard, *, cut_in=None, cut_out=None, **kwargs):
    """Run `module(x)` whole and, made parallel by `shard(module, comm)`, on `size` ranks.

    cut_in, cut_out: `(dim, layout)` of the input and output where they are sharded.
    """
    whole_x = copy_of(x)
    want = module(whole_x, **kwargs)
    probe = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(5))
    (want * probe).sum().backward()

    def fn(comm):
        local = copy.deepcopy(module)
        held = {name: p for name, p in local.named_parameters()}
        cls = type(local)
        made = shard(local, comm)
        assert isinstance(local, cls) and all(p is held[n] for n, p in local.named_parameters())
        assert f"tp rank {comm.rank}/{comm.size}" in repr(local)
        own_x = copy_of(take_dim(x, cut_in[0], cut_in[1][comm.rank]) if cut_in else x)
        own_probe, own_want = (take_dim(t, cut_out[0], cut_out[1][comm.rank]) if cut_out else t
                               for t in (probe, want))
        got = local(own_x, **kwargs)
        torch.testing.assert_close(got, own_want)
        (got * own_probe).sum().backward()
        if x.is_floating_point():
            grad = whole_x.grad
            torch.testing.assert_close(
                own_x.grad, take_dim(grad, cut_in[0], cut_in[1][comm.rank]) if cut_in else grad)
        for name, p in local.named_parameters():
            grad = module.get_parameter(name).grad
            torch.testing.assert_close(p.grad, take(grad, made[name], comm.rank) if name in made else grad)
        return repr(local)

    return simulate(size, fn)


LINEARS = {"plain": nn.Linear, "transposed": lambda i, o, b: Conv1D(o, i), "own forward": OwnForwardLinear,
           "subclass": PlainSubclass}


@pytest.mark.parametrize("kind", LINEARS)
@given(layouts(repeats=False), st.booleans(), st.booleans())
@settings(max_examples=8, deadline=None)
def test_column(kind, drawn, gather, bias):
    layout, size = drawn
    module = randomise(LINEARS[kind](3, size, bias))
    compare(module, torch.randn(2, 4, 3, dtype=torch.float64), len(layout),
            lambda m, comm: make.make_column(m, layout, comm, gather_output=gather),
            cut_out=None if gather else (-1, layout))


@pytest.mark.parametrize("kind", LINEARS)
@given(layouts(repeats=False), st.booleans())
@settings(max_examples=8, deadline=None)
def test_row(kind, drawn, bias):
    layout, size = drawn
    module = randomise(LINEARS[kind](size, 5, bias))
    compare(module, torch.randn(2, 4, size, dtype=torch.float64), len(layout),
            lambda m, comm: make.make_row(m, layout, comm), cut_in=(-1, layout))


@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_left_partial_or_used_with_sharded_values(kind):
    """row -> (partial sum of two rows, one reduce) and row -> column without enter: gradients whole."""
    from autotp import collectives as c
    layout, out = split(5, 2), split(4, 2)
    rows, column = [randomise(LINEARS[kind](5, 3, True)) for _ in range(3)], randomise(nn.Linear(3, 4))
    x = torch.randn(2, 5, dtype=torch.float64)

    def model(x, a, b, r, col, reduce=lambda t: t):
        return torch.tanh(reduce(a(x) + b(x))) ** 2, torch.tanh(col(torch.tanh(r(x))))

    want = model(x, *rows, column)
    sum(t.sum() for t in want).backward()

    def fn(comm):
        a, b, r, col = (copy.deepcopy(m) for m in (*rows, column))
        for m in (a, b, r, col):
            m.zero_grad()
        made = [make.make_row(a, layout, comm, None), make.make_row(b, layout, comm, None),
                make.make_row(r, layout, comm, "reduce_enter"), make.make_column(col, out, comm, enter=False)]
        got = model(take_dim(x, 1, layout[comm.rank]), a, b, r, col, lambda t: c.reduce(t, comm))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], take_dim(want[1], 1, out[comm.rank]))
        sum(t.sum() for t in got).backward()
        for local, whole, held in zip((a, b, r, col), (*rows, column), made, strict=True):
            for name, p in local.named_parameters():
                grad = whole.get_parameter(name).grad
                grad = take(grad, held[name], comm.rank) if name in held else grad
                torch.testing.assert_close(p.grad, grad)

    simulate(2, fn)


def test_fused_gate_up_column():
    gate = split(5, 2)
    layout = fuse((gate, 5), (gate, 5))
    compare(randomise(nn.Linear(3, 10)), torch.randn(2, 3, dtype=torch.float64), 2,
            lambda m, comm: make.make_column(m, layout, comm), cut_out=(-1, layout))


def test_what_print_shows_and_local_sizes():
    linear, conv = nn.Linear(4, 64), Conv1D(64, 4)
    make.make_column(linear, split(64, 2), ShapeComm(1, 2))
    assert repr(linear) == ("ColumnParallelLinear(in_features=4, out_features=32, bias=True, "
                            "out 32 of 64, tp rank 1/2)")
    make.make_row(conv, split(4, 2), ShapeComm(0, 2))
    assert (conv.nf, conv.nx, type(conv).__name__) == (64, 2, "RowParallelConv1D")
    assert isinstance(conv, Conv1D) and "in 2 of 4, tp rank 0/2" in repr(conv)
    assert linear.out_features == 32 and linear.weight.shape == (32, 4)
    assert linear.weight.untyped_storage().nbytes() == 32 * 4 * 4        # the whole weight's memory is gone


@pytest.mark.parametrize("cls", [nn.Embedding, ScaledEmbedding, OffsetEmbedding])
@pytest.mark.parametrize("padding_idx", [None, 0, 256])
def test_vocabulary_of_257_over_4(cls, padding_idx):
    module = randomise(cls(257, 6, padding_idx=padding_idx))
    high = 255 if cls is OffsetEmbedding else 257
    ids = torch.randint(0, high, (3, 40))
    ids[0, :4] = torch.tensor([0, 64, 65, high - 1])
    results = compare(module, ids, 4, lambda m, comm: make.make_vocab_embedding(m, split(257, 4), comm))
    name = "Embedding" if cls is nn.Embedding else cls.__name__
    assert f"VocabParallel{name}" in results[0] and "65 of 257" in results[0]


@given(layouts(repeats=False))
@settings(max_examples=10, deadline=None)
def test_vocabulary_in_any_order(drawn):
    layout, size = drawn
    module = randomise(nn.Embedding(size, 3, padding_idx=1))
    compare(module, torch.arange(size).view(1, -1), len(layout),
            lambda m, comm: make.make_vocab_embedding(m, layout, comm))


@pytest.mark.parametrize("bad", [-1, 257, 10 ** 6])
def test_an_id_outside_the_vocabulary_fails_on_every_rank(bad):
    def fn(comm):
        module = nn.Embedding(257, 2)
        make.make_vocab_embedding(module, split(257, 3), comm)
        with pytest.raises(IndexError):
            module(torch.tensor([3, bad]))
        return True

    assert simulate(3, fn) == [True] * 3


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("cls", [nn.Embedding, ScaledEmbedding])
def test_embedding_features(cls, gather):
    """T5's relative attention bias: [buckets, heads] with the heads sharded."""
    layout = split(5, 2)
    compare(randomise(cls(32, 5)), torch.randint(0, 32, (4, 4)), 2,
            lambda m, comm: make.make_feature_embedding(m, layout, comm, gather_output=gather),
            cut_out=None if gather else (-1, layout))


def test_tied_embedding_and_head_stay_one_parameter():
    embed, head = randomise(nn.Embedding(257, 6)), randomise(nn.Linear(6, 257, bias=False))
    head.weight = embed.weight
    ids = torch.randint(0, 257, (2, 9))
    want = head(torch.tanh(embed(ids)))
    F.cross_entropy(want.flatten(0, 1), ids.flatten()).backward()
    grad = embed.weight.grad

    def fn(comm):
        e, h = copy.deepcopy(nn.ModuleList([embed, head]))
        made = make.make_vocab_embedding(e, split(257, 4), comm)
        make.make_column(h, split(257, 4), comm, gather_output=True)
        assert h.weight is e.weight and tuple(h.weight.shape) == made["weight"].local_shape(comm.rank)
        got = h(torch.tanh(e(ids)))
        torch.testing.assert_close(got, want)
        F.cross_entropy(got.flatten(0, 1), ids.flatten()).backward()
        torch.testing.assert_close(e.weight.grad, take(grad, made["weight"], comm.rank))

    simulate(4, fn)


@given(layouts(repeats=False), st.booleans())
@settings(max_examples=10, deadline=None)
def test_layer_norm_over_a_sharded_dim(drawn, affine):
    layout, size = drawn
    compare(randomise(nn.LayerNorm(size, eps=1e-3, elementwise_affine=affine)),
            torch.randn(2, 3, size, dtype=torch.float64) + 4, len(layout),
            lambda m, comm: make.make_norm(m, layout, comm), cut_in=(-1, layout), cut_out=(-1, layout))


@given(layouts(repeats=False), st.sampled_from([None, 1e-2]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_rms_norm_over_a_sharded_dim(drawn, eps, affine):
    layout, size = drawn
    compare(randomise(nn.RMSNorm(size, eps=eps, elementwise_affine=affine)),
            torch.randn(2, 3, size, dtype=torch.float64), len(layout),
            lambda m, comm: make.make_norm(m, layout, comm), cut_in=(-1, layout), cut_out=(-1, layout))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, partial(nn.RMSNorm, eps=0.1)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_norms_in_bfloat16_compute_as_torch_does(norm, scale):
    module = randomise(norm(8)).bfloat16()
    x = (torch.randn(64, 8) * scale).bfloat16()
    want = module(x)
    make.make_norm(module, (((0, 8),),), ShapeComm(0, 1))
    torch.testing.assert_close(module(x), want, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("groups,per_in,per_out", [(5, 1, 1), (5, 1, 2), (3, 2, 4)])
def test_grouped_convolutions(groups, per_in, per_out):
    layout = split(groups, 2)
    cut_in, cut_out = (1, expand(layout, per_in)), (1, expand(layout, per_out))
    for cls, shape in ((nn.Conv1d, (7,)), (nn.Conv2d, (5, 6))):
        module = randomise(cls(groups * per_in, groups * per_out, 3, padding=1, groups=groups))
        x = torch.randn(2, groups * per_in, *shape, dtype=torch.float64)
        for shard in (lambda m, comm: make.make_grouped(m, layout, comm),
                      lambda m, comm: make.make_grouped_channels(m, cut_out[1], comm)):
            module.zero_grad()
            compare(module, x, 2, shard, cut_in=cut_in, cut_out=cut_out)


def test_group_norm():
    layout = split(3, 2)
    compare(randomise(nn.GroupNorm(3, 6)), torch.randn(2, 6, 5, dtype=torch.float64), 2,
            lambda m, comm: make.make_grouped(m, layout, comm),
            cut_in=(1, expand(layout, 2)), cut_out=(1, expand(layout, 2)))


# ---------------------------------------------------------------- attention
def attend(make_module, inputs, call, size=2, heads=5):
    module = randomise(make_module()).eval()
    layout = split(heads, size)
    xs = [copy_of(x) for x in inputs]
    want = call(module, xs)
    outs = [t for t in want if t is not None]
    probes = [torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(5)) for t in outs]
    sum((t * p).sum() for t, p in zip(outs, probes, strict=True)).backward()

    def fn(comm):
        local = copy.deepcopy(module)
        local.zero_grad()
        made = make.make_attention(local, layout, comm)
        own = [copy_of(x) for x in inputs]
        got = call(local, own)
        assert [t is None for t in got] == [t is None for t in want]
        got = [t for t in got if t is not None]
        for ours, theirs in zip(got, outs, strict=True):
            torch.testing.assert_close(ours, theirs)
        sum((t * p).sum() for t, p in zip(got, probes, strict=True)).backward()
        for ours, theirs in zip(own, xs, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        for name, p in local.named_parameters():
            grad = module.get_parameter(name).grad
            torch.testing.assert_close(p.grad, take(grad, made[name], comm.rank) if name in made else grad)

    simulate(size, fn)


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True},
    {"kdim": 7, "vdim": 6}])
@pytest.mark.parametrize("weights", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_multihead_attention(options, weights):
    first = options.get("batch_first", False)
    shapes = [(3, 4, 20), (3, 6, options.get("kdim", 20)), (3, 6, options.get("vdim", 20))]
    xs = [torch.randn(s if first else (s[1], s[0], s[2]), dtype=torch.float64) for s in shapes]
    attend(lambda: nn.MultiheadAttention(20, 5, **options), xs, lambda m, xs: m(*xs, **weights))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("mask", ["bool2d", "float2d", "float3d", "padding", "both", "causal", "zero"])
def test_multihead_attention_masks(mask, batched):
    batch, length = (3, 4) if batched else (1, 4)
    x = torch.randn(*((batch, length) if batched else (length,)), 20, dtype=torch.float64)
    causal = torch.ones(length, length).triu(1).bool()
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[:, -1] = True
    float3d = torch.randn(batch * 5, length, length, dtype=torch.float64)
    kwargs = {"bool2d": {"attn_mask": causal}, "float2d": {"attn_mask": torch.randn(length, length).double()},
              "float3d": {"attn_mask": float3d}, "padding": {"key_padding_mask": padding},
              "both": {"attn_mask": causal, "key_padding_mask": padding},
              "zero": {"key_padding_mask": padding},
              "causal": {"attn_mask": causal, "is_causal": True, "need_weights": False}}[mask]
    if "key_padding_mask" in kwargs and not batched:
        kwargs["key_padding_mask"] = kwargs["key_padding_mask"][0]
    attend(lambda: nn.MultiheadAttention(20, 5, batch_first=True, add_zero_attn=mask == "zero"), [x],
           lambda m, xs: m(xs[0], xs[0], xs[0], **kwargs))


@pytest.mark.parametrize("shard_attention", [True, False])
@torch.no_grad()
def test_the_fused_encoder_kernel_is_off(shard_attention):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2)
    encoder = randomise(encoder).float().eval()
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, -1] = True
    want = encoder(x, src_key_padding_mask=padding)

    def fn(comm):
        local = copy.deepcopy(encoder)
        for layer in local.layers:
            make.make_column(layer.linear1, split(16, 2), comm)
            make.make_row(layer.linear2, split(16, 2), comm)
            if shard_attention:
                own = split(8, 2)
                make.make_attention(layer.self_attn, fuse((own, 8), (own, 8), (own, 8)), comm)
        assert make.turn_off_fast_path(local) == ["", "layers.0", "layers.1"]
        got = local(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[0, :4], want[0, :4], rtol=1e-4, atol=1e-5)

    simulate(2, fn)


def test_what_cannot_be_split_is_refused_with_the_reason():
    comm, halves = ShapeComm(0, 2), split(4, 2)

    class OwnLookup(nn.Embedding):
        def forward(self, ids):
            return F.embedding(ids, self.weight)

    twice, by_freq = (((0, 4),), ((2, 4),)), nn.Embedding(4, 2, scale_grad_by_freq=True)
    cases = [
        (lambda: make.make_column(nn.ReLU(), halves, comm), "ReLU is no linear"),
        (lambda: make.make_row(nn.Linear(4, 2), twice, comm), "held once each"),
        (lambda: make.make_row(nn.Linear(4, 2), halves, comm, "sum"), "reduce='sum' is not one of"),
        (lambda: make.make_vocab_embedding(nn.Embedding(4, 2, max_norm=1.0), halves, comm), "max_norm"),
        (lambda: make.make_vocab_embedding(nn.Embedding(4, 2, sparse=True), halves, comm), "sparse"),
        (lambda: make.make_vocab_embedding(by_freq, halves, comm), "scale_grad_by_freq"),
        (lambda: make.make_feature_embedding(nn.Embedding(2, 4, max_norm=1.0), halves, comm), "max_norm"),
        (lambda: make.make_vocab_embedding(OwnLookup(4, 2), halves, comm), "does its own lookup"),
        (lambda: make.make_norm(nn.LayerNorm((3, 4)), halves, comm), r"normalized_shape \(3, 4\) cannot"),
        (lambda: make.make_grouped(nn.Linear(4, 4), halves, comm), "no groups"),
        (lambda: make.make_attention(nn.ReLU(), halves, comm), "no nn.MultiheadAttention"),
    ]
    for case, message in cases:
        with pytest.raises(LayerError, match=message):
            case()
    with pytest.raises(LayoutError, match="rank 1 of 2 would hold none"):
        make.make_column(nn.Linear(2, 1), split(1, 2), comm)
    with pytest.raises(LayoutError, match="cuts through"):
        make.make_grouped_channels(nn.Conv1d(2, 6, 1, groups=2), (((0, 2),), ((2, 6),)), comm)
    linear = nn.Linear(2, 4)
    make.make_column(linear, halves, comm)
    with pytest.raises(LayerError, match="already tensor-parallel"):
        make.make_row(linear, split(2, 2), comm)


def test_parameters_on_meta_and_tied_another_way():
    with torch.device("meta"):
        linear, other = nn.Linear(4, 6), nn.Linear(6, 4)
    make.make_column(linear, split(6, 2), ShapeComm(0, 2))
    assert linear.weight.shape == (3, 4) and linear.weight.device.type == "meta"
    other.weight = linear.weight
    with pytest.raises(LayerError, match=r"shape \(3, 4\) is neither whole"):
        make.make_row(other, split(6, 2), ShapeComm(0, 2))
