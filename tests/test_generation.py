"""Every rank draws, stops and drops alike, or apart where it should."""

import copy
import time

import pytest
import torch
import torch.multiprocessing as mp
from models import MODELS, NanoGPT
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotp.comm import Comm, ProcessComm, RankError, ShapeComm, simulate
from autotp.errors import AutotpError
from autotp.generation import (
    ParallelDropout,
    rank_rng,
    refuse_resize,
    synchronise_generation,
    synchronise_rng,
)

NEW = 6


def tiny():
    model, _ = MODELS["llama_gqa"](dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


IDS = torch.randint(4, 250, (2, 5), generator=torch.Generator().manual_seed(3))


class Later(Comm):
    """A rank that runs after rank 0 and hears what rank 0 said: exact, in one process, for random numbers.

    Rank 0 runs with `heard=None` and keeps what it says in `said`.
    """

    def __init__(self, rank, heard=None):
        self.rank, self.size, self.said = rank, 2, []
        self.heard = None if heard is None else list(heard)

    def _meet(self, value):
        self.said.append(value)
        return value if self.heard is None else self.heard.pop(0)

    def broadcast(self, x, src):
        assert src == 0
        return self._meet(x).clone()

    def exchange(self, obj):
        first = self._meet(obj)
        return [first, obj]

    def all_reduce(self, x, op="sum"):
        raise AssertionError("no collective per token is needed here")

    def all_gather(self, x, dim, sizes):
        raise AssertionError


def generate_on(comm, seed, **kwargs):
    model = tiny()
    synchronise_generation(model, comm)
    torch.manual_seed(seed)
    out = model.generate(IDS, max_new_tokens=NEW, **kwargs)
    return out, torch.get_rng_state()


@pytest.mark.parametrize(
    "how", [dict(do_sample=True), dict(do_sample=True, num_beams=2)], ids=["sample", "beams"]
)
def test_sampling_is_rank_zeros_on_every_rank(how):
    model = tiny()
    torch.manual_seed(11)
    alone = model.generate(IDS, max_new_tokens=NEW, **how)
    alone_state = torch.get_rng_state()
    first = Later(0)
    out0, state0 = generate_on(first, 11, **how)
    second = Later(1, heard=first.said)
    out1, state1 = generate_on(second, 12, **how)
    torch.manual_seed(12)
    unsynchronised = model.generate(IDS, max_new_tokens=NEW, **how)
    assert not torch.equal(unsynchronised, alone)
    assert torch.equal(out0, alone) and torch.equal(out1, alone)
    assert torch.equal(state0, alone_state)
    torch.manual_seed(12)
    assert torch.equal(state1, torch.get_rng_state())
    assert second.heard == []


def test_a_deep_copy_generates_with_the_copy():
    model = tiny()
    synchronise_generation(model, ShapeComm(0, 1))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.randn_like(p) * 0.1)
    expected = tiny()
    expected.load_state_dict(twin.state_dict())
    out = twin.generate(IDS, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected.generate(IDS, max_new_tokens=NEW, do_sample=False))
    assert not torch.equal(out, model.generate(IDS, max_new_tokens=NEW, do_sample=False))


def in_threads(fn):
    """fn(comm, model) as two ranks; models are built beforehand, one thread at a time."""
    models = [tiny(), tiny()]

    def run(comm):
        synchronise_generation(models[comm.rank], comm)
        return fn(comm, models[comm.rank])

    return simulate(2, run)


class StopAt:
    """Stops at a length on one rank only; it keeps a count, so it must be asked once a token."""

    def __init__(self, asked_rank, rank, calls):
        self.asked_rank, self.rank, self.left = asked_rank, rank, calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.rank == self.asked_rank and self.left <= 0)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_on_one_rank_is_a_stop_on_all(asked):
    outs = in_threads(
        lambda comm, m: m.generate(IDS, max_new_tokens=NEW, stopping_criteria=[StopAt(asked, comm.rank, 3)])
    )
    assert [o.shape[1] for o in outs] == [IDS.shape[1] + 3] * 2
    assert torch.equal(*outs)


def test_rows_stop_on_their_own():
    def criterion(comm):
        return lambda ids, scores, **kw: torch.tensor([comm.rank == 1 and ids.shape[1] >= 7, False])

    outs = in_threads(
        lambda comm, m: m.generate(
            IDS, max_new_tokens=NEW, eos_token_id=255, pad_token_id=0, stopping_criteria=[criterion(comm)]
        )
    )
    assert torch.equal(*outs)
    assert (outs[0][0, 7:] == 0).all() and not (outs[0][1, 7:] == 0).any()


@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_max_time_stops_all_ranks_at_the_same_token(where, monkeypatch):
    # rank 1's clock is far ahead: alone it would stop after one token, and rank 0 would go on
    def run(comm, model):
        kwargs = {"max_time": 30.0} if where == "argument" else {}
        if where == "config":
            kwargs["generation_config"] = copy.deepcopy(model.generation_config)
            kwargs["generation_config"].update(max_time=30.0, max_new_tokens=NEW)
        elif where == "model":
            model.generation_config.max_time = 30.0
        return model.generate(IDS, **({} if where == "config" else {"max_new_tokens": NEW}), **kwargs)

    clocks = {}

    def clock():
        import threading

        name = threading.current_thread().name
        clocks[name] = clocks.get(name, 0) + 1
        return 0.0 if name == "rank 0" or clocks[name] <= 2 else 1000.0

    monkeypatch.setattr(time, "monotonic", clock)
    outs = in_threads(run)
    assert [o.shape[1] for o in outs] == [IDS.shape[1] + 2] * 2


