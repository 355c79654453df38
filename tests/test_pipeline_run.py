"""Models in stages against themselves whole: outputs, tokens, memory, files, errors."""
from __future__ import annotations

import functools
import time
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run
from models import DECODER, GQA, MODELS, NOT_GENERATING, hf
from torch import nn
from whole import EXACT, FLOAT32, logits_of

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import AbsentError, AutotpError, PlanError, RankError
from autotp.mesh import Mesh
from autotp.nested import map_tensors
from autotp.pipeline.absent import Absent, Home, Origin, QuietComm, absent, on_meta
from autotp.pipeline.stub import Stub
from autotp.resume import save_training
from autotp.verify import relative_error

GRANITE = functools.partial(
    hf, "GraniteConfig", "GraniteForCausalLM", dtype=torch.float64, embedding_multiplier=3.0,
    attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0, **GQA,
)  # fmt: skip
ROUTES = {
    "greedy": {},
    "beam": dict(num_beams=3),
    "static": dict(cache_implementation="static"),
    "scores": dict(output_scores=True, return_dict_in_generate=True),
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = GRANITE() if name == "granite" else MODELS[name](dtype=torch.float64)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    return model, inputs


def in_stages(
    name: str, use: Callable[[nn.Module, dict[str, Any]], Any], pp: int = 2, **options: Any
) -> list[Any]:
    """`use(model, inputs)` on each of `pp` simulated ranks of a model in stages."""
    built = [build(name) for _ in range(pp)]

    def one(comm: Comm) -> Any:
        model, inputs = built[comm.rank]
        mesh = Mesh.split(comm, 1, pp)  # type: ignore[arg-type]
        autotp.parallelize(model, 1, pp, comm=mesh, example_inputs=inputs, **options)
        return use(model, inputs)

    return simulate(pp, one)


def outcomes(model: nn.Module, inputs: dict[str, Any], routes: tuple[str, ...]) -> list[torch.Tensor]:
    """The output, and the tokens of every route; first with a padded batch."""
    with torch.no_grad():
        found = [logits_of(model(**inputs))]
    given = {k: v for k, v in inputs.items() if k not in ("decoder_input_ids", "use_cache")}
    for route in routes:
        if "input_ids" in given:
            mask = torch.ones_like(given["input_ids"])
            mask[0, :3] = route != "greedy"
            given["attention_mask"] = mask
        out = model.generate(**given, max_new_tokens=6, do_sample=False, **ROUTES[route])
        found += [out] if isinstance(out, torch.Tensor) else [out.sequences, *out.scores]
    return found


@pytest.mark.parametrize(
    "name",
    ["llama_gqa", "granite", "gemma3", "mixtral", "gpt_neox", "phi", "t5", "bart", "bert", "vit", "mamba"],
)
def test_outputs_and_tokens_are_those_of_one_process(name):
    routes = tuple(ROUTES) if name in ("llama_gqa", "gemma3", "t5") else ("greedy",)
    routes = () if name in NOT_GENERATING else routes
    want = outcomes(*build(name), routes)
    for got in in_stages(name, lambda m, i: outcomes(m, i, routes)):
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.device.type == "cpu" and not isinstance(ours, Absent)
            if theirs.is_floating_point():
                assert relative_error(ours, theirs) < EXACT
            else:
                assert torch.equal(ours, theirs)


def test_experts_split_by_expert_in_stages():
    want = outcomes(*build("mixtral"), ("greedy",))

    def one(comm: Comm) -> Any:
        model, inputs = build("mixtral")
        autotp.parallelize(model, 2, 2, ep=2, comm=Mesh.split(comm, 2, 2), example_inputs=inputs)  # type: ignore[arg-type]
        return outcomes(model, inputs, ("greedy",))

    for logits, tokens in simulate(4, one):
        assert relative_error(logits, want[0]) < FLOAT32 and torch.equal(tokens, want[1])  # a float32 router


def test_several_stages_a_rank_and_stages_stated_by_hand():
    small = dict(dtype=torch.float64, **{**DECODER, "num_hidden_layers": 5})
    inputs = MODELS["llama_gqa"](dtype=torch.float64)[1]
    built = [hf("LlamaConfig", "LlamaForCausalLM", **small)[0] for _ in range(5)]
    with torch.no_grad():
        want = built[4](**inputs).logits
    starts = ["model.layers.1", "model.layers.2", "model.layers.4"]

    def one(comm: Comm) -> Any:
        model = built[comm.rank]
        mesh = Mesh.split(comm, 1, 2)  # type: ignore[arg-type]
        autotp.parallelize(model, 1, 2, comm=mesh, example_inputs=inputs, stages=starts)
        with torch.no_grad():
            return model.autotp.pipeline.mine, model(**inputs).logits

    (first, ours), (second, theirs) = simulate(2, one)
    assert first == (0, 2) and second == (1, 3)
    assert relative_error(ours, want) < EXACT and relative_error(theirs, want) < EXACT

    def wrong(comm: Comm) -> None:
        mesh = Mesh.split(comm, 1, 2)  # type: ignore[arg-type]
        autotp.parallelize(built[2 + comm.rank], 1, 2, comm=mesh, example_inputs=inputs, stages=starts[:2])

    with pytest.raises(PlanError, match="pp=2 with the 2 cuts"):
        simulate(2, wrong)


def test_a_part_of_the_model_may_be_called_and_hidden_states_are_everywhere():
    whole, inputs = build("t5")
    with torch.no_grad():
        want = whole.get_encoder()(inputs["input_ids"], output_hidden_states=True)

    def use(model, inputs):
        with torch.no_grad():
            return model.get_encoder()(inputs["input_ids"], output_hidden_states=True)

    for got in in_stages("t5", use, stages=["encoder.block.1"]):
        assert relative_error(got.last_hidden_state, want.last_hidden_state) < EXACT
        assert len(got.hidden_states) == len(want.hidden_states)
        for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
            assert relative_error(ours, theirs) < EXACT


def test_under_inference_mode():
    def use(model, inputs):
        with torch.inference_mode():
            return outcomes(model, inputs, ("greedy",))

    want = outcomes(*build("llama_gqa"), ("greedy",))
    for got in in_stages("llama_gqa", use):
        assert relative_error(got[0], want[0]) < EXACT and torch.equal(got[1], want[1])


def test_a_unit_that_changes_its_argument_in_place_is_refused_where_that_would_be_stale():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2) + 1

    stub = Stub("doubles", Doubles().forward)
    origin = Origin("doubles", 1, Home(torch.device("cpu"), (0,)))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(AbsentError, match="changes an argument in place"):
            stub.run((torch.ones(3),), {}, origin)
    with torch.no_grad():
        for size in (3, 5, 3):  # what is known of shapes is known by shape
            out = stub.run((absent(torch.empty(size, device="meta"), origin),), {}, origin)
            assert isinstance(out, Absent) and out.shape == (size,)


