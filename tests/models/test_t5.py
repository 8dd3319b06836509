"""T5 against transformers: ReLU and a tied head, GeGLU as in v1.1."""

from tests.models.encoder_decoder import EncoderDecoderConformance


class TestT5(EncoderDecoderConformance):
    family = "t5"
    config = "T5Config"
    base = {
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 44,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,  # sequences are longer
        "decoder_start_token_id": 0,
    }
    cases = {"relu": {}, "gated": {"feed_forward_proj": "gated-gelu"}}
    matters = {"layer_norm_epsilon": 0.1, "relative_attention_max_distance": 30}
    refused = {"feed_forward_proj": "gated-silu", "decoder_start_token_id": 5, "attn_logit_softcapping": 50.0}
    presets = {
        "t5-small": 0.061,
        "t5-base": 0.223,
        "t5-large": 0.738,
        "t5-3b": 2.85,
        "t5-11b": 11.31,
        "flan-t5-small": 0.077,
        "flan-t5-base": 0.248,
        "flan-t5-large": 0.783,
        "flan-t5-xl": 2.85,
        "flan-t5-xxl": 11.14,
    }


transformers_cases = TestT5.transformers_cases
