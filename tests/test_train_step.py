"""`train_step` against one process's backward on the whole batch: gradients, loss, norms."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run
from models import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole import FLOAT32, assert_same_grads, full_grads

import autotp
from autotp.comm import simulate
from autotp.errors import RankError, TrainError
from autotp.losses import Watch, Weights, combined
from autotp.mesh import Mesh
from autotp.microbatches import split_batch
from autotp.pipeline.deferred import Deferred
from autotp.train import train_step
from autotp.verify import relative_error

# Losses of transformers are float32 in float64 models too.
ROWS = 8


def padded_batch(inputs: dict[str, Any], rows: int = ROWS) -> dict[str, Any]:
    """Rows that count unevenly many tokens, the last none."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        name: torch.randint(4, 250, (rows, *value.shape[1:]), generator=generator)
        if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }  # fmt: skip
    labels = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"].clone()
    for row in range(rows):
        labels[row, labels.shape[1] - row - 1 :] = -100
    labels[-1] = -100
    return {**batch, "labels": labels}


def part_of(batch: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    return {n: v.chunk(parts)[part] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


Result = tuple[float, dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]


def three_steps(model: nn.Module, step: Callable[[], Any], times: int) -> Result:
    """Clipped AdamW steps: loss, gradients and norm of the first, of which `times` add up; the norms of all;
    the parameters."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), []
    for i in range(3):
        optimizer.zero_grad()
        for _ in range(times if i == 0 else 1):
            loss = step().item()
        if i == 0:
            first = loss, full_grads(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return *first, norms, autotp.full_state_dict(model)


def whole_steps(name: str, times: int = 1) -> Result:
    """Of one process."""
    model, inputs = MODELS[name]()
    batch = padded_batch(inputs)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss

    return three_steps(model, step, times)


def staged(
    name: str, tp: int, pp: int, dp: int, count: int, zero: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in `count` stages over the ranks of this process group."""
    model, inputs = MODELS[name]()
    autotp.parallelize(model, tp, pp, dp, stages=count, zero=zero, example_inputs=inputs)
    return model, inputs


# tp, pp, dp and zero; model, schedule, micro-batches, stages, steps whose gradients add up
Job = tuple[tuple[int, int, int, int], str, str, int, int, int]


def _staged(rank: int, jobs: list[Job]) -> list[Result]:
    results = []
    for (*mesh, zero), name, schedule, count, stages, times in jobs:
        model, inputs = staged(name, *mesh, stages, zero)
        batch = part_of(padded_batch(inputs), *autotp.data_rank(model))
        results.append(three_steps(model, partial(train_step, model, batch, count, schedule), times))
    return results


def check(jobs: list[Job], ranks: list[list[Result]]) -> None:
    for i, (_, name, *_, times) in enumerate(jobs):
        loss, grads, norms, params = whole_steps(name, times)
        seen: set[str] = set()
        for results in ranks:
            got_loss, got, got_norms, got_params = results[i]
            assert got_loss == ranks[0][i][0] == pytest.approx(loss, rel=FLOAT32)
            assert got_norms == pytest.approx(norms, rel=FLOAT32)
            # against the whole model's largest entry: a stage may have small ones only
            assert_same_grads({**grads, **got}, grads, FLOAT32)
            assert got and set(got_params) == set(params)
            for key, value in params.items():
                assert relative_error(got_params[key], value) <= FLOAT32, (jobs[i], key)
            seen |= set(got)
        assert seen == set(grads)


PP2, PP4, TP_PP, PP_DP = (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)
# gpt2: tied embedding and head, dropout off; t5: two values cross, one is only handed on
TWO: list[Job] = [
    ((*PP2, 0), "gpt2", "zero-bubble", 4, 2, 2),
    ((*PP2, 0), "gpt2", "interleaved", 4, 4, 1),
    ((*PP2, 0), "t5", "1f1b", 2, 2, 1),
    ((*PP2, 0), "t5", "zero-bubble", 4, 4, 1),
]
# Key-value rows held twice, and norms over heads: gradients that are corrected over tp
FOUR: list[Job] = [
    ((*PP4, 0), "gpt2", "gpipe", 4, 4, 2),
    ((*PP4, 0), "t5", "1f1b", 4, 4, 1),
    ((*PP4, 0), "llama_tied", "zero-bubble", 4, 4, 1),
    ((*TP_PP, 0), "llama_mqa", "zero-bubble", 4, 2, 1),
    ((*TP_PP, 0), "qwen3", "1f1b", 4, 2, 2),
    ((*PP_DP, 0), "llama_tied", "1f1b", 2, 2, 2),
    ((*PP_DP, 1), "gpt2", "1f1b", 4, 2, 2),
    ((*PP_DP, 2), "llama_tied", "interleaved", 2, 4, 1),
    ((*PP_DP, 3), "t5", "gpipe", 2, 2, 1),
    ((*PP_DP, 3), "gpt2", "zero-bubble", 4, 2, 1),
]


def _one_fails(rank: int) -> str:
    model, inputs = staged("gpt2", 1, 2, 1, 2)
    batch, calls, block = padded_batch(inputs), [0], model.transformer.h[1].mlp
    with pytest.raises(RankError, match="was given another batch than rank 0: labels of micro-batch 0"):
        train_step(model, {**batch, "labels": batch["labels"] + rank}, 4)
    with pytest.raises(TrainError, match="has no loss to train on"):  # known to the last stage alone
        train_step(model, {"input_ids": batch["input_ids"]}, 4)
    with pytest.raises(TrainError, match="1f1b over 2 stages needs 2 micro-batches"):
        train_step(model, batch, 1)
    train_step(model, batch, 4)
    before = full_grads(model)
    forward = block.forward

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("out of luck")
        return forward(*args)

    block.forward = failing if rank == 1 else forward
    with pytest.raises(RankError) as error:
        train_step(model, batch, 4)
    assert_same_grads(full_grads(model), before, 0.0)  # as they were
    with pytest.raises(RankError, match="start the processes anew"):
        train_step(model, batch, 4)
    return str(error.value)


def _two(rank: int, jobs: list[Job]) -> tuple[list[Result], str]:
    return _staged(rank, jobs), _one_fails(rank)


def test_two_stages_and_a_failure_on_one_that_is_told_on_both() -> None:
    ranks = run(2, _two, TWO)
    check(TWO, [results for results, _ in ranks])
    for _, said in ranks:
        assert said.startswith("rank 1 (pp 1), stage 1, micro-batch 2, at transformer.h.1") and "luck" in said


def _one_dies(rank: int) -> tuple[str, float]:
    """Rank 3, stage 1, is killed in its third forward."""
    model, inputs = staged("gpt2", 2, 2, 1, 2)
    batch, calls, block = padded_batch(inputs), [0], model.transformer.h[1].mlp
    train_step(model, batch, 4)
    forward = block.forward

    def dying(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args)

    if rank == 3:
        block.forward = dying
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        train_step(model, batch, 4)
    return str(error.value), time.monotonic() - start


def _four(rank: int, jobs: list[Job], folder: str) -> tuple[str, float]:
    torch.save(_staged(rank, jobs), f"{folder}/{rank}.pt")  # rank 3 gives no result
    return _one_dies(rank)


def test_four_ranks_and_one_that_is_killed(tmp_path: Path) -> None:
    """It ends all others: its pp peer, its tp peer, and who waits for these, which live and have failed."""
    told = run(4, _four, FOUR, str(tmp_path), timeout=300, lost=(3,))
    check(FOUR, [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)])
    for said, seconds in told:
        assert seconds < 30
        assert re.match(
            r"rank [012] \(pp [01], tp [01]\), stage [01], micro-batch \d, (in its|waiting)", said
        )


def _frozen(rank: int, trained: list[str], pp: int) -> tuple[float, float]:
    """The norms that clipping meets where only the parameters `trained` are."""
    model, inputs = MODELS["llama_gqa"]()
    if pp > 1:
        autotp.parallelize(model, 1, pp, stages=pp, example_inputs=inputs)
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in trained))
    batch, norms = padded_batch(inputs), []
    for _ in range(2):
        model.zero_grad()
        if pp > 1:
            train_step(model, batch, 4)
        else:
            model(**batch).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    return norms[1], clipped


