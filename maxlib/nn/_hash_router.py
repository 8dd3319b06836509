"""A router that chooses experts by a table of token ids (Roller et al. 2021, arXiv:2106.04426; DeepSeek V4)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import draw_key
from maxlib.nn.router import Router, Routing


class HashRouter(Router):
    """Router whose `top_k` experts of a token are stored by its id; scores of the token only weigh them.

    The table is stored with the model and not trained. Its initial values give every expert as many ids as any other.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        vocab: Number of token ids.
        top_k: Experts per token.
        rngs: Source of initial values.
        **options: `score`, `renormalize`, `scale`, `bias` and `init` of a `Router`.
    """

    takes_tokens = True

    def __init__(self, dim: int, num_experts: int, *, vocab: int, top_k: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(dim, num_experts, top_k=top_k, rngs=rngs, **options)
        # Experts at equal distances from a first one, so that those of an id differ.
        first = jax.random.permutation(draw_key(rngs), jnp.arange(vocab)) % num_experts
        experts = (first[:, None] + jnp.arange(top_k)[None] * (num_experts // top_k)) % num_experts
        self.table = nnx.Variable(experts.astype(jnp.int32), axes=("vocab", None))

    def __call__(self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"] | None = None) -> Routing:
        """Returns the routing of tokens.

        Args:
            x: Tokens, `B T D`.
            tokens: Their ids, `B T`.

        Raises:
            ValueError: when there are no ids.
        """
        if tokens is None:
            raise ValueError(
                "a HashRouter needs the ids of tokens, but ctx.tokens is None: set layers_take_tokens = True on the model, "
                "or pass tokens= to nn.make_context"
            )
        # [B, T] -> [B, T, X]
        return self.routing(x, self.table[...][tokens])
