"""The base class of decoder-only models with modules for multi-token prediction."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.nn.cache import Cache
from maxlib.nn.decoder._decoder import Decoder
from maxlib.nn.decoder._mtp import MTP, MTPOutput, draft, predict_ahead


class MTPDecoder(Decoder):
    """Decoder with multi-token prediction modules; the first of them can draft.

    Attributes:
        mtp: The modules, which predict 2, 3, ... tokens ahead.
    """

    mtp: Sequence[MTP] = ()

    def predict_ahead(self, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"], **inputs: Any) -> list[MTPOutput]:
        """Predicts further ahead from the final `hidden`.

        Args:
            hidden: The model's output, `B T D`.
            tokens: Ids, `B T`.
            inputs: `positions`, `segment_ids`, `valid`, `remat`.

        Returns:
            One output per module (`nn.mtp.predict_ahead`).
        """
        # The modules share the model's embedding.
        return predict_ahead(self.mtp, self.embed, hidden, tokens, ropes=self.ropes, **inputs)

    def draft(self, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"], **inputs: Any):
        """Drafts with the first module while decoding (`nn.mtp.draft`); `inputs` are `cache` and `valid`."""
        return draft(self._drafter, self.embed, hidden, tokens, masks=self.masks, ropes=self.ropes, **inputs)

    def init_draft_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16) -> Cache:
        """Makes an empty cache of the first module."""
        layers = self._drafter.init_cache(batch, capacity, dtype)
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    @property
    def _drafter(self) -> MTP:
        """Returns the first module; raises ValueError if there is none."""
        if not len(self.mtp):
            raise ValueError(f"this {type(self).__name__} has no MTP module to draft with: load it with num_mtp=1")
        return self.mtp[0]