@pytest.mark.parametrize(
    ("pp", "trained", "trains"),
    [
        (2, ["lm_head"], [False, True]),
        (4, ["embed_tokens", "lm_head"], [True, False, False, True]),
    ],
    ids=["one of two", "two of four"],
)
def test_stages_that_train_nothing_are_not_waited_for(
    pp: int, trained: list[str], trains: list[bool]
) -> None:
    norm, clipped = _frozen(0, trained, 1)
    for kind, found in zip(trains, run(pp, _frozen, trained, pp, timeout=120), strict=True):
        assert found == (pytest.approx((norm, clipped), rel=FLOAT32) if kind else (0.0, 0.0))


def _frozen_later(rank: int, pp: int) -> float:
    """The norm of two steps' gradients, where the first stage trains in the first step alone."""
    model, inputs = MODELS["llama_gqa"]()
    if pp > 1:
        autotp.parallelize(model, 1, pp, stages=pp, example_inputs=inputs)
    for turn in range(2):
        for name, param in model.named_parameters():
            param.requires_grad_("lm_head" in name or turn == 0)
        if pp > 1:
            train_step(model, padded_batch(inputs), 4)
        else:
            model(**padded_batch(inputs)).loss.backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()


def test_gradients_of_steps_before_come_to_the_norm() -> None:
    assert run(2, _frozen_later, 2, timeout=120) == [pytest.approx(_frozen_later(0, 1), rel=FLOAT32)] * 2


