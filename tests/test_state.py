"""A sharded model trains, clips, saves and loads as the whole one."""
import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run
from torch import nn

from autotp import collectives as c
from autotp import layers as make
from autotp.comm import ProcessComm, ShapeComm, simulate
from autotp.errors import ShardStateError
from autotp.gradients import ShardGrad, global_norms, plain
from autotp.layouts import ParamLayout, expand, fuse, split, take
from autotp.spread_sums import BY_ELEMENT, Spread
from autotp.state import Held, ShardState, full_state_dict, gather, weight_norms

VOCAB, DIM, HEADS, HEAD_DIM = 11, 8, 3, 2


class Block(nn.Module):
    """Multi-query attention with a norm on the heads: every kind of gradient there is."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM)
        self.kv = nn.Linear(DIM, 2 * HEAD_DIM)        # one head, held by every rank: repeated rows
        self.norm = nn.Parameter(torch.empty(HEAD_DIM))       # replicated, used on sharded heads
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)
        self.heads = HEADS

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2) * self.norm
        k, v = self.kv(x).chunk(2, -1)
        y = F.scaled_dot_product_attention(q, k.unsqueeze(1).expand_as(q), v.unsqueeze(1).expand_as(q))
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.scale = nn.Parameter(torch.empty(DIM))           # replicated everywhere
        self.block = Block()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(HEADS, 4))

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        return self.head(x + self.block(x))


def whole_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = Model()
    for t in (*model.parameters(), *model.buffers()):
        nn.init.normal_(t, 0.3, 0.7)
    return model.to(dtype)


def shard(model, comm):
    """By hand what a plan would do; every rank holds the one KV head."""
    n = comm.size
    heads, vocab = split(HEADS, n), split(VOCAB, n)
    rows = expand(heads, HEAD_DIM)
    everywhere = (((0, HEAD_DIM),),) * n
    kv = fuse((everywhere, HEAD_DIM), (everywhere, HEAD_DIM))
    make.make_vocab_embedding(model.embed, vocab, comm)
    make.make_column(model.head, vocab, comm, gather_output=True)
    make.make_column(model.block.q, rows, comm)
    make.make_column(model.block.kv, kv, comm)
    make.make_row(model.block.out, rows, comm)
    model.block.heads = sum(b - a for a, b in heads[comm.rank])
    model.table.data = take(model.table.data, ParamLayout((HEADS, 4), {0: heads}), comm.rank).clone()
    size = HEADS * HEAD_DIM
    held = {
        "embed.weight": Held(ParamLayout((VOCAB, DIM), {0: vocab})),
        "table": Held(ParamLayout((HEADS, 4), {0: heads})),
        "block.q.weight": Held(ParamLayout((size, DIM), {0: rows})),
        "block.q.bias": Held(ParamLayout((size,), {0: rows})),
        "block.kv.weight": Held(ParamLayout((2 * HEAD_DIM, DIM), {0: kv}), "slots"),
        "block.kv.bias": Held(ParamLayout((2 * HEAD_DIM,), {0: kv}), "slots"),
        "block.out.weight": Held(ParamLayout((DIM, size), {1: rows})),
        "block.norm": Held(None, "summed"),
    }
    state = ShardState(comm, held)
    state.finish(model)
    return model, held


def batches(n):
    g = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (2, 5), generator=g) for _ in range(n)]


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()) * 20


def part(grad, held, name, rank):
    layout = held[name].layout if name in held else None
    return grad if layout is None else take(grad, layout, rank)


def check_state(model, whole, **tolerance):
    full, want = full_state_dict(model), whole.state_dict()
    assert list(full) == list(want)
    for name in want:
        torch.testing.assert_close(full[name], want[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
}


def train(model, optimizer, norm_type, foreach):
    """Three steps of two accumulated backwards, clipped; the norms."""
    norms = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        for ids in batches(6)[2 * step:2 * step + 2]:
            loss_of(model, ids).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, True, foreach))
        optimizer.step()
    return torch.stack(norms)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("norm_type,foreach", [(2.0, None), (2.0, True), (1.0, True), (math.inf, None)])
def test_three_steps_are_those_of_one_process(optimizer, norm_type, foreach):
    start = whole_model()
    whole = copy.deepcopy(start)
    want = train(whole, OPTIMIZERS[optimizer](whole.parameters()), norm_type, foreach)

    def fn(comm):
        model, _ = shard(copy.deepcopy(start), comm)
        got = train(model, OPTIMIZERS[optimizer](model.parameters()), norm_type, foreach)
        torch.testing.assert_close(got, want)
        check_state(model, whole)
        assert type(got) is torch.Tensor

    simulate(3 if foreach else 2, fn)


def _gloo(rank):
    start = whole_model(torch.float32)
    whole = copy.deepcopy(start)
    want = train(whole, torch.optim.AdamW(whole.parameters(), 1e-3), 2.0, True)
    model, _ = shard(copy.deepcopy(start), ProcessComm())
    check_state(model, start, rtol=0, atol=0)
    got = train(model, torch.optim.AdamW(model.parameters(), 1e-3), 2.0, True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    check_state(model, whole, rtol=1e-3, atol=1e-4)
    compiled_gradients(whole, model)
    plain(model.block.q.weight.grad)[0, 0] = math.nan if rank else 0.0    # backends differ in NaN's maximum
    assert math.isnan(global_norms([model.block.q.weight.grad], math.inf)[0])
    return True


def compiled_gradients(whole, model):
    for m in (whole, model):
        m.zero_grad()
    loss_of(whole, batches(1)[0]).backward()
    loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), batches(1)[0]).backward()
    held = model.autotp.held
    for name, p in model.named_parameters():
        want = part(whole.get_parameter(name).grad, held, name, model.autotp.comm.rank)
        torch.testing.assert_close(p.grad, want, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_processes():
    assert run(2, _gloo) == [True, True]


def test_gradients_and_every_way_to_ask_for_their_norm():
    whole = whole_model()
    loss_of(whole, batches(1)[0]).backward()
    grads = {n: p.grad for n, p in whole.named_parameters()}
    ways = [lambda g: g.norm(), lambda g: g.norm(1), lambda g: g.norm(p=math.inf), lambda g: torch.norm(g),
            lambda g: torch.norm(g, 3), lambda g: torch.linalg.vector_norm(g), lambda g: torch.linalg.norm(g),
            lambda g: torch.linalg.vector_norm(g, 0), lambda g: torch.linalg.vector_norm(g, -math.inf),
            lambda g: g.detach().norm(2), lambda g: g.data.norm(), lambda g: g.clone().norm(),
            lambda g: g.float().norm(dtype=torch.float64), lambda g: copy.deepcopy(g).norm(),
            lambda g: torch.linalg.vector_norm(g, keepdim=True),
            lambda g: torch.linalg.vector_norm(g, 2, tuple(range(g.dim()))),
            lambda g: torch.nn.utils.get_total_norm([g]), lambda g: torch._foreach_norm([g], 1)[0],
            # and by hand
            lambda g: (g * g).sum().sqrt(), lambda g: g.pow(2).sum() ** 0.5, lambda g: g.abs().max(),
            lambda g: torch.mean(g.square()), lambda g: g.view(-1).square().sum(), lambda g: torch.amin(g),
            lambda g: (2 * g - g.tanh()).mean(), lambda g: (g > 1e-9).sum(), lambda g: torch.isnan(g).any(),
            lambda g: torch.isfinite(g).all(), lambda g: g.t().flatten().abs().sum(),
            lambda g: g.sum(tuple(range(g.dim())), keepdim=True), lambda g: g.sum(dtype=torch.float64),
            lambda g: g.t().norm(), lambda g: g.mT.square().sum() if g.dim() == 2 else g.norm()]

    def fn(comm):
        model, held = shard(copy.deepcopy(whole), comm)
        model.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, part(grads[name], held, name, comm.rank), msg=name)
            assert isinstance(p.grad, ShardGrad) == (name in held and held[name].layout is not None)
            for i, way in enumerate(ways):
                got, want = way(p.grad), way(grads[name])
                tolerance = {"rtol": 1e-5, "atol": 1e-6} if i == 12 else {}
                torch.testing.assert_close(got, want, msg=lambda m, i=i: f"way {i}: {m}", **tolerance)
                assert type(got) is torch.Tensor
        g = model.embed.weight.grad
        for across in (lambda g: g.norm(dim=1), lambda g: g.mean(0), lambda g: g @ g.t(), lambda g: g.std(),
                       lambda g: torch.cat([g.view(-1), g.flatten()]), lambda g: torch.argmax(g),
                       lambda g: torch.einsum("ij,ik->jk", g, g), lambda g: (g * 2).softmax(-1)):
            with pytest.raises(ShardStateError, match="each rank has only a part of it"):
                across(g)
        with pytest.raises(ShardStateError, match="matrix norm of a sharded gradient"):
            g.norm("nuc")
        torch.testing.assert_close(gather(g, held["embed.weight"].layout, comm), grads["embed.weight"])

    simulate(3, fn)


@pytest.mark.parametrize("ord", [2.0, 1.0, math.inf])
def test_norms_of_weights_are_those_of_the_whole(ord):
    whole = whole_model()
    want = {n: torch.linalg.vector_norm(p.detach(), ord) for n, p in whole.named_parameters()}

    def fn(comm):
        model, _ = shard(copy.deepcopy(whole), comm)
        model.embed.weight.requires_grad_(False)
        got = weight_norms(model, ord)
        torch.testing.assert_close(got, want)
        assert all(type(norm) is torch.Tensor and not norm.requires_grad for norm in got.values())

    simulate(3, fn)
    torch.testing.assert_close(weight_norms(whole, ord), want)


def _first_row(g):
    g[0] = 0


LOOK_ACROSS = {
    "matrix_norm": torch.linalg.matrix_norm, "svdvals": torch.linalg.svdvals, "a row": lambda g: g[0].norm(),
    "rows": lambda g: sum(row.norm() for row in g), "a row set": _first_row, "numpy": lambda g: g.numpy(),
    "mse_loss": lambda g: F.mse_loss(g, torch.zeros_like(g)), "tolist": lambda g: g.tolist(),
    "numpy's view": lambda g: np.asarray(g), "unbind": lambda g: g.unbind(), "chunk": lambda g: g.chunk(2),
    "those that are": lambda g: g[g > 0], "a list's maximum": lambda g: torch._foreach_max([g]),
    "dist": lambda g: torch.dist(g, torch.zeros_like(g)), "spread out": lambda g: g * g.new_ones(2, 1, 1),
    "cosine": lambda g: F.cosine_similarity(g, g), "equal": lambda g: torch.equal(g, g * 2),
    "truth": lambda g: bool(g), "renorm": lambda g: g.renorm(2, 0, 1.0), "diff": lambda g: g.diff(),
}


@pytest.mark.parametrize("way", LOOK_ACROSS)
def test_what_is_not_known_to_work_by_element_is_refused(way):
    def fn(comm):
        local = ShardGrad.of(torch.randn(4, 3, generator=torch.Generator().manual_seed(comm.rank)),
                             Spread((comm,)))
        with pytest.raises(ShardStateError, match="each rank has only a part of it"):
            LOOK_ACROSS[way](local)

    simulate(2, fn)


def test_a_stages_own_gradient_is_whole_and_anything_can_be_asked_of_it():
    g = torch.randn(4, 3)
    own = ShardGrad.of(g.clone(), Spread())
    torch.testing.assert_close(torch.linalg.svdvals(own), torch.linalg.svdvals(g))


MADE_OF_GRADIENTS = {
    "a buffer": lambda g: torch.zeros(g.shape).add_(g), "a copy": lambda g: torch.empty(g.shape).copy_(g),
    "moments": lambda g: torch.zeros(g.shape).lerp_(g, 0.1).div_(torch.ones(g.shape).addcmul_(g, g).sqrt_()),
    "out=": lambda g: torch.mul(g, 2, out=torch.empty(g.shape)), "the larger": lambda g: torch.max(g, -g),
    "lists": lambda g: torch._foreach_mul([torch.ones(2), g], 3.0)[1],
    "masked": lambda g: _masked(g.clone()), "added to another": lambda g: torch.ones(g.shape) + g,
    "a list's buffers": lambda g: _summed([torch.zeros(g.shape)], [g]),
    "where": lambda g: torch.where(g > 0, g, 0),
}


def _masked(g):
    g[g > 0] = 0.5
    return g


def _summed(buffers, gradients):
    torch._foreach_add_(buffers, gradients)
    return buffers[0]


@pytest.mark.parametrize("made", MADE_OF_GRADIENTS)
def test_what_is_made_of_gradients_by_element_has_the_norms_of_the_whole_too(made):
    """What accumulates gradients, the moments of an optimizer among it."""
    g = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    want = MADE_OF_GRADIENTS[made](g)

    def fn(comm):
        local = ShardGrad.of(g.chunk(2)[comm.rank].clone(), Spread((comm,)))
        result = MADE_OF_GRADIENTS[made](local)
        torch.testing.assert_close(plain(result), want.chunk(2)[comm.rank])
        for norm in (lambda x: x.norm(), lambda x: x.square().sum(), lambda x: torch._foreach_norm([x])[0]):
            torch.testing.assert_close(norm(result), norm(want))
        untouched = torch.ones(4, 3)
        assert type(untouched + local) is ShardGrad and type(untouched) is torch.Tensor

    simulate(2, fn)


def test_what_counts_as_by_element_is_the_same_on_a_part():
    x, y = torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tried = 0
    for name in sorted(BY_ELEMENT):
        fn = getattr(torch, name, None) or getattr(torch.Tensor, name, None)
        for count in (1, 2, 3):
            try:
                whole = fn(*(x, y, x)[:count])
                part = fn(*(x[:2], y[:2], x[:2])[:count])
            except (TypeError, RuntimeError, IndexError):
                continue
            drawn = name.startswith(("rand", "empty", "normal", "bernoulli"))
            if isinstance(whole, torch.Tensor) and not drawn:
                torch.testing.assert_close(part, whole[:2], equal_nan=True, msg=name)
                tried += 1
            break
    assert tried > 80


@pytest.mark.parametrize("optimizer", [
    lambda params: torch.optim.LBFGS(params, max_iter=2),
    lambda params: torch.optim.Adafactor(params, foreach=False),
    lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], nesterov=False),
])
def test_optimizers_that_look_across_a_weight_are_refused(optimizer):
    def fn(comm):
        model, _ = shard(whole_model(), comm)
        by = optimizer([p for p in model.parameters()])

        def closure():
            by.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            return loss

        with pytest.raises(ShardStateError, match="An optimizer that looks across a whole weight"):
            by.step(closure)

    simulate(2, fn)


def test_a_list_of_norms_is_one_all_reduce():
    def fn(comm):
        calls = []
        model, _ = shard(whole_model(), comm)
        loss_of(model, batches(1)[0]).backward()
        real = comm.all_reduce
        comm.all_reduce = lambda x, op="sum": calls.append(tuple(x.shape)) or real(x, op)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        assert calls == [(6,)]

    simulate(2, fn)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nonfinite_gradient_on_one_rank_is_seen_by_all(bad, norm_type):
    def fn(comm):
        model, _ = shard(whole_model(), comm)
        loss_of(model, batches(1)[0]).backward()
        if comm.rank == 1:
            plain(model.block.q.weight.grad)[0, 0] = bad
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        found, scale = torch.zeros(1), torch.ones(1)
        grads = [p.grad for p in model.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        return found.item()

    assert simulate(3, fn) == [1.0, 1.0, 1.0]


def test_norms_of_half_precision_are_summed_in_float():
    g = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()

    def fn(comm):
        local = ShardGrad.of(g.chunk(2)[comm.rank].clone(), Spread((comm,)))
        return global_norms([local])[0]

    for got in simulate(2, fn):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, g.norm(), rtol=0, atol=0)


def test_full_state_dict_has_the_same_bits_names_shapes_and_ties():
    whole = whole_model(torch.bfloat16)

    def fn(comm):
        model, _ = shard(copy.deepcopy(whole), comm)
        check_state(model, whole, rtol=0, atol=0)
        full = full_state_dict(model)
        assert full["head.weight"] is full["embed.weight"]
        assert full["scale"].data_ptr() == model.scale.data_ptr()
        wrapped = full_state_dict(nn.Sequential(model))           # PEFT, DDP: a module around it
        assert list(wrapped) == ["0." + name for name in full]
        assert torch.equal(wrapped["0.block.q.weight"], full["block.q.weight"])

    simulate(3, fn)
    assert list(full_state_dict(whole)) == list(whole.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_whole_and_local_tensors(assign):
    first, second = whole_model(seed=1), whole_model(seed=2)
    trained = copy.deepcopy(second)
    loss_of(trained, batches(1)[0]).backward()

    def fn(comm):
        model, held = shard(copy.deepcopy(first), comm)
        local = {n: t.clone() for n, t in model.state_dict().items()}
        given = copy.deepcopy(second).state_dict()            # assigned tensors are shared with the giver
        kept = {n: t.shape for n, t in given.items()}
        assert not any(model.load_state_dict(given, assign=assign))
        assert {n: t.shape for n, t in given.items()} == kept
        check_state(model, second, rtol=0, atol=0)
        if assign:
            model.head.weight = model.embed.weight            # as torch: assigning parts ties
            assert model.block.q.weight.untyped_storage().nbytes() == model.block.q.weight.numel() * 8
        loss_of(model, batches(1)[0]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, part(trained.get_parameter(name).grad, held, name, comm.rank))
        model.load_state_dict(local)
        check_state(model, first, rtol=0, atol=0)
        model.block.load_state_dict(second.block.state_dict())    # a submodule alone
        torch.testing.assert_close(full_state_dict(model)["block.q.weight"], second.block.q.weight.data)

    simulate(2, fn)


def test_loading_a_wrong_shape_says_what_to_give():
    model, _ = shard(whole_model(), ShapeComm(0, 2))
    state = whole_model().state_dict()
    state["block.q.weight"] = torch.zeros(5, DIM)
    with pytest.raises(RuntimeError, match=r"block\.q\.weight has shape \(5, 8\) in the state dict; this "
                       r"model is split over tp=2: give the whole tensor, \(6, 8\), or rank 0's part, \(4"):
        model.load_state_dict(state)


def test_a_deep_copy_trains_as_well():
    whole = whole_model()
    loss_of(whole, batches(1)[0]).backward()

    def fn(comm):
        model, held = shard(copy.deepcopy(whole), comm)
        twin = copy.deepcopy(model)
        assert twin.autotp.comm is comm and twin.autotp.owners[0][0] is not model.autotp.owners[0][0]
        twin.zero_grad()
        loss_of(twin, batches(1)[0]).backward()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(p.grad, part(whole.get_parameter(name).grad, held, name, comm.rank))
        assert model.block.q.weight.grad is None

    simulate(2, fn)


def test_assigning_to_a_submodule_keeps_its_gradients_right():
    whole = whole_model()
    loss_of(whole, batches(1)[0]).backward()

    def fn(comm):
        model, held = shard(copy.deepcopy(whole), comm)
        model.zero_grad()
        model.block.load_state_dict(copy.deepcopy(whole).block.state_dict(), assign=True)
        loss_of(model, batches(1)[0]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, part(whole.get_parameter(name).grad, held, name, comm.rank))

    simulate(2, fn)


def test_finishing_turns_the_fused_encoder_kernel_off():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
    ShardState(ShapeComm(0, 1), {}).finish(model)
    assert not model.use_nested_tensor and not model.layers[0].activation_relu_or_gelu


def test_frozen_parameters_and_thawing_them():
    whole = whole_model()
    loss_of(whole, batches(1)[0]).backward()

    def fn(comm):
        model = copy.deepcopy(whole).requires_grad_(False)
        model.scale.requires_grad_()
        model, held = shard(model, comm)
        loss_of(model, batches(1)[0]).backward()
        assert [n for n, p in model.named_parameters() if p.grad is not None] == ["scale"]
        model.requires_grad_().zero_grad()
        loss_of(model, batches(1)[0]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, part(whole.get_parameter(name).grad, held, name, comm.rank))

    simulate(2, fn)


class Shifted(nn.Module):
    """A parameter that is added to a partial value: kept on rank 0 (`once`)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.reduce = lambda x: x

    def forward(self, x):
        return self.reduce((x @ self.w.t() + self.shift) * 2)


