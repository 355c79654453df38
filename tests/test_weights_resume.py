"""Training checkpoints: saved over some ranks, resumed over others, training on as if nothing had been."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_weights import built
from torch import nn

import autotp
from autotp import resume
from autotp.comm import simulate
from autotp.entries import Writer
from autotp.errors import CheckpointError, PlanError, RankError
from autotp.resume import SETTINGS, load_training, save_training
from autotp.state import full_state_dict
from autotp.train import train_step

STEPS = 2
ROWS = 4


class Scored(nn.Module):
    """A language model with a loss in float64 (transformers' own are float32)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def optimizer_of(model: Any, kind: str) -> torch.optim.Optimizer:
    biases = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 2e-3}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-5)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Tokens, and labels of which rows have unevenly many."""
    ids, labels = torch.randint(4, 250, (2, ROWS, 6), generator=torch.Generator().manual_seed(seed))
    labels[1, 2:] = -100
    return {"input_ids": ids, "labels": labels}


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int = STEPS) -> None:
    """Steps on the batches `first`, ..., clipped by the norm of all gradients."""
    part, parts = autotp.data_rank(model) if hasattr(model, "autotp") else (0, 1)
    for seed in range(first, first + steps):
        optimizer.zero_grad()
        batch = {n: t.chunk(parts)[part] for n, t in batch_of(seed).items()}
        train_step(model, batch, 2, weigh="tokens")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def ready(name: str, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    model = Scored(built(name)[0])
    return model, optimizer_of(model, kind)


def turns(rank: int, path: str) -> None:
    """Turn by turn, over other ranks: load what the turn before has saved, train, save. The parameters go to
    files. In the end one rank dies while all save."""
    for turn, (tp, pp, dp, zero) in enumerate(TURNS):
        for name, kind in JOBS:
            model = Scored(built(name)[0])
            example = {"input_ids": batch_of(0)["input_ids"]}
            autotp.parallelize(model, tp, pp, dp, zero=zero, example_inputs=example)
            optimizer = optimizer_of(model, kind)
            place = os.path.join(path, name)
            if turn:
                assert load_training(place, model, optimizer) == {"turn": turn - 1}
                assert [g["lr"] for g in optimizer.param_groups] == [lr(turn - 1), 2e-3]
            optimizer.param_groups[0]["lr"] = lr(turn)  # a scheduler's doing: to be found again
            train(model, optimizer, turn * STEPS)
            found = {n: t.detach().clone() for n, t in full_state_dict(model).items()}
            torch.save(found, f"{path}/{name}-{turn}-{rank}.pt")
            future = save_training(place, model, optimizer, extra={"turn": turn}, wait=kind == "sgd")
            train(model, optimizer, 100, 1)  # while it is written: what is saved is what was
            future.result(60)
    dist.barrier()
    if rank == 3:
        Writer.resolve_data = lambda *_: os._exit(9)  # type: ignore[assignment]
    save_training(place, model, optimizer, extra={"turn": "lost"})


def lr(turn: int) -> float:
    return 1e-3 * (turn + 1)


JOBS = [("llama_tied", "adamw"), ("gpt2", "sgd")]
TURNS = [(2, 1, 2, 0), (1, 2, 2, 3), (4, 1, 1, 0), (2, 2, 1, 0)]  # tp, pp, dp, zero


@pytest.mark.filterwarnings("ignore:.*stay whole", "ignore::FutureWarning", "ignore::UserWarning")
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """llama_tied over 4 ranks holds its 2 key-value heads twice; gpt2 has fused weights and row biases. Both
    have one weight on the first and the last stage. In the end over one process."""
    with pytest.raises(RuntimeError, match=r"rank 3 died with exit code 9|what was there before stays"):
        distributed.run(4, turns, str(tmp_path), timeout=300)
    assert (tmp_path / ".gpt2.part").exists()
    for name, kind in JOBS:
        whole, optimizer = ready(name, kind)
        for turn in range(len(TURNS) + 1):
            optimizer.param_groups[0]["lr"] = lr(turn)
            train(whole, optimizer, turn * STEPS)
            want = whole.state_dict()
            if turn < len(TURNS):
                results = [torch.load(tmp_path / f"{name}-{turn}-{rank}.pt") for rank in range(4)]
            else:
                last, its = ready(name, kind)
                assert load_training(tmp_path / name, last, its) == {"turn": turn - 1}
                its.param_groups[0]["lr"] = lr(turn)
                train(last, its, turn * STEPS)
                results = [last.state_dict()]
            for found in results:
                assert set(found) == set(want)
                for key, value in want.items():
                    error = float((found[key] - value).abs().max())
                    # Llama's norms are float32 inside: what the losses were scaled by, other numbers over
                    # copies than in one process, shows in the eighth digit of their gradients.
                    close = 1e-6 if name == "llama_tied" else 1e-9
                    assert error <= close * max(1.0, float(value.abs().max())), (turn, name, key, error)


@pytest.fixture
def alone(tmp_path: Path) -> tuple[Any, torch.optim.Optimizer, Path]:
    model, inputs = built("llama_gqa")
    optimizer = optimizer_of(model, "adamw")
    (model(**inputs).logits ** 2).mean().backward()
    optimizer.step()
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


def test_two_saves_into_one_directory(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one would take away what the first is writing: it is refused until that is done."""
    model, optimizer, path = alone
    go_on, write = threading.Event(), resume._write

    def held_up(*args: Any) -> None:
        assert go_on.wait(30)
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "_write", held_up)
        first = save_training(path, model, optimizer, extra={"step": 2}, wait=False)
    with pytest.raises(CheckpointError, match="is being written by a save that has not ended"):
        save_training(path, model, optimizer, extra={"step": 3})
    save_training(path.parent / "other", model, optimizer)
    go_on.set()
    first.result(30)
    assert load_training(path, model) == {"step": 2}
    save_training(path, model, optimizer, extra={"step": 3})
    assert load_training(path, model) == {"step": 3}
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "other"]


def test_only_a_checkpoint_is_replaced(alone: Any, tmp_path: Path) -> None:
    """Neither a directory of the user's with files of other kinds, nor a file; and a full or closed disk is
    an error that names the directory."""
    model, optimizer, path = alone
    (tmp_path / "runs" / "logs").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"runs holds other files than a checkpoint \(logs\)"):
        save_training(tmp_path / "runs", model, optimizer)
    with pytest.raises(CheckpointError, match="file is a file"):
        save_training(tmp_path / "file", model, optimizer)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="notes.txt"):
        save_training(path, model, optimizer)
    with pytest.raises(CheckpointError, match="could not be written"):
        save_training(tmp_path / "file" / "below", model, optimizer)
    assert (tmp_path / "file").read_text() == (path / "notes.txt").read_text() == "mine"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ck", "file", "runs"]


def elsewhere(rank: int, path: str) -> None:
    model = autotp.parallelize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), 2,
                               example_inputs=(torch.ones(2, 8),))  # fmt: skip
    with pytest.raises(RankError, match="give the same directory on every rank"):
        save_training(f"{path}/of-rank-{rank}", model)
    (Path(path) / "file").touch()
    with pytest.raises(CheckpointError if rank == 0 else RankError, match="file is a file"):
        save_training(f"{path}/file", model)
    save_training(f"{path}/ours", model)


def test_ranks_name_the_same_directory(tmp_path: Path) -> None:
    """Each rank's part would lie in another, and nothing could be loaded of it."""
    distributed.run(2, elsewhere, str(tmp_path))
    assert (tmp_path / "ours" / SETTINGS).exists()


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