def test_a_unit_may_move_its_own_tensors_to_where_known_ones_lie():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(4, 3))

        def forward(self, ids):
            rows = self.table.to(ids.device)[ids].cpu()
            return rows.to("cpu", torch.float16), rows.to(device=ids.device)

    model, origin = Moves(), Origin("moves", 1, Home(torch.device("cpu"), (0,)))
    model.table = absent(torch.empty(4, 3, device="meta"), origin)
    for _ in range(2):
        half, rows = Stub("moves", model.forward).run((torch.tensor([0, 2]),), {}, origin)
        assert isinstance(half, Absent) and half.dtype == torch.float16
        assert isinstance(rows, Absent) and rows.shape == (2, 3)


def test_what_a_unit_puts_into_a_container_is_there_afterwards():
    def forward(x, shared, row, *, seen):
        shared["new"] = (x * 2, shared["old"])
        del shared["gone"]
        row.append(x)
        seen["inner"]["x"] = x + 1
        return x

    origin = Origin("keeps", 1, Home(torch.device("cpu"), (0,)))
    x, old = torch.ones(3), torch.zeros(2)
    shared, row = UserDict(old=old, gone=old), [old]
    seen = {"inner": {"x": old}, "same": old}
    assert Stub("keeps", forward).run((x, shared, row), {"seen": seen}, origin) is x
    assert isinstance(shared["new"][0], Absent) and shared["new"][1] is old and shared["old"] is old
    assert "gone" not in shared and row[0] is old and row[1] is x
    assert isinstance(seen["inner"]["x"], Absent) and seen["same"] is old


