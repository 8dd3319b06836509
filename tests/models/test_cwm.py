"""CWM against transformers: windows in three layers of four, from the second on."""

import pytest

import maxlib
from tests.models.conformance import BASE, Conformance, _logits, assert_close

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


class TestCWM(Conformance):
    family = "cwm"
    config = "CwmConfig"
    base = BASE | {"head_dim": 10, "sliding_window": 5, "bos_token_id": 1, "eos_token_id": 2}
    cases = {
        "usual": {"num_hidden_layers": 5, "vocab_size": 53},
        "tied": {
            "layer_types": [SLIDING, FULL, SLIDING],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": PLAIN,
        },
    }
    windows = {"usual": {5, 24}, "tied": {5, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [FULL, FULL, SLIDING, SLIDING, FULL],
        "rms_norm_eps": 0.1,
        "rope_parameters": PLAIN,
    }

    @pytest.mark.full
    def test_transformers_opens_the_export(self, name, made, tmp_path):
        """With the ids of special tokens, which the released directories have: transformers' class insists on one."""
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, directory, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export", like=directory)
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "export", attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            want = theirs(torch.from_numpy(case["tokens"]).long()).logits.numpy()
        assert_close(_logits(model, case["tokens"]), want, 1e-4)
