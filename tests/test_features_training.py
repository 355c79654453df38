"""Training a split model the ways users do, and what else they do to a model object."""

import copy
import os
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from models import MODELS
from torch import nn
from whole import assert_close, assert_same_grads, forward_and_grads, full_grads, logits_of, loss_of, on_ranks

import autotp
from autotp.errors import AutotpError
from autotp.verify import relative_error


def llama(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Any]]:
    return MODELS["llama_gqa"](dtype=dtype)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing(when: str, reentrant: bool) -> None:
    model, inputs = llama()
    _, want = forward_and_grads(model, inputs)
    runs: list[int] = []

    def checkpointed(model: Any) -> None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = llama()
        if when == "before":
            checkpointed(model)
        return model, inputs

    def use(model: Any, inputs: Any) -> dict[str, torch.Tensor]:
        if when == "after":
            checkpointed(model)
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: runs.append(1))
        loss_of(model, inputs).backward()
        return full_grads(model)

    for grads in on_ranks(2, build, use):
        assert_same_grads(grads, want)
    assert len(runs) == 4  # twice on each rank: it was run again in backward


# --- adapters -------------------------------------------------------------------------------------------


def with_adapters(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    peft = pytest.importorskip("peft")
    model, inputs = llama()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    adapted = peft.get_peft_model(model, config).double().eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:  # B is zero at first, which hides everything
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return adapted, inputs


@pytest.mark.parametrize("tp", [2, 4])
def test_adapters_are_found_and_trained(tp: int) -> None:
    """The linears are wrapped (`q_proj.base_layer`) and only the adapters have gradients."""
    model, inputs = with_adapters()
    want_logits, want = forward_and_grads(model, inputs)
    assert want and all("lora_" in name for name in want)

    def use(model: Any, inputs: Any) -> Any:
        return *forward_and_grads(model, inputs), model.autotp.plan.sharded_fraction

    for logits, grads, fraction in on_ranks(tp, with_adapters, use):
        assert_close(logits, want_logits)
        assert_same_grads(grads, want)
        assert fraction > 0.9


def test_adapters_merged_after_the_split() -> None:
    model, inputs = with_adapters()
    merged = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    want, state = logits_of(merged(**inputs)), merged.state_dict()

    def use(model: Any, inputs: Any) -> Any:
        model = model.merge_and_unload()
        with pytest.raises(AutotpError, match="full_state_dict"):
            model.save_pretrained("/nowhere")
        return logits_of(model(**inputs)).detach(), autotp.full_state_dict(model)

    for logits, full in on_ranks(2, with_adapters, use):
        assert_close(logits, want.detach())
        assert set(full) == set(state)
        for name, tensor in state.items():
            assert_close(full[name], tensor)


# --- dtypes, compilers, trainers ------------------------------------------------------------------------


def test_bfloat16() -> None:
    model, inputs = llama(torch.bfloat16)
    exact, _ = llama()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    want, want_grads = forward_and_grads(exact, inputs)
    rounding = relative_error(forward_and_grads(model, inputs)[0], want)
    for logits, grads in on_ranks(2, lambda: llama(torch.bfloat16), forward_and_grads):
        assert logits.dtype == torch.bfloat16
        assert relative_error(logits, want) < 1.5 * rounding  # no worse than bfloat16 on one rank
        assert_same_grads({k: g.double() for k, g in grads.items()}, want_grads, limit=0.05)


def _compiled(rank: int, name: str) -> tuple[float, float, int]:
    model, inputs = MODELS[name](dtype=torch.float64)
    want_logits, want = forward_and_grads(model, inputs)
    model.zero_grad()
    autotp.parallelize(model, tp=2, example_inputs=inputs)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        error = relative_error(logits_of(compiled(**inputs)), want_logits)
    loss_of(compiled, inputs).backward()
    grads = full_grads(model)
    from torch._dynamo.utils import counters

    return error, max(relative_error(grads[k], g) for k, g in want.items()), len(counters["stats"])


def test_compiled_over_two_processes() -> None:
    for error, grad_error, graphs in distributed.run(2, _compiled, "nanogpt", timeout=240):
        assert error < 1e-9 and grad_error < 1e-9
        assert graphs > 0  # something was compiled


def _by_inductor(rank: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    inputs = {"input": torch.randn(4, 8)}
    want = copy.deepcopy(model)
    result = want(**inputs)
    result.square().sum().backward()
    autotp.parallelize(model, tp=2, example_inputs=inputs)
    found = torch.compile(model)(**inputs)
    found.square().sum().backward()
    mine = full_grads(model)
    return relative_error(found, result), max(
        relative_error(mine[name], p.grad) for name, p in want.named_parameters() if p.grad is not None
    )


def test_compiled_by_inductor() -> None:
    for error, grad_error in distributed.run(2, _by_inductor, timeout=240):
        assert error < 1e-5 and grad_error < 1e-5


def _with_a_trainer(rank: int, folder: str) -> tuple[str, float]:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (12, 10), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]

    def train(model: Any) -> None:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2,
            max_grad_norm=0.5, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=model, args=args, train_dataset=data).train()  # type: ignore[arg-type]

    whole, split = llama()[0], llama()[0]
    autotp.parallelize(split, tp=2)
    try:
        nn.parallel.DistributedDataParallel(split)
        refused = ""
    except AutotpError as error:
        refused = str(error)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # every rank for itself, as one
        del os.environ[name]
    train(whole)
    train(split)
    full = autotp.full_state_dict(split)
    return refused, max(relative_error(full[k], v) for k, v in whole.state_dict().items())


