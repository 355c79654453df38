"""The world as a mesh: who a rank's peers are along each dim, and what is said where the sizes do not fit."""

import warnings

import pytest
import torch
import torch.distributed as dist
from distributed import run

from autotp.errors import LaunchError
from autotp.mesh import attach


def _three(rank):
    with pytest.raises(LaunchError, match="tp=2 does not divide the world size 3"):
        attach(2)
    with pytest.raises(LaunchError, match="tp=1 x pp=2 x dp=2 does not divide .* a multiple of 4 processes"):
        attach(1, pp=2, dp=2)
    with pytest.raises(LaunchError, match="tp=all x pp=2 does not divide the world size 3"):
        attach(pp=2)
    with pytest.raises(LaunchError, match="pp=0: give a number of processes"):
        attach(pp=0)
    whole = attach()
    assert whole.tp.size == 3 and whole.tp.rank == rank and whole.world.size == 3
    alone = attach(1)
    assert (alone.tp.rank, alone.tp.size) == (0, 1)
    copies = attach(dp=3)
    assert copies.sizes == {"dp": 3, "pp": 1, "tp": 1} and copies.dp.exchange(rank) == [0, 1, 2]


def test_sizes_that_do_not_fit_the_world():
    run(3, _three)


def _four(rank):
    found = []
    for sizes in ((2, 2, 1), (2, 1, 2), (None, 2, 1)):
        mesh = attach(*sizes)
        found.append({name: getattr(mesh, name).exchange(rank) for name in ("tp", "pp", "dp", "world")})
        assert mesh.world.rank == rank
    mesh = attach(2, dp=2)
    assert str(mesh) == f"rank {rank} (dp {rank // 2}, tp {rank % 2})"
    assert mesh.devices["dp"].get_local_rank() == mesh.dp.rank
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pair = attach(2)
    summed = pair.tp.all_reduce(torch.tensor([float(rank)])).item()
    last = pair.world.broadcast(torch.tensor([float(rank)]), 1).item()
    return found, (pair.tp.rank, pair.world.size, summed, last), [str(w.message) for w in said]


def test_tp_peers_are_consecutive_and_dp_is_outermost():
    told = run(4, _four)
    peers = [[0, 1], [0, 1], [2, 3], [2, 3]]
    across = [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, (found, _, _) in enumerate(told):
        own, world = [rank], [0, 1, 2, 3]
        staged = {"tp": peers[rank], "pp": across[rank], "dp": own, "world": world}
        assert found[0] == staged and found[2] == staged
        assert found[1] == {"tp": peers[rank], "pp": own, "dp": across[rank], "world": world}
    # two meshes in one world
    assert [pair for _, pair, _ in told] == [(0, 2, 1, 1), (1, 2, 1, 1), (0, 2, 5, 3), (1, 2, 5, 3)]
    assert ["dp=2 makes them train" in " ".join(said) for _, _, said in told] == [True, *3 * [False]]


def test_without_torchrun_it_says_what_to_run(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"torchrun --nproc-per-node 2 .*autotp\.plan or autotp\.verify"):
        attach(2)
    with pytest.raises(LaunchError, match=r"tp=2 x pp=2 needs .*torchrun --nproc-per-node 4 "):
        attach(2, pp=2)
    assert attach(1).tp.size == 1 and not dist.is_initialized()
