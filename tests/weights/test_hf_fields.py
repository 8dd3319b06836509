"""Configurations that declare their fields' names in config.json: both directions, defaults, and errors."""

from dataclasses import dataclass
from typing import Any

import pytest

from maxlib.ops import Rope
from maxlib.weights import REQUIRED, Computed, Field, Fields, HFConfig, Multimodal, fields

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Config:
    dim: int
    num_heads: int
    head_dim: int
    num_kv_heads: int = 3
    chunk: int = 5
    eps: float = 1e-5
    cap: float | None = 30.0
    skipped: tuple[int, ...] = ()
    width: int = 7
    power: int
    losses: tuple[Any, ...] = ()


ENTRIES = [
    Field("dim", "hidden_size"),
    Field("num_heads", "num_attention_heads"),
    Field("head_dim"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("chunk"),
    Field("eps", "rms_norm_eps"),
    Field("cap", "softcap"),
    Field("skipped"),
    *fields.under("tower", [Field("width")]),
    Computed("power", lambda hf, c: hf.take("log_power", 3) ** 2, lambda value, cfg: {"log_power": round(value**0.5)}),
]
FIELDS = Fields(
    Config,
    ENTRIES,
    model_types={"toy": "ToyForCausalLM", "toy_old": "ToyForCausalLM"},
    fixed={"hidden_act": ("silu", "swish"), "tower.act": "gelu", "n_ctx": fields.num_heads},
    fixed_if_present={"use_mrope": False, "absent.kind": "x"},
    ignored=("tower.head", "absent.other"),
    absent={"head_dim": fields.equal_heads, "num_kv_heads": 1, "eps": 1e-6},
    null={"num_kv_heads": fields.num_heads, "chunk": REQUIRED},
)


MINIMAL = {"model_type": "toy", "hidden_size": 12, "num_attention_heads": 3, "tower": {}}


def read(**changes: Any) -> Config:
    hf = HFConfig(MINIMAL | changes)
    cfg = FIELDS.read(hf)
    hf.done()
    return cfg


def test_what_a_config_leaves_out():
    want = dict(head_dim=4, num_kv_heads=1, chunk=5, eps=1e-6, cap=30.0, skipped=(), width=7, power=9)
    assert read() == Config(dim=12, num_heads=3, **want)
    made = Config(dim=12, num_heads=3, head_dim=4, power=9)
    assert (made.eps, made.num_kv_heads) == (1e-5, 3)  # the constructor's own defaults


def test_heads_divide_the_width_or_say_how_wide_they_are():
    assert read(hidden_size=13, head_dim=5).head_dim == 5
    for changes in ({}, {"head_dim": None}):
        with pytest.raises(ValueError, match="must divide hidden_size, or head_dim say .* got 3 heads for 13"):
            read(hidden_size=13, **changes)


def test_what_null_means():
    assert read(num_key_value_heads=None).num_kv_heads == 3
    assert read(softcap=None).cap is None
    assert read(rms_norm_eps=None, head_dim=None) == read()
    with pytest.raises(ValueError, match="chunk must be given, but it is null"):
        read(chunk=None)


def test_written_fields_are_read_back():
    cfg = read(rms_norm_eps=1, softcap=None, skipped=[1, 4], tower={"width": 5, "head": 3}, log_power=4, n_ctx=3)
    assert (cfg.eps, cfg.skipped, cfg.width, cfg.power) == (1.0, (1, 4), 5, 16)
    written = FIELDS.write(cfg)
    assert written == {
        "architectures": ["ToyForCausalLM"],
        "model_type": "toy",
        "hidden_act": "silu",
        "hidden_size": 12,
        "num_attention_heads": 3,
        "n_ctx": 3,
        "head_dim": 4,
        "num_key_value_heads": 1,
        "chunk": 5,
        "rms_norm_eps": 1.0,
        "softcap": None,
        "skipped": [1, 4],
        "tower": {"act": "gelu", "width": 5},
        "log_power": 4,
    }
    hf = HFConfig(written)
    assert FIELDS.read(hf) == cfg
    hf.done()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "other"}, "model_type must be 'toy' or 'toy_old', got 'other'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or 'swish', got 'gelu'"),
        ({"use_mrope": True}, "use_mrope must be False, got True"),
        ({"tower": {"act": "silu"}}, "tower.act must be 'gelu', got 'silu'"),
        ({"tower": {"width": "7"}}, 'tower.width must be of type int, got "7"'),
        ({"tower": {"depth": 7}}, "tower.depth = 7"),
        ({"unknown": 1}, "unknown = 1"),
        ({"hidden_size": None}, "hidden_size must be given, but it is null"),
        ({"hidden_size": 12.0}, "hidden_size must be of type int, got 12.0"),
        ({"n_ctx": 4}, "n_ctx must be 3, got 4"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be of type float, got true"),
        ({"softcap": "x"}, 'softcap must be of type float, got "x"'),
        ({"skipped": 3}, "skipped must be of type list, got 3"),
    ],
)
def test_what_is_refused_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_required_fields_are_known():
    assert FIELDS.required == ["hidden_size", "num_attention_heads"]
    for name in FIELDS.required:
        with pytest.raises(ValueError, match=f"{name} must be given, but it is missing"):
            FIELDS.read(HFConfig({key: value for key, value in MINIMAL.items() if key != name}))


