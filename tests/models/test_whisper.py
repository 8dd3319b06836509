"""Whisper against transformers: log-mel frames in, text out."""

import jax.numpy as jnp
import pytest

from maxlib import nn
from tests.models import parity
from tests.models.encoder_decoder import EncoderDecoderConformance


class TestWhisper(EncoderDecoderConformance):
    family = "whisper"
    config = "WhisperConfig"
    base = {
        "vocab_size": 61,
        "num_mel_bins": 8,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 44,
        "d_model": 32,
        "max_source_positions": 12,
        "max_target_positions": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "begin_suppress_tokens": None,
    }
    cases = {"whisper": {}}
    matters = {"decoder_attention_heads": 2, "encoder_attention_heads": 4}

    def test_clips_that_do_not_fit_are_named(self, made):
        case, _, model = made("whisper")
        clips = parity.audio(case)
        with pytest.raises(ValueError, match="one clip of 24 frames of 8 bands for each of the 2 rows"):
            model(jnp.asarray(case["tokens"]), audio=nn.audio.Clips(clips.frames[:, :, :20], clips.lengths))
        with pytest.raises(TypeError, match=r"nn\.audio\.Clips"):
            model(jnp.asarray(case["tokens"]), audio=clips.frames)
        with pytest.raises(ValueError, match="40 learned positions"):
            model.init_cache(2, 41)
