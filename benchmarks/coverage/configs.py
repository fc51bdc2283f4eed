"""A tiny config of any class: its own defaults, with every number that its name says is a size made small.

A field is read by its name (RULES: the first pattern that matches), in sub-configs too. Three ways, tried in turn:

    fixed    hidden sizes 64, 4 heads of 16, 4 layers, a vocabulary of 128
    divide   sizes divided by what makes the hidden size 64, so that products of sizes stay true
    layers   4 layers and a small vocabulary; sizes as they are
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

__all__ = ["VOCAB", "WAYS", "tiny_config"]

WAYS = ("fixed", "divide", "layers")
VOCAB, NUM_LAYERS, WIDTH, NUM_HEADS, HEAD_DIM = 128, 4, 64, 4, 16
IMAGE, PATCH = 64, 16
FIRST_SPECIAL = 100
"""Ids of special tokens beyond the vocabulary are brought here; inputs are drawn from below."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "lilt": {"hidden_size": 96},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "is_decoder": True},
}
"""What no rule can know, by model type."""

MISSING = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "prediction_length": 8,
    "attn_layer_indices": [1, 3],
    "vocab_size": VOCAB,
    "image_token_id": VOCAB - 1,
    "image_token_index": VOCAB - 1,
}
"""What a config leaves open that its model needs."""

STANDARD = {
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "dtype",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "architectures",
    "id2label",
    "label2id",
    "problem_type",
    "transformers_version",
    "per_layer_config",
    "name_or_path",
}

LAYERS = (
    r"^(num_hidden_layers|num_layers|n_layers?|depth|num_blocks|layers|num_encoder_blocks)$|layers$|_depth$|_blocks$"
)
ID = (
    r"(token|bos|eos|pad|sep|cls|mask|unk|image|video|audio)_(id|index|ids)$"
    r"|^(\w+_)?token_(id|index)\w*$|_idx$|token_ids?$"
)
WIDTHS = (
    r"(size|dim|dims|width|channels?|filters|embd?|model|rank|inner|units|features|hidden|planes|state|ffn)(s|_list)?$"
)


def at_most(limit: int) -> Callable[[int, str], int]:
    return lambda value, _: min(value, limit)


def exactly(number: int) -> Callable[[int, str], int]:
    return lambda value, _: number if value > 1 else value


def width(number: int) -> Callable[[int, str], int]:
    """Small numbers are not widths: a kernel, a stride, a number of colour channels."""
    return lambda value, _: value if value < 24 else number


def image(value: int, _: str) -> int:
    return IMAGE if value > IMAGE else value


RULES: list[tuple[str, Callable[[int, str], int]]] = [
    (r"vocab_size|^vocab|num_embeddings_text", lambda value, _: min(value, VOCAB)),
    (
        r"type_vocab|num_labels|num_channels|in_channels|stride|kernel|padding|dilation|seed|^(num_)?feature_layer",
        at_most(10**9),
    ),
    (r"sampling_rate|sample_rate|temperature|scale|factor|ratio|expand$|multiplier|theta|bucket", at_most(10**9)),
    (r"(period|interval|pattern|frequency)$", at_most(2)),
    (r"offset$|first_k_dense|num_kv_shared|num_dense_layers|nextn|mtp_|n_dense", at_most(1)),
    (r"mel", at_most(10**9)),
    (LAYERS, at_most(NUM_LAYERS)),
    (r"experts_per|top_?k|topk|_k$|num_selected|active_experts", at_most(2)),
    (r"experts|n_routed", at_most(4)),
    (r"(n|num)_groups?$|topk_group", at_most(2)),
    (r"d_head$|dim_head$|_head_dim$|^head_dim", width(HEAD_DIM)),
    (r"(key_value|kv)_heads?$|num_kv|n_head_kv|multi_query_group", exactly(2)),
    (r"mamba_(n|num)_heads|^(n|num)_mamba_heads|ssm_heads", exactly(8)),
    (r"heads?$|n_head$", exactly(NUM_HEADS)),
    (
        r"head_dim|dim_head|d_head|head_size|^d_kv|key_dim|value_dim|headdim|attention_channels|rotary_dim",
        width(HEAD_DIM),
    ),
    (r"lora_rank|_rank$", width(16)),
    (
        r"intermediate|ffn|mlp_(dim|hidden|size)|inner|feed_?forward|^d_ff|ff_dim|linear_dim|hidden_dim_ff",
        width(2 * WIDTH),
    ),
    (r"image_size|crop_size|img_size|input_resolution|^input_size$|frame_size", image),
    (r"patch_size|tubelet", at_most(PATCH)),
    (r"sliding_window|attention_window|local_attention|window_size|chunk", at_most(16)),
    (r"max_source_positions", at_most(32)),
    (
        r"max_.*position|n_positions|max_target|position_embeddings|context_length|max_seq|n_ctx|max_length",
        at_most(1024),
    ),
    (r"num_(queries|proposals|query|object_queries|latents|frames|negatives|denoising)|top_k_proposals", at_most(16)),
    (WIDTHS, width(WIDTH)),
]


