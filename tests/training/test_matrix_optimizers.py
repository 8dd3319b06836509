"""Muon and its variants, SOAP and schedule-free: twenty steps as in other libraries, and Muon spread over devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, ops, plan, sharding, training
from maxlib.training import _optimizers as optimizers
from tests.training import optimizer_goldens as goldens
from tests.training import tiny


class Matrix(nnx.Module):
    def __init__(self, rngs):
        size = goldens.SIZE
        self.proj = nn.Einsum("...I,OI->...O", (size, size), ("mlp", "embed"), rngs=rngs)

    def __call__(self, x, ctx, cache):
        return x + self.proj(x), cache, {}


def stack():
    """The matrices of the other libraries as one stack."""
    return nn.Stack(lambda _, rngs: Matrix(rngs), goldens.LAYERS, rngs=nnx.Rngs(0))


def trained(optimizer, *, steps=goldens.STEPS, skipped=0):
    """The matrices, `layers x outputs x inputs`, after as many steps; `skipped` gradients are zero-step ones."""
    (path,) = nn.partition(stack())[0]
    axes = nn.tree.axes(stack())[path]
    is_out_first = axes[-1] == "embed"
    params = {path: jnp.asarray(goldens.start() if is_out_first else goldens.start().swapaxes(1, 2))}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        w = np.asarray(params[path])
        grads = goldens.gradient(w if is_out_first else w.swapaxes(1, 2), step)
        updates, state = update({path: jnp.asarray(grads if is_out_first else grads.swapaxes(1, 2))}, state, params)
        params = optax.apply_updates(params, updates)
    w = np.asarray(params[path])
    return (w if is_out_first else w.swapaxes(1, 2)), params, state


def test_it_prints():
    print(nn.tree.axes(stack()), nn.tree.summed_axes(stack()))
    out = np.load(goldens.FILE)
    model = jax.eval_shape(stack)
    for name, opt in {
        "adamuon": training.muon(
            goldens.RATE, model=model, normalize="elements", nesterov=False, weight_decay=0.1, clip=None
        ),
        "normuon": training.muon(
            goldens.RATE, model=model, normalize="rows", nesterov=False, weight_decay=0.0, clip=None
        ),
        "soap": training.soap(goldens.RATE, model=model, precondition_every=5, weight_decay=0.0, clip=None),
        "schedule_free": optax.contrib.schedule_free(
            optax.adamw(goldens.RATE, b1=0.0, b2=0.95, weight_decay=0.0), goldens.RATE, b1=0.9
        ),
    }.items():
        w, params, state = trained(opt)
        print(name, np.abs(w - out[name]).max(), np.abs(w - goldens.start()).max())
        if name == "schedule_free":
            x = optax.contrib.schedule_free_eval_params(state, params)
            print(
                np.abs(np.asarray(list(x.values())[0]) - out["schedule_free_average"]).max(),
                np.abs(np.asarray(list(x.values())[0]).swapaxes(1, 2) - out["schedule_free_average"]).max(),
            )
    w, _, _ = trained(training.muon(goldens.RATE, model=model, clip=None))
    from optax.contrib import muon, MuonDimensionNumbers as D

    d = optimizers.muon_dimensions(model)
    w2, _, _ = trained(muon(goldens.RATE, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=d))
    print("muon", np.abs(w - w2).max())
