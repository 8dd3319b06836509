"""Seed-OSS against transformers: separate options for the biases of attention and output."""

from tests.models.conformance import BASE, NO_TOKENS, YARN, Conformance


class TestSeedOss(Conformance):
    family = "seed_oss"
    config = "SeedOssConfig"
    # transformers gives the padding token's row no gradient.
    base = BASE | NO_TOKENS
    cases = {
        "biases": {"head_dim": 10, "vocab_size": 53},
        "other_biases_tied": {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": None,
            "rope_parameters": YARN,
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
