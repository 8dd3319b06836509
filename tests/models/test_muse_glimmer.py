"""Muse Glimmer against transformers: gated attention, layers without positions, norms before and after, images.

transformers has the text only within a model that sees. A class around its text model, with the head of that one,
stands for it here; a test compares with the whole.
"""

import pytest

import maxlib
from maxlib.models.muse_glimmer import FULL, SLIDING
from tests.models import conformance, parity
from tests.models.conformance import NO_TOKENS, YARN, Conformance, assert_close
from tests.models.image_conformance import IMAGE, VIDEO, ImageConformance

BASE = conformance.BASE | NO_TOKENS


def _register() -> None:
    """Makes `AutoModelForCausalLM` build the text model with a head."""
    import torch
    import transformers
    from transformers.modeling_outputs import CausalLMOutput
    from transformers.models.muse_glimmer import modeling_muse_glimmer as theirs

    class MuseGlimmerForCausalLM(theirs.MuseGlimmerPreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.MuseGlimmerTextConfig
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config):
            super().__init__(config)
            self.model = theirs.MuseGlimmerTextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids, **kwargs):
            cap = self.config.final_logit_softcapping
            out = self.model(input_ids, **kwargs)
            logits = self.lm_head(out.last_hidden_state) * self.config.output_multiplier
            logits = cap * torch.tanh(logits / cap)
            return CausalLMOutput(logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    transformers.AutoModelForCausalLM.register(
        transformers.MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True
    )


@pytest.mark.full  # by default its relative below is
class TestMuseGlimmer(Conformance):
    family = "muse_glimmer"
    config = "MuseGlimmerTextConfig"
    base = BASE
    cases = {
        # With the usual 3.87, which the second case has, weights changed by 1e-7 move these logits by 2e-5 of their
        # deviation: as much as two orders of summation may differ by.
        "usual": {
            "num_hidden_layers": 5,
            "sliding_window": 4,
            "head_dim": 10,
            "vocab_size": 53,
            "qk_scale_factor": 1.0,
        },
        "in_turn_tied": {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "layer_rope_theta": [1e4, 1e4, 0, 1e4],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": YARN,
        },
    }
    windows = {"usual": {4, 24}, "in_turn_tied": {6, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING] * 5,
        "layer_rope_theta": [1e4] * 5,
        "qk_scale_factor": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
        "rms_norm_eps": 0.1,
        "post_norm_eps": 0.1,
        "rope_parameters": YARN,
    }
    refused = {"layer_rope_theta": [1e4, 2e4, 1e4, 1e4, 0]}

    @classmethod
    def transformers_cases(cls):
        cases = super().transformers_cases()
        _register()
        return cases

    @pytest.fixture(autouse=True)
    @classmethod
    def registered(cls, request):
        if any(name in request.node.name for name in ("golden", "opens_the_export", "captured")):
            pytest.importorskip("torch")
            pytest.importorskip("transformers")
            _register()


class TestMuseGlimmerImages(ImageConformance):
    family = "muse_glimmer"
    config = "MuseGlimmerConfig"
    text_base = BASE | {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 8, "qk_scale_factor": 1.0}
    # Windows of 2 x 2 patches, and images larger than the table of positions.
    vision_base = {
        "hidden_size": 24,
        "intermediate_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "max_position_embeddings": 4,
        "layer_types": ["window_attention", "full_attention", "window_attention"],
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "out_hidden_size": 96,
        "projector_hidden_size": 20,
        "tie_word_embeddings": False,
    }
    offset = 0
    cases = {
        "images": {},
        "images_in_larger_windows": {
            "vision": {
                "pos_emb_height": 3,
                "pos_emb_width": 3,
                "max_position_embeddings": 9,
                "layer_types": None,
                "num_hidden_layers": 6,
            }
        },
    }
    matters = {
        "vision_config.layer_types": ["full_attention"] * 3,
        "vision_config.layer_norm_eps": 0.1,
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "text_config.rms_norm_eps": 0.1,
    }


@pytest.mark.full
def test_text_of_a_model_that_sees_is_that_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = BASE | TestMuseGlimmer.cases["usual"] | {"model_type": "muse_glimmer_text"}
    see = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MuseGlimmerConfig(
        text_config=text,
        vision_config=see | {"patch_size": 2, "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4},
        out_hidden_size=64,
        projector_hidden_size=12,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    theirs = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens = parity.tokens(53, 24)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert_close(parity.logits(maxlib.from_pretrained(tmp_path, vision=None), tokens), want, 1e-4)
