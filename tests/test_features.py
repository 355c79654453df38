"""What users do with a model besides a plain forward, with a split one: masks, generation, what it shows."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, hard_inputs, randomise
from torch import nn
from whole import EXACT, FLOAT32, assert_close, assert_same_grads, forward_and_grads, on_ranks

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import CaptureError
from autotp.mesh import Mesh

NEW_TOKENS = 8


def built(name: str, attention: str = "sdpa") -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = MODELS[name](dtype=torch.float64)
    model.set_attn_implementation(attention)  # type: ignore[operator]
    return model, inputs


def padded(name: str, inputs: dict[str, Any], attention: str = "sdpa") -> dict[str, Any]:
    """Row 0 is padded, on the left where the model can (eager attention in float64 makes NaN of that)."""
    hard = hard_inputs(name, inputs)
    if attention == "eager" and hard["attention_mask"][0, 0] == 0:
        hard["attention_mask"] = hard["attention_mask"].flip(1)
    return hard


# --- masks: another branch than the captured one --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "attention"),
    [
        ("llama_gqa", 2, "sdpa"),
        ("llama_gqa", 4, "sdpa"),  # 4 heads and 2 key heads over 4: each key head is held twice
        ("llama_gqa", 4, "eager"),
        ("llama_mqa", 2, "sdpa"),
        ("llama_9_3", 4, "sdpa"),
        ("llama_9_3", 4, "eager"),
        ("qwen3", 4, "sdpa"),
    ],
)
def test_with_and_without_a_mask(name: str, tp: int, attention: str) -> None:
    """transformers takes other ways without a mask (enable_gqa) than with one (repeated key heads): both are
    right, whichever was captured, forward and backward; also where key heads are held by several ranks."""
    model, inputs = built(name, attention)
    asked = [inputs, padded(name, inputs, attention)]
    want = [forward_and_grads(model, i) for i in asked]
    limit = EXACT if attention == "sdpa" and name != "qwen3" else FLOAT32  # a softmax or norm in float32
    for example in asked:

        def use(model: nn.Module, _: Any) -> Any:
            return [forward_and_grads(model, i) for i in asked]

        for rank in on_ranks(tp, lambda: built(name, attention), use, example_inputs=example):
            for (logits, grads), (whole_logits, whole_grads) in zip(rank, want, strict=True):
                assert_close(logits, whole_logits, limit)
                assert_same_grads(grads, whole_grads, limit)


# --- switches turned after the split -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "switch"),
    [
        ("llama_mqa", 4, lambda model: model.set_attn_implementation("eager")),  # repeats key heads itself
        ("t5", 2, lambda model: model.set_attn_implementation("eager")),
        ("mixtral", 2, lambda model: model.set_experts_implementation("eager")),
        ("mixtral", 2, lambda model: model.train().gradient_checkpointing_enable()),
    ],
)
def test_another_implementation_chosen_after_the_split(name: str, tp: int, switch: Any) -> None:
    model, inputs = built(name)
    switch(model)
    want = forward_and_grads(model, inputs)
    limit = FLOAT32 if name == "mixtral" else EXACT  # its router's softmax is in float32

    def use(model: nn.Module, _: Any) -> Any:
        switch(model)
        return forward_and_grads(model, inputs)

    for logits, grads in on_ranks(tp, lambda: built(name), use):
        assert_close(logits, want[0], limit)
        assert_same_grads(grads, want[1], limit)


# --- generation -----------------------------------------------------------------------------------------


class EndsInSevens:
    """A criterion of the user's own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beam search": {"num_beams": 3},
    "beams over a static cache": {"num_beams": 2, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "own criterion": {"stopping_criteria": [EndsInSevens()]},
}


