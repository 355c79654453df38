"""Training checkpoints: saved over some ranks, resumed over others, training on as if nothing had been."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from test_weights import built

import autotp
from autotp.comm import simulate
from autotp.errors import CheckpointError, PlanError
from autotp.resume import SETTINGS, load_training, save_training
from autotp.state import full_state_dict

STEPS = 3


def optimizer_of(model: Any, kind: str) -> torch.optim.Optimizer:
    biases = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 2e-3}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-5)


def train(model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], steps: int) -> None:
    model.eval()  # gpt2 has dropout
    for _ in range(steps):
        optimizer.zero_grad()
        (model(**inputs).logits.double() ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def ready(name: str, kind: str, tp: int) -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
    model, inputs = built(name)
    if tp > 1:
        autotp.parallelize(model, tp=tp, example_inputs=inputs)
    return model, optimizer_of(model, kind), inputs


def part(rank: int, tp: int, turn: int, path: str) -> dict[str, Any]:
    """Load what the turn before has saved, train, save; gives the whole parameters."""
    found = {}
    for name, kind in JOBS:
        model, optimizer, inputs = ready(name, kind, tp)
        place = os.path.join(path, name)
        if turn:
            assert load_training(place, model, optimizer) == {"turn": turn - 1}
            assert optimizer.param_groups[0]["lr"] == lr(turn - 1) and optimizer.param_groups[1]["lr"] == 2e-3
        optimizer.param_groups[0]["lr"] = lr(turn)  # a scheduler's doing: to be found again
        train(model, optimizer, inputs, STEPS)
        found[name] = {n: t.detach().clone() for n, t in full_state_dict(model).items()}
        future = save_training(place, model, optimizer, extra={"turn": turn}, wait=kind == "sgd")
        train(model, optimizer, inputs, 1)  # while it is written: what is saved is what was
        future.result(60)
    return found


def lr(turn: int) -> float:
    return 1e-3 * (turn + 1)


JOBS = [("llama_gqa", "adamw"), ("gpt2", "sgd")]
TURNS = [2, 4, 1]


@pytest.mark.filterwarnings("ignore:.*stay whole", "ignore::FutureWarning", "ignore::UserWarning")
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Over 2, then 4 ranks, then 1. llama_gqa over 4 ranks holds its 2 key-value heads twice; gpt2 has
    fused weights,
    ties and row biases."""
    whole = {name: ready(name, kind, 1) for name, kind in JOBS}
    for turn, tp in enumerate(TURNS):
        args = (tp, turn, str(tmp_path))
        results = distributed.run(tp, part, *args) if tp > 1 else [part(0, *args)]
        for name, (model, optimizer, inputs) in whole.items():
            optimizer.param_groups[0]["lr"] = lr(turn)
            train(model, optimizer, inputs, STEPS)
            for found in results:
                assert set(found[name]) == set(model.state_dict())
                for key, value in model.state_dict().items():
                    error = float((found[name][key] - value).abs().max())
                    assert error <= 1e-9 * max(1.0, float(value.abs().max())), (turn, name, key, error)


@pytest.fixture
def alone(tmp_path: Path) -> tuple[Any, torch.optim.Optimizer, Path]:
    model, inputs = built("llama_gqa")
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, inputs, 1)
    save_training(tmp_path / "ck", model, optimizer, extra={"step": 1})
    return model, optimizer, tmp_path / "ck"


def test_a_crash_leaves_the_previous_checkpoint(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of writing, and between the two renames."""
    model, optimizer, path = alone
    with torch.no_grad():
        saved = {n: p.clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.add_(1)

    class Killed(BaseException):
        pass

    def killed(*args: Any) -> None:
        raise Killed

    def restored() -> None:
        other, _ = built("llama_gqa")
        assert load_training(path, other) == {"step": 1}
        assert all(torch.equal(p, saved[n]) for n, p in other.named_parameters())

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(Killed):
            save_training(path, model, optimizer, extra={"step": 2})
    restored()
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda a, b: killed() if str(a).endswith(".part") else rename(a, b))
        with pytest.raises(Killed):
            save_training(path, model, optimizer, extra={"step": 2})
    assert not path.exists()
    restored()
    save_training(path, model, optimizer, extra={"step": 2})
    other, _ = built("llama_gqa")
    assert load_training(path, other) == {"step": 2}
    assert all(torch.equal(p, saved[n] + 1) for n, p in other.named_parameters())
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_refusals(alone: Any, tmp_path: Path) -> None:
    model, optimizer, path = alone
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_training(tmp_path / "nowhere", model)
    with pytest.raises(CheckpointError, match=r"is of another model|lacks"):
        load_training(path, built("llama_bias")[0])
    with pytest.raises(CheckpointError, match="is of another model"):
        load_training(path, built("llama_ffn130")[0])
    with pytest.raises(CheckpointError, match="other parameters"):
        load_training(path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match="none of the model's"):
        save_training(path, model, torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    with pytest.raises(CheckpointError, match="numbers and texts"):
        save_training(path, model, extra={"what": object()})
    save_training(tmp_path / "bare", model)
    with pytest.raises(CheckpointError, match="without an optimizer"):
        load_training(tmp_path / "bare", model, optimizer)
    shutil.copytree(path, tmp_path / "cut")
    (tmp_path / "cut" / SETTINGS).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_training(tmp_path / "cut", model)

    def one(comm: Any) -> None:
        save_training(tmp_path / "threads", autotp.parallelize(built("llama_gqa")[0], comm=comm))

    with pytest.raises(PlanError, match="simulated ranks"):
        simulate(2, one)
