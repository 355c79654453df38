"""Saving a split model: what save_pretrained of the whole one writes, and no rank left waiting."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weights import QUIET, built, files, on_ranks, saved
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import AutotpError, CheckpointError, RankError
from autotp.save import install_save, save
from autotp.state import full_state_dict
from autotp.tensorfiles import _DTYPES, FileWriter


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """All dtypes, names that are not ASCII, empty and 0-dim tensors, written in pieces."""
    tensors = {
        f't{i * 7 % 20}é"\\.{k}': torch.randint(0, 2, (3, 5)).to(d)
        for i, (k, d) in enumerate(_DTYPES.items())
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "want", metadata={"format": "pt"})
    writer = FileWriter(
        tmp_path / "got", {n: (t.dtype, t.shape) for n, t in tensors.items()}, {"format": "pt"}
    )
    for name in writer.names:
        for piece in tensors[name].split(2) if tensors[name].dim() else [tensors[name]]:
            writer.write(piece.contiguous())
    writer.close()
    assert (tmp_path / "got").read_bytes() == (tmp_path / "want").read_bytes()
    short = FileWriter(tmp_path / "short", {"a": (torch.float32, (4,))}, {})
    short.write(torch.zeros(3))
    with pytest.raises(CheckpointError, match="incomplete"):
        short.close()


@QUIET
def test_save_pretrained_of_a_parallelized_and_trained_model(tmp_path: Path) -> None:
    """The method that users know, after training, over old files; a model never saved before has conversions
    too."""
    whole, inputs = built("mixtral", torch.float32)
    stale = tmp_path / "out" / "model-00001-of-00009.safetensors"
    stale.parent.mkdir()
    stale.write_bytes(b"old")

    def one(comm: Comm) -> Any:
        model, _ = built("mixtral", torch.float32)
        autotp.parallelize(model, comm=comm, example_inputs=inputs)
        install_save(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5)
        model.save_pretrained(tmp_path / "out", variant="ema")
        return full_state_dict(model)

    state = simulate(2, one)[0]
    with torch.no_grad():
        for name, p in whole.named_parameters():
            p.add_(0.5)
            assert torch.equal(state[name], p)
    whole.save_pretrained(tmp_path / "want", variant="ema")
    written = files(tmp_path / "out")
    assert stale.name in written  # another variant's
    del written[stale.name]
    assert written == files(tmp_path / "want")


@QUIET
def test_config_keeps_the_whole_numbers(tmp_path: Path) -> None:
    """A config entry that became local on the root is whole in config.json, and local again afterwards."""
    saved("llama_gqa", tmp_path / "in")

    def use(model: Any) -> Any:
        from dataclasses import replace

        from autotp.plan import LocalInt

        heads = LocalInt("", "config.num_attention_heads", 4, (2, 2))
        model.autotp.plan = replace(model.autotp.plan, ints=(*model.autotp.plan.ints, heads))
        model.config.num_attention_heads = 2
        save(model, tmp_path / "out")
        return model.config.num_attention_heads

    assert on_ranks(tmp_path / "in", 2, use) == [2, 2]
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "in" / "config.json").read_bytes()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.embed(ids)))))


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    want_model = Tied()  # built before: the ranks are threads, which share one random state

    def one(comm: Comm) -> Any:
        model = copy.deepcopy(want_model)
        autotp.parallelize(model, comm=comm, example_inputs=(torch.arange(5),))
        assert any(h.layout for h in model.autotp.held.values())  # type: ignore[union-attr]
        save(model, tmp_path)

    simulate(2, one)
    want = want_model.state_dict()
    del want["head.weight"]
    got = load_file(tmp_path / "model.safetensors")
    assert set(got) == set(want) and all(torch.equal(got[n], t) for n, t in want.items())


def test_unsharded_models_are_saved_too(tmp_path: Path) -> None:
    model, _ = saved("llama_tied", tmp_path / "want")
    save(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "want")


@QUIET
def test_state_dicts_given(tmp_path: Path) -> None:
    saved("llama_gqa", tmp_path / "in")

    def use(model: Any) -> Any:
        install_save(model)
        told = []
        for how in ({"state_dict": model.state_dict()}, {"push_to_hub": True}):
            try:
                model.save_pretrained(tmp_path / "none", **how)
            except CheckpointError as error:
                told.append(str(error))
        state = full_state_dict(model)
        if model.autotp.comm.rank == 0:
            model.save_pretrained(tmp_path / "out", state_dict=state)
        return told

    for part, hub in on_ranks(tmp_path / "in", 2, use):
        assert "only this rank's part" in part and "push_to_hub" in hub
    assert files(tmp_path / "out") == files(tmp_path / "in")
    assert not (tmp_path / "none").exists()


@QUIET
def test_rank_0_failing_to_write_is_told_on_all(tmp_path: Path) -> None:
    saved("llama_gqa", tmp_path / "in")
    (tmp_path / "file").write_text("in the way")

    def use(model: Any) -> Any:
        try:
            save(model, tmp_path / "file")
        except AutotpError as error:
            return f"{type(error).__name__}: {error}"

    mine, theirs = on_ranks(tmp_path / "in", 2, use)
    assert mine.startswith("CheckpointError") and "is a file" in mine
    assert theirs.startswith("RankError: failed on rank 0") and "is a file" in theirs


@QUIET
def test_only_one_simulated_rank_calls(tmp_path: Path) -> None:
    saved("llama_gqa", tmp_path / "in")
    with pytest.raises(RankError, match="rank 0 waits"):
        on_ranks(tmp_path / "in", 2, lambda m: save(m, tmp_path / "out") if m.autotp.comm.rank == 0 else None)


def in_processes(rank: int, path: str) -> Any:
    """Only rank 0 calls, while rank 1 goes on to another collective; then both call, and it works."""
    torch.set_num_threads(1)
    model = autotp.parallelize(built("llama_gqa")[0], tp=2)
    told = ""
    if rank == 0:
        try:
            save(model, os.path.join(path, "out"), patience=1.0)
        except RankError as error:
            told = str(error)
    torch.distributed.barrier()
    save(model, os.path.join(path, "out"))
    save(model, os.path.join(path, "again"))
    return told


@QUIET
def test_only_rank_0_calls_over_processes(tmp_path: Path) -> None:
    told, _ = distributed.run(2, in_processes, str(tmp_path))
    assert "rank 1 of 2 did not call it within 1 s" in told and "every rank" in told
    saved("llama_gqa", tmp_path / "want")
    assert files(tmp_path / "out") == files(tmp_path / "again") == files(tmp_path / "want")