def test_a_unit_may_loop_over_the_experts_that_were_hit():
    """Its output has the same shape whichever were. Where a shape hangs on how many rows a mask picks, in the
    output or in what the unit keeps, nothing is made up."""

    class Unit(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.kept = body, None

        def forward(self, x):
            return self.body(self, x)

    def loops(self, x):
        out = torch.zeros_like(x)
        for expert in nn.functional.one_hot((x > 0).long().sum(1), 8).sum(0).gt(0).nonzero():
            rows, _ = torch.where(x > int(expert))
            out.index_add_(0, rows, x[rows] * 2)
        out[out < 0] = 0
        return out

    def keeps(self, x):
        self.kept = x[x > 0].exp()
        return x + 1

    origin = Origin("u", 1, Home(torch.device("cpu"), (0,)))
    x = absent(torch.empty(4, 3, device="meta"), origin)
    out = Stub("u", Unit(loops).forward).run((x,), {}, origin)
    assert isinstance(out, Absent) and out.shape == (4, 3)
    for body in (
        lambda self, x: x[x.sum(1) > 0],
        lambda self, x: torch.cat([x, x[x.sum(1) > 0]]),
        lambda self, x: x.new_ones((x > 0).nonzero().shape[0], 2),
        keeps,
    ):  # fmt: skip
        unit = Unit(body)
        with pytest.raises(AbsentError, match="how many rows a mask picks"):
            Stub("u", unit.forward).run((x,), {}, origin)


def test_a_unit_that_reads_values_is_refused_by_its_line():
    def reads(x):
        rows = x.sum(1).tolist()
        return x.new_zeros(len(rows))

    origin = Origin("u", 1, Home(torch.device("cpu"), (0,)))
    line = reads.__code__.co_firstlineno + 1
    with pytest.raises(AbsentError, match=rf"u runs on stage 1.*test_pipeline_run.py:{line} in reads"):
        Stub("u", reads).run((absent(torch.empty(4, 3, device="meta"), origin),), {}, origin)


def test_masks_and_numbers_that_are_known_say_shapes_of_what_is_absent():
    origin = Origin("tower", 1, Home(torch.device("cpu"), (0,)))
    mask = torch.tensor([True, False, True])
    x = absent(torch.empty(3, 5, device="meta"), origin)
    for index, shape in ((mask, (2, 5)), ((mask, slice(2)), (2, 2)), ((slice(1), torch.tensor(4)), (1,))):
        assert x[index].shape == shape and isinstance(x[index], Absent)
        seen = Stub("u", lambda x, index=index: x[index]).run((x,), {}, origin)
        assert seen.shape == shape and isinstance(seen, Absent)
    n = torch.div(15, 3, rounding_mode="trunc")  # a number in a tensor is a size
    assert x.view(n, 3).shape == (5, 3)
    for use in (lambda x: x.view(n, torch.tensor(3)), lambda x: x.as_strided(size=(n, 3), stride=(3, 1))):
        assert use(x).shape == Stub("u", use).run((x,), {}, origin).shape == (5, 3)
    every = Stub("u", lambda x, mask: x[:2] if mask.to(x.device).all() else x).run((x, mask), {}, origin)
    assert every.shape == (3, 5)
    with pytest.raises(AbsentError, match="tower on stage 1"):
        torch.ones(3)[x[:, 0] > 0]


def test_forms_by_rule_are_those_of_real_tensors():
    def both(function, *args, **kwargs):
        real = function(*args, **kwargs)
        hollow, named = map_tensors(args, on_meta), map_tensors(kwargs, on_meta)
        for _ in range(2):
            form = Stub("f", function).run(hollow, named, Origin("f", 1, Home(torch.device("cpu"), (0,))))
            assert (form.shape, form.dtype) == (real.shape, real.dtype)

    keys = torch.randn(2, 4, 5, 8)
    both(torch.cat, [keys, keys[:, :, :1], keys], dim=-2)
    both(torch.cat, (keys, keys.half()), 1)
    both(torch.cat, [keys.transpose(1, 2), keys.transpose(1, 2)])
    both(torch.cat, [torch.randn(0), torch.randn(3)])
    attention = nn.functional.scaled_dot_product_attention
    both(attention, keys[:, :, :1], keys, keys[..., :3], is_causal=True)
    both(attention, torch.randn(2, 8, 3, 8), keys, keys, enable_gqa=True)
    both(attention, keys[:1], keys, keys)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    weights = torch.randn(2, 16, 8)
    both(nn.functional.grouped_mm, torch.randn(5, 16), weights, offs=offsets)
    # With weights that this rank has, as where a training step asks its own units for shapes alone.
    both(lambda rows: nn.functional.grouped_mm(rows, weights, offs=offsets), torch.randn(5, 16))


def test_other_stages_weights_and_caches_take_no_memory():
    def use(model, inputs):
        names = {n for n, p in model.named_parameters() if isinstance(p, Absent)}
        with torch.no_grad():
            cache = model(input_ids=inputs["input_ids"], use_cache=True).past_key_values
        static = model.generate(
            inputs["input_ids"], max_new_tokens=3, cache_implementation="static", return_dict_in_generate=True
        ).past_key_values
        meta = [[layer.keys.is_meta for layer in c.layers] for c in (cache, static)]
        return names, meta, cache.get_seq_length(), int(static.get_seq_length())

    model, _ = build("llama_gqa")
    every = {n for n, _ in model.named_parameters()}
    (first, meta, dynamic, static), (second, other, *lengths) = in_stages("llama_gqa", use)
    assert first | second == every and not first & second
    assert {n for n in every if n.startswith("model.layers.1.")} <= first
    assert meta == [[False, True]] * 2 and other == [[True, False]] * 2
    assert [dynamic, static] == lengths == [12, 14]


def test_state_dicts_hold_every_stage_and_load_back():
    model, _ = build("llama_tied")
    want = {n: t.clone() for n, t in model.state_dict().items()}

    def use(model, inputs):
        state = {n: t.clone() for n, t in autotp.full_state_dict(model).items()}
        changed = {n: t + 1 for n, t in state.items()}
        model.load_state_dict(changed)
        model.load_state_dict(changed, assign=True)
        absents = sum(isinstance(p, Absent) for p in model.parameters())
        return state, autotp.full_state_dict(model), absents

    for state, changed, absents in in_stages("llama_tied", use):
        assert list(state) == list(want) and absents > 0
        for name, tensor in want.items():
            assert torch.equal(state[name], tensor), name
            assert torch.equal(changed[name], tensor + 1), name


def test_saved_files_are_those_of_one_process_and_load_into_stages(tmp_path):
    model, inputs = build("llama_tied")
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        want = model(**inputs).logits
    in_stages("llama_tied", lambda m, i: m.save_pretrained(tmp_path / "staged"))
    for file in (tmp_path / "whole").glob("*"):
        assert (tmp_path / "staged" / file.name).read_bytes() == file.read_bytes(), file.name

    def loaded(comm: Comm) -> Any:
        mesh = Mesh.split(comm, 1, 2)  # type: ignore[arg-type]
        again = autotp.load(tmp_path / "staged", 1, 2, comm=mesh, example_inputs=inputs)
        with torch.no_grad():
            return again(**inputs).logits, sum(isinstance(p, Absent) for p in again.parameters())

    for got, absents in simulate(2, loaded):
        assert relative_error(got, want) < EXACT and absents > 0


# ---------------------------------------------------------------- errors
def test_a_call_with_gradients_names_train_step():
    with pytest.raises(AutotpError, match="train_step"):
        in_stages("llama_gqa", lambda m, i: m(**i))


def test_an_error_on_one_stage_ends_the_others():
    def use(model, inputs):
        broken = model.model.layers[1]

        def fails(module, args):
            if model.autotp.pipeline.rank == 1:
                raise ValueError("out of luck")

        broken.self_attn.register_forward_pre_hook(fails)
        with torch.no_grad(), pytest.raises((ValueError, RankError)) as caught:
            model(**inputs)
        return caught.value

    first, second = in_stages("llama_gqa", use)
    assert isinstance(second, ValueError)
    assert isinstance(first, RankError)
    assert "rank 1 (pp 1), stage 1" in str(first) and "ValueError: out of luck" in str(first)


def test_the_value_of_an_absent_is_not_read():
    origin = Origin("layers.3", 1, Home(torch.device("cpu"), (0,)))
    x = absent(torch.empty(2, 3, device="meta"), origin)
    assert x.device.type == "cpu" and not x.is_meta
    assert isinstance(x + torch.ones(3), Absent) and (x + torch.ones(3)).shape == (2, 3)
    assert isinstance(torch.cat([torch.ones(1, 3), x]), Absent)
    assert torch.equal(x.new_zeros(2), torch.zeros(2))
    known = torch.zeros(2, 3)
    for read in (
        lambda: bool(x.sum() > 0), lambda: x[0, 0].item(), lambda: x.tolist(), lambda: x.nonzero(),
        lambda: known.add_(x), lambda: known.__setitem__(0, x[0]), lambda: torch.equal(x, known),
        lambda: x.numpy(),
    ):  # fmt: skip
        with pytest.raises(AbsentError, match="layers.3 on stage 1"):
            read()
    assert torch.equal(known, torch.zeros(2, 3))
    assert QuietComm(_Deaf()).all_reduce(x).shape == (2, 3)


class _Deaf(Comm):
    rank, size = 0, 2

    def all_reduce(self, x, op="sum"):
        raise AssertionError("talked about a value nobody has")

    all_gather = exchange = broadcast = all_reduce


# ---------------------------------------------------------------- processes
def _over_processes(rank: int, tp: int, pp: int, names: tuple[str, ...]) -> list[Any]:
    found = []
    for name in names:
        model, inputs = build(name)
        autotp.parallelize(model, tp, pp, example_inputs=inputs)
        found.append(outcomes(model, inputs, ("greedy", "beam")))
        if "input_ids" in inputs:
            torch.manual_seed(5 + rank)
            found[-1].append(model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=True))
    return found


