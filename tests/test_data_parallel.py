"""Copies that see different data train as one process on all of it: gradients, steps, clipping, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run
from models import MODELS
from torch import nn
from torch.distributed.tensor import DTensor
from whole import EXACT, FLOAT32, assert_close, assert_same_grads, full_grads, logits_of

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import PlanError, RankError, TrainError
from autotp.mesh import Mesh
from autotp.resume import load_training, save_training
from autotp.verify import relative_error


def batch_of(inputs: dict[str, Any], seed: int, rows: int = 4) -> dict[str, Any]:
    """Inputs of `rows` rows, other tokens for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(4, 250, (rows, *value.shape[1:]), generator=generator)
        if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def part_of(batch: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    return {n: v.chunk(parts)[part] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


def loss_on(model: nn.Module, batch: dict[str, Any], part: int = 0, parts: int = 1) -> torch.Tensor:
    """A mean over part `part` of the batch in which every logit has a weight of its own."""
    logits = logits_of(model(**part_of(batch, part, parts)))
    shape = (logits.shape[0] * parts, *logits.shape[1:])
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (logits * weights.chunk(parts)[part]).mean()


def on_mesh(tp: int, dp: int, name: str, use: Callable[..., Any], **options: Any) -> list[Any]:
    """`use(model, inputs, part, parts)` on simulated ranks."""

    def one(world: Comm) -> Any:
        model, inputs = MODELS[name]()
        autotp.parallelize(model, comm=Mesh.split(world, tp=tp, dp=dp), example_inputs=inputs, **options)
        return use(model, inputs, *autotp.data_rank(model))

    return simulate(tp * dp, one)


def three_steps(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> tuple[Any, Any, Any]:
    """Three clipped AdamW steps: the norms, also by hand, the gradients of the last, the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_on(model, batch_of(inputs, step), part, parts).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms += [sum(float((g * g).sum()) for g in grads), max(float(g.abs().max()) for g in grads)]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms, full_grads(model), autotp.full_state_dict(model)


def assert_same_training(got: tuple[Any, Any, Any], want: tuple[Any, Any, Any], limit: float = EXACT) -> None:
    assert got[0] == pytest.approx(want[0], rel=limit)
    assert_same_grads(got[1], want[1], limit)
    assert set(got[2]) == set(want[2])
    for name, tensor in want[2].items():
        assert relative_error(got[2][name], tensor) <= 100 * limit, name  # AdamW divides by tiny numbers


@pytest.mark.parametrize(
    ("name", "ep"), [*((name, 1) for name in ("llama_gqa", "qwen3", "gpt2", "t5", "mixtral")), ("mixtral", 2)]
)
def test_steps_are_those_of_one_process_on_the_whole_batch(name: str, ep: int) -> None:
    model, inputs = MODELS[name]()
    want = three_steps(model, inputs, 0, 1)
    for got in on_mesh(2, 2, name, three_steps, ep=ep):
        assert_same_training(got, want, FLOAT32 if name == "mixtral" else EXACT)  # its router is float32


def test_data_parallel_alone() -> None:
    model, inputs = MODELS["llama_tied"]()
    want = three_steps(model, inputs, 0, 1)
    for got in on_mesh(1, 2, "llama_tied", three_steps):
        assert_same_training(got, want)


def test_gradients_gather_under_no_sync() -> None:
    def accumulate(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> Any:
        with autotp.no_sync(model):
            loss_on(model, batch_of(inputs, 0), part, parts).backward()
            own = full_grads(model)
        loss_on(model, batch_of(inputs, 1), part, parts).backward()
        loss_on(model, batch_of(inputs, 2), part, parts).backward()
        return own, full_grads(model)

    model, inputs = MODELS["llama_gqa"]()
    for seed in range(3):
        loss_on(model, batch_of(inputs, seed)).backward()
    want = full_grads(model)
    got = on_mesh(2, 2, "llama_gqa", accumulate)
    for _, grads in got:
        assert_same_grads(grads, want)
    assert any(not torch.equal(got[0][0][n], got[2][0][n]) for n in want)  # before: each copy's own


class Parts(nn.Module):
    """A layer that only some inputs go through, one that none does, one used twice, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.never = (nn.Linear(8, 8) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.some.weight.data += 1.0

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = self.first(self.frozen(self.first(x).tanh()))
        return self.some(x) if use else x


def _parts(world: Comm) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Parts().double()
    autotp.parallelize(model, comm=Mesh.split(world, dp=2), example_inputs={"x": torch.ones(2, 8).double()})
    part, _ = autotp.data_rank(model)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).double().chunk(2)[part]
    model(x, use=part == 1).pow(2).sum().backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def test_what_a_copy_does_not_use() -> None:
    torch.manual_seed(1)
    model = Parts().double()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).double().chunk(2)
    ((model(x[0]).pow(2).sum() + model(x[1], use=True).pow(2).sum()) / 2).backward()
    for got in simulate(2, _parts):
        for name, param in model.named_parameters():
            if param.grad is None:
                assert got[name] is None, name
            else:
                torch.testing.assert_close(got[name], param.grad)


def test_copies_of_the_object_and_new_parameters_are_averaged_too() -> None:
    def grads(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> Any:
        other = copy.deepcopy(model)
        other.extra = nn.Parameter(torch.ones((), dtype=torch.float64))
        (loss_on(other, batch_of(inputs, 0), part, parts) + (part + 1.0) * other.extra).backward()
        assert all(p.grad is None for p in model.parameters())
        return full_grads(other)

    model, inputs = MODELS["llama_gqa"]()
    loss_on(model, batch_of(inputs, 0)).backward()
    want = full_grads(model) | {"extra": torch.tensor(1.5, dtype=torch.float64)}
    for got in on_mesh(1, 2, "llama_gqa", grads):
        assert_same_grads(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool) -> None:
    def grads(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> Any:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        loss_on(model, batch_of(inputs, 0), part, parts).backward()
        return full_grads(model)

    model, inputs = MODELS["llama_tied"]()
    want = grads(model, inputs, 0, 1)
    for got in on_mesh(1, 2, "llama_tied", grads):
        assert_same_grads(got, want)


def test_peers_that_get_different_batches_are_told() -> None:
    def use(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> None:
        rank = model.autotp.mesh.world.rank
        model(**batch_of(inputs, part))
        model(**batch_of(inputs, rank))

    with pytest.raises(RankError, match=r"rank 1 of 2 was given another batch than rank 0: input_ids is .*"
                                        r"autotp\.data_rank"):
        on_mesh(2, 2, "llama_gqa", use)


@pytest.mark.parametrize("differs", ["gradients", "training"])
def test_peers_that_call_the_model_in_different_modes_are_told(differs: str) -> None:
    """One would come to collectives, of backward or of dropout's random state, that the other never joins."""

    def use(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> None:
        first = model.autotp.mesh.world.rank == 0
        model.train(differs == "gradients" or first)
        with torch.set_grad_enabled(differs == "training" or first):
            model(**inputs)

    with pytest.raises(RankError, match="rank 1 of 2 calls the model .*, rank 0 .*all must call it alike"):
        on_mesh(2, 1, "llama_gqa", use)


def test_data_rank() -> None:
    def use(model: nn.Module, inputs: dict[str, Any], part: int, parts: int) -> Any:
        return part, parts

    assert on_mesh(2, 2, "llama_gqa", use) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    with pytest.raises(PlanError, match="not parallelized"):
        autotp.data_rank(nn.Linear(2, 2))


# ---------------------------------------------------------------- processes
def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], seed: int) -> None:
    optimizer.zero_grad()
    loss_on(model, batch_of(inputs, seed), *autotp.data_rank(model)).backward()
    optimizer.step()


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want) and all(torch.equal(got[n], tensor) for n, tensor in want.items())


def _zero(rank: int, folder: str, zero: int, name: str, ep: int, limit: float) -> None:
    model, inputs = MODELS[name]()
    with torch.no_grad():
        logits = logits_of(model(**inputs))
    want = three_steps(model, inputs, 0, 1)
    model, inputs = MODELS[name]()
    autotp.parallelize(model, tp=2, dp=2, ep=ep, zero=zero, example_inputs=inputs)
    part, parts = autotp.data_rank(model)
    with torch.no_grad():  # leaves no whole parameters behind for the optimizer to find
        assert_close(logits_of(model(**inputs)), logits, limit)
    assert_same_training(three_steps(model, inputs, part, parts), want, limit)
    # `model` goes on: what it holds is saved, lost, and found again
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # norms are float32
    one_step(model, optimizer, inputs, 3)
    kept = autotp.full_state_dict(model)
    save_training(f"{folder}/training", model, optimizer)
    autotp.save(model, f"{folder}/saved")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(kept)
    assert_equal(autotp.full_state_dict(model), kept)
    again, inputs = MODELS[name]()
    autotp.parallelize(again, tp=4, example_inputs=inputs)
    another = torch.optim.AdamW(again.parameters(), lr=0.5)
    load_training(f"{folder}/training", again, another)
    assert_equal(autotp.full_state_dict(again), kept)
    one_step(again, another, inputs, 4)
    one_step(model, optimizer, inputs, 4)
    stepped = autotp.full_state_dict(model)
    for n, tensor in autotp.full_state_dict(again).items():
        error = relative_error(tensor, stepped[n])
        assert error <= 1e-6, (n, error)
    model.load_state_dict(kept)
    if rank == 0:
        assert_equal(type(again).from_pretrained(f"{folder}/saved").state_dict(), kept)  # type: ignore[attr-defined]
    # it generates
    alone, inputs = MODELS[name]()
    alone.load_state_dict(kept)
    ids = inputs["input_ids"]
    want = alone.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=4), want)
    # gradients that gather
    model.zero_grad()
    with autotp.no_sync(model):
        loss_on(model, batch_of(inputs, 0), part, parts).backward()
    if zero == 1:  # under 2 and 3 they are summed at once
        with pytest.raises(TrainError, match="gradients from autotp.no_sync"):
            autotp.train_step(model, batch_of(inputs, 1), 1)
    loss_on(model, batch_of(inputs, 1), part, parts).backward()
    got = full_grads(model)
    for seed in range(2):
        loss_on(alone, batch_of(inputs, seed)).backward()
    assert_same_grads(got, full_grads(alone), limit)
    model.adapter = nn.Parameter(torch.ones(1))
    with pytest.raises(autotp.AutotpError, match="before autotp.parallelize"):
        model(**inputs)


# mixtral has a float32 router
SHARED_OUT = [(1, "gpt2", 1, EXACT), (2, "mixtral", 2, FLOAT32), (3, "llama_mqa", 1, EXACT)]


def _shared_out(rank: int, folder: str) -> None:
    for case in SHARED_OUT:
        try:
            _zero(rank, f"{folder}/{case[1]}", *case)
        except BaseException as error:
            raise AssertionError(f"zero, model, ep, limit: {case}") from error


def test_copies_that_share_out_what_they_hold(tmp_path: Path) -> None:
    run(4, _shared_out, str(tmp_path), timeout=300)


def _loaded(rank: int, folder: str) -> Any:
    model, inputs = MODELS["llama_tied"]()
    autotp.parallelize(model, tp=1, dp=2, example_inputs=inputs)
    found = [three_steps(model, inputs, *autotp.data_rank(model))]
    for zero in (0, 3):
        model = autotp.load(folder, tp=1, dp=2, zero=zero, progress=False)
        assert any(isinstance(p, DTensor) for p in model.parameters()) == (zero > 0)
        found.append(three_steps(model, MODELS["llama_tied"]()[1], *autotp.data_rank(model)))
    return found


def test_copies_in_processes_split_or_loaded(tmp_path: Path) -> None:
    """A checkpoint read by copies that train on different data, all of it or a share of it each."""
    model, inputs = MODELS["llama_tied"]()
    model.save_pretrained(tmp_path)
    want = three_steps(model, inputs, 0, 1)
    for got in run(2, _loaded, str(tmp_path)):
        for trained in got:
            assert_same_training(trained, want)


def test_zero_needs_copies() -> None:
    model, inputs = MODELS["gpt2"]()
    with pytest.raises(PlanError, match="zero=2 with dp=1"):
        autotp.parallelize(model, tp=1, zero=2, example_inputs=inputs)
