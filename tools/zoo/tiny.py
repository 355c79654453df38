"""Tiny random instances of any class of transformers' auto mappings, from its default config shrunk.

A config is shrunk twice over: first its constructor is given small values (so that what it derives from them
is derived anew), then what has no constructor argument is set. The names of settings below are transformers'
vocabulary for sizes; nothing here is about what a model does.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

TASKS = {  # how the tables call them -> transformers' mapping
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "zero-shot-image": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}

SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size emb_dim word_embed_proj_dim "
    "dim_model attention_hidden_size encoder_hidden_size decoder_hidden_size projection_dim lru_width "
    "output_proj_size qkv_channels v_channels qk_channels d_latents projector_hidden_size "
    "text_hidden_size out_hidden_size cross_attention_hidden_size embedding_dim rotary_emb_base_dim "
    "mlp_dim language_model_hidden_size entity_emb_size",
    4: "linear_num_key_heads num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads attention_heads "
    "num_cross_attention_heads num_self_attention_heads num_hash_heads "
    "encoder_num_attention_heads decoder_num_attention_heads",
    2: "num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok moe_topk top_k "
    "experts_per_token moe_top_k num_experts_per_token n_group topk_group encoder_num_key_value_heads "
    "decoder_num_key_value_heads moe_k top_k_experts num_swa_key_value_heads",
    128: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "hidden_dim_ff d_inner shared_expert_intermediate_size dense_intermediate_size mlp_hidden_size "
    "shared_intermediate_size ffn_intermediate_size intermediate_dim encoder_intermediate_size "
    "decoder_intermediate_size",
    32: "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size "
    "moe_shared_expert_intermediate_size image_size moe_ffn_hidden_size conv_channels "
    "subsampling_conv_channels",
    16: "head_dim attention_head_size d_kv kv_channels v_head_dim qk_nope_head_dim qk_head_dim "
    "linear_key_head_dim linear_value_head_dim global_head_dim max_source_positions mamba_d_state "
    "ssm_state_size state_size num_conv_pos_embeddings num_mel_bins time_step_rank codebook_size",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim "
    "num_codevectors_per_group linear_num_value_heads chunk_size mamba_chunk_size patch_size "
    "num_conv_pos_embedding_groups index_head_dim num_labels",
    256: "vocab_size text_vocab_size audio_vocab_size speech_vocab_size pad_vocab_size "
    "vocab_size_per_layer_input entity_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    24: "q_lora_rank kv_lora_rank o_lora_rank",
}
CAPS = {name: cap for cap, names in SIZES.items() for name in names.split()}
LISTS = {
    "image_size": 32, "patch_size": 8, "conv_dim": 16, "tdnn_dim": 32, "depths": 1,
    "hidden_sizes": 64, "embed_dims": 32,
    "neck_hidden_sizes": 64, "encoder_hidden_size": 64,
}  # fmt: skip
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers "
    "depth num_self_attends_per_block encoder_num_layers decoder_num_layers num_mem_blocks num_adapter_layers"
).split()
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_types")
TOKENS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2,
    "unk_token_id": 0, "cls_token_id": 1, "mask_token_id": 3, "image_token_id": 5, "image_token_index": 5,
    "video_token_id": 6, "video_token_index": 6, "audio_token_id": 7, "audio_token_index": 7,
    "vision_start_token_id": 8, "vision_end_token_id": 9, "vision_token_id": 3, "boi_token_id": 8,
    "eoi_token_id": 9, "boi_token_index": 8, "eoi_token_index": 9, "image_start_token_id": 8,
    "image_end_token_id": 9, "boa_token_id": 8, "eoa_token_id": 9,
}  # fmt: skip


def archs(task: str) -> Iterator[tuple[str, str]]:
    """(class name, model type), each class of the task's mapping once, under the type it is named after."""
    from transformers.models.auto import modeling_auto

    types: dict[str, list[str]] = {}
    for model_type, classes in getattr(modeling_auto, TASKS[task]).items():
        for cls in classes if isinstance(classes, (tuple, list)) else (classes,):
            types.setdefault(cls, []).append(model_type)
    for cls in sorted(types):
        named = [t for t in types[cls] if cls.lower().startswith(t.replace("-", "").replace("_", "").lower())]
        yield cls, max(named or types[cls][:1], key=len)