def test_a_value_kept_on_rank_0_trains_there_and_stays_zero_elsewhere():
    torch.manual_seed(3)
    start, x = Shifted(), torch.randn(5, 6, dtype=torch.float64)

    def steps(model, x):
        optimizer, norms = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        return torch.stack(norms)

    whole = copy.deepcopy(start)
    want = steps(whole, x)

    def fn(comm):
        model, layout = copy.deepcopy(start), split(6, comm.size)
        held = ParamLayout((4, 6), {1: layout})
        plan = SimpleNamespace(params={
            "w": SimpleNamespace(shape=(4, 6), layout=held, gradient="own", once=False),
            "shift": SimpleNamespace(shape=(4,), layout=None, gradient="whole", once=True)})
        state = ShardState.prepare(model, plan, comm)
        make.shard_parameter(model.w, held, comm.rank)
        if comm.rank:
            model.shift.data = torch.zeros_like(model.shift)
        model.reduce = lambda y: c.reduce(y, comm)
        state.finish(model)
        own = take(x, ParamLayout((5, 6), {1: layout}), comm.rank)
        torch.testing.assert_close(steps(model, own), want)
        check_state(model, whole)
        assert comm.rank == 0 or not model.shift.any()
        model.load_state_dict(start.state_dict())
        check_state(model, start, rtol=0, atol=0)
        assert comm.rank == 0 or not model.shift.any()

    simulate(3, fn)


def test_a_state_that_does_not_fit_the_model_is_refused():
    comm = ShapeComm(0, 2)
    with pytest.raises(ShardStateError, match=r"weight has shape \(4, 3\) on rank 0, its layout says \(2"):
        ShardState(comm, {"weight": Held(ParamLayout((4, 3), {0: split(4, 2)}))}).finish(nn.Linear(3, 4))
    with pytest.raises(ShardStateError, match="Linear has no parameter or buffer gone"):
        ShardState(comm, {"gone": Held(None, "summed")}).finish(nn.Linear(3, 4))
    plan = SimpleNamespace(params={"weight": SimpleNamespace(shape=(5, 3), layout=None)})
    with pytest.raises(ShardStateError, match=r"the plan knows weight as \(5, 3\), this model's is \(4, 3\)"):
        ShardState.prepare(nn.Linear(3, 4), plan, comm)
