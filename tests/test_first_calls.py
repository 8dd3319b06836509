"""A newcomer's first calls: the plausible ones work, and common mistakes raise errors that say what to do, without the
checks of annotations that tests have.
"""

import inspect
import re
import textwrap
import types
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

from maxlib import nn
from maxlib.models import llama
from tests import typecheck

MISTAKES = {
    "nn.Attention(64, num_heads=4)": "missing 2 required keyword-only arguments: 'head_dim' and 'rngs'",
    "nn.Attention(64, num_heads=4, head_dim=16, rngs=0)": "rngs must be an nnx.Rngs, got int 0; nnx.Rngs.0.",
    "nn.Attention(64, num_heads=4, head_dim=16, mask='causal', rngs=rngs)": "such as Causal.. & SlidingWindow.8., got str",
    "nn.Attention(64, num_heads=4, head_dim=16, rope=1e4, rngs=rngs)": "rope must be an ops.Rope, .*got float 10000.0",
    "nn.MLP(64, 128, rngs=jax.random.key(0))": "rngs must be an nnx.Rngs, got PRNGKeyArray",
    "nn.Embed(64, 128, rngs=None)": "rngs must be an nnx.Rngs, got NoneType",
    "nn.MoE(8, 8, router=nn.Router(8, 4, top_k=2, rngs=rngs), rngs=rngs)(jnp.ones((3, 8)))": "one row is x.None",
    "nn.Stack(lambda _, rngs: nn.MLP(8, 8, rngs=rngs), 2, rngs=0)": "rngs must be an nnx.Rngs, got int 0",
    "nn.MoE(8, 8, router=nn.Router(8, 4, top_k=2, rngs=rngs), rngs=0)": "rngs must be an nnx.Rngs, got int 0",
    "nn.MoE(8, 8, router=4, rngs=rngs)": "router must be a router, such as nn.Router.*, got 4",
    "nn.Attention(64, num_heads=4, head_dim=16, mask=ops.Causal, rngs=rngs)": "got the class Causal, .* write Causal..",
    "nn.Attention(64, num_heads=4, head_dim=16, mask=jnp.ones((4, 4)), rngs=rngs)": r"got an array of shape \(4, 4\)",
    "attn(jnp.ones((4, 64)))": r"rows of tokens `B T D`, got x of shape \(4, 64\); one row is x.None",
    "attn(jnp.ones((1, 4, 64)), jnp.ones((4, 4)))": r"ctx must come from nn.make_context\(B, T\), .*a mask is an argument",
    "nn.MLA(64, num_heads=4, kv_rank=8, nope_dim=8, v_dim=8, rope=None, rngs=rngs)": "MLA needs rope=, .*shared_dim=None",
    "sharding.init_sharded(model, sharding.Layout({'fsdp': 1}))": r"a function that builds the model, lambda: Llama\(...\)",
    "ops.SlidingWindow(8.5)": "whole number of tokens, at least 1, got 8.5",
    "ops.Chunked(2.5)": "whole number of tokens, at least 1, got 2.5",
    "sharding.Layout({'fsdp': '8'})": "the degree of mesh axis 'fsdp' must be an integer, got '8'",
    "nn.Attention(64, num_heads=4, head_dim=16, mask=ops.SlidingWindow(8), rngs=rngs)": "write Causal.. & SlidingWindow.window=8.",
    "model.layers[:2]": "a layer's number must be a whole number, got slice",
    "model([[1, 2]])": "tokens must be an array .*got list: pass np.asarray.tokens.",
    "model(((1, 2),))": "tokens must be an array .*got tuple: pass np.asarray.tokens.",
    "model(Tensor())": "tokens must be an array .*got a torch Tensor: pass tokens.numpy..",
    "model('hello')": "tokens .*got text: encode it",
    "model(jnp.array([[1, 2]]), valid=[[True, True]])": "valid must be an array .*got list: pass np.asarray.valid.",
    "model(jnp.array([[1, 2]]), dtype='fp32')": "dtype must be one of jax, .*got 'fp32'; did you mean .float32.",
    "maxlib.from_pretrained(sys.argv[1], dtype='bf16')": "dtype must be one of jax, .*got 'bf16'; did you mean .bfloat16.",
    "maxlib.from_pretrained(sys.argv[1], layout=sharding.FSDP)": "layout must be a sharding.Layout, .*got the strategy FullyShard",
    "sharding.init_sharded(build, mesh)": "layout must be a sharding.Layout, .*got the mesh Mesh",
    "sharding.use(sharding.TP).__enter__()": "layout must be a sharding.Layout, .*got the strategy",
    "sharding.Layout(mesh, sharding.strategies.FullyShard)": "a strategy such as sharding.FSDP, .*a class: write FullyShard..",
    "sharding.Layout(sharding.FSDP)": "a mesh and a strategy, such as sharding.Layout.sharding.make_mesh",
    "training.Trainer(build, adam, loader, layout=sharding.FSDP)": "layout must be a sharding.Layout, .*got the strategy",
    "training.NextToken()(model, (ids, ids))": "a batch must be a dictionary of arrays, .*got tuple",
    "training.NextToken()(model, {'tokens': ids, 'targets': [[2, 3]]})": r"batch\['targets'\] must be an array .*got list",
    "training.shard_batch({'tokens': Tensor()}, None)": r"batch\['tokens'\] must be an array .*a torch Tensor",
    "training.shard_batch((ids, ids), None)": "a batch must be a dictionary of arrays, .*got tuple",
    "training.Trainer(build, adam, loader).writers.append(print)": "has the methods resume.step., write.step, values. and "
    "close.., .*lacks resume, write, close",
    "attend(type('Mine', (ops.Mask,), {})())": "Mine must define interval.tokens. -> .k_start, k_end.",
    "model(jnp.array([[1, 32]]))": r"tokens must be in \[0, 32\), got 32: is this the model's tokenizer",
    "model(jnp.array([[1, -100]]))": r"tokens must be in \[0, 32\), got -100",
    "model(jnp.array([[1, 2]])).logits": r"an Output has no logits: call model.logits\(output.hidden\)",
    "model.logits(model(jnp.array([[1, 2]])))": "an Output has no shape: its hidden states are output.hidden",
    "maxlib.from_pretrained('llama3.1-8b')": "llama3.1-8b is a preset, .*weights.presets..",
    "model.layers[1]": "there is no layer 1: the stack has 1, numbered from 0",
    "nn.MLP(8, 8, act='gelu', rngs=rngs)": "act must be a function, such as jax.nn.gelu, got 'gelu'",
    "nn.GatedMLP(8, 8, act='silu', rngs=rngs)": "act must be a function, .*got 'silu'",
    "llama.Config(num_kv_head=1)": "unexpected keyword argument 'num_kv_head'",
    "llama.Llama(dataclasses.replace(cfg, num_heads=6, num_kv_heads=4), rngs=rngs)": "a multiple of .*got 6 and 4",
    "llama.Llama(dataclasses.replace(cfg, num_kv_heads=0), rngs=rngs)": r"both at least 1; got \d+ and 0",
    "nn.with_attention(model, 'flash')": "implementation must be None or one of chunked, .*got 'flash'",
    "training.trainer": "no attribute 'trainer'; did you mean 'Trainer'",
    "maxlib.from_pretrain": "no attribute 'from_pretrain'; did you mean 'from_pretrained'",
    "maxlib.models.llama5x": "did you mean 'llama",
    "weights.presets()['llama3.1_8B']": "no preset is called 'llama3.1_8B'; did you mean 'llama3.1-8b'",
    "adapters.add(model, 'lora', rngs=rngs)": r"rules must be a LoRA, such as LoRA\(16, alpha=32\), or Rules, got 'lora'",
    "adapters.add(model, adapters.Rule(adapters.LoRA(4, 8), '*.q_proj'), rngs=rngs)": "Did you mean layers.attn.q\\?",
    "adapters.add(model, adapters.Rule(adapters.LoRA(4, 8), ['q', 'v']), rngs=rngs)": "match must be one pattern, .*got ..q., .v..",
    "train(training.NextToken)": r"or a training.Loss, such as training.NextToken\(\), got <class",
    "training.NextToken()(model, {'tokens': jnp.ones((1, 4), int)})": r"reads batch\['targets'\], the token that follows",
    "training.Trainer(build, optimizer=adam, loader=loader, loss='ce')": "loss must be a function .*got 'ce'",
    "training.adamw('1e-3')": "learning_rate must be a number or a schedule .*got '1e-3'",
    "training.adamw(1e-3, mask=True)": "mask must be None, a dictionary or a function .*got True",
    "training.adamw(1e-3, clip=-1.0)": "clip must be positive, or None for no clipping, got -1.0",
    "training.make_state(cfg, adam)": "a model must have parameters to train, got Config",
    "training.make_state(build, 'adamw')": "optimizer must be an optax.GradientTransformation, .*training.adamw.1e-3., got 'adamw'",
    "training.make_state(build, training.adamw)": "optimizer must be an optax.GradientTransformation, .*got <function adamw",
    "training.make_state(build, adam, filter='norm')": "filter must be a function .*got 'norm'",
    "training.make_state(build, adam, filter=lambda *_: False)": "selected no parameters; nn.tree.pattern_paths",
    "training.Trainer(build, optimizer=adam)": "missing 1 required positional argument: 'loader'",
    "training.Trainer(build, optimizer=adam, loader=[])": "loader must have at least one batch, got an empty list",
    "training.Trainer(build, optimizer=adam, loader={'tokens': ids})": "an iterable of batches, such as a list; got dict",
    "training.Trainer(cfg, optimizer=adam, loader=loader)": "model must be an nnx.Module, a pytree of them or a function .*got Config",
    "training.Trainer(build, optimizer=adam, loader=loader, callbacks=[print])": "pairs .every, function., .*got <built-in",
    "training.Trainer(build, optimizer=adam, loader=loader, callbacks=[(None, print)])": "pairs .every, function., .*got .None",
    "training.Trainer(build, optimizer=adam, loader=loader, evaluation=loader)": "must be a training.Evaluation.loader, every=100., got",
    "training.Evaluation([])": "Evaluation.loader must have at least one batch, got an empty list",
    "training.Evaluation(iter([1]))": "reads its batches from the first one each time, which a list_iterator cannot",
    "training.Evaluation(loader, every=-1)": "every of at least 0 and at least one batch, got every=-1",
    "training.make_train_step(training.NextToken(), adam, microbatches=0)": "at least one microbatch, got 0",
    "training.Trainer(build, optimizer=adam, loader=loader, checkpointer='run')": "Checkpointer.directory. or Tiers, got 'run'",
    "train(lambda model, batch, key: jnp.sum(model(batch['tokens']).hidden))": "must return its sum .*and a training.Stats",
    "data.Loader(documents, batch_size=2)": "rows_of_shard must be a function .*got RepeatMapDataset",
    "data.tokenize(documents, 'gpt2')": "tokenizer must be one, .*got the name 'gpt2'",
    "data.in_memory('hello')": "got one string: put it in a list",
    "inference.generate(model, ['hi'], max_new_tokens=2)": "must consist of integer ids, got text: encode text first",
}  # fmt: skip
BEGINNING = """
    import dataclasses, functools
    import jax, jax.numpy as jnp, maxlib
    from flax import nnx
    from maxlib import adapters, data, inference, nn, ops, post_training, save_pretrained, sharding, training, weights
    from maxlib.models import llama
    from tests.nn.tiny import filled

    rope = ops.Rope(8, max_length=16)
    cfg = llama.Config(vocab=32, num_layers=1, dim=16, mlp_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, rope=rope)
    build = lambda: llama.Llama(cfg, rngs=nnx.Rngs(0))
    model, adam, rngs = filled(build), training.adamw(1e-3), nnx.Rngs(0)
    Tensor = type('Tensor', (), {'__module__': 'torch'})
    mesh, ids = sharding.make_mesh(fsdp=-1), jnp.array([[1, 2]])
    attend = lambda mask: nn.Attention(8, num_heads=1, head_dim=8, mask=mask, rngs=rngs)(jnp.ones((1, 4, 8)))
    attn = nn.Attention(64, num_heads=4, head_dim=16, rngs=rngs)
    documents = data.in_memory([list(range(1, 30))]).repeat()
    loader = data.Loader(lambda part: data.pack(documents[part], length=8), batch_size=2, num_shards=1)

    def train(loss):
        step = training.make_train_step(loss, adam)
        return jax.eval_shape(step, training.make_state(build, adam), next(loader))

    train(training.NextToken())
    save_pretrained(model, sys.argv[1])
"""