@dataclasses.dataclass
class _Tree:
    """What is known of all sub-configs of one tiny config."""

    way: str
    ids: dict[str, int] = dataclasses.field(default_factory=dict)

    def special(self, name: str, value: int) -> int:
        """One small id for each name of a special token."""
        if value < FIRST_SPECIAL:
            return value
        return self.ids.setdefault(
            name.replace("_index", "_id"), FIRST_SPECIAL + len(self.ids) % (VOCAB - FIRST_SPECIAL)
        )


def tiny_config(cls: Any, way: str) -> Any:
    """A config of class `cls` whose model is small; `way` is one of WAYS."""
    return _tiny(cls(), _Tree(way))


def _tiny(default: Any, tree: _Tree) -> Any:
    cls = type(default)
    if default.model_type == "timm_backbone":
        resnet: Any = importlib.import_module("transformers").ResNetConfig
        indices = [index for index in getattr(default, "out_indices", None) or [4] if index <= 4]
        return _tiny(resnet(out_indices=indices), tree)
    divide = _divisor(default)
    counts = [_get(default, item.name) for item in dataclasses.fields(cls) if re.search(LAYERS, item.name)]
    num_layers = {count for count in counts if isinstance(count, int)}
    words: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        name = item.name
        if name in STANDARD or name.startswith("_"):
            continue
        value = _get(default, name)
        if value is None and name in MISSING:
            words[name] = MISSING[name]
        is_derived = item.default is None and value is not None and not isinstance(value, (dict, list, tuple))
        if hasattr(value, "model_type"):
            words[name] = _tiny(value, tree)
        elif not is_derived:
            new = _small(name, value, tree, num_layers, divide)
            if new != value:
                words[name] = new
    if "backbone_config" in words and hasattr(default, "use_timm_backbone"):
        words["use_timm_backbone"] = False
    indices, stages = getattr(default, "out_indices", None), getattr(default, "stage_names", None) or []
    if indices is not None:
        words["out_indices"] = _indices(list(indices)) if len(stages) > 6 else list(indices)
    words.pop("out_features", None)
    heads, shared = _get(default, "num_attention_heads"), _get(default, "num_key_value_heads")
    if "num_key_value_heads" in words and "num_attention_heads" in words and heads == shared:
        words["num_key_value_heads"] = words["num_attention_heads"]
    if tree.way != "layers" and "head_dim" in cls.__dataclass_fields__ and _get(default, "head_dim") is None:
        words["head_dim"] = HEAD_DIM
    if hasattr(default, "depths") and isinstance(getattr(default, "window_size", None), int):
        words["window_size"] = 2  # divides the smallest stage
    _add_sections(default, words, tree)
    words.update(OVERRIDES.get(default.model_type, {}))
    config = cls(**words)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _get(config: Any, name: str) -> Any:
    """A field's value, also where it may differ by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return config._getattr_without_heterogeneous_validation(name, None)


def _add_sections(default: Any, words: dict[str, Any], tree: _Tree) -> None:
    """Rotary positions of several axes: the sections of half a head's rotary dimensions."""
    rope = words.get("rope_parameters", getattr(default, "rope_parameters", None))
    if not isinstance(rope, dict) or tree.way == "layers":
        return
    ignored = getattr(default, "ignore_keys_at_rope_validation", None) or ()
    part = getattr(default, "partial_rotary_factor", None)
    words["rope_parameters"] = _with_sections(rope, "mrope_section" in ignored, part)


