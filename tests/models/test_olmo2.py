"""OLMo 2 and 3 against transformers: norms after the layers and over all heads, windows, scaling on full layers
only.
"""

import pytest

from maxlib.models import olmo2
from maxlib.models.olmo2 import FULL, SLIDING
from maxlib.weights import HFConfig
from tests.models import conformance
from tests.models.conformance import NO_TOKENS, YARN, Conformance

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BASE = conformance.BASE | NO_TOKENS  # transformers' embeddings give the padding token no gradient


@pytest.mark.full  # by default its relative below is
class TestOLMo2(Conformance):
    family = "olmo2"
    config = "Olmo2Config"
    base = BASE
    cases = {
        "olmo2": {"vocab_size": 53},
        "olmo2_tied_biases": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": YARN,
        },
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": PLAIN | {"rope_theta": 5e5}}


class TestOLMo3(Conformance):
    family = "olmo2"
    config = "Olmo3Config"
    base = BASE | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 4}
    cases = {"olmo3": {"vocab_size": 53, "rope_parameters": {FULL: YARN, SLIDING: PLAIN}}}
    windows = {"olmo3": {4, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rms_norm_eps": 0.1,
        "rope_parameters": {FULL: YARN | {"factor": 4.0}, SLIDING: PLAIN},
    }
    refused = {"rope_parameters": YARN}


@pytest.mark.parametrize("change", [{"rope_type": "yarn", **YARN}, {"rope_theta": 2e4}], ids=["scaled", "other_theta"])
def test_sliding_layers_rotate_like_full_ones_without_scaling(change):
    fields = {"model_type": "olmo3"} | BASE | {"rope_parameters": {FULL: YARN, SLIDING: PLAIN | change}}
    with pytest.raises(ValueError, match=f"{SLIDING} must be as {FULL} without its scaling"):
        olmo2.FIELDS.read(HFConfig(fields))


@pytest.mark.full
def test_every_fourth_layer_sees_everything():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Olmo3Config(**BASE | {"num_hidden_layers": 9})
    ours = olmo2.FIELDS.read(HFConfig({"model_type": "olmo3"} | BASE | {"num_hidden_layers": 9}))
    assert list(ours.types) == theirs.layer_types
    assert ours.rope.theta == theirs.rope_parameters[FULL]["rope_theta"]