@pytest.fixture(autouse=True, scope="module")
def _as_at_home():
    with typecheck.switched_off(), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Iterator[dict]:
    names = {"sys": types.SimpleNamespace(argv=["program", str(tmp_path_factory.mktemp("first") / "model")])}
    exec(textwrap.dedent(BEGINNING), names)
    yield names
    names["loader"].close()


def test_notebooks_show_the_arguments_of_layers():
    """As `nn.MLP?` does; flax alone shows (*args, **kwargs)."""

    class Mine(nn.MLP):
        def __init__(self, width: int, *, rngs: nnx.Rngs):
            super().__init__(width, 4 * width, rngs=rngs)

    of = lambda what: list(inspect.signature(what).parameters)
    assert of(nn.MLP) == ["dim", "mlp_dim", "act", "bias", "rngs"] and of(Mine) == ["width", "rngs"]
    assert of(llama.Llama) == ["cfg", "rngs"] and of(nn.Attention)[:2] == ["dim", "num_heads"]
    assert of(Mine(4, rngs=nnx.Rngs(0))) == ["x"]


@pytest.mark.parametrize("call", MISTAKES)
def test_a_mistake_is_named(call, names):
    errors = AttributeError, LookupError, OSError, NotImplementedError, TypeError, ValueError
    with pytest.raises(errors) as caught:
        eval(call, names)
    assert re.search(MISTAKES[call], str(caught.value))