@pytest.mark.parametrize(("name", "tp"), [("llama_gqa", 4), ("llama_9_3", 2)])
def test_generation_gives_the_same_tokens(name: str, tp: int) -> None:
    model, inputs = built(name)
    prompts = [
        {"input_ids": inputs["input_ids"]},
        {k: v for k, v in padded(name, inputs).items() if k in ("input_ids", "attention_mask")},
    ]

    def generate(model: Any, _: Any = None) -> dict[tuple[str, int], torch.Tensor]:
        return {
            (how, i): model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
            for how, options in GENERATION.items()
            for i, prompt in enumerate(prompts)
        }

    want = generate(model)
    assert (
        len({tuple(tokens.flatten().tolist()) for tokens in want.values()}) >= 4
    )  # they are different questions
    for rank in on_ranks(tp, lambda: built(name), generate):
        for how, tokens in want.items():
            assert torch.equal(rank[how], tokens), how


def test_a_static_cache_is_allocated_for_local_heads() -> None:
    """Each rank keeps the keys of its own heads only."""

    def use(model: Any, inputs: Any) -> list[int]:
        ids = inputs["input_ids"]
        out = model.generate(
            ids, max_new_tokens=2, cache_implementation="static", return_dict_in_generate=True
        )
        return [layer.keys.shape[1] for layer in out.past_key_values.layers]

    assert on_ranks(2, lambda: built("llama_gqa"), use) == [[1, 1], [1, 1]]


# --- attention weights and hidden states ----------------------------------------------------------------


def shown(model: nn.Module, inputs: dict[str, Any]) -> dict[str, tuple[torch.Tensor, ...]]:
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    return {k: v for k, v in out.items() if k.endswith(("attentions", "hidden_states")) and v}


@pytest.mark.parametrize(
    ("name", "tp", "when"),
    [
        ("llama_gqa", 4, "before"),
        ("llama_gqa", 4, "after"),
        ("llama_gqa", 2, "recorded before"),
        ("llama_9_3", 2, "after"),
        ("gptj", 2, "before"),
        ("t5", 2, "after"),
        ("bert", 2, "recorded before"),
    ],
)
def test_attention_weights_of_all_heads_and_hidden_states(name: str, tp: int, when: str) -> None:
    """Whether eager attention was chosen before or after parallelizing, and also where transformers had put
    its recording hooks onto the model before."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = MODELS[name](dtype=torch.float64)
        if when != "after":
            model.set_attn_implementation("eager")
        if when == "recorded before":
            shown(model, inputs)
        return model, inputs

    def use(model: Any, inputs: Any) -> Any:
        model.set_attn_implementation("eager")
        return shown(model, inputs)

    want = use(*MODELS[name](dtype=torch.float64))
    assert any(k.endswith("attentions") for k in want) and any(k.endswith("hidden_states") for k in want)
    for rank in on_ranks(tp, build, use):
        assert set(rank) == set(want)
        for key, values in want.items():
            assert len(rank[key]) == len(values)
            for got, value in zip(rank[key], values, strict=True):
                assert_close(got, value, FLOAT32)


def test_a_hook_of_the_users_sees_all_heads() -> None:
    """And nothing is gathered while nobody looks."""
    seen: dict[str, list[torch.Tensor]] = {"whole": [], "split": []}

    def look(key: str) -> Any:
        return lambda module, args, result: seen[key].append(result[1].detach())

    model, inputs = built("llama_gqa", "eager")
    model.model.layers[1].self_attn.register_forward_hook(look("whole"))  # type: ignore[union-attr, index]
    model(**inputs)

    def use(model: Any, inputs: Any) -> int:
        counted = Counted(model)
        before = counted.of(inputs)
        model.model.layers[1].self_attn.register_forward_hook(look("split"))
        return counted.of(inputs) - before

    assert on_ranks(2, lambda: built("llama_gqa", "eager"), use) == [1, 1]
    for got in seen["split"]:
        assert_close(got, seen["whole"][0], FLOAT32)


class Counted:
    """Counts the all-gathers of a forward."""

    def __init__(self, model: Any):
        self.model, self.comm, self.count = model, model.autotp.comm, 0
        original = self.comm.all_gather

        def all_gather(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        self.comm.all_gather = all_gather

    def of(self, inputs: dict[str, Any]) -> int:
        self.count = 0
        self.model(**inputs)
        return self.count


@pytest.mark.parametrize("asked", ["by the config", "in the example inputs"])
def test_asking_when_planning_costs_no_split_heads(asked: str) -> None:
    """Attention weights as outputs of the captured forward: gathered when asked for, heads split as ever."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = built("llama_gqa", "eager")
        if asked == "by the config":
            model.config.output_attentions = True  # type: ignore[union-attr]
            return model, inputs
        return model, {**inputs, "output_attentions": True}

    model, inputs = build()
    want = [a.detach() for a in model(**inputs).attentions]
    assert want[0].shape[1] == 4
    for rank, local in on_ranks(
        2, build, lambda m, i: ([a.detach() for a in m(**i).attentions], local_heads(m))
    ):
        assert local == 2
        for got, value in zip(rank, want, strict=True):
            assert_close(got, value, FLOAT32)


