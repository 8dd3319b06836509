"""Every mesh axis alone and combined, for four kinds of models on eight devices: loss and gradients equal those of one
device; the bytes per device and the collectives of the compiled program are as recorded.
"""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek, gemma2, llama, mixtral
from maxlib.plan._hlo import Costs, read_costs
from tests.nn.tiny import filled
from tests.training.tiny import QUICKLY

SIZE = {"vocab": 64, "dim": 32, "num_heads": 8}
GROUPED = SIZE | {"num_kv_heads": 4, "head_dim": 8, "rope": ops.Rope(8)}


def dense(num_layers: int):
    return llama.Llama(llama.Config(**GROUPED, num_layers=num_layers, mlp_dim=64), rngs=nnx.Rngs(0))


def experts(num_layers: int, window: int | None = None):
    """About as wide as Mixtral's are: 3 times the vectors that go to them, which tensor parallelism leaves whole."""
    sizes = {"num_layers": num_layers, "expert_dim": 96, "num_experts": 8, "top_k": 2}
    return mixtral.Mixtral(mixtral.Config(**GROUPED, **sizes, window=window), rngs=nnx.Rngs(0))


def latent(num_layers: int):
    """Latent attention; a dense layer, then experts beside a shared one."""
    ranks = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "v_dim": 8, "rope": ops.Rope(4)}
    sizes = {"num_layers": num_layers + 1, "num_dense": 1, "mlp_dim": 64, "expert_dim": 64}
    routing = {"num_experts": 8, "num_shared": 1, "top_k": 2, "renormalize": True}
    return deepseek.DeepSeek(deepseek.Config(version=3, **SIZE, **ranks, **sizes, **routing), rngs=nnx.Rngs(0))


def sliding(num_layers: int):
    """Every other layer sees nine tokens only."""
    cfg = gemma2.Config(**GROUPED, num_layers=2 * num_layers, mlp_dim=64, window=9)
    return gemma2.Gemma2(cfg, rngs=nnx.Rngs(0))


MODELS = {"dense": dense, "experts": experts, "latent": latent, "sliding": sliding}
MODELS["experts of windows"] = functools.partial(experts, window=9)  # in one case, for what runs by default
RULES = {
    "data": sharding.DP,
    "fsdp": sharding.FSDP,
    "tensor": sharding.TP,
    "sequence": sharding.SP,
    "expert": sharding.EP,
    "gather": sharding.CP_GATHER,
    "ring": sharding.CP_RING,
    "heads": sharding.CP_ULYSSES,
    "stage": sharding.Pipeline("stage", microbatches=2),
}


# What may talk over which axis; all-reduces sum gradients and the parts of products everywhere.
MAY = {
    "data": set(),
    "fsdp": {"all-gather", "all-to-all"},  # weights; rows for width at the embedding and the head
    "tensor": {"all-to-all"},
    "sequence": {"all-gather"},
    "expert": {"all-gather", "all-to-all"},
    "gather": {"all-gather", "collective-permute"},  # keys and values; the zigzag order
    "ring": {"collective-permute"},
    "heads": {"all-to-all", "all-gather"},  # the latter of numbers of documents, for windows (11 KB of seven)
    "stage": {"collective-permute", "all-gather", "all-to-all"},  # the next stage; rows, as all else shares them
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
    def devices(self) -> int:
        return math.prod(dict(self.degrees).values())

    @property
    def ways(self) -> int:
        """Into how many parts layers' matrices are cut."""
        return math.prod(degree for axis, degree in self.degrees if axis not in ("data", "context"))

    @property
    def ways_outside(self) -> int:
        """The same of what belongs to no stage."""
        return self.ways // dict(self.degrees).get("stage", 1)

    @property
    def may_talk(self) -> set[tuple[str, str]]:
        """Kinds of collectives, and the mesh axis over which they may go."""
        axis = {"gather": "context", "ring": "context", "heads": "context", "sequence": "tensor"}
        pairs = {(kind_of_talk, axis.get(kind, kind)) for kind in self.kinds for kind_of_talk in MAY[kind]}
        pairs |= {(kind_of_talk, "fsdp") for kind_of_talk in MAY["fsdp"] if "expert" in self.kinds}  # which takes both
        # Vectors of tokens leave the embedding cut by width, and are dealt out by rows over these axes and stages.
        pairs |= {("collective-permute", axis) for axis in ("fsdp", "expert") if "stage" in self.kinds}
        # A router's matrix and those that make a latent: the compiler works on parts of them over one axis, and hands
        # these to the other (1.7 KiB each).
        both = {"tensor", "expert"} <= set(self.kinds)
        return pairs | {("collective-permute", axis) for axis in ("tensor", "expert") if both}

    @property
    def num_layers(self) -> int:
        return 4 if dict(self.degrees).get("stage", 1) == 4 else 2

    @property
    def layout(self) -> sharding.Layout:
        """All kinds together."""
        return sharding.Layout(self.mesh, sharding.strategies.join(*(RULES[kind] for kind in self.kinds)))


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
    case("tensor", "sequence", "ring", data=2, tensor=2, context=2),
]
CASES = MIXED + ALONE


def batch() -> dict[str, Any]:
    """Packed documents, one of them longer than any window, and padding."""
    tokens = np.random.RandomState(0).randint(0, 64, (16, 32)).astype(np.int32)
    segments = np.array([[1] * 21 + [2] * 11, [1] * 5 + [2] * 7 + [3] * 17 + [0] * 3], np.int32).repeat(8, axis=0)
    targets = np.where(segments > 0, np.roll(tokens, -1, axis=1), -1)
    return {"tokens": tokens, "targets": targets, "segment_ids": segments}


