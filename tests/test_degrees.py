"""Degrees left to the search."""

import pytest
from models import MODELS
from whole import assert_close, logits_of

import autotp
from autotp.comm import simulate
from autotp.errors import LaunchError, PlanError
from autotp.mesh import Mesh
from autotp.search.find import choose_degrees

WORKLOAD = {"batch": 2, "seq": 64, "mode": "generate"}


def test_auto_takes_what_the_search_finds_best_and_runs():
    model, inputs = MODELS["llama_gqa"]()
    want = logits_of(model(**inputs)).detach()
    best = choose_degrees(model, 2, dp=1, pp=1, **WORKLOAD)
    assert best["tp"] * best["pp"] * best["dp"] == 2
    models = [MODELS["llama_gqa"]()[0] for _ in range(2)]

    def fn(comm):
        split = autotp.parallelize(models[comm.rank], tp="auto", comm=comm, workload=WORKLOAD)
        assert split.autotp.mesh.sizes == best
        assert_close(logits_of(split(**inputs)).detach(), want)

    simulate(2, fn)


def test_what_does_not_fit_is_an_error_on_every_rank():
    def fn(comm):
        model, _ = MODELS["nanogpt"]()
        with pytest.raises(LaunchError, match="tp='most': give a number of ranks, or \"auto\""):
            autotp.parallelize(model, tp="most", pp="auto", comm=comm)
        with pytest.raises(PlanError, match="none is: give tp=\"auto\""):
            autotp.parallelize(model, tp=2, comm=comm, workload=WORKLOAD)
        assert isinstance(Mesh.of(comm), Mesh)

    simulate(2, fn)
