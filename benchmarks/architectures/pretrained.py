"""Tiny models of transformers with random weights, from their own configuration classes.

A group is one of transformers' lists of classes for a task, with a batch of this task. Sizes are
set by their names, those of configurations inside of configurations, too; ``OWN`` has what single
families need.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from families import SIZES
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as lists

from architectures.case import Case, Task

B, T, IMAGE, MOST_PARAMETERS = 2, 16, 64, 8_000_000
VISION: dict[str, Any] = {
    "image_size": IMAGE,
    "patch_size": 8,
    "num_channels": 3,
    "stochastic_depth_rate": 0.0,
    "projection_dim": 16,
    "qformer_hidden_size": 64,
    "fusion_hidden_size": 16,
    "decoder_hidden_size": 16,
    "num_queries": 5,
    "mask_feature_size": 16,
    "feature_size": 16,
    "fpn_feature_size": 16,
    "mask_dim": 16,
    "embedding_size": 8,
    "use_pretrained_backbone": False,
}
SPEECH: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "classifier_proj_size": 16,
    "num_mel_bins": 16,
    "mask_time_prob": 0.0,
    "input_channels": 1,
    "conv_channels": 16,
}
MORE: dict[str, Any] = {**SIZES, **VISION, **SPEECH, "num_labels": 3, "embedding_dim": 16}
#: Sizes per stage of an image.
STAGES: dict[str, list[int]] = {
    "depths": [1],
    "depth": [1],
    "num_block_repeats": [1],
    "layer_repeats": [1],
    "hidden_sizes": [16, 32, 48, 64],
    "embed_dim": [16, 32, 48, 64],
    "num_heads": [2],
    "num_attention_heads": [2],
    "key_dim": [8],
    "embedding_dims": [16, 32, 48, 64],
}
T5: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "num_layers": 2,
    "d_model": 64,
    "d_ff": 96,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 128,
}
#: Latent attention.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 8,
    "num_attention_heads": 4,
    "n_group": 1,
}
#: What families need besides, as fields of the configuration.
OWN: dict[str, dict[str, Any]] = {
    "bit": {
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 64, 64],
        "depths": [1, 1, 1, 1],
        "num_groups": 4,
    },
    "swin": {
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
    },
    "swinv2": {
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
    },
    "donut-swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "maskformer-swin": {
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
    },
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 1, 1], "hidden_sizes": [32, 48, 64, 64]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "hiera": {
        "embed_dim": 16,
        "image_size": [64, 64],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 2],
    },
    "cvt": {
        "embed_dim": [16, 32, 48],
        "num_heads": [1, 2, 2],
        "depth": [1, 1, 2],
        "drop_path_rate": [0.0, 0.0, 0.0],
    },
    "regnet": {
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "groups_width": 8,
        "embedding_size": 8,
    },
    "levit": {
        "patch_size": 16,
        "depths": [1, 1, 1],
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 2, 2],
        "key_dim": [8, 8, 8],
    },
    "yolos": {"image_size": [64, 64], "num_detection_tokens": 5},
    "convnext": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    "convnextv2": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    "squeezebert": {"embedding_size": 64, "q_groups": 2},
    "reformer": {
        "axial_pos_embds": False,
        "num_buckets": 4,
        "feed_forward_size": 96,
        "max_position_embeddings": 64,
    },
    "imagegpt": {"vocab_size": 129, "n_positions": 64},
    "flaubert": {"emb_dim": 64, "n_layers": 2},
    "xlm": {"emb_dim": 64, "n_layers": 2},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "roc_bert": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20},
    "t5": T5,
    "switch_transformers": T5,
    "longt5": T5,
    "marian": {"decoder_start_token_id": 0, "decoder_vocab_size": 128},
    "fsmt": {"langs": ["en", "de"], "src_vocab_size": 128, "tgt_vocab_size": 128},
    "whisper": {"max_source_positions": 64, "decoder_start_token_id": 1, "num_mel_bins": 16},
    "speech_to_text": {"input_feat_per_channel": 16, "decoder_start_token_id": 1},
    "audio-spectrogram-transformer": {"max_length": 64, "frequency_stride": 4, "time_stride": 8},
    "mamba": {"state_size": 8, "use_associative_scan": False},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": 8,
        "block_types": ("recurrent", "attention"),
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}


def tiny(kind: type[Any], own: Mapping[str, Any] | None = None) -> Any:
    """A configuration with small sizes, and without dropout."""
    usual = kind()
    fields = [name for name in vars(usual) if name not in (usual.attribute_map or {})]
    found = {name: _small(name, getattr(usual, name)) for name in fields}
    sizes = {name: size for name, size in found.items() if size is not None}
    made = kind(**{**sizes, **(own or OWN.get(kind.model_type, {}))})
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(made, "is_encoder_decoder", False) and getattr(made, name, None) is None:
            setattr(made, name, 0)
    return made


def _small(name: str, value: Any) -> Any:
    """A small value of a field; None to keep the usual one."""
    if isinstance(value, transformers.PreTrainedConfig):
        return tiny(type(value))
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, tuple | list) and name in STAGES:
        return (STAGES[name] * 9)[: len(value)]
    if value is None or isinstance(value, type(MORE.get(name))):
        return MORE.get(name)
    return None


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's own loss, or a sum over what it returns."""
    out = model(**batch)
    loss = out.get("loss") if isinstance(out, Mapping) else None
    if loss is not None and loss.requires_grad:
        return loss.sum()
    return sum(each.float().square().mean() for each in floats(out) if each.requires_grad)


