"""ModernBERT against transformers: windows shorter than the sequence, biases, an untied head."""

from tests.models.conformance import BASE
from tests.models.encoder_decoder import EncoderConformance

IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)


class TestModernBert(EncoderConformance):
    family = "modernbert"
    config = "ModernBertConfig"
    base = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | IDS | {"local_attention": 8}
    cases = {
        "windows": {},
        "biases_untied": {
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 4,
        },
        "no_head_bias": {
            "decoder_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    }
    matters = {"norm_eps": 0.1, "local_attention": 12, "num_attention_heads": 2}
    test_both_spellings_are_read = None  # rope_parameters are nested by the type of layer
