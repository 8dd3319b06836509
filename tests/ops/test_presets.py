"""Which kernels presets run on devices that are not there: proven ones, or the reason why not."""

import jax
import jax.numpy as jnp
import pytest

from maxlib import sharding, weights
from tests.benchmarks import kernels
from tests.nn.tiny import filled_llama

EVERY, GPUS = tuple(kernels.DEVICES), ("A100", "H100", "B200")
TPUS = tuple(device for device in EVERY if device not in GPUS)
# What no proven kernel takes while training, and where. One preset for each kind of layer.
LACKING = {
    "llama3.2-1b": {},
    "gpt2": {},
    "gemma2-2b": {"gradients of a softcap": ("A100", "B200")},
    "gemma4-e2b": {"heads of 512": GPUS},
    "gpt-oss-20b": {},
    "mimo-v2-flash": {},
    "deepseek-v2-lite": {},
    "qwen3.5-0.8b": {"the gated delta rule": ("A100", "B200", *TPUS)},
    "nemotron-3-nano-30b-a3b": {"Mamba-2's recurrence": ("A100", "B200", *TPUS)},
    "kimi-linear-48b-a3b": {"Kimi delta attention": ("A100", "B200", *TPUS)},
    "lfm2-350m": {},
}


# By default one that lacks nothing and one that lacks something; which kernels refuse what is in test_dispatch.
BY_DEFAULT = {"llama3.2-1b", "qwen3.5-0.8b"}
PRESETS = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full) for name in LACKING]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_proven_kernels_or_the_table_says_what_they_lack(preset):
    for row in kernels.rows([preset], ["train"]):
        wanted = {why for why, devices in LACKING[preset].items() if row["device"] in devices}
        assert set(row["lacking"]) == wanted, row
        assert bool(wanted) == bool(set(row["kernels"]) - set(kernels.PROVEN)), row


@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        (sharding.CP_GATHER, {"A100": "tokamax_triton", "B200": "tokamax", "H100": "mosaic_gpu"}),
        (sharding.CP_RING, {"A100": "chunked", "B200": "chunked", "H100": "mosaic_gpu"}),
        (sharding.CP_ULYSSES, dict.fromkeys(GPUS, "cudnn")),
    ],
    ids=["gather", "ring", "heads"],
)
def test_split_sequences_run_what_the_guide_says(strategy, chosen):
    """`docs/guides/parallelism.md` has this table."""
    model, tokens = filled_llama(num_kv_heads=4, head_dim=64), jnp.zeros((2, 256), jnp.int32)
    layout = sharding.Layout(sharding.make_mesh(fsdp=2, context=4), sharding.FSDP | strategy)
    with sharding.use(layout), kernels._recorded("train") as calls:
        jax.eval_shape(lambda model: model(tokens, dtype=jnp.bfloat16).hidden, model)
    with kernels._all_installed():
        for device, name in (chosen | dict.fromkeys(TPUS, "splash")).items():
            assert {call(kernels.DEVICES[device]).name for call in calls.values()} == {name}, device


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_has_the_tables_of_all_presets():
    rows = kernels.rows(list(weights.presets()))
    assert kernels.shares(rows) in kernels.PAGE.read_text(), "run python -m tests.benchmarks.kernels --write"