def test_transformers_own_criteria_cost_nothing_and_keep_their_class():
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    first = Later(0)
    model = tiny()
    synchronise_generation(model, first)
    criteria = StoppingCriteriaList([MaxLengthCriteria(IDS.shape[1] + 2)])
    assert model.generate(IDS, max_new_tokens=NEW, stopping_criteria=criteria).shape[1] == IDS.shape[1] + 2


@pytest.mark.parametrize(
    ("mine", "other", "word"),
    [
        (dict(inputs=IDS), dict(inputs=IDS + 1), "inputs: int64"),
        (dict(inputs=IDS), dict(inputs=IDS[:, :4]), "inputs: int64"),
        (dict(inputs=IDS, do_sample=True), dict(inputs=IDS), "do_sample"),
        (dict(inputs=IDS, stopping_criteria=[len]), dict(inputs=IDS), "stopping_criteria"),
    ],
)
def test_different_inputs_are_an_error_on_every_rank(mine, other, word):
    raised = []

    def run(comm, model):
        try:
            model.generate(**(mine, other)[comm.rank], max_new_tokens=NEW)
        except RankError as error:
            raised.append(str(error))

    in_threads(run)
    assert len(raised) == 2 and all(word in message for message in raised), raised


def test_a_model_without_generate_is_left_alone():
    model = NanoGPT()
    synchronise_generation(model, ShapeComm(0, 1))
    refuse_resize(model)
    assert not hasattr(model, "generate") and not hasattr(model, "resize_token_embeddings")


def test_resizing_is_refused_with_the_way_out():
    model = tiny()
    refuse_resize(model)
    with pytest.raises(AutotpError, match="before autotp.parallelize"):
        model.resize_token_embeddings(300)


# --- dropout ------------------------------------------------------------------------------------------------


def test_dropout_on_replicated_values_agrees_in_training_only():
    x = torch.ones(8, 8)
    said, outs = None, []
    for rank in range(2):
        comm = Later(rank, heard=said)
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        synchronise_rng(model, comm)
        torch.manual_seed(100 + rank)
        outs.append(model(x))
        said = comm.said
        assert len(said) == 1
        state = torch.get_rng_state()
        assert (
            torch.equal(model.eval()(x), x) and torch.equal(state, torch.get_rng_state()) and len(said) == 1
        )
    assert torch.equal(*outs) and (outs[0] == 0).any()


def dropped(rank, run):
    torch.manual_seed(5)
    module = nn.Dropout(0.5)
    ParallelDropout.swap(module, ShapeComm(rank, 2))
    return run(module), torch.rand(4)


def test_dropout_on_sharded_values_differs_and_the_ranks_agree_again_after():
    x = torch.ones(64, 64)
    (one, after_one), (two, after_two) = dropped(0, lambda m: m(x)), dropped(1, lambda m: m(x))
    assert not torch.equal(one, two) and torch.equal(after_one, after_two)
    assert torch.equal(dropped(1, lambda m: m(x))[0], two)
    assert 0.45 < (one == 0).float().mean() < 0.55 and set(one.unique().tolist()) == {0.0, 2.0}
    (first, second), _ = dropped(0, lambda m: (m(x), m(x)))
    assert not torch.equal(first, second)
    eval_out, after_eval = dropped(0, lambda m: m.eval()(x))
    torch.manual_seed(5)
    assert torch.equal(eval_out, x) and torch.equal(after_eval, torch.rand(4))


def test_dropout_is_the_same_when_it_is_recomputed():
    x = torch.ones(16, 16, requires_grad=True)
    out, _ = dropped(1, lambda m: checkpoint(lambda y: m(y) * m(y), x, use_reentrant=False))
    out.sum().backward()
    plain = torch.ones(16, 16, requires_grad=True)
    dropped(1, lambda m: (m(plain) * m(plain)).sum().backward())
    assert torch.equal(x.grad, plain.grad) and (x.grad > 0).any()


def test_only_plain_dropout_is_swapped():
    with pytest.raises(AutotpError, match="Dropout2d"):
        ParallelDropout.swap(nn.Dropout2d(), ShapeComm(0, 2))


def test_rank_rng_as_a_decorator_leaves_the_state_when_the_body_fails():
    torch.manual_seed(3)
    torch.randint(2**62, ())
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ValueError):
        with rank_rng(ShapeComm(1, 2)):
            torch.rand(7)
            raise ValueError
    assert torch.equal(torch.rand(2), expected)


# --- processes ----------------------------------------------------------------------------------------------


def _process(rank, port, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2
    )
    model = tiny()
    comm = ProcessComm()
    synchronise_generation(model, comm)
    torch.manual_seed(rank)
    sampled = model.generate(IDS, max_new_tokens=NEW, do_sample=True)
    stopped = model.generate(IDS, max_new_tokens=NEW, stopping_criteria=[StopAt(1, rank, 2)])
    results.put((rank, sampled.tolist(), stopped.tolist()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_sample_and_stop_alike():
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").Queue()
    processes = mp.spawn(_process, (port, results), nprocs=2, join=False)
    out = dict((rank, rest) for rank, *rest in (results.get(timeout=60), results.get(timeout=60)))
    while not processes.join():
        pass
    assert out[0] == out[1]
    assert len(out[0][1][0]) == IDS.shape[1] + 2
