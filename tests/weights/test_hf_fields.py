"""Configurations that declare their fields' names in config.json: both directions, defaults, and errors."""

from dataclasses import dataclass
from typing import Any

import pytest

from maxlib.ops import Rope
from maxlib.weights import (
    REQUIRED,
    HFConfig,
    ModelConfig,
    hf,
    hf_fields,
    hf_layer_types,
    hf_max_window_layers,
    hf_rope,
    hf_switched_window,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    model_types = ("toy", "toy_old")
    architecture = "ToyForCausalLM"
    fixed = {"hidden_act": ("silu", "swish"), "tower.act": "gelu"}
    fixed_if_present = {"use_mrope": False}
    ignored = ("tower.head",)

    dim: int = hf("hidden_size")
    num_heads: int = hf("num_attention_heads", same=("n_ctx",))
    head_dim: int = hf("head_dim", absent=lambda c: c.dim // c.num_heads)
    num_kv_heads: int = hf("num_key_value_heads", 3, absent=1, null=lambda c: c.num_heads)
    chunk: int = hf("chunk", 5, null=REQUIRED)
    eps: float = hf("rms_norm_eps", 1e-5, absent=1e-6)
    cap: float | None = hf("softcap", 30.0)
    skipped: tuple[int, ...] = hf("skipped", ())
    width: int = hf("tower.width", 7)
    power: int = hf_fields(
        lambda f, c: f.take("log_power", 3) ** 2, lambda value, cfg: {"log_power": round(value**0.5)}
    )
    losses: tuple[Any, ...] = ()


MINIMAL = {"model_type": "toy", "hidden_size": 12, "num_attention_heads": 3, "tower": {}}


def read(**changes: Any) -> Config:
    fields = HFConfig(MINIMAL | changes)
    cfg = Config.from_hf(fields)
    fields.done()
    return cfg


def test_what_a_config_leaves_out():
    want = dict(head_dim=4, num_kv_heads=1, chunk=5, eps=1e-6, cap=30.0, skipped=(), width=7, power=9)
    assert read() == Config(dim=12, num_heads=3, **want)
    made = Config(dim=12, num_heads=3, head_dim=4, power=9)
    assert (made.eps, made.num_kv_heads) == (1e-5, 3)  # the constructor's own defaults


def test_what_null_means():
    assert read(num_key_value_heads=None).num_kv_heads == 3
    assert read(softcap=None).cap is None
    assert read(rms_norm_eps=None, head_dim=None) == read()
    with pytest.raises(ValueError, match="chunk must be given, but it is null"):
        read(chunk=None)


def test_written_fields_are_read_back():
    cfg = read(rms_norm_eps=1, softcap=None, skipped=[1, 4], tower={"width": 5, "head": 3}, log_power=4, n_ctx=3)
    assert (cfg.eps, cfg.skipped, cfg.width, cfg.power) == (1.0, (1, 4), 5, 16)
    written = cfg.to_hf()
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
    fields = HFConfig(written)
    assert Config.from_hf(fields) == cfg
    fields.done()


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
    assert Config.required() == ["hidden_size", "num_attention_heads"]
    for name in Config.required():
        with pytest.raises(ValueError, match=f"{name} must be given, but it is missing"):
            Config.from_hf(HFConfig({key: value for key, value in MINIMAL.items() if key != name}))


@dataclass(frozen=True, kw_only=True)
class Layered(ModelConfig):
    """In turn, with a rope for each kind of layer."""

    num_layers: int = hf("num_hidden_layers")
    head_dim: int = hf("head_dim")
    rope: Rope = hf_rope(layer_type=FULL, default_theta=1e6)
    local_rope: Rope = hf_rope(layer_type=SLIDING, theta_field="rope_local_base_freq", scaling_field=None)
    window: int | None = hf("sliding_window", None)
    layer_types: tuple[str, ...] | None = hf_layer_types(
        FULL, SLIDING, usual=lambda c: tuple(SLIDING if i % 2 else FULL for i in range(c.num_layers))
    )


def test_layers_of_two_kinds():
    ropes = dict(rope=Rope(8, 1e6, max_length=64), local_rope=Rope(8, 1e4, max_length=64))
    cfg = Layered(num_layers=3, head_dim=8, window=4, **ropes)
    written = cfg.to_hf()
    assert written["layer_types"] == [FULL, SLIDING, FULL]
    assert written["rope_parameters"] == {
        FULL: {"rope_type": "default", "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (1e6, 1e4)
    old = {name: value for name, value in written.items() if name not in ("rope_parameters", "layer_types")}
    assert Layered.from_hf(HFConfig(written)) == Layered.from_hf(HFConfig(old)) == cfg  # usual ones become None
    other = Layered.from_hf(HFConfig(written | {"layer_types": [SLIDING] * 3}))
    assert other.layer_types == (SLIDING,) * 3
    assert other.to_hf()["layer_types"] == [SLIDING] * 3


def test_layer_types_fit_the_layers():
    ropes = dict(rope=Rope(8, max_length=64), local_rope=Rope(8, max_length=64))
    with pytest.raises(ValueError, match="layer_types must name 3 layers, got 2"):
        Layered(num_layers=3, head_dim=8, window=4, layer_types=(FULL,) * 2, **ropes)
    with pytest.raises(ValueError, match="layer_types has sliding_attention, which needs a window"):
        Layered(num_layers=1, head_dim=8, layer_types=(SLIDING,), **ropes)


@dataclass(frozen=True, kw_only=True)
class Windowed(ModelConfig):
    num_layers: int = hf("num_hidden_layers")
    layer_types: tuple[str, ...] | None = hf_max_window_layers(FULL, absent=1, window=9)
    window: int | None = hf_switched_window(absent=9)


@pytest.mark.parametrize(
    ("fields", "types", "window"),
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
def test_windows_of_the_upper_layers(fields, types, window):
    config = HFConfig({"num_hidden_layers": 3} | fields)
    cfg = Windowed.from_hf(config)
    config.done()
    assert (cfg.layer_types, cfg.window) == (types, window)
    written = cfg.to_hf()
    assert written["max_window_layers"] == written["layer_types"].count(FULL)
    assert written["use_sliding_window"] == (window is not None)
    assert Windowed.from_hf(HFConfig(written)) == cfg


def test_an_attribute_that_nothing_reads_is_an_error():
    with pytest.raises(TypeError, match=r"Typo\.fixd has no effect: did you mean fixed\?"):
        type("Typo", (Config,), {"fixd": {"hidden_act": "silu"}})
    with pytest.raises(TypeError, match=r"Bare\.depth has no effect: a field needs an annotation"):
        type("Bare", (Config,), {"depth": hf("num_layers")})
    type("Fine", (Config,), {"fixed": {}, "width": 3, "_own": 1, "total": property(lambda self: 1)})


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (2, 4), (4, 0), (0, 0), (4, -2)])
def test_heads_that_do_not_divide_are_refused_before_a_layer_is_built(heads, kv_heads):
    both = rf"num_heads \(num_attention_heads\) .*num_kv_heads \(num_key_value_heads\).* got {heads} and {kv_heads}$"
    with pytest.raises(ValueError, match=both):
        Config(dim=12, num_heads=heads, head_dim=4, num_kv_heads=kv_heads, power=9)