@pytest.mark.parametrize(("tp", "pp", "names"), [(2, 2, ("llama_gqa",))], ids=["tp2xpp2"])
def test_processes_give_the_tokens_of_one(tp, pp, names):
    told = run(tp * pp, _over_processes, tp, pp, names)
    for i, name in enumerate(names):
        model, inputs = build(name)
        want = outcomes(model, inputs, ("greedy", "beam"))
        torch.manual_seed(5)
        want.append(model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=True))
        for rank in range(tp * pp):
            for ours, theirs in zip(told[rank][i], want, strict=True):
                if theirs.is_floating_point():
                    assert relative_error(ours, theirs) < EXACT
                else:
                    assert torch.equal(ours, theirs)


def _one_fails(rank: int) -> tuple[str, float, list[Any]]:
    model, inputs = build("llama_gqa")
    autotp.parallelize(model, 1, 2, example_inputs=inputs)
    fails = rank == 1

    def hook(module, args):
        if fails:
            raise ValueError("out of luck")

    model.model.layers[1].mlp.register_forward_pre_hook(hook)
    began = time.monotonic()
    said = ""
    with torch.no_grad():
        try:
            model(**inputs)
        except (ValueError, RankError) as error:
            said = f"{type(error).__name__}: {error}"
        took = time.monotonic() - began
        fails = False  # and the next call is right again
        return said, took, [model(**inputs).logits]


def test_a_process_that_raises_is_heard_of_at_once():
    (first, took, logits), (second, _, other) = run(2, _one_fails)
    assert second.startswith("ValueError") and took < 30
    assert "rank 1 (pp 1), stage 1, at model.layers.1 failed: ValueError: out of luck" in first
    model, inputs = build("llama_gqa")
    with torch.no_grad():
        want = model(**inputs).logits
    assert relative_error(logits[0], want) < EXACT and relative_error(other[0], want) < EXACT


def test_training_checkpoints_of_simulated_ranks_are_refused_before_anything_is_written(tmp_path):
    def use(model, inputs):
        with pytest.raises(PlanError, match="by processes of torch.distributed"):
            save_training(tmp_path / "step", model)

    in_stages("llama_gqa", use)
    assert not list(tmp_path.iterdir())
