"""Example inputs: valid for the model, small, and of sizes the model does not have itself."""

import pytest
import torch
from torch import nn

from autotp.errors import CaptureError
from autotp.inputs import bind_inputs, example_inputs

transformers = pytest.importorskip("transformers")

SMALL = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4)
TOKENS = dict(vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
SEQ2SEQ = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=56, decoder_ffn_dim=56, **TOKENS,
)  # fmt: skip
TOWER = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4)

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(**SMALL, vocab_size=99),
        {"input_ids", "use_cache"},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", dict(**SMALL, vocab_size=99), {"input_ids"}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        dict(d_model=32, d_kv=8, d_ff=56, num_layers=1, num_heads=4, **TOKENS),
        {"input_ids", "decoder_input_ids", "use_cache"},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig", dict(**SMALL, image_size=16, patch_size=4),
        {"pixel_values"},
    ),
    "clip": (
        "CLIPModel", "CLIPConfig",
        dict(
            text_config=dict(**TOWER, vocab_size=99, eos_token_id=2, bos_token_id=1, pad_token_id=0),
            vision_config=dict(**TOWER, image_size=16, patch_size=4),
            projection_dim=24,
        ),
        {"input_ids", "pixel_values"},
    ),
    "llava": (
        "LlavaForConditionalGeneration", "LlavaConfig",
        dict(
            text_config=dict(model_type="llama", **SMALL, vocab_size=99),
            vision_config=dict(model_type="clip_vision_model", **TOWER, image_size=16, patch_size=4),
            image_token_index=5,
        ),
        {"input_ids", "pixel_values"},
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        dict(**SEQ2SEQ, max_source_positions=20, max_target_positions=30, num_mel_bins=8),
        {"input_features", "decoder_input_ids", "use_cache"},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC", "Wav2Vec2Config",
        dict(**SMALL, vocab_size=32, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2),
             num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4),
        {"input_values"},
    ),
    "ast": (
        "ASTForAudioClassification", "ASTConfig", dict(**SMALL, max_length=64, num_mel_bins=32),
        {"input_values"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_model_runs_on_its_example_inputs(family: str) -> None:
    model_class, config_class, settings, names = MODELS[family]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    random = torch.get_rng_state()
    inputs = example_inputs(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert set(inputs) == names
    with torch.no_grad():
        output = model(**inputs)
    first = next(iter(inputs.values()))
    logits = output["logits_per_image"] if family == "clip" else output["logits"]
    assert logits.shape[0] == first.shape[0] and torch.isfinite(logits).all()


def test_sizes_differ_from_the_models_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 12
            self.embed = nn.Embedding(40, 10)
            self.out = nn.Linear(10, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(ids))

    (ids,) = example_inputs(Net()).values()
    assert set(ids.shape).isdisjoint({12, 40, 10, 2}) and ids.shape[0] != ids.shape[1]
    assert 0 <= int(ids.min()) and int(ids.max()) < 40


def test_float_inputs_have_the_models_dtype() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to(torch.bfloat16)
    (x,) = example_inputs(model).values()
    assert x.dtype == torch.bfloat16 and model(x).shape == x.shape


class Blend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.proj(left) + scale * right


def test_unknown_signature_is_refused_with_the_signature() -> None:
    with pytest.raises(CaptureError, match=r"Blend\.forward\(left: .*scale.*example_inputs="):
        example_inputs(Blend())


def test_inputs_are_bound_by_name() -> None:
    a, b = torch.ones(2, 4), torch.zeros(2, 4)
    assert list(bind_inputs(Blend(), (a, b))) == ["left", "right"]
    assert bind_inputs(Blend(), {"right": b, "left": a, "scale": 2.0})["scale"] == 2.0
    assert bind_inputs(nn.ReLU(), a) == {"input": a}
    with pytest.raises(CaptureError, match=r"do not fit Blend\.forward.*right"):
        bind_inputs(Blend(), (a,))


def test_keyword_arguments_pass_and_positional_only_ones_are_refused() -> None:
    class Open(nn.Module):
        def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            return x + more["y"]

    class Closed(nn.Module):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return xs[0]

    x = torch.ones(1)
    assert bind_inputs(Open(), {"x": x, "y": x}) == {"x": x, "y": x}
    with pytest.raises(CaptureError, match="position only"):
        bind_inputs(Closed(), (x,))


def test_text_has_a_place_for_each_feature_of_the_image() -> None:
    model_class, config_class, settings, _ = MODELS["llava"]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    ids = example_inputs(model)["input_ids"]
    assert (ids == 5).sum(1).tolist() == [16] * ids.shape[0]  # a patch each
    assert (ids != 5).any(1).all()
