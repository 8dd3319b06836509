"""Dense Nemotron against transformers: LayerNorm stored less one, squared ReLU, a part of each head rotated."""

from tests.models.conformance import BASE, Conformance

ROPE = {"rope_type": "default", "rope_theta": 1e4}


class TestNemotron(Conformance):
    family = "nemotron"
    config = "NemotronConfig"
    base = BASE | {"head_dim": 12}
    cases = {
        "half_rotated": {"vocab_size": 53},
        "tied_biases": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {"norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
