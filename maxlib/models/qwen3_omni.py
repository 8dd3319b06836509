"""Qwen3-Omni (Qwen team 2025, arXiv:2509.17765): the thinker, which reads text, images, videos and sound, and writes
text. The models that speak (talker, code2wav) are not read.

Its text is Qwen3's with experts, its image encoder that of Qwen3-VL. Frames of a video have positions by their time,
and sound between them has positions of the same clock.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib.models import _qwen3_omni_audio as audio
from maxlib.models import _qwen_vision as vision
from maxlib.models._layers import DeepstackPreNorm, TextDecoder, attention
from maxlib.models._sizes import SparseSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, HFConfig, Ignore, Multimodal, Renamed, Table, fields, names

Audio = audio.Audio
Vision = vision.Vision


@dataclass(frozen=True, kw_only=True)
class Config(vision.DeepstackSizes, SparseSizes):
    """Sizes of a Qwen3-Omni; `PRESETS` has the published ones."""

    audio: Audio


class Block(DeepstackPreNorm):
    """Qwen3's layer with experts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.mrope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # Softmax over all E experts, of which a token takes the best k: 8 of 128.
        router = nn.Router(D, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class Qwen3Omni(TextDecoder):
    """Qwen3-Omni's thinker: Qwen3 with experts that sees images and videos, and hears sound."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.has_features, rngs=rngs)
        self.tower = vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)
        self.audio_tower = audio.AudioEncoder(cfg.audio, cfg.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images, with frames of videos among them, and the sound that the model reads."""
        sees, hears = self.cfg.vision, self.cfg.audio
        images = nn.vision.PatchInput(
            self.tower,
            tokens=(sees.image_token, sees.video_token),
            merge=sees.merge,
            patch_dim=sees.patch_dim,
            mrope=True,
            positions_per_second=hears.positions_per_second,
            audio_token=hears.audio_token,
        )
        sound = nn.audio.AudioInput(
            self.audio_tower, hears.audio_token, frame_dim=hears.num_bands, num_tokens=hears.num_tokens
        )
        return {"images": images, "audio": sound}

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> nn.cache.Cache:
        """Makes an empty cache, see `nn.Decoder.init_cache`; times of frames may be fractions of a position."""
        cache = super().init_cache(batch, capacity, dtype=dtype, rope_length=rope_length)
        return dataclasses.replace(cache, position_offset=jnp.zeros(batch, jnp.float32))


OMNI, THINKER = "qwen3_omni_moe", "qwen3_omni_moe_thinker"

TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        *fields.EXPERTS,
        *fields.ATTENTION,
        fields.rope(default_theta=1_000_000.0, default_length=32_768),
        vision.sections(vision.SECTIONS),
        fields.ATTENTION_BIAS,
    ],
    model_types={"qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": ([],),
        "use_sliding_window": False,
        "sliding_window": None,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    ignored=["intermediate_size"],  # of layers without experts; there are none
    absent={"head_dim": fields.equal_heads},
)


class _Fields(Multimodal):
    """`Multimodal` in `thinker_config`, beside models that speak; or the thinker's alone."""

    def read(self, hf: HFConfig) -> Config:
        if hf.take("model_type") == THINKER:
            return super().read(hf)
        hf.ignore("talker_config", "code2wav_config", "enable_audio_output")
        # Tokens of chats and of speech.
        hf.ignore("im_start_token_id", "im_end_token_id", "system_token_id", "user_token_id", "assistant_token_id")
        hf.ignore("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id")
        return super().read(hf.nested("thinker_config"))

    def write(self, cfg: Any) -> dict[str, Any]:
        thinker = super().write(cfg)
        outer = {"architectures": [self.model_types[OMNI]], "model_type": OMNI, "enable_audio_output": False}
        return outer | {"thinker_config": {name: value for name, value in thinker.items() if name != "architectures"}}


FIELDS = _Fields(
    TEXT,
    {
        "vision": replace(
            vision.FIELDS,
            ignored=[f"vision_config.{name}" for name in ("image_size", "tokens_per_second")],  # of other encoders
            fixed_if_present={
                "vision_config.apply_vit_abs_pos_embed": True,
                "vision_config.in_chans": 3,
                "vision_config.spatial_patch_size": lambda c: c.patch_size,
            },
            absent={
                "deepstack": (8, 16, 24),
                "image_token": 151_655,
                "video_token": 151_656,
                "start_token": 151_652,
                "end_token": 151_653,
            },
        ),
        "audio": audio.FIELDS,
    },
    model_types={
        THINKER: "Qwen3OmniMoeThinkerForConditionalGeneration",
        OMNI: "Qwen3OmniMoeForConditionalGeneration",
    },
    fixed={
        "vision_config.model_type": "qwen3_omni_moe_vision_encoder",
        "vision_config.out_hidden_size": lambda c: c.dim,
        "audio_config.output_dim": lambda c: c.dim,
    },
    # A token of chats, and how processors cut videos.
    ignored=["user_token_id", "seconds_per_chunk"],
    text_alone=False,
)


def _table(cfg: Config) -> Table:
    """Maps the names of the releases; the thinker alone has no prefix."""
    alone = [Renamed(f"{name}.", f"thinker.{name}.") for name in ("model", "lm_head", "visual", "audio_tower")]
    layer = [*names.NORMS, *names.ATTENTION, *names.EXPERTS]
    return [
        *alone,
        *names.decoder_table(layer, prefix="thinker."),
        *vision.table("thinker.visual", mergers="merger_list", merger_parts=("ln_q", "mlp.0", "mlp.2")),
        *audio.table("thinker.audio_tower"),
        Ignore("talker.*"),
        Ignore("code2wav.*"),
    ]


# fmt: off
PRESETS = {
    "qwen3-omni-30b-a3b": Config(
        vocab=152_064, num_layers=48, dim=2048, expert_dim=768, num_experts=128, top_k=8, num_heads=32, num_kv_heads=4,
        head_dim=128, rope=Rope(128, 1_000_000.0, max_length=65_536),
        vision=Vision(
            deepstack=(8, 16, 24), image_token=151_655, video_token=151_656, start_token=151_652, end_token=151_653,
        ),
        audio=Audio(audio_token=151_675, start_token=151_669, end_token=151_670),
    ),
}
# fmt: on

FAMILY = Family("qwen3_omni", Qwen3Omni, FIELDS, _table, PRESETS)