def local_heads(model: Any) -> int:
    """By the rows of the output projection's layout: whole heads of 16 on each rank."""
    layout = model.autotp.held["model.layers.0.self_attn.o_proj.weight"].layout
    return sum((stop - start) // 16 for start, stop in layout.dims[1][model.autotp.comm.rank])


def test_torchs_own_attention_shows_all_heads() -> None:
    """nn.MultiheadAttention, which makes them whole itself."""

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, weights = self.attention(x, x, x, average_attn_weights=False)
            return self.down(torch.relu(self.up(y))), weights

    inputs = {"x": torch.randn(2, 5, 32, dtype=torch.float64)}
    model = randomise(Shows().double().eval())
    want = model(**inputs)
    split = on_ranks(2, lambda: (copy.deepcopy(model), inputs), lambda model, _: model(**inputs))
    for rank in split:
        for got, value in zip(rank, want, strict=True):
            assert_close(got.detach(), value.detach())


class Held:
    """A user's own output: a class that has attributes only, no container that torch knows of."""

    def __init__(self, logits: Any, inner: Any = None) -> None:
        self.logits, self.inner = logits, inner


class Measured(Held):
    def entropy(self) -> Any:
        return self.logits.softmax(-1)


class Speaks(nn.Module):
    """Logits split over the vocabulary, in an object; a module in it gives an object as well."""

    def __init__(self, of: Callable[..., Any] = Held) -> None:
        super().__init__()
        self.embed, self.block, self.head, self.of = nn.Embedding(64, 32), Deep(), nn.Linear(32, 64), of

    def forward(self, input_ids: torch.Tensor) -> Any:
        logits = self.head(self.block(self.embed(input_ids)).logits)
        return self.of(logits, {"again": Held(2 * logits)})


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> Held:
        return Held(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("of", [Held, types.SimpleNamespace], ids=["class", "namespace"])
@pytest.mark.parametrize("pp", [1, 2])
def test_outputs_in_an_object_of_the_users_are_whole(of: Any, pp: int) -> None:
    def made(logits: torch.Tensor, inner: Any) -> Any:
        return of(logits=logits, inner=inner)

    model = randomise(Speaks(made).double())
    inputs = {"input_ids": torch.arange(10).view(2, 5)}
    want = model(**inputs)

    def one(comm: Comm) -> Any:
        mesh = Mesh.split(comm, 2 // pp, pp)  # type: ignore[arg-type]
        split = autotp.parallelize(copy.deepcopy(model), 2 // pp, pp, comm=mesh, example_inputs=inputs)
        with torch.no_grad():
            return split(**inputs)

    for got in simulate(2, one):
        assert type(got) is type(want)
        assert_close(got.logits, want.logits.detach(), EXACT)
        assert_close(got.inner["again"].logits, want.inner["again"].logits.detach(), EXACT)


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: Any, _: Any) -> None:
        self.logits = logits


@pytest.mark.parametrize(
    "of",
    [Measured, Slotted, lambda x, _: {x}, lambda x, _: iter([x])],
    ids=["methods", "slots", "set", "iterator"],
)
def test_outputs_that_are_not_looked_into_are_refused(of: Any) -> None:
    """They would be a rank's part: an object with methods may be a cache, which is the model's own."""
    with pytest.raises(CaptureError, match=r"the model returns an object of .* Return a dict"):
        autotp.plan(Speaks(of), tp=2, example_inputs={"input_ids": torch.arange(10).view(2, 5)})
