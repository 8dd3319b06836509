"""Every axis of a mesh alone and mixed, for four kinds of models on eight devices: the loss and gradients of one device,
the bytes that a device holds, and which collectives the compiled program has."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek, gemma2, llama, mixtral
from maxlib.plan.hlo import Costs, read_costs
from tests.training.tiny import QUICKLY

SIZE = {"vocab": 64, "dim": 32, "num_heads": 8}
GROUPED = SIZE | {"num_kv_heads": 4, "head_dim": 8, "rope": ops.Rope(8)}


def dense(num_layers: int):
    return llama.Llama(llama.Config(**GROUPED, num_layers=num_layers, mlp_dim=64), rngs=nnx.Rngs(0))


def experts(num_layers: int):
    cfg = mixtral.Config(**GROUPED, num_layers=num_layers, expert_dim=16, num_experts=8, top_k=2)
    return mixtral.Mixtral(cfg, rngs=nnx.Rngs(0))


def latent(num_layers: int):
    """Latent attention; a dense layer, then experts beside a shared one."""
    ranks = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "v_dim": 8, "rope": ops.Rope(4)}
    sizes = {"num_layers": num_layers + 1, "num_dense": 1, "mlp_dim": 64, "expert_dim": 16}
    routing = {"num_experts": 8, "num_shared": 1, "top_k": 2, "renormalize": True}
    return deepseek.DeepSeek(deepseek.Config(version=3, **SIZE, **ranks, **sizes, **routing), rngs=nnx.Rngs(0))


def sliding(num_layers: int):
    """Every other layer sees nine tokens only."""
    cfg = gemma2.Config(**GROUPED, num_layers=2 * num_layers, mlp_dim=64, window=9)
    return gemma2.Gemma2(cfg, rngs=nnx.Rngs(0))


MODELS = {"dense": dense, "experts": experts, "latent": latent, "sliding": sliding}
RULES = {
    "data": sharding.DP,
    "fsdp": sharding.FSDP,
    "tensor": sharding.TP,
    "sequence": sharding.SP,
    "expert": sharding.EP,
    "gather": sharding.CP_GATHER,
    "ring": sharding.CP_RING,
    "heads": sharding.CP_HEADS,
    "stage": {"layers": sharding.Pipeline("stage", microbatches=2)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and the kinds of parallelism on it."""

    name: str
    degrees: tuple[tuple[str, int], ...]
    kinds: tuple[str, ...]

    @property
    def mesh(self) -> Any:
        degrees = dict(self.degrees)
        return sharding.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])

    @property
    def num_layers(self) -> int:
        return 4 if dict(self.degrees).get("stage", 1) == 4 else 2

    @property
    def rules(self) -> sharding.Rules:
        """All tables together; where two name the same axis, it takes the mesh axes of both."""
        joined: dict[str, Any] = {}
        for kind in self.kinds:
            joined |= RULES[kind]
        return joined


def case(*kinds: str, **degrees: int) -> Case:
    return Case("+".join(kinds), tuple(degrees.items()), kinds)


ALONE = [
    case("data", data=8),
    case("fsdp", fsdp=8),
    case("data", "tensor", tensor=4),
    case("data", "tensor", "sequence", tensor=4),
    case("expert", expert=8),
    case("data", "gather", context=4),
    case("data", "ring", context=4),
    case("data", "heads", context=4),
    case("data", "stage", stage=4),
]
# Every pair of axes meets in one of the first six.
MIXED = [
    case("fsdp", "tensor", "ring", fsdp=2, tensor=2, context=2),
    case("tensor", "expert", fsdp=2, tensor=2, expert=2),
    case("fsdp", "stage", data=2, fsdp=2, stage=2),
    case("tensor", "sequence", "stage", data=2, tensor=2, stage=2),
    case("expert", "gather", "stage", expert=2, context=2, stage=2),
    case("expert", "heads", data=2, expert=2, context=2),
    case("fsdp", "ring", "stage", fsdp=2, context=2, stage=2),
    case("tensor", "expert", "stage", tensor=2, expert=2, stage=2),
    case("tensor", "heads", data=2, tensor=2, context=2),
]


def batch() -> dict[str, Any]:
    """Packed documents, one of them longer than any window, and padding."""
    tokens = np.random.RandomState(0).randint(0, 64, (16, 32)).astype(np.int32)
    segments = np.array([[1] * 21 + [2] * 11, [1] * 5 + [2] * 7 + [3] * 17 + [0] * 3], np.int32).repeat(8, axis=0)
    targets = np.where(segments > 0, np.roll(tokens, -1, axis=1), -1)
    return {"tokens": tokens, "targets": targets, "segment_ids": segments}


def loss_and_gradients(params, rest, data):
    loss = lambda params: training.next_token_loss(nn.combine(params, rest), data, dtype=jnp.float32)[0]
    return jax.value_and_grad(loss)(params)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a program gave, and what it is. Sizes are bytes on one device; matrices: those of the layers."""

    loss: Any
    gradients: dict[str, Any]
    parameters: int
    matrices: int
    temporaries: int
    costs: Costs

    @property
    def collectives(self) -> dict[str, int]:
        """How many are written, by kind and mesh axes; those of a device with itself are none."""
        return {" ".join((one.kind, *one.axes)): one.written for one in self.costs.collectives if one.axes}


def compiled(model: Any, mesh: Any) -> Run:
    params, rest = nn.partition(model)
    places = (None, jax.tree.map(lambda x: x.sharding, params))
    run = jax.jit(loss_and_gradients, out_shardings=places).lower(params, rest, batch())
    program = run.compile(compiler_options=QUICKLY)
    loss, gradients = jax.device_get(program(params, rest, batch()))
    names = nn.axes(rest)
    held = {path: x.addressable_shards[0].data.nbytes for path, x in params.items()}
    matrices = sum(size for path, size in held.items() if ".body." in path and len(names[path]) > 1)
    sizes: Any = program.memory_analysis()
    costs = read_costs(program.as_text(), mesh)
    return Run(loss, gradients, sum(held.values()), matrices, sizes.temp_size_in_bytes, costs)


@functools.cache
def alone(name: str, num_layers: int) -> tuple[Any, Run]:
    model = jax.jit(MODELS[name], static_argnums=0)(num_layers)
    return model, compiled(model, {"data": 1})


def spread(name: str, one: Case) -> Run:
    model, mesh = alone(name, one.num_layers)[0], one.mesh
    with sharding.use(mesh, one.rules):
        return compiled(jax.device_put(model, sharding.shardings(model, mesh, one.rules)), dict(mesh.shape))
