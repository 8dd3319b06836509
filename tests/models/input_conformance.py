"""Tests of families with images or sound: `Conformance`, with inputs of their own in rows of tokens."""

import json
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import maxlib
from maxlib import sharding
from tests.models import parity
from tests.models.conformance import CLOSE, Conformance, _dtype, _logits, assert_close


class InputConformance(Conformance):
    prompts: ClassVar[tuple[int, ...]]  # of each row, as many tokens as hold all of its inputs
    offset: ClassVar[int | None] = 0  # of positions behind all inputs from the number of tokens, if rows share it

    test_what_a_config_leaves_out_is_as_in_transformers = None
    test_both_spellings_are_read = None  # of the families in turn

    def by_row(self, case: dict[str, Any], *rows: int) -> dict[str, Any]:
        """The inputs of some rows of tokens, a row for each."""
        raise NotImplementedError

    @pytest.mark.full
    def test_transformers_opens_the_export(self, name, made, tmp_path):
        torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, _, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        written = json.loads((tmp_path / "export" / "config.json").read_text())
        if "text_config" in written:  # a default of theirs may lie outside of a tiny vocabulary
            written["text_config"].setdefault("pad_token_id", None)
            (tmp_path / "export" / "config.json").write_text(json.dumps(written))
        theirs, info = parity.auto(case["config"]["model_type"], sees=True).from_pretrained(
            tmp_path / "export", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
        theirs = theirs.to(getattr(torch, self.dtype))
        assert not any(info.values()), info
        ids = torch.from_numpy(case["tokens"]).long()
        with torch.no_grad():
            want = parity.forward(theirs)(**parity.arguments(case, ids, theirs.dtype)).logits.float().numpy()
        assert_close(parity.logits(model, case["tokens"], *parity.inputs_of(case)), want, 1e-4)

    @pytest.mark.full
    def test_rows_of_inputs_and_padding_change_nothing(self, name, made):
        case, _, model = made(name)
        inputs = self.by_row(case, *range(len(self.prompts)))
        assert_close(parity._logits(model, case["tokens"], inputs), case["logits"], 1e-4)

    @pytest.mark.full
    def test_packed_equals_separate(self, name, exact):
        """All rows as documents of one row, with padding behind."""
        case, _, model = exact(name)
        tokens, want = case["tokens"], _logits(model, case["tokens"], None, *parity.inputs_of(case))
        row = np.append(tokens, [0, 0, 0]).astype(np.int32)[None]
        segments = np.repeat([*range(1, len(tokens) + 1), 0], [tokens.shape[1]] * len(tokens) + [3])[None]
        got = _logits(model, row, segments.astype(np.int32), *parity.inputs_of(case))[0, :-3]
        assert_close(got, want.reshape(got.shape), CLOSE)

    @pytest.mark.full
    def test_prefill_and_decode_equal_the_full_pass(self, name, exact):
        """Prompts of different lengths with all of their inputs, more text of one, then token by token."""
        case, _, model = exact(name)
        (rows, length), inputs = case["tokens"].shape, parity.inputs_of(case)
        want, done = _logits(model, case["tokens"], None, *inputs), np.zeros(rows, int)
        got, cache = np.zeros_like(want), model.init_cache(rows, length, dtype=_dtype(model), rope_length=length)
        new, seen = np.array(self.prompts), parity._given(*inputs)
        while new.any():
            at = np.minimum(done[:, None] + np.arange(max(new)), length - 1)
            valid = np.arange(max(new)) < new[:, None]
            tokens = np.where(valid, np.take_along_axis(case["tokens"], at, 1), 0)
            logits, cache = step(model, tokens, valid, cache, seen)
            for row, n in enumerate(new):
                got[row, done[row] : done[row] + n] = np.asarray(logits)[row, :n]
            done += new
            new = np.minimum(3 * (np.arange(rows) == 0) if seen else 1, length - done)
            seen = {}
        if self.offset is not None:
            np.testing.assert_array_equal(0 if cache.position_offset is None else cache.position_offset, self.offset)
        assert_close(got, want, CLOSE)

    @pytest.mark.full
    def test_eight_devices_equal_one(self, exact):
        """Read onto data x fsdp x tensor by the rules; each device has the inputs of its rows."""
        case, directory, model = exact(next(iter(self.cases)))
        layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), self.rules)
        spread = maxlib.from_pretrained(directory, layout=layout, dtype=_dtype(model))
        order = [i % len(self.prompts) for i in range(8)]
        with sharding.use(layout):
            got = _logits(spread, case["tokens"][order], None, **self.by_row(case, *order))
        assert_close(got, _logits(model, case["tokens"], None, *parity.inputs_of(case))[order], CLOSE)


@jax.jit
def step(model, tokens, valid, cache, seen):
    out = model(tokens, valid=valid, cache=cache, dtype=_dtype(model), **seen)
    return model.logits(out.hidden), out.cache