def loss_and_gradients(params, rest, data):
    loss = lambda params: training.NextToken()(nn.combine(params, rest), data, dtype=jnp.float32)[0]
    return jax.value_and_grad(loss)(params)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a program gave, and what it is. Sizes are bytes on one device: of all parameters, of those in the layers
    that repeat, and of these layers' matrices.
    """

    loss: Any
    gradients: dict[str, Any]
    parameters: int
    layers: int
    matrices: int
    temporaries: int
    program: str
    mesh: Any

    @functools.cached_property
    def costs(self) -> Costs:
        return read_costs(self.program, self.mesh)

    @property
    def collectives(self) -> dict[str, list[int]]:
        """How many are written, and the bytes they move, by kind and mesh axes; those of a device with itself are
        none.
        """
        on_axes = (collective for collective in self.costs.collectives if collective.axes)
        return {
            " ".join((collective.kind, *collective.axes)): [collective.written, int(collective.bytes)]
            for collective in on_axes
        }


def compiled(model: Any, mesh: Any) -> Run:
    params, rest = nn.partition(model)
    places = (None, jax.tree.map(lambda x: x.sharding, params))
    run = jax.jit(loss_and_gradients, out_shardings=places).lower(params, rest, batch())
    program = run.compile(compiler_options=QUICKLY)
    loss, gradients = jax.device_get(program(params, rest, batch()))
    names = nn.tree.axes(rest)
    held = {path: x.addressable_shards[0].data.nbytes for path, x in params.items()}
    layers = {path: size for path, size in held.items() if ".groups.0.0." in path}
    matrices = sum(size for path, size in layers.items() if len(nn.tree.own_axes(names[path])) > 1)
    sizes: Any = program.memory_analysis()
    parameters = sum(held.values()), sum(layers.values()), matrices
    return Run(loss, gradients, *parameters, sizes.temp_size_in_bytes, program.as_text(), mesh)


@functools.cache
def alone(name: str, num_layers: int) -> tuple[Any, Run]:
    model = filled(lambda: MODELS[name](num_layers))
    return model, compiled(model, {"data": 1})


def spread(name: str, case: Case) -> Run:
    model, layout = alone(name, case.num_layers)[0], case.layout
    with sharding.use(layout):
        return compiled(jax.device_put(model, sharding.shardings(model, layout)), dict(layout.mesh.shape))


def errors(got: Run, want: Run) -> dict[str, float]:
    """By how much the loss and each gradient differ, as a part of their largest value."""
    pairs = {"loss": (got.loss, want.loss)} | {path: (got.gradients[path], g) for path, g in want.gradients.items()}
    return {path: float(np.abs(a - b).max() / np.abs(b).max()) for path, (a, b) in pairs.items()}


COUNTS = Path(__file__).with_suffix(".jsonl").with_stem("collectives")
# How many there are is the compiler's choice: one of jax 0.12 splits some reductions that this one joins. Numbers,
# bytes and kinds are checked with all.
COUNTED_WITH = "0.10."
SMALL = 10_000  # bytes; a layer's activations are 65,536 at least, and numbers of documents go anywhere
# Experts are in test_moe_devices by default, stages in test_pipeline.
DEFAULT = ("dense fsdp+tensor+ring", "dense data+heads")


@pytest.fixture(autouse=True)
def _programs_go(request):
    """Those of the full run in one process are more than it can map."""
    yield
    if request.node.get_closest_marker("full"):
        jax.clear_caches()


def pairs() -> list[tuple[str, Case]]:
    """Every model in every case, but for that of one case only."""
    every = itertools.product(MODELS, CASES)
    return [(name, case) for name, case in every if name != "experts of windows" or f"{name} {case.name}" in DEFAULT]


def cases() -> list[Any]:
    marks = lambda case: () if case in DEFAULT else pytest.mark.full
    return [
        pytest.param(name, case, id=f"{name} {case.name}", marks=marks(f"{name} {case.name}")) for name, case in pairs()
    ]


@pytest.mark.parametrize(("name", "case"), cases())
def test_a_mesh_is_one_device_spread(name, case):
    want, got = alone(name, case.num_layers)[1], spread(name, case)
    wrong = {path: error for path, error in errors(got, want).items() if error > 1e-5}
    assert not wrong
    # Norms are whole, and of several axes one may leave small matrices whole: those that make or read a latent, a
    # router's.
    even = want.layers / case.ways + (want.parameters - want.layers) / case.ways_outside
    assert got.parameters < even / 0.9
    assert want.matrices / got.matrices > 0.8 * case.ways
    # Stages idle in bubbles, and tensor parallelism alone splits no norm's input.
    assert want.temporaries / got.temporaries > (0.35 if "stage" in case.kinds else 0.55) * case.devices
    large = [key.split() for key, (_, size) in got.collectives.items() if size > SMALL]
    kinds = {(kind, axis) for kind, *axes in large for axis in axes}
    assert {pair for pair in kinds if pair[0] not in ("all-reduce", "reduce-scatter")} <= case.may_talk
    counts = counted()[f"{name} {case.name}"]  # a new case's: python -m tests.sharding.collectives
    if jax.__version__.startswith(COUNTED_WITH):
        no_more_than(counts, got.collectives)


def no_more_than(counts: dict[str, list[int]], got: dict[str, list[int]]) -> None:
    """No other collectives, no more of them and no more bytes than when somebody looked at them."""
    assert got.keys() <= counts.keys()
    for key, (written, size) in got.items():
        assert written <= counts[key][0] and size <= 1.05 * counts[key][1], key


@functools.cache
def counted() -> dict[str, dict[str, list[int]]]:
    rows = map(json.loads, COUNTS.read_text().splitlines())
    return {row["case"]: row["collectives"] for row in rows}