def floats(value: Any) -> Iterator[Tensor]:
    """All tensors of numbers in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from floats(each)


# -- batches --------------------------------------------------------------------------------------


def ids(length: int = T) -> Tensor:
    """Tokens."""
    return torch.randint(3, 100, (B, length))


def images(config: Any) -> Tensor:
    """Images of the size that a configuration names."""
    size = getattr(config, "image_size", IMAGE)
    size = size if isinstance(size, int) else size[0]
    return torch.randn(B, getattr(config, "num_channels", 3), size, size)


def classes(config: Any) -> dict[str, Tensor]:
    """Images and classes."""
    return {"pixel_values": images(config), "labels": torch.randint(2, (B,))}


def maps(config: Any) -> dict[str, Tensor]:
    """Images and a class of each pixel."""
    pixels = images(config)
    return {"pixel_values": pixels, "labels": torch.randint(2, (B, *pixels.shape[2:]))}


def only_images(config: Any) -> dict[str, Tensor]:
    """Images without targets."""
    return {"pixel_values": images(config)}


def tokens(_: Any) -> dict[str, Tensor]:
    """Tokens, and the same as targets."""
    found = ids()
    return {"input_ids": found, "labels": found}


def waves(_: Any) -> dict[str, Tensor]:
    """Sound and a text."""
    return {"input_values": torch.randn(B, 400), "labels": torch.randint(1, 20, (B, 4))}


def sounds(_: Any) -> dict[str, Tensor]:
    """Sound and a class."""
    return {"input_values": torch.randn(B, 400), "labels": torch.randint(2, (B,))}


def spectra(config: Any) -> dict[str, Tensor]:
    """Spectra and a text."""
    bins = getattr(config, "num_mel_bins", 16)
    return {"input_features": torch.randn(B, bins, 2 * 64), "labels": ids()}


def pairs(config: Any) -> dict[str, Tensor]:
    """Images and texts."""
    vision = getattr(config, "vision_config", config)
    return {"input_ids": ids(), "pixel_values": images(vision), "return_loss": True}


def films(config: Any) -> dict[str, Tensor]:
    """Films and classes."""
    frames = getattr(config, "num_frames", 4)
    return {
        "pixel_values": torch.randn(B, frames, 3, IMAGE, IMAGE),
        "labels": torch.randint(2, (B,)),
    }


#: Lists of transformers, and the batch of each.
GROUPS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "images and texts": ("ZERO_SHOT_IMAGE_CLASSIFICATION", pairs),
    "image classification": ("IMAGE_CLASSIFICATION", classes),
    "masked language": ("MASKED_LM", tokens),
    "encoder and decoder": ("SEQ_TO_SEQ_CAUSAL_LM", tokens),
    "speech recognition": ("SPEECH_SEQ_2_SEQ", spectra),
    "speech, CTC": ("CTC", waves),
    "audio classification": ("AUDIO_CLASSIFICATION", sounds),
    "object detection": ("OBJECT_DETECTION", only_images),
    "semantic segmentation": ("SEMANTIC_SEGMENTATION", maps),
    "universal segmentation": ("UNIVERSAL_SEGMENTATION", only_images),
    "masks": ("MASK_GENERATION", only_images),
    "depth": ("DEPTH_ESTIMATION", classes),
    "films": ("VIDEO_CLASSIFICATION", films),
    "causal language": ("CAUSAL_LM", tokens),
}


def make(kind: type[Any], model: type[Any], batch: Callable[[Any], dict[str, Any]]) -> Task:
    """A tiny model with its batch."""
    config = tiny(kind)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in model(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters")
    made = model(config).train()
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return Task(made, batch(config), loss_of)


FOUR: Any = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
STAGE_NAMES: Any = ["stage1", "stage2", "stage3", "stage4"]


def resnet(*names: str) -> Any:
    """A backbone."""
    return transformers.ResNetConfig(**FOUR, embedding_size=8, out_features=list(names))


def swin() -> Any:
    """A backbone."""
    own = {"embed_dim": 16, "depths": [1] * 4, "num_heads": [2] * 4, "window_size": 4}
    return transformers.SwinConfig(
        **own, image_size=64, patch_size=2, drop_path_rate=0.0, out_features=STAGE_NAMES
    )


DETECTOR: Any = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_queries": 5,
    "dropout": 0.0,
    "use_timm_backbone": False,
}
ENCODER: Any = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
SERIES: Any = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 32,
    "dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}


def sam() -> Any:
    """An encoder of images, one of prompts, and a decoder."""
    size = {"image_size": 64, "patch_size": 8}
    return transformers.SamConfig(
        vision_config={
            **ENCODER,
            **size,
            "output_channels": 32,
            "num_pos_feats": 16,
            "global_attn_indexes": [1],
            "window_size": 4,
            "mlp_dim": 48,
        },
        prompt_encoder_config={**size, "hidden_size": 32, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 32,
            "mlp_dim": 48,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )


def points(_: Any) -> dict[str, Tensor]:
    """Images and points."""
    return {
        "pixel_values": torch.randn(B, 3, 64, 64),
        "input_points": torch.rand(B, 1, 2, 2) * 64,
    }


def future(config: Any) -> dict[str, Tensor]:
    """A past and a future."""
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.rand(B, past),
        "past_time_features": torch.rand(B, past, 1),
        "past_observed_mask": torch.ones(B, past),
        "future_values": torch.rand(B, 4),
        "future_time_features": torch.rand(B, 4, 1),
    }


def llava() -> Any:
    """CLIP and Llama."""
    vision = transformers.CLIPVisionConfig(**ENCODER, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**ENCODER, vocab_size=128, num_key_value_heads=2)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=127)


def with_image(count: int) -> Callable[[Any], dict[str, Tensor]]:
    """A text after an image of some tokens."""

    def batch(_: Any) -> dict[str, Tensor]:
        text = ids()
        text = torch.cat([torch.full((B, count), 127), text], 1)
        return {"input_ids": text, "labels": text, "pixel_values": torch.randn(B, 3, 32, 32)}

    return batch


def qwen() -> Any:
    """Patches and a text."""
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "mlp_ratio": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {
        **ENCODER,
        "vocab_size": 128,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=127,
        video_token_id=126,
        vision_start_token_id=125,
        vision_end_token_id=124,
    )


def patches(_: Any) -> dict[str, Tensor]:
    """A text with four tokens of an image."""
    text = torch.cat([torch.full((B, 1), 125), torch.full((B, 4), 127), ids()], 1)
    return {
        "input_ids": text,
        "labels": text,
        "pixel_values": torch.randn(B * 16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * B),
        "mm_token_type_ids": (text == 127).int(),
    }


def trajectories(config: Any) -> dict[str, Tensor]:
    """States and actions."""
    return {
        "states": torch.randn(B, 5, config.state_dim),
        "actions": torch.randn(B, 5, 4),
        "rewards": torch.randn(B, 5, 1),
        "returns_to_go": torch.randn(B, 5, 1),
        "timesteps": torch.arange(5).expand(B, -1),
        "attention_mask": torch.ones(B, 5),
    }


def trocr() -> Any:
    """ViT and a decoder."""
    vision = transformers.ViTConfig(**ENCODER, image_size=64, patch_size=8)
    text = transformers.TrOCRConfig(
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        vocab_size=128,
        dropout=0.0,
    )
    made = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    made.decoder_start_token_id, made.pad_token_id = 1, 0
    return made


def written(_: Any) -> dict[str, Tensor]:
    """Images and their texts."""
    return {"pixel_values": torch.randn(B, 3, 64, 64), "labels": ids()}


def special() -> dict[str, tuple[str, Callable[[], Any], Callable[[Any], dict[str, Any]]]]:
    """Models with a configuration or a batch of their own, by name: class, configuration, batch."""
    return {
        "detr (object detection)": (
            "DetrForObjectDetection",
            lambda: transformers.DetrConfig(**DETECTOR, backbone_config=resnet("stage4")),
            only_images,
        ),
        "conditional_detr (object detection)": (
            "ConditionalDetrForObjectDetection",
            lambda: transformers.ConditionalDetrConfig(
                **DETECTOR, backbone_config=resnet("stage4")
            ),
            only_images,
        ),
        "deformable_detr (object detection)": (
            "DeformableDetrForObjectDetection",
            lambda: transformers.DeformableDetrConfig(
                **DETECTOR, backbone_config=resnet(*STAGE_NAMES[1:])
            ),
            only_images,
        ),
        "sam (masks)": ("SamModel", sam, points),
        "mask2former (universal segmentation)": (
            "Mask2FormerForUniversalSegmentation",
            lambda: transformers.Mask2FormerConfig(
                backbone_config=swin(),
                feature_size=32,
                mask_feature_size=32,
                hidden_dim=32,
                num_queries=5,
                encoder_feedforward_dim=48,
                dim_feedforward=48,
                encoder_layers=1,
                decoder_layers=3,
                num_attention_heads=2,
            ),
            only_images,
        ),
        "upernet (semantic segmentation)": (
            "UperNetForSemanticSegmentation",
            lambda: transformers.UperNetConfig(
                backbone_config=transformers.ConvNextConfig(**FOUR, out_features=STAGE_NAMES),
                hidden_size=16,
                auxiliary_in_channels=48,
                auxiliary_channels=16,
            ),
            only_images,
        ),
        "dpt (depth)": (
            "DPTForDepthEstimation",
            lambda: transformers.DPTConfig(
                **{**ENCODER, "num_hidden_layers": 4},
                image_size=64,
                patch_size=8,
                backbone_out_indices=[0, 1, 2, 3],
                neck_hidden_sizes=[16] * 4,
                fusion_hidden_size=16,
            ),
            only_images,
        ),
        "vit_mae (masked image)": (
            "ViTMAEForPreTraining",
            lambda: transformers.ViTMAEConfig(
                **ENCODER,
                image_size=64,
                patch_size=8,
                decoder_hidden_size=32,
                decoder_num_attention_heads=2,
                decoder_num_hidden_layers=1,
                decoder_intermediate_size=48,
            ),
            only_images,
        ),
        "dinov3_vit (features)": (
            "DINOv3ViTModel",
            lambda: transformers.DINOv3ViTConfig(**ENCODER, image_size=64, patch_size=8),
            only_images,
        ),
        "audio-spectrogram-transformer (audio classification)": (
            "ASTForAudioClassification",
            lambda: transformers.ASTConfig(
                **ENCODER,
                max_length=64,
                num_mel_bins=16,
                patch_size=8,
                time_stride=8,
                frequency_stride=4,
            ),
            lambda _: {"input_values": torch.randn(B, 64, 16), "labels": torch.randint(2, (B,))},
        ),
        "speecht5 (speech recognition)": (
            "SpeechT5ForSpeechToText",
            lambda: tiny(transformers.SpeechT5Config, SPEECHT5),
            waves,
        ),
        "speecht5 (text to speech)": (
            "SpeechT5ForTextToSpeech",
            lambda: tiny(transformers.SpeechT5Config, SPEECHT5),
            lambda _: {
                "input_ids": ids(),
                "labels": torch.randn(B, 20, 16),
                "speaker_embeddings": torch.randn(B, 8),
            },
        ),
        "speech_to_text (speech recognition)": (
            "Speech2TextForConditionalGeneration",
            lambda: tiny(transformers.Speech2TextConfig),
            lambda _: {"input_features": torch.randn(B, 64, 16), "labels": ids()},
        ),
        "wav2vec2-bert (speech, CTC)": (
            "Wav2Vec2BertForCTC",
            lambda: tiny(transformers.Wav2Vec2BertConfig),
            lambda c: {
                "input_features": torch.randn(B, 40, c.feature_projection_input_dim),
                "labels": torch.randint(1, 20, (B, 4)),
            },
        ),
        "moonshine (speech recognition)": (
            "MoonshineForConditionalGeneration",
            lambda: tiny(transformers.MoonshineConfig),
            lambda _: {"input_values": torch.randn(B, 4000), "labels": ids()},
        ),
        "encodec (audio codec)": (
            "EncodecModel",
            lambda: transformers.EncodecConfig(
                num_filters=4,
                hidden_size=16,
                codebook_size=16,
                upsampling_ratios=[4, 2],
                target_bandwidths=[12.0],
                sampling_rate=24000,
            ),
            lambda _: {"input_values": torch.randn(B, 1, 320)},
        ),
        "llava (images and texts)": ("LlavaForConditionalGeneration", llava, with_image(16)),
        "qwen2_vl (images and texts)": ("Qwen2VLForConditionalGeneration", qwen, patches),
        "trocr (images and texts)": ("VisionEncoderDecoderModel", trocr, written),
        "decision_transformer (trajectories)": (
            "DecisionTransformerModel",
            lambda: transformers.DecisionTransformerConfig(
                hidden_size=32,
                n_layer=2,
                n_head=2,
                max_ep_len=20,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            ),
            trajectories,
        ),
        "patchtst (time series)": (
            "PatchTSTForPrediction",
            lambda: transformers.PatchTSTConfig(
                num_input_channels=2,
                d_model=32,
                ffn_dim=48,
                patch_length=4,
                patch_stride=4,
                num_hidden_layers=2,
                prediction_length=4,
            ),
            lambda _: {"past_values": torch.randn(B, 32, 2), "future_values": torch.randn(B, 4, 2)},
        ),
        "time_series_transformer (time series)": (
            "TimeSeriesTransformerForPrediction",
            lambda: transformers.TimeSeriesTransformerConfig(**SERIES),
            future,
        ),
        "informer (time series)": (
            "InformerForPrediction",
            lambda: transformers.InformerConfig(**SERIES),
            future,
        ),
        "autoformer (time series)": (
            "AutoformerForPrediction",
            lambda: transformers.AutoformerConfig(**SERIES, label_length=2, moving_average=3),
            future,
        ),
    }


SPEECHT5: dict[str, Any] = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2,
    "speech_decoder_prenet_units": 16,
    "speech_decoder_postnet_units": 16,
    "vocab_size": 128,
    "speaker_embedding_dim": 8,
    "speech_decoder_postnet_dropout": 0.0,
    "apply_spec_augment": False,
    "use_guided_attention_loss": False,
    "speech_decoder_prenet_layers": 1,
    "speech_decoder_postnet_layers": 2,
}


def make_special(name: str) -> Task:
    """One of these."""
    model, config, batch = special()[name]
    sizes = config()
    return Task(getattr(transformers, model)(sizes).train(), batch(sizes), loss_of)


#: Families of causal language models that families.py leaves out.
CAUSAL = (
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "recurrent_gemma",
    "deepseek_v2",
    "deepseek_v3",
    "reformer",
    "xlnet",
    "prophetnet",
    "falcon_h1",
)


def pretrained_cases() -> list[Case]:
    """One for each family of each group."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    cases = [Case(name, partial(make_special, name)) for name in special()]
    seen = {case.name.partition(" ")[0] for case in cases}
    for group, (name, batch) in GROUPS.items():
        found = getattr(lists, f"MODEL_FOR_{name}_MAPPING")
        for kind, model in found.items():
            family = kind.model_type
            if family in seen or (name == "CAUSAL_LM" and family not in CAUSAL):
                continue
            seen.add(family)
            first = model[0] if isinstance(model, tuple) else model
            cases.append(Case(f"{family} ({group})", partial(make, kind, first, batch)))
    return cases
