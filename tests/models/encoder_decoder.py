"""The conformance of families with an encoder and a decoder, and that of encoders alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import inference, nn, sharding
from tests.models import parity
from tests.models.conformance import CLOSE, SEQ, Conformance, _forward, _step, assert_close


class EncoderConformance(Conformance):
    """An encoder reads whole sequences: it has no cache."""

    test_prefill_and_decode_equal_the_full_pass = None

    def test_it_has_no_cache(self, made):
        _, _, model = made(next(iter(self.cases)))
        with pytest.raises(ValueError, match="is an encoder, which has no cache"):
            model.init_cache(1, 8)


class EncoderDecoderConformance(Conformance):
    """What the encoder reads is that of `parity.inputs_of`."""

    test_both_spellings_are_read = None  # of rotary embeddings, which they have none of

    @staticmethod
    def read(case) -> dict:
        return parity._given(*parity.inputs_of(case))

    @staticmethod
    def rows(read: dict, rows: slice) -> dict:
        """The same for some of the rows."""

        def some(x):
            return None if x is None else x[rows]

        if "source" in read:
            return {
                "source": nn.Source(*(some(getattr(read["source"], n)) for n in ("tokens", "segment_ids", "valid")))
            }
        return {"audio": nn.audio.Clips(some(read["audio"].frames), some(read["audio"].lengths))}

    @pytest.mark.full
    def test_transformers_opens_the_export(self, name, made, tmp_path):
        """Nothing is missing or left over, and it computes and generates what we do."""
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, _, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        theirs, info = parity.auto(case["config"]["model_type"]).from_pretrained(
            tmp_path / "export", attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        arguments = parity.arguments(case, torch.from_numpy(case["tokens"]).long(), torch.float32)
        theirs.generation_config.eos_token_id = None  # write to the end
        with torch.no_grad():
            want = theirs.float()(**arguments).logits.numpy()
            read = {name: x for name, x in arguments.items() if not name.startswith("decoder")}
            texts = transformers.GenerationMixin.generate(
                theirs, **read, decoder_start_token_id=3, max_new_tokens=12, do_sample=False
            )
        assert_close(parity.logits(model, case["tokens"], *parity.inputs_of(case)), want, 1e-4)
        generator = inference.Generator(model, dtype=jnp.float32)
        got = generator.generate([[3], [3]], max_new_tokens=12, **self.read(case))
        assert got == texts[:, 1:].tolist()

    @pytest.mark.full
    def test_prefill_and_decode_equal_the_full_pass(self, name, made):
        """Rows of different lengths; only the first call reads the encoder's input."""
        case, _, model = made(name)
        tokens, read = case["tokens"], self.read(case)
        want = np.asarray(_forward(model, tokens, read))
        cache = model.init_cache(2, SEQ, dtype=jnp.float32)
        valid = np.arange(5) < np.array([[5], [3]])
        out = model(jnp.asarray(tokens[:, :5]), valid=jnp.asarray(valid), cache=cache, dtype=jnp.float32, **read)
        done, cache = np.array([5, 3]), out.cache
        assert_close(np.asarray(model.logits(out.hidden))[valid], want[:, :5][valid], CLOSE)
        while done[1] < SEQ:
            new = done < SEQ
            at = np.minimum(done, SEQ - 1)[:, None]
            logits, cache = _step(model, np.take_along_axis(tokens, at, 1), new[:, None], cache)
            for row in np.flatnonzero(new):
                assert_close(np.asarray(logits)[row, 0], want[row, done[row]], CLOSE)
            done += new

    @pytest.mark.full
    def test_packed_equals_separate(self, name, made):
        """Documents with their sources in one row, and beside each other with padding, also on the left."""
        case, _, model = made(name)
        read, tokens, cut = self.read(case), case["tokens"], SEQ // 3
        if "source" not in read:
            pytest.skip("sound is not packed: each row hears one clip")
        source = read["source"]
        texts, sources = (
            [tokens[0], tokens[1, :cut]],
            [ids[real] for ids, real in zip(source.tokens, source.valid, strict=True)],
        )
        want = [
            np.asarray(_forward(model, text[None], {"source": nn.Source(other[None])}))[0]
            for text, other in zip(texts, sources, strict=True)
        ]
        zeros = np.zeros(2, np.int32)
        row = np.concatenate([texts[0], texts[1], zeros])[None]
        ids = np.repeat(np.array([1, 2, 0], np.int32), [SEQ, cut, 2])[None]
        other = nn.Source(
            np.concatenate([sources[0], zeros, sources[1], zeros])[None],
            segment_ids=np.repeat(np.array([1, 0, 2, 0], np.int32), [len(sources[0]), 2, len(sources[1]), 2])[None],
        )
        got = np.asarray(_forward(model, row, {"segment_ids": ids, "source": other}))[0]
        assert_close(got[: SEQ + cut], np.concatenate(want), CLOSE)
        left = np.concatenate([np.zeros(SEQ - cut, np.int32), texts[1]])
        valid = np.arange(SEQ) >= np.array([[0], [SEQ - cut]])
        got = np.asarray(_forward(model, np.stack([texts[0], left]), {"valid": valid, "source": source}))
        assert_close(got[1, SEQ - cut :], want[1], CLOSE)

    @pytest.mark.filterwarnings("ignore:nothing is split over")
    @pytest.mark.full
    def test_eight_devices_equal_one(self, made):
        """Read onto data x fsdp x tensor by the rules."""
        case, directory, model = made(next(iter(self.cases)))
        layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), self.rules)
        spread = maxlib.from_pretrained(directory, layout=layout)
        double = {
            name: type(x)(*(None if a is None else np.tile(a, (2,) + (1,) * (a.ndim - 1)) for a in vars(x).values()))
            for name, x in self.read(case).items()
        }
        tokens = np.tile(case["tokens"], (2, 1))
        with sharding.use(layout):
            got = _forward(spread, tokens, double)
        assert_close(got, _forward(model, tokens, double), CLOSE)

    def test_a_decoder_alone_is_an_error(self, made):
        case, _, model = made(next(iter(self.cases)))
        with pytest.raises(ValueError, match="needs the output of an encoder"):
            jax.eval_shape(lambda tokens: model(tokens), case["tokens"])
