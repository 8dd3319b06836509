"""Pictures that the pages draw from models."""

import jax
from flax import nnx

from maxlib import nn
from maxlib.models import llama


def llama_3_1_8b() -> str:
    model = jax.eval_shape(lambda: llama.Llama(llama.PRESETS["llama3.1-8b"], rngs=nnx.Rngs(0)))
    return f"{nn.draw(model).svg}\n<p><code>nn.draw(model)</code> of Llama 3.1 8B</p>"
