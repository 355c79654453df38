"""What a model takes besides its token ids: offered where it reaches more of the model, and split right for
calls with and without it."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import randomise
from torch import nn
from whole import EXACT, on_ranks

import autotp
from autotp.inputs import best_inputs, example_inputs
from autotp.modalities import elements_reached
from autotp.verify import relative_error, tensors

PLACE = 5  # the id of a token in whose place a feature goes


class Hears(nn.Module):
    """Token ids and sounds [batch, frames, bins], encoded in pairs of frames; `quiet` is what else happens to
    the hidden units where there is no sound."""

    main_input_name = "input_ids"

    def __init__(self, quiet: Any = lambda h: h) -> None:
        super().__init__()
        sound = SimpleNamespace(num_mel_bins=6, name="sound")
        self.config = SimpleNamespace(vocab_size=40, audio_token_id=PLACE, audio_config=sound)
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.listen, self.tell = nn.Linear(12, 24), nn.Linear(24, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.quiet = quiet

    def get_audio_features(self, input_features: torch.Tensor) -> torch.Tensor:
        pairs = input_features.unflatten(1, (-1, 2)).flatten(2)
        return self.tell(torch.tanh(self.listen(pairs))).flatten(0, 1)

    def forward(
        self, input_ids: torch.Tensor, input_features: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        if input_features is not None:
            places = (input_ids == PLACE)[..., None].expand_as(x)
            x = x.masked_scatter(places, self.get_audio_features(input_features))
        hidden = torch.tanh(self.up(x))
        return self.head(x + self.down(hidden if input_features is not None else self.quiet(hidden)))


def hearing(quiet: Any = lambda h: h) -> nn.Module:
    return randomise(Hears(quiet).double())


def seeing() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    part = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.LlavaConfig(
        text_config=dict(model_type="llama", **part, vocab_size=99),
        vision_config=dict(model_type="clip_vision_model", **{**part, "num_hidden_layers": 2},
                           image_size=16, patch_size=4),
        image_token_index=PLACE,
    )  # fmt: skip
    return randomise(transformers.LlavaForConditionalGeneration(config).double()).eval()


MODELS = {"sounds": (hearing, "input_features"), "images": (seeing, "pixel_values")}


@pytest.mark.parametrize("kind", MODELS)
def test_the_encoder_is_split_too(kind: str) -> None:
    build, argument = MODELS[kind]
    report = autotp.verify(build(), tp=2, new_tokens=4)
    report.raise_if_wrong()
    assert report.plan.sharded_fraction > 0.9 and argument in example_inputs(build())


@pytest.mark.parametrize("planned", ["with", "without"])
@pytest.mark.parametrize("kind", MODELS)
def test_calls_with_and_without_are_right_under_either_plan(kind: str, planned: str) -> None:
    build, argument = MODELS[kind]
    full = example_inputs(build())
    ways = {"with": full, "without": {k: v for k, v in full.items() if k != argument}}

    def outputs(model: nn.Module, _: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [t for way in ways.values() for t in tensors(model(**way)) if t.is_floating_point()]

    model = build()
    want = outputs(model, None)
    for rank in on_ranks(2, lambda: (copy.deepcopy(model), ways[planned]), outputs):
        assert len(rank) == len(want) and max(map(relative_error, rank, want)) < EXACT


def test_generation_from_images() -> None:
    """generate() calls the tower by itself, past the modules around it."""
    model = seeing()
    given = {**example_inputs(model), "max_new_tokens": 4, "do_sample": False}
    want = model.generate(**given)  # type: ignore[operator]
    assert not torch.equal(want, model.generate(**{**given, "pixel_values": -given["pixel_values"]}))  # type: ignore[operator]
    for tokens in on_ranks(2, lambda: (seeing(), None), lambda model, _: model.generate(**given)):
        assert torch.equal(tokens, want)


def test_what_is_done_without_sounds_is_looked_at() -> None:
    plan = autotp.plan(hearing(lambda h: h / h.norm(dim=-1, keepdim=True)), 2)
    assert plan.params["listen.weight"].layout is not None
    assert plan.params["up.weight"].layout is None and "without input_features" in plan.kept["up.weight"]


def test_a_part_that_was_not_reached_is_told_with_the_arguments_that_forward_takes() -> None:
    plan = autotp.plan(hearing(), 2, example_inputs={"input_ids": torch.ones(2, 5, dtype=torch.long)})
    assert "forward also takes input_features" in plan.kept["listen.weight"]


def test_features_have_their_places() -> None:
    ids = example_inputs(hearing())["input_ids"]
    assert (ids == PLACE).sum(1).tolist() == [32] * len(ids)  # 64 frames in pairs


SMALL = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4, vocab_size=99)
FURTHER = {
    "BartForCausalLM": (
        "BartConfig", "encoder_hidden_states",
        dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=56, vocab_size=99),
    ),
    "LukeForMaskedLM": ("LukeConfig", "entity_ids", dict(**SMALL, entity_vocab_size=50, entity_emb_size=16)),
}  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_further_arguments_reach_every_weight(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config_class, argument, settings = FURTHER[name]
    model = getattr(transformers, name)(getattr(transformers, config_class)(**settings)).eval()
    everything = sum(p.numel() for p in model.parameters())
    assert elements_reached(model, example_inputs(model)) < everything
    inputs = best_inputs(model)
    assert argument in inputs and elements_reached(model, inputs) == everything
    model(**inputs)  # and they run in earnest


def test_attention_whose_output_axis_can_be_split_is_split_by_its_heads() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.out = nn.MultiheadAttention(24, 2, batch_first=True), nn.Linear(24, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.attend(x, x, x)[0])

    x = torch.randn(3, 5, 24, dtype=torch.float64)
    autotp.verify(randomise(Pooled().double()), tp=2, example_inputs=(x,)).raise_if_wrong()