def _with_sections(rope: dict[str, Any], is_wanted: bool, part: float | None) -> dict[str, Any]:
    if rope and all(isinstance(item, dict) for item in rope.values()):
        return {key: _with_sections(item, is_wanted, part) for key, item in rope.items()}
    if "mrope_section" not in rope and not (is_wanted and "rope_type" in rope):
        return rope
    half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or part or 1.0)) // 2
    third = max(1, half * 3 // 8)
    return {**rope, "mrope_section": [half - 2 * third, third, third]}


def _divisor(config: Any) -> float:
    """What the widths are divided by, so that the hidden size becomes WIDTH."""
    hidden = (
        getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or getattr(config, "embed_dim", None)
    )
    hidden = max(hidden) if isinstance(hidden, (list, tuple)) else hidden
    return max(1.0, hidden / WIDTH) if isinstance(hidden, int) else 8.0


def _small(name: str, value: Any, tree: _Tree, num_layers: set[int], divide: float) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return False if name == "apply_spec_augment" else value
    if isinstance(value, float):
        if re.search(r"^pos_embed_(shift|jitter|rescale)$", name):
            return None
        return 0.0 if re.search(r"drop|noise|jitter|mask_(time|feature)_prob", name) else value
    if isinstance(value, int):
        return _small_number(name, value, tree, divide)
    if isinstance(value, (list, tuple)):
        return _small_list(name, list(value), tree, num_layers, divide)
    if isinstance(value, dict):
        return _small_rope(value)
    return value


def _small_number(name: str, value: int, tree: _Tree, divide: float) -> int:
    if re.search("drop|noise|jitter", name) and value in (0, 1):
        return 0
    if re.search(ID, name) and "num" not in name:
        return tree.special(name, value)
    for pattern, rule in RULES:
        if re.search(pattern, name):
            new = rule(value, name)
            is_size = pattern == WIDTHS or "intermediate" in pattern or "lora_rank" in pattern
            if tree.way == "layers" and (is_size or "head" in pattern):
                return value
            if tree.way == "divide" and is_size and new != value:
                return max(16, round(value / divide / 16) * 16)
            return new
    return value if value < 64 or tree.way == "layers" else WIDTH


def _small_list(name: str, value: list[Any], tree: _Tree, num_layers: set[int], divide: float) -> list[Any]:
    if value and all(isinstance(item, (list, tuple)) for item in value):
        return [_small_list(name, list(item), tree, num_layers, divide) for item in value]
    if len(value) > NUM_LAYERS and len(value) in num_layers:
        return _shortened(value)
    if name in ("out_features", "out_indices", "stage_names") or not value:
        return value
    if all(isinstance(item, float) for item in value):
        return [_small(name, item, tree, num_layers, divide) for item in value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if re.search("index|indices|indexes|layer(s|_ids)?$|_idx", name) and "token" not in name:
        return _indices(value)
    if re.search("depths|num_layers|layers_per|block_repeats|num_blocks|layer_list", name):
        return [min(item, 2) for item in value]
    if re.search("heads", name):
        return [max(1, item // min(value)) for item in value]
    if re.search(WIDTHS, name) and max(value) >= 24 and len(value) > 1 and "kernel" not in name and "image" not in name:
        if tree.way == "layers":
            return value
        least = min(item for item in value if item >= 8)
        return [item if item < 8 else max(16, round(16 * item / least / 16) * 16) for item in value]
    return [_small_number(name, item, tree, divide) for item in value]


def _shortened(value: list[Any]) -> list[Any]:
    """The first layers, with one of each kind where there is room."""
    short = value[:NUM_LAYERS]
    for kind in value:
        if kind not in short:
            for place in reversed(range(len(short))):
                if short.count(short[place]) > 1:
                    short[place] = kind
                    break
    return short


def _indices(value: list[int]) -> list[int]:
    """Layer numbers of a deep model, in a model of four layers: distinct and in order where there is room."""
    if all(-NUM_LAYERS <= item <= NUM_LAYERS for item in value):
        return value
    if any(item < 0 for item in value):
        return [max(-NUM_LAYERS, min(NUM_LAYERS - 1, item)) for item in value]
    top = NUM_LAYERS if len(value) <= NUM_LAYERS else len(value)
    return list(range(top - len(value), top))


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: what is a list has one entry for each pair of a head's dimensions."""
    new: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            new[key] = _small_rope(item)
        elif isinstance(item, list) and key.endswith("_factor"):
            new[key] = item[: HEAD_DIM // 2]
        else:
            new[key] = item
    return new