@pytest.mark.parametrize(("tp", "dp", "count"), [(1, 1, 4), (2, 2, 2)])
def test_one_stage_accumulates(tp: int, dp: int, count: int) -> None:
    def one(world: Any) -> Any:
        model, inputs = MODELS["llama_gqa"]()
        autotp.parallelize(model, comm=Mesh.split(world, tp=tp, dp=dp), example_inputs=inputs)
        batch = part_of(padded_batch(inputs), *autotp.data_rank(model))
        for _ in range(2):
            loss = train_step(model, batch, count)
        grads, norm = full_grads(model), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        return loss.item(), grads, norm

    loss, grads, (norm, *_), _ = whole_steps("llama_gqa", 2)
    for got_loss, got, got_norm in simulate(tp * dp, one):
        assert got_loss == pytest.approx(loss, rel=FLOAT32)
        assert_same_grads(got, grads, FLOAT32)
        assert got_norm == pytest.approx(norm, rel=FLOAT32)


# ---------------------------------------------------------------- losses
class Toy(nn.Module):
    """A linear classifier with a loss of its own making."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(3, 5).double(), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int | None = None) -> Any:
        logits = self.layer(x)
        return self.loss(logits, y) if n is None else self.loss(logits, y) / n


def toy_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(0, 5, (8,), generator=generator)
    y[[0, 1, 6]] = -100
    return {"x": torch.randn(8, 3, generator=generator, dtype=torch.float64), "y": y}


CLASSES = torch.arange(1.0, 6.0, dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "mean": F.cross_entropy,
    "classes weighted": lambda z, y: F.cross_entropy(z, y, weight=CLASSES),
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "likelihood": lambda z, y: F.nll_loss(z.log_softmax(-1), y),
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "sum by count": lambda z, y: F.cross_entropy(z, y, reduction="sum") / (y >= 0).sum(),
    "own mean": lambda z, y: F.cross_entropy(z, y, reduction="none").sum() / (y >= 0).sum(),
    "mean of all": lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
    "squares": lambda z, y: F.mse_loss(z, torch.ones_like(z)),
    "two of one kind": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(-z, y),
    "something added": lambda z, y: F.cross_entropy(z, y) + 0.0 * z.mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_weights(name: str) -> None:
    whole, parts = Toy(LOSSES[name]), Toy(LOSSES[name])
    loss = whole(**toy_batch())
    loss.backward()
    got = train_step(parts, toy_batch(), microbatches=4)
    assert got.item() == pytest.approx(loss.item())
    torch.testing.assert_close(parts.layer.weight.grad, whole.layer.weight.grad)


def test_a_sum_divided_by_a_given_number_adds_up() -> None:
    whole, parts = Toy(LOSSES["sum"]), Toy(LOSSES["sum"])
    whole(**toy_batch(), n=5).backward()
    train_step(parts, {**toy_batch(), "n": 5}, microbatches=4)
    torch.testing.assert_close(parts.layer.weight.grad, whole.layer.weight.grad)


def test_stated_weights() -> None:
    for weigh, loss in (("rows", lambda z, y: z.pow(2).mean()), ("sum", lambda z, y: z.pow(2).sum())):
        whole, parts = Toy(loss), Toy(loss)
        whole(**toy_batch()).backward()
        train_step(parts, toy_batch(), microbatches=4, weigh=weigh)
        torch.testing.assert_close(parts.layer.weight.grad, whole.layer.weight.grad)


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": (lambda z, y: z.pow(2).mean(), 'no loss function of torch.*weigh="rows"'),
    "own reduction": (
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.arange(len(z))).mean(),
        "in its own way",
    ),
    "different counts": (
        lambda z, y: F.cross_entropy(z, y) + F.mse_loss(z, torch.ones_like(z)),
        "count different things",
    ),
    "no loss": (lambda z, y: {"logits": z}, "has no loss to train on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_right_weights(name: str) -> None:
    loss, said = REFUSED[name]
    model = Toy(loss)
    model.layer.weight.grad = kept = torch.ones_like(model.layer.weight)
    with pytest.raises(TrainError, match=said):
        train_step(model, toy_batch(), microbatches=4)
    assert model.layer.weight.grad is kept and bool((kept == 1).all())  # as before
    assert model.layer.bias.grad is None


def test_a_sum_that_looks_like_a_mean_in_each_part_is_refused() -> None:
    batch = toy_batch()
    batch["y"] = torch.tensor([1, -100] * 4)  # one that counts in each of four
    with pytest.raises(TrainError, match="not clear whether they are sums or means"):
        train_step(Toy(LOSSES["sum"]), batch, microbatches=4)


def test_parts_that_count_alike_leave_nothing_to_scale() -> None:
    weights = Weights("tokens", 3)
    y = torch.tensor([0, 0, -100, 1])
    for _ in range(3):
        with Watch() as watch:
            loss = F.cross_entropy(torch.zeros(4, 2), y)
        weights.share(loss, watch)
    assert combined([weights.told()[1:5]])[0] == 1


def test_nothing_counted_at_all() -> None:
    model = Toy(F.cross_entropy)
    batch = toy_batch()
    batch["y"][:] = -100
    assert train_step(model, batch, microbatches=2).isnan()


def test_copies_are_weighted_by_what_they_count() -> None:
    told = []
    for counts in ([4, 0], [1, 3]):
        weights = Weights("tokens")
        for n in counts:
            y = torch.full((4,), -100)
            y[:n] = 0
            with Watch() as watch:
                loss = F.cross_entropy(torch.zeros(4, 2), y)
            weights.share(loss, watch)
        told.append(weights.told()[1:5])
    factor, loss = combined(told)
    assert factor == 4 / 8 and loss == pytest.approx(torch.log(torch.tensor(2.0)).item())


def test_what_is_checkpointed_is_not_put_off() -> None:
    layers, deferred = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double(), Deferred()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    layers(x).square().sum().backward()
    want = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    with deferred:
        out = layers[1](checkpoint(layers[0], x, use_reentrant=False))
    out.square().sum().backward()
    assert layers[0].weight.grad is not None and layers[1].weight.grad is None
    deferred.take()()
    for p, grad in zip(layers.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


# ---------------------------------------------------------------- batches
def test_rows_are_cut_where_they_are() -> None:
    batch = {"ids": torch.arange(12).view(4, 3), "positions": torch.zeros(3, 4, 2), "n": 7,
             "scale": torch.tensor(2.0), "past": [torch.ones(4, 1), None]}  # fmt: skip
    parts = split_batch(batch, 2)
    assert [part["ids"].tolist() for part in parts] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert parts[1]["positions"].shape == (3, 2, 2) and parts[1]["n"] == 7 and parts[0]["scale"] == 2
    assert parts[0]["past"][0].shape == (2, 1) and parts[0]["past"][1] is None
    assert split_batch({"x": torch.zeros(4, 4)}, 2)[0]["x"].shape == (2, 4)
    kinds = {"x": torch.zeros(4, 5), "position_ids": torch.zeros(4, 4, 5)}  # four kinds, or four rows first?
    with pytest.raises(TrainError, match=r"position_ids, of shape \[4, 4, 5\], has more than one dim"):
        split_batch(kinds, 2)
    assert split_batch(kinds, 2, {"position_ids": 1})[0]["position_ids"].shape == (4, 2, 5)
    assert split_batch({"x": torch.zeros(4, 2), "y": torch.zeros(4, 4)}, 2, {"y": 1})[0]["y"].shape == (4, 2)
    shared = {"x": torch.zeros(4, 2), "y": torch.zeros(1, 2)}
    assert split_batch(shared, 2, {"y": None})[1]["y"] is shared["y"]


@pytest.mark.parametrize(
    ("batch", "count", "said"),
    [
        ({"x": torch.zeros(6, 2)}, 4, "a batch of 6 rows does not make 4 equal micro-batches"),
        ({"x": torch.zeros(6, 2), "y": torch.zeros(6, 1), "z": torch.zeros(3, 6, 6)}, 2, "more than one dim"),
        ({"x": torch.zeros(6, 2), "y": torch.zeros(6, 1), "z": torch.zeros(5)}, 2, "z, .*no dim of"),
        ({"n": 3}, 2, "no tensor with rows"),
        (torch.zeros(4), 2, "give a dict"),
    ],
)
def test_batches_that_can_not_be_cut(batch: Any, count: int, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        split_batch(batch, count)


def test_words_that_are_not_known() -> None:
    with pytest.raises(TrainError, match="choose one of 1f1b, gpipe"):
        train_step(Toy(F.cross_entropy), toy_batch(), 2, "2f2b")
    with pytest.raises(TrainError, match="choose one of tokens"):
        train_step(Toy(F.cross_entropy), toy_batch(), 2, weigh="words")