def _shrunk(name: str, value: Any, given: Any) -> Any:
    """The small value of the setting `name`, whose default is `value`; `given` reads the other defaults."""
    if name in TOKENS and (value is None or isinstance(value, int)) and not isinstance(value, bool):
        return TOKENS[name]
    if isinstance(value, bool) or value is None:
        return value
    if name in LISTS and isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
        return [min(v, LISTS[name]) for v in value]
    if name in ("num_key_value_heads", "num_kv_heads") and value == given("num_attention_heads"):
        return 4
    if isinstance(value, int):
        if name in LAYERS:
            return min(value, 2)
        return min(value, CAPS[name]) if name in CAPS else value
    return value


def _setting(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some configs refuse to say what differs from layer to layer
        return None


def _layers(pattern: list[Any], n: int = 2) -> list[Any]:
    """One layer of each kind, in the order of the pattern, and at least `n`."""
    kinds = list(dict.fromkeys(map(str, pattern)))
    short = [next(p for p in pattern if str(p) == kind) for kind in kinds]
    return short + pattern[len(short) : n] if len(short) < n else short


def shrunk_arguments(config_class: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make a small config of `config_class`."""
    default = config_class(**extra)
    names = [
        n for n in inspect.signature(config_class.__init__).parameters if n not in ("self", "kwargs", "args")
    ]

    def given(name: str) -> Any:
        return _setting(default, name)

    found: dict[str, Any] = {}
    for name in names:
        value = given(name)
        small = _shrunk(name, value, given)
        if small is not value:
            found[name] = small
    for name in PATTERNS:
        pattern = given(name)
        if name in names and isinstance(pattern, list) and len(pattern) > 2:
            found[name] = _layers(pattern)
            for count in LAYERS:
                if isinstance(given(count), int) and given(count) == len(pattern):
                    found[count] = len(found[name])
    rope = given("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        found["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}  # of half a head's width
    for name in getattr(config_class, "sub_configs", {}):
        part = given(name)
        if part is not None and name in names:
            small = shrunk(type(part), {})
            found[name] = small if small is not None else part
    return {**found, **extra}


def shrunk(config_class: Any, extra: dict[str, Any]) -> Any:
    """A small config."""
    extra = {**EXTRA.get(getattr(config_class, "model_type", ""), {}), **extra}
    try:
        return config_class(**shrunk_arguments(config_class, extra))
    except Exception:
        config = config_class(**extra)
        return set_small(config, extra)


def set_small(config: Any, extra: dict[str, Any]) -> Any:
    """The config with its settings set small one by one: nothing is derived anew."""
    config = copy.deepcopy(config)
    default = copy.deepcopy(config)
    for name in list(CAPS) + LAYERS + list(TOKENS):
        value = _setting(default, name)
        if value is None or name in extra:
            continue
        small = _shrunk(name, value, lambda n: _setting(default, n))
        if small is not value:
            _try_set(config, name, small)
    for name in PATTERNS:
        pattern = _setting(default, name)
        if isinstance(pattern, list) and len(pattern) > 2 and name not in extra:
            small = _layers(pattern)
            _try_set(config, name, small)
            for count in LAYERS:
                if _setting(default, count) == len(pattern):
                    _try_set(config, count, len(small))
    rope = _setting(config, "qk_rope_head_dim")
    if isinstance(rope, int):
        _try_set(config, "head_dim", rope)
        if hasattr(config, "qk_head_dim"):
            _try_set(config, "qk_head_dim", config.qk_nope_head_dim + rope)
    for name in getattr(config, "sub_configs", {}) or {}:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            _try_set(config, name, set_small(part, EXTRA.get(getattr(part, "model_type", ""), {})))
    return config


def _try_set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property, or a value that is checked: it keeps its default
        return


_GQA: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
_SWIN: dict[str, Any] = dict(
    embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4, image_size=32, patch_size=4
)
_MIXED: dict[str, Any] = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
LARGEST = 30_000_000  # parameters: what is bigger was not shrunk

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(layer_types=None),
    "bamba": dict(
        attn_layer_indices=[1], num_hidden_layers=2, mamba_n_heads=8, mamba_d_state=16, mamba_n_groups=2
    ),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
            "full_attention": None,
        },
    ),
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=2,
        vocab_size=256,
        max_seq_len=512,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "qwen4_exp_text": dict(
        head_dim=16,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "donut-swin": _SWIN,
    "efficientnet": dict(width_coefficient=0.1, depth_coefficient=0.1, image_size=64, hidden_dim=128),
    "esm": dict(vocab_size=33, pad_token_id=1, mask_token_id=32),
    "gemma3": dict(mm_tokens_per_image=4),
    "gemma3n_text": dict(
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=256,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        intermediate_size=[128] * 4,
        **_MIXED,
    ),
    "gemma4_text": dict(
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=256,
        **_MIXED,
    ),
    "gemma4_unified_text": dict(head_dim=16, global_head_dim=16, num_kv_shared_layers=0, **_MIXED),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2),
    "hunyuan_v1_dense": _GQA,
    "hunyuan_v1_moe": _GQA,
    "jamba": dict(
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2, num_dense_layers=1),
    "longcat_flash": dict(n_routed_experts=4, zero_expert_num=2, moe_topk=2),
    "mamba2": dict(hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=2),
    "ministral": _GQA,
    "nemotron": _GQA,
    "reformer": dict(
        is_decoder=True,
        hidden_size=64,
        axial_pos_embds_dim=(32, 32),
        axial_pos_shape=(4, 3),
        attn_layers=["local", "local"],
    ),
    "seamless_m4t": dict(
        feature_projection_input_dim=80,
        speech_encoder_layers=2,
        speech_encoder_intermediate_size=128,
        speech_encoder_attention_heads=4,
    ),
    "qwen3_asr_encoder": dict(output_dim=64, downsample_hidden_size=16),
    "nemotron3_diarization_head": dict(audio_hidden_size=64, hidden_size=64, num_speakers=4),
    "seamless_m4t_v2": dict(feature_projection_input_dim=80),
    "swin": _SWIN,
    "swinv2": _SWIN,
    "wav2vec2-bert": dict(vocab_size=32, feature_projection_input_dim=80),
    "wav2vec2-conformer": dict(vocab_size=32),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        attention_hidden_size=128,
        attention_head_dim=32,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
    ),
    "aria": dict(projector_patch_to_query_dict={16: 4}),
    "blt_patcher": dict(vocab_size=260),
    "blt": dict(vocab_size=260, encoder_hash_byte_group_vocab=64),
    "chameleon": dict(vocabulary_map={"<image>": 5, **{f"IMGIMG{chr(65 + i)}Z": i + 20 for i in range(10)}}),
    "deepseek_ocr2_text": dict(
        mlp_layer_types=["dense", "sparse"], num_hidden_layers=2, hidden_size=64, num_experts_per_tok=2
    ),
    "dia_decoder": dict(
        cross_hidden_size=64, cross_num_attention_heads=4, cross_num_key_value_heads=4, cross_head_dim=16
    ),
    "dia_encoder": dict(num_key_value_heads=4),
    "diffusion_gemma_text": dict(
        num_experts=4, top_k_experts=2, moe_intermediate_size=32, head_dim=16, **_MIXED
    ),
    "emu3": dict(
        vocabulary_map={
            "<image>": 5,
            "<|extra_200|>": 6,
            **{f"<|visual token {i:06}|>": i + 20 for i in range(16)},
        }
    ),
    "florence_vision": dict(
        embed_dim=[32, 32, 64, 64],
        num_heads=[2, 2, 4, 4],
        num_groups=[2, 2, 4, 4],
        depths=[1, 1, 1, 1],
        window_size=4,
        projection_dim=64,
    ),
    "glm4v_text": dict(**_GQA, rope_parameters=_MROPE),
    "glm4v_moe_text": dict(**_GQA, rope_parameters={**_MROPE, "partial_rotary_factor": 1.0}),
    "glm_ocr_text": dict(**_GQA, rope_parameters=_MROPE),
    "glm46v_text": dict(**_GQA, rope_parameters=_MROPE),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, pad_token_id=0),
    "granite4_vision": dict(
        deepstack_layer_map=[[-1, 0]],
        spatial_target_layers=[1],
        image_grid_pinpoints=[[32, 32]],
        downsample_rate="2/4",
    ),
    "kyutai_speech_to_text": dict(
        audio_pad_token_id=7, audio_bos_token_id=6, codebook_vocab_size=256, num_codebooks=4, vocab_size=256
    ),
    "layoutlmv3": dict(coordinate_size=8, shape_size=16, input_size=32),
    "levit": dict(
        hidden_sizes=[64, 64, 64],
        num_attention_heads=[2, 4, 4],
        depths=[1, 1, 1],
        image_size=64,
        patch_size=16,
    ),
    "lilt": dict(hidden_size=96),
    "mobilevitv2": dict(
        image_size=64, base_attn_unit_dims=[32, 32, 32], n_attn_blocks=[1, 1, 1], width_multiplier=0.5
    ),
    "moonshine": dict(encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    "perceiver": dict(
        num_latents=16,
        d_latents=64,
        d_model=64,
        num_self_attends_per_block=1,
        num_cross_attention_heads=1,
        num_self_attention_heads=4,
    ),
    "shieldgemma2": dict(yes_token_index=10, no_token_index=11, mm_tokens_per_image=4),
    "align_vision_model": dict(width_coefficient=0.1, depth_coefficient=0.1, image_size=64, hidden_dim=128),
    "blt_local_encoder": dict(hidden_size_global=64),
    "blt_local_decoder": dict(hidden_size_global=64),
    "chameleon_vqgan": dict(
        num_embeddings=10,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1],
        embed_dim=32,
        latent_channels=32,
        resolution=32,
        num_res_blocks=1,
    ),
    "emu3_vqgan": dict(codebook_size=16, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1),
    "deepseek_ocr2_sam_vision_model": dict(
        output_channels=32, downsample_channels=[32, 64], mlp_dim=128, global_attn_indexes=[1], window_size=2
    ),
    "ernie4_5_vl_moe_text": dict(
        moe_intermediate_size=[32, 32],
        moe_num_experts=4,
        moe_k=2,
        head_dim=16,
        rope_parameters={**_MROPE, "mrope_section": [3, 3, 2]},
    ),
    "sam_vision_model": dict(global_attn_indexes=[1], window_size=2, output_channels=32, mlp_dim=128),
    "align": dict(projection_dim=32),
    "blip-2": dict(num_query_tokens=4),
    "mimi": dict(upsample_groups=64),
}
"""model type -> constructor arguments, where the common ones do not fit together."""


def randomise(model: nn.Module, seed: int = 1) -> nn.Module:
    """Random values: weights of size ~1/sqrt(fan in), biases ~0.2, norm weights around their own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            if name.endswith("bias"):
                p.copy_(0.2 * noise)
            elif p.ndim >= 2:
                p.copy_(
                    0.8 * noise / math.sqrt(max(p.shape[1:].numel(), 1))
                    if p.ndim > 2
                    else 0.8 * noise / math.sqrt(p.shape[-1])
                )
            else:
                p.add_(0.1 * noise)
    return model


def config_of(cls: str, model_type: str, how: str) -> Any:
    """A small config for the class; how: `anew` (constructed with small values) or `set` (set one by one)."""
    import transformers

    # A mapping may give a multimodal config for a class that takes the text part: the class knows better.
    config_class = getattr(transformers, cls).config_class or transformers.CONFIG_MAPPING[model_type]
    extra = EXTRA.get(config_class.model_type, {})
    config = (
        config_class(**shrunk_arguments(config_class, extra))
        if how == "anew"
        else set_small(config_class(**extra), extra)
    )
    if config.is_encoder_decoder and _setting(config, "decoder_start_token_id") is None:
        config.decoder_start_token_id = TOKENS["decoder_start_token_id"]  # without it there is no generation
    return config


def build(cls: str, model_type: str, how: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model in eval mode. Raises whatever its constructor does."""
    import transformers

    config = config_of(cls, model_type, how)
    torch.manual_seed(0)
    make = getattr(transformers, cls)
    with torch.device("meta"):
        size = sum(p.numel() for p in make(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError("its default config can't be shrunk by the common names of sizes")
    model = randomise(make(config).to(dtype).eval())
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        try:
            cast(Any, model).set_experts_implementation(
                "batched_mm"
            )  # the default, grouped_mm, knows no float64
        except (ValueError, AttributeError):
            pass
    return model