@dataclass(frozen=True, kw_only=True)
class Layered:
    """In turn, with a rope for each kind of layer."""

    num_layers: int
    head_dim: int
    rope: Rope
    local_rope: Rope
    window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self):
        fields.check_layer_types(self)


LAYERED = Fields(
    Layered,
    [
        Field("num_layers", "num_hidden_layers"),
        Field("head_dim"),
        fields.rope(layer_type=FULL, default_theta=1e6),
        fields.rope("local_rope", layer_type=SLIDING, theta_field="rope_local_base_freq", scaling_field=None),
        fields.WINDOW,
        fields.layer_types(
            FULL, SLIDING, usual=lambda c: tuple(SLIDING if i % 2 else FULL for i in range(c.num_layers))
        ),
    ],
)


def test_layers_of_two_kinds():
    ropes = dict(rope=Rope(8, 1e6, max_length=64), local_rope=Rope(8, 1e4, max_length=64))
    cfg = Layered(num_layers=3, head_dim=8, window=4, **ropes)
    written = LAYERED.write(cfg)
    assert written["layer_types"] == [FULL, SLIDING, FULL]
    assert written["rope_parameters"] == {
        FULL: {"rope_type": "default", "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (1e6, 1e4)
    old = {name: value for name, value in written.items() if name not in ("rope_parameters", "layer_types")}
    assert LAYERED.read(HFConfig(written)) == LAYERED.read(HFConfig(old)) == cfg  # usual ones become None
    other = LAYERED.read(HFConfig(written | {"layer_types": [SLIDING] * 3}))
    assert other.layer_types == (SLIDING,) * 3
    assert LAYERED.write(other)["layer_types"] == [SLIDING] * 3


def test_layer_types_fit_the_layers():
    ropes = dict(rope=Rope(8, max_length=64), local_rope=Rope(8, max_length=64))
    with pytest.raises(ValueError, match="layer_types must name 3 layers, got 2"):
        Layered(num_layers=3, head_dim=8, window=4, layer_types=(FULL,) * 2, **ropes)
    with pytest.raises(ValueError, match="layer_types has sliding_attention, which needs a window"):
        Layered(num_layers=1, head_dim=8, layer_types=(SLIDING,), **ropes)


@dataclass(frozen=True, kw_only=True)
class Windowed:
    num_layers: int
    layer_types: tuple[str, ...] | None = None
    window: int | None = None


WINDOWED = Fields(
    Windowed,
    [Field("num_layers", "num_hidden_layers"), *fields.upper_layers_slide(FULL, absent=1, window=9)],
)


@pytest.mark.parametrize(
    ("stored", "types", "window"),
    [
        ({}, None, None),
        ({"sliding_window": 4, "max_window_layers": 0}, None, None),  # not turned on
        ({"use_sliding_window": True}, (FULL, SLIDING, SLIDING), 9),
        ({"use_sliding_window": True, "sliding_window": None}, None, None),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, (FULL, FULL, SLIDING), 4),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}, None, None),
        ({"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL]}, (SLIDING, FULL, FULL), 9),
    ],
    ids=str,
)
def test_windows_of_the_upper_layers(stored, types, window):
    config = HFConfig({"num_hidden_layers": 3} | stored)
    cfg = WINDOWED.read(config)
    config.done()
    assert (cfg.layer_types, cfg.window) == (types, window)
    written = WINDOWED.write(cfg)
    assert written["max_window_layers"] == written["layer_types"].count(FULL)
    assert written["use_sliding_window"] == (window is not None)
    assert WINDOWED.read(HFConfig(written)) == cfg


def test_misspelt_names_are_errors():
    with pytest.raises(TypeError, match="has no field 'num_head'; it has dim, num_heads"):
        Fields(Config, [Field("num_head", "num_attention_heads")])
    with pytest.raises(TypeError, match="has no field 'epsilon'"):
        Fields(Config, ENTRIES, absent={"epsilon": 1e-6})
    with pytest.raises(TypeError, match="one entry, got several for dim"):
        Fields(Config, [*ENTRIES, Field("dim", "width")])
    with pytest.raises(TypeError, match="fixd"):
        Fields(Config, ENTRIES, fixd={"hidden_act": "silu"})


SEEING = Multimodal(
    FIELDS,
    {"losses": Fields(Windowed, [Field("num_layers", "vision_config.depth")])},
    model_types={"toy_vl": "ToyForConditionalGeneration"},
    fixed={"vision_config.out_size": lambda c: c.dim},
    ignored=["tie_word_embeddings"],
)


def test_text_beside_an_encoder():
    config = {"model_type": "toy_vl", "text_config": MINIMAL, "vision_config": {"depth": 2, "out_size": 12}}
    hf = HFConfig(config)
    cfg = SEEING.read(hf)
    hf.done()
    assert (cfg.dim, cfg.losses.num_layers) == (12, 2)
    assert SEEING.read(HFConfig(MINIMAL)) == read()  # the text alone
    with pytest.raises(ValueError, match="vision_config.out_size must be 12, got 13"):
        SEEING.read(HFConfig(config | {"vision_config": {"depth": 2, "out_size": 13}}))
