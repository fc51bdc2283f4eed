"""Inputs and labels for a model of transformers, from the names in its forward's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["VARIANTS", "inputs_of", "optional_inputs"]

LENGTH, FIRST_TOKEN, LAST_TOKEN = 16, 5, 90
VARIANTS = ("plain", "features first", "packed", "long", "codes", "text only")
"""How what the signature leaves open is read: "plain" first, the others where it does not work.

features first: audio features are [batch, features, frames], not [batch, frames, features]; images and videos swap.
packed: images are rows of flattened patches with a grid. long: sequences and images of more positions.
codes: a token is one number from each of several codebooks.
text only: no images or sounds, for a model that takes them or not.
"""

TEXT = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForPreTraining",
    "ForQuestionAnswering",
)


class Source:
    """Random inputs of one batch size for one model."""

    def __init__(self, model: Any, batch: int, seed: int, variant: str) -> None:
        self.model, self.config, self.batch, self.variant = model, model.config, batch, variant
        self.random = torch.Generator().manual_seed(seed)
        self.kind = type(model).__name__
        self.parameters = inspect.signature(model.forward).parameters
        self.parts = [self.config]
        for part in self.parts:
            self.parts += [item for item in vars(part).values() if hasattr(item, "model_type")]
        self.length = LENGTH * 4 if variant == "long" else LENGTH
        self.num_images = 0
        self.grid = (1, 4, 4)

    def of(self, *names: str, default: Any = None, where: str = "") -> Any:
        """The first of these settings that the config or one of its sub-configs has."""
        parts = [part for part in self.parts if where in part.model_type] or self.parts
        if where:
            parts = parts + self.parts
        for part in parts:
            for name in names:
                value = getattr(part, name, None)
                if value is not None and not callable(value):
                    return value
        return default

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def tokens(self, length: int = 0) -> Tensor:
        known = self.of("vocab_size", default=LAST_TOKEN, where="text" if self.of("text_config") is not None else "")
        last = min(LAST_TOKEN, known - 1) if isinstance(known, int) else LAST_TOKEN
        return self.ints(last, self.batch, length or self.length, low=FIRST_TOKEN)

    @property
    def num_labels(self) -> int:
        return getattr(self.config, "num_labels", 2) or 2

    @property
    def image_shape(self) -> tuple[int, int, int]:
        vision = "vision" if self.of("vision_config") is not None else ""
        size = self.of("image_size", "img_size", "crop_size", default=64, where=vision)
        height, width = (
            (size, size)
            if isinstance(size, int)
            else (size[0], size[-1])
            if isinstance(size, (list, tuple))
            else (64, 64)
        )
        channels = self.of("num_channels", "in_channels", "in_chans", default=3, where=vision)
        channels = channels if isinstance(channels, int) else 3
        if self.variant == "long":
            height, width = 2 * height, 2 * width
        return channels, height, width

    @property
    def num_frames(self) -> int:
        return self.of("num_frames", "frames_per_clip", default=2)

    @property
    def num_spectra(self) -> int:
        """Of a sound; some encoders have half as many positions, all of which must be there."""
        positions = self.of("max_source_positions", default=0, where="audio")
        return 2 * positions if 0 < positions <= 512 else 256 if self.variant == "long" else 64

    @property
    def num_mels(self) -> int:
        return self.of(
            "num_mel_bins",
            "num_mels",
            "n_mels",
            "input_feat_per_channel",
            "feature_size",
            "input_dim",
            "mel_dim",
            default=80,
            where="audio",
        )


def tokens(s: Source) -> Tensor:
    if s.variant == "codes":
        books = s.of("num_codebooks", "num_channels", "num_quantizers", default=1)
        return s.ints(30, s.batch, s.length, books + ("Kyutai" in s.kind), low=FIRST_TOKEN)
    return s.tokens()


def images(s: Source) -> Tensor:
    channels, height, width = s.image_shape
    is_video = any(word in s.kind for word in ("Video", "Vivit", "VJEPA", "VJepa", "Timesformer", "TimeSformer"))
    if s.variant == "packed":
        patch = _first(s.of("patch_size", default=16, where="vision"))
        time = _first(s.of("temporal_patch_size", default=1, where="vision"))
        s.num_images = s.batch
        return s.floats(s.batch * s.grid[1] * s.grid[2], channels * time * patch * patch)
    if is_video != (s.variant == "features first"):
        return s.floats(s.batch, s.num_frames, channels, height, width)
    return s.floats(s.batch, channels, height, width)


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def videos(s: Source) -> Tensor:
    channels, height, width = s.image_shape
    return s.floats(s.batch, s.num_frames, channels, height, width)


def features(s: Source) -> Tensor:
    frames = s.num_spectra
    if s.variant == "features first":
        return s.floats(s.batch, s.num_mels, frames)
    return s.floats(s.batch, frames, s.num_mels)


def values(s: Source) -> Tensor:
    if s.variant == "features first":
        return s.floats(s.batch, s.of("max_length", default=64), s.num_mels)
    if s.variant == "packed":
        return s.floats(s.batch, 1, 4000)
    return s.floats(s.batch, 16000 if s.variant == "long" else 4000)


def boxes(s: Source) -> Tensor:
    corner = s.ints(400, s.batch, s.length, 2)
    return torch.cat([corner, corner + s.ints(400, s.batch, s.length, 2, low=1)], -1)


def series(s: Source) -> Tensor:
    context = s.of("context_length", default=32)
    lags = max(s.of("lags_sequence", default=[0]) or [0]) if s.of("lags_sequence") else 0
    channels = s.of("num_input_channels", "input_size", default=1)
    shape = (s.batch, context + lags) if channels == 1 and lags else (s.batch, context + lags, channels)
    return s.floats(*shape)


def future(s: Source) -> Tensor:
    channels = s.of("num_input_channels", "input_size", default=1)
    return s.floats(s.batch, s.of("prediction_length", default=8), *([channels] if channels > 1 else []))


def targets(s: Source) -> Any:
    """`labels`, by what the class is for."""
    kind = s.kind
    _, height, width = s.image_shape
    if "ForCTC" in kind:
        return s.ints(min(30, s.of("vocab_size", default=30)), s.batch, 4, low=1)
    if "Detection" in kind:
        return [detections(s, height, width) for _ in range(s.batch)]
    if "DetrForSegmentation" in kind or (kind.endswith("InstanceSegmentation") and "MaskFormer" not in kind):
        return [detections(s, height, width, masks=True) for _ in range(s.batch)]
    if "SemanticSegmentation" in kind:
        return s.ints(s.num_labels, s.batch, height, width)
    if "Depth" in kind:
        return s.uniform(s.batch, height, width) + 0.1
    if "FrameClassification" in kind:
        return None
    if "TokenClassification" in kind:
        return s.ints(s.num_labels, s.batch, s.length)
    if any(
        word in kind
        for word in (
            "ForSequenceClassification",
            "ForImageClassification",
            "ForVideoClassification",
            "ForAudioClassification",
            "XVector",
            "NextSentence",
        )
    ):
        return s.ints(s.num_labels, s.batch)
    if "MultipleChoice" in kind:
        return s.ints(2, s.batch)
    if kind.startswith("ViltForQuestion"):
        return s.uniform(s.batch, s.num_labels)
    if "TextToSpectrogram" in kind or "TextToSpeech" in kind or "SpeechToSpeech" in kind:
        return s.floats(s.batch, 8, s.num_mels)
    if any(word in kind for word in (*TEXT, "Seq2Seq", "RNNT", "TDT", "Transducer")):
        return s.tokens()
    return None


def attention(s: Source) -> Tensor | None:
    if "input_ids" in s.parameters or "states" in s.parameters:
        return torch.ones(s.batch, s.length, dtype=torch.long)
    if "input_features" in s.parameters:
        return torch.ones(s.batch, s.num_spectra, dtype=torch.long)
    return None


def detections(s: Source, height: int, width: int, *, masks: bool = False) -> dict[str, Tensor]:
    centre = 0.3 + 0.4 * s.uniform(3, 2)
    found = {"class_labels": s.ints(s.num_labels, 3), "boxes": torch.cat([centre, 0.1 + 0.2 * s.uniform(3, 2)], -1)}
    if masks:
        found["masks"] = s.ints(2, 3, height, width).float()
    return found


def grids(s: Source) -> Tensor | None:
    return torch.tensor([s.grid] * s.batch) if s.num_images else None


BUILDERS: dict[str, Callable[[Source], Any]] = {
    "input_ids": tokens,
    "pixel_values": images,
    "image_grid_thw": grids,
    "grid_thw": lambda s: torch.tensor([s.grid] * s.batch),
    "pixel_values_videos": lambda s: videos(s) if "input_ids" not in s.parameters else None,
    "input_features": features,
    "input_values": values,
    "audio_values": values,
    "bbox": boxes,
    "past_values": series,
    "future_values": future,
    "past_time_features": lambda s: s.floats(s.batch, series(s).shape[1], s.of("num_time_features", default=0)),
    "future_time_features": lambda s: s.floats(s.batch, future(s).shape[1], s.of("num_time_features", default=0)),
    "past_observed_mask": lambda s: torch.ones(series(s).shape),
    "decoder_input_ids": tokens,
    "qformer_input_ids": tokens,
    "states": lambda s: s.floats(s.batch, s.length, s.of("state_dim", default=8)),
    "actions": lambda s: s.floats(s.batch, s.length, s.of("act_dim", default=4)),
    "rewards": lambda s: s.floats(s.batch, s.length, 1),
    "returns_to_go": lambda s: s.floats(s.batch, s.length, 1),
    "timesteps": lambda s: s.ints(20, s.batch, s.length),
    "decoder_input_values": lambda s: s.floats(s.batch, 8, s.num_mels),
    "labels": targets,
    "start_positions": lambda s: s.ints(s.length, s.batch),
    "end_positions": lambda s: s.ints(s.length, s.batch),
    "next_sentence_label": lambda s: s.ints(2, s.batch),
    "sentence_order_label": lambda s: s.ints(2, s.batch),
    "mask_labels": lambda s: [s.ints(2, 2, *s.image_shape[1:]).float() for _ in range(s.batch)],
    "class_labels": lambda s: [torch.arange(2) % s.num_labels for _ in range(s.batch)],
    "return_loss": lambda s: True,
    "noise": lambda s: s.uniform(s.batch, 16),
    "bool_masked_pos": lambda s: torch.arange(16).expand(s.batch, 16) % 2 == 0,
    "input_points": lambda s: 64 * s.uniform(s.batch, 1, 2, 2),
    "input_boxes": lambda s: torch.tensor([[[8.0, 8.0, 40.0, 40.0]]] * s.batch),
    "attention_mask": attention,
}
MEDIA = {"pixel_values", "input_features", "input_values", "image_grid_thw", "pixel_values_videos", "audio_values"}
MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask", "audio_attention_mask")
BUILDERS.update(dict.fromkeys(MASKS, lambda s: torch.ones(s.batch, s.num_spectra, dtype=torch.long)))
NEEDED = {
    "noise",
    "bool_masked_pos",
    "attention_mask",
    "input_points",
    "input_boxes",
    "decoder_input_ids",
    "decoder_input_values",
    *MASKS,
}
"""Given only where the signature has no default for it, or the model says that it misses it."""


def optional_inputs(cls: Any) -> tuple[str, ...]:
    """What a class may be given besides, where it does not do without."""
    parameters = inspect.signature(cls.forward).parameters
    return tuple(sorted(name for name in NEEDED if name in parameters and parameters[name].default is None))


def inputs_of(model: Any, batch: int, seed: int, variant: str, needed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Keyword arguments of one call."""
    s = Source(model, batch, seed, variant)
    words: dict[str, Any] = {}
    for name, parameter in s.parameters.items():
        if name not in BUILDERS or (variant == "text only" and name in MEDIA):
            continue
        is_needed = name in needed or parameter.default is inspect.Parameter.empty
        is_needed |= name == "decoder_input_ids" and "labels" not in s.parameters
        if name in NEEDED and not is_needed:
            continue
        value = BUILDERS[name](s)
        if value is not None:
            words[name] = value
    _place_media(s, words)
    return words