def test_a_trainer_and_no_ddp(tmp_path: Any) -> None:
    for refused, error in distributed.run(2, _with_a_trainer, str(tmp_path)):
        assert "is split over ranks already" in refused and "WORLD_SIZE" in refused
        assert error < 1e-9


# --- the object -----------------------------------------------------------------------------------------


def test_the_users_hooks_fire_once_and_see_whole_results() -> None:
    def watched() -> tuple[nn.Module, dict[str, Any], list[Any]]:
        model, inputs = llama()
        seen: list[Any] = []
        model.register_forward_pre_hook(lambda *_: seen.append("model"))
        model.model.layers[0].mlp.register_forward_hook(  # type: ignore[union-attr, index]
            lambda module, args, result: seen.append(result.detach())
        )
        model.model.layers[0].self_attn.q_proj.register_forward_hook(  # type: ignore[union-attr, index]
            lambda *_: seen.append("query")
        )
        return model, inputs, seen

    model, inputs, want = watched()
    model(**inputs)
    lists: dict[int, list[Any]] = {}

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs, seen = watched()
        lists[id(model)] = seen
        return model, inputs

    def use(model: Any, inputs: Any) -> Any:
        seen = lists[id(model)]
        planned = list(seen)
        model(**inputs)
        return planned, seen

    for planned, seen in on_ranks(2, build, use):
        assert planned == []  # planning runs no hook
        assert [s if isinstance(s, str) else "mlp" for s in seen] == ["model", "query", "mlp"]
        assert_close(seen[2], want[2])


def test_two_models_split_differently_stay_apart() -> None:
    """A policy for one, none for the other; and another number of ranks afterwards."""
    model, inputs = llama()
    want = logits_of(model(**inputs)).detach()
    whole = {"schema": 1, "modules": {"model.layers.*.mlp.*": "replicate"}}

    def use(first: Any, inputs: Any) -> Any:
        second = autotp.parallelize(llama()[0], comm=first.autotp.comm, example_inputs=inputs, policy=whole)
        plans = [m.autotp.plan.sharded_fraction for m in (first, second)]
        return plans, [logits_of(m(**inputs)).detach() for m in (first, second, first)]

    for tp in (2, 4, 2):
        for plans, logits in on_ranks(tp, llama, use):
            assert plans[0] == 1.0 and plans[1] < 0.5
            for found in logits:
                assert_close(found, want)
    assert_close(logits_of(model(**inputs)).detach(), want)


def test_a_subclass_and_a_wrapper_of_a_known_architecture() -> None:
    """Nothing is looked up by class."""
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=input_ids, use_cache=False).logits

    model, inputs = llama()
    want, _ = forward_and_grads(model, inputs)

    def subclass() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = llama()
        mine = Mine(model.config).double().eval()
        mine.load_state_dict(model.state_dict())
        return mine, inputs

    def wrapped() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = llama()
        return Wrapper(model), {"input_ids": inputs["input_ids"]}

    for build in (subclass, wrapped):
        for logits, fraction in on_ranks(
            2, build, lambda m, i: (logits_of(m(**i)).detach(), m.autotp.plan.sharded_fraction)
        ):
            assert_close(logits, want)
            assert fraction == 1.0


def test_copies_names_loading_and_saving(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model, inputs = llama()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    want, want_grads = forward_and_grads(model, inputs)

    def use(model: Any, inputs: Any) -> Any:
        twin = copy.deepcopy(model)
        assert list(model.state_dict()) == list(state)
        saved = {k: v.clone() for k, v in autotp.full_state_dict(model).items()}
        inner = autotp.full_state_dict(model.model)  # a part alone
        assert all(
            torch.equal(inner[k.removeprefix("model.")], v)
            for k, v in state.items()
            if k.startswith("model.")
        )
        model.load_state_dict({k: v * 0.5 for k, v in state.items()})
        halved = autotp.full_state_dict(model)
        assert all(torch.equal(halved[k], v * 0.5) for k, v in state.items())
        with pytest.raises(AutotpError, match="before autotp.parallelize"):
            model.resize_token_embeddings(300)
        model.save_pretrained(tmp_path / str(model.autotp.comm.rank), state_dict=dict(saved))
        return saved, forward_and_grads(twin, inputs)

    for rank, (saved, (logits, grads)) in enumerate(on_ranks(2, llama, use)):
        assert all(torch.equal(saved[k], v) for k, v in state.items())
        assert_close(logits, want)  # the copy kept its own weights
        assert_same_grads(grads, want_grads)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / str(rank), dtype=torch.float64).eval()
        assert_close(logits_of(loaded(**inputs)).detach(), want)


class LiteralDropout(nn.Module):
    """Attention whose rate of dropout stands in the code. Queries and keys are zero and values all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 96, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, -1, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rate = 0.5 if self.training else 0.0
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


def test_attention_dropout_of_a_literal_rate_differs_by_rank() -> None:
    x = torch.ones(1, 16, 8)

    def build() -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        model = LiteralDropout()
        with torch.no_grad():
            model.qkv.weight.fill_(0.1)
        return model, {"x": x}

    def use(model: nn.Module, inputs: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        model.get_submodule("out").register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        model.train()(x)
        return seen[0]

    first, second = on_ranks(2, build, use)
    assert first.shape == second.shape == (1, 16, 16) and not torch.equal(first, second)
