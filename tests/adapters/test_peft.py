"""PEFT directories: read as PEFT computes them, written so that PEFT reads them, refused where something is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import adapters
from tests.adapters import peft_parity as theirs
from tests.adapters.test_adapters import QUICKLY, trained
from tests.models import parity

BY_DEFAULT = ("llama", "llama_dora", "qwen3_moe_experts")
CASES = [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.full) for n in theirs.CASES]


@jax.jit(compiler_options=QUICKLY)
def logits(model, tokens):
    return model.logits(model(tokens, dtype=jnp.float32).hidden)


@pytest.fixture
def base(tmp_path):
    def read(name):
        return maxlib.from_pretrained(parity.directory(tmp_path / f"base_{name}", theirs.base_case(name)))

    return read


def equal(got, want, atol=5e-5):
    size = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol * max(1.0, float(size)))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name, base, tmp_path):
    model = base(name)
    adapted = adapters.load(model, theirs.directory(tmp_path / "adapter", name))
    tokens = theirs.tokens(model.cfg.vocab)
    got, want = logits(adapted, tokens)[:, -theirs.KEPT :], theirs.golden(name)["logits"]
    equal(got, want)
    assert np.abs(want - logits(model, tokens)[:, -theirs.KEPT :]).max() > 0.05

    # What is written is read as the same, in every layout that the family has.
    layouts = (None, "fused") if "experts" in name and "gpt" not in name else (None,)
    for number, layout in enumerate(layouts):
        try:
            adapters.save(adapted, tmp_path / f"own{number}", experts=layout)
        except ValueError as error:
            assert "no DoRA for fused" in str(error)
            continue
        again = adapters.load(model, tmp_path / f"own{number}")
        equal(logits(again, tokens)[:, -theirs.KEPT :], want)


@pytest.mark.parametrize("name", CASES)
def test_peft_reads_what_is_written(name, base, tmp_path):
    pytest.importorskip("peft")
    model = base(name)
    adapted = trained(adapters.load(model, theirs.directory(tmp_path / "adapter", name)), size=0.1)
    tokens = theirs.tokens(model.cfg.vocab)
    lines = adapters.save(adapted, tmp_path / "own")
    if "ignores" in lines[0]:
        pytest.skip(lines[0])
    path = tmp_path / f"base_{name}"
    got = theirs.their_logits(theirs.their_base(path), tmp_path / "own", tokens)
    equal(logits(adapted, tokens), got)


@pytest.mark.full
@pytest.mark.parametrize("name", theirs.CASES)
def test_golden_arrays_are_what_peft_gives(name, tmp_path):
    pytest.importorskip("peft")
    now, golden = theirs.theirs(name, tmp_path), theirs.golden(name)
    assert now["shapes"] == golden["shapes"]
    equal(now["logits"], golden["logits"], 1e-5)