def _place_media(s: Source, words: dict[str, Any]) -> None:
    """Where text holds a token for each feature of an image or a sound, put as many."""
    ids = words.get("input_ids")
    if ids is None:
        return
    sources = (
        ("pixel_values", "image", "get_image_features"),
        ("input_features", "audio", "get_audio_features"),
        ("input_values", "audio", "get_audio_features"),
    )
    for name, what, method in sources:
        token = s.of(f"{what}_token_id", f"{what}_token_index")
        if name not in words or token is None or not hasattr(s.model, method):
            continue
        get = getattr(s.model, method)
        known = {
            key: value
            for key, value in words.items()
            if key in inspect.signature(get).parameters and key != "input_ids"
        }
        with torch.no_grad():
            found = get(**known)
        found = getattr(found, "pooler_output", found)
        if isinstance(found, (list, tuple)):
            found = torch.cat([item.reshape(-1, item.shape[-1]) for item in found])
        number = found.numel() // found.shape[-1] // s.batch
        text = torch.cat([ids[:, :2], torch.full((s.batch, number), token), ids[:, 2:]], 1)
        ids = words["input_ids"] = text
        if isinstance(words.get("labels"), Tensor) and words["labels"].shape != text.shape:
            words["labels"] = torch.where(text == token, -100, text)
    if "attention_mask" in words:
        words["attention_mask"] = torch.ones_like(words["input_ids"])
    if "mm_token_type_ids" in s.parameters and words["input_ids"] is ids:
        token = s.of("image_token_id")
        words["mm_token_type_ids"] = (ids == token).long() if token is not None else torch.zeros_like(ids)
