"""Generation with the rows of a batch in groups over stages: the tokens of one process."""

import functools

import pytest
import torch
from models import MODELS

import autotp
from autotp.comm import simulate
from autotp.errors import AutotpError, RankError
from autotp.mesh import Mesh


def built(name):
    model, inputs = MODELS[name](dtype=torch.float64)
    torch.manual_seed(3)
    ids = torch.randint(3, 60, (5, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[4, :1] = 0
    return model.eval(), inputs, {"input_ids": ids, "attention_mask": mask}


def tokens(generate, given, **other):
    how = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **other}
    return generate(**given, **how)


ROUTES = [{}, {"cache_implementation": "static"}]


CASES = [("llama_gqa", 1, 3, None), ("t5", 1, 2, 3), ("gpt2", 2, 2, 2)]


@pytest.mark.parametrize(("name", "tp", "pp", "groups"), CASES)
def test_tokens_are_those_of_one_process(name, tp, pp, groups):
    model, inputs, given = built(name)
    whole = tokens(model.generate, given, eos_token_id=None)
    stop = int(whole[0, -3])  # some rows end early, in one group all of them
    want = [tokens(model.generate, given, eos_token_id=e, **r) for r in ROUTES for e in (None, stop)]
    models = [built(name)[0] for _ in range(tp * pp)]

    def one(comm):
        mine = models[comm.rank]
        autotp.parallelize(mine, tp, pp, comm=Mesh.split(comm, tp, pp), example_inputs=inputs)
        make = functools.partial(autotp.generate, mine, groups)
        found = [tokens(make, given, eos_token_id=e, **r) for r in ROUTES for e in (None, stop)]
        return [*found, tokens(mine.generate, given, eos_token_id=None)]

    for got in simulate(tp * pp, one):
        for ours, theirs in zip(got, [*want, whole], strict=True):
            assert torch.equal(ours, theirs)


def test_a_failure_in_one_group_is_told_on_all_ranks_and_leaves_the_model_usable():
    _, inputs, given = built("llama_gqa")
    models = [built("llama_gqa")[0] for _ in range(2)]

    def one(comm):
        mine, calls = models[comm.rank], []
        autotp.parallelize(mine, 1, 2, comm=Mesh.split(comm, 1, 2), example_inputs=inputs)

        def fails(module, args):
            calls.append(1)
            if comm.rank == 1 and len(calls) == 4:
                raise ValueError("out of luck")

        hook = mine.model.layers[1].mlp.register_forward_pre_hook(fails)
        with pytest.raises((ValueError, RankError)) as caught:
            tokens(functools.partial(autotp.generate, mine), given)
        hook.remove()
        again = tokens(functools.partial(autotp.generate, mine), given)
        return str(caught.value), again, tokens(mine.generate, given)

    for said, ours, theirs in simulate(2, one):
        assert "out of luck" in said and torch.equal(ours, theirs)


def test_what_is_not_greedy_or_not_in_stages_is_refused():
    model, inputs, given = built("llama_gqa")
    with pytest.raises(AutotpError, match="for a model in pipeline stages"):
        autotp.generate(model, **given)
    models = [built("llama_gqa")[0] for _ in range(2)]

    def one(comm):
        mine = models[comm.rank]
        autotp.parallelize(mine, 1, 2, comm=Mesh.split(comm, 1, 2), example_inputs=inputs)
        for other in ({"do_sample": True}, {"num_beams": 2}, {"streamer": print}, {"output_scores": True}):
            with pytest.raises(AutotpError, match=f"takes no {next(iter(other))}"):
                autotp.generate(mine, **given, **other)
        with pytest.raises(AutotpError, match="groups=0"):
            autotp.generate(mine, 0, **given)

    simulate(2, one)
