"""Loss spikes are found where they are, with what came with them."""

import numpy as np
import pytest

from maxlib.observability import loss_spikes
from maxlib.observability._report import Run, page


def rows_of(losses, **series):
    """The metrics of a run, one row for each step."""
    return [
        {"step": i + 1, "loss": loss} | {name: values[i] for name, values in series.items()}
        for i, loss in enumerate(losses)
    ]


def falling(steps=200, seed=0):
    """A loss that falls from 10 to 2.5, with noise of 0.1."""
    t = np.arange(steps)
    return 2.5 + 7.5 * np.exp(-t / 30) + 0.1 * np.random.default_rng(seed).standard_normal(steps)


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_falls_with_noise_has_no_spike(seed):
    assert loss_spikes(rows_of(falling(seed=seed))) == []


def test_spikes_are_found_with_what_came_with_them():
    losses, norms = falling(), np.full(200, 0.5)
    losses[100:104] += 3.0
    losses[150] += 1.2
    norms[100:104], norms[146:152] = 2.0, 1.5
    rates = np.linspace(1e-3, 1e-4, 200)
    targets = np.full(200, 512)
    targets[150] = 64
    skipped = np.zeros(200)
    skipped[100:103] = 1
    first, second = loss_spikes(
        rows_of(losses, grad_norm=norms, learning_rate=rates, num_targets=targets, skipped=skipped)
    )
    assert (first.step, first.last, first.norm_since, first.skipped) == (101, 104, 101, 3)
    assert first.loss == losses[100:104].max() and first.usual == np.median(losses[80:100])
    assert first.beside["grad_norm"] == (2.0, 0.5) and first.beside["learning_rate"][0] == rates[100]
    # The norm rose four steps before the loss did, and the batch had few targets.
    assert (second.step, second.last, second.norm_since, second.skipped) == (151, 151, 147, 0)
    assert second.beside["num_targets"] == (64, 512)
    assert str(second) == (
        f"step 151: loss {losses[150]:.4g}, usually {np.median(losses[130:150]):.4g}; gradient norm 1.5, usually 0.5, "
        f"high since step 147; learning rate {rates[150]:.4g}; targets 64, usually 512"
    )
    assert "steps 101-104" in str(first) and str(first).endswith("; updates skipped: 3")


def test_a_loss_that_is_not_finite_is_a_spike_and_one_that_stays_high_is_one():
    losses = [float(loss) for loss in falling()]
    losses[150:] = [loss + 3 for loss in losses[150:]]
    rows = rows_of(losses)
    rows[120]["loss"] = None
    rows.append({"step": 121, "eval/loss": 3.0})
    nan, shift = loss_spikes(rows)
    assert nan.step == nan.last == 121 and np.isnan(nan.loss) and nan.beside == {} and nan.norm_since is None
    assert shift.step == 151 and shift.last < 175  # later steps are usual by then


def test_a_loss_of_any_sign_has_spikes_by_its_noise():
    losses = 0.1 * np.random.default_rng(0).standard_normal(100)
    losses[60] = 3.0
    assert [spike.step for spike in loss_spikes(rows_of(losses))] == [61]
    losses[60] = -3.0
    assert loss_spikes(rows_of(losses)) == []


def test_the_report_lists_spikes():
    losses = falling()
    losses[100] += 3.0
    run = lambda name, losses: Run(name, rows_of(losses), None, {}, [])
    (spike,) = loss_spikes(rows_of(losses))
    html = page([run("a", losses)])
    assert f"<li>{spike}</li>" in html and "<dt>loss spikes</dt><dd>1</dd>" in html
    assert f"<li>a, {spike}</li>" in page([run("a", losses), run("b", falling())])
    assert "spikes</" not in page([run("b", falling())])
