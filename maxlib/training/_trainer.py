"""A small trainer around `make_train_step`: the loop, plus restoring, saving, metrics and stopping."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from maxlib import nn, sharding
from maxlib._utils.garbage import collection_paused
from maxlib._utils.process import enable_compilation_cache
from maxlib.checkpoint import Checkpointer, Tiers
from maxlib.distributed import Interrupted, StopRequest, hard_timeout, stop_on_signal
from maxlib.observability import (
    Console,
    GoodputRecorder,
    Jsonl,
    Meter,
    Writers,
    collect_metrics,
    memory_use,
    peak_flops,
    training_flops,
)
from maxlib.training._batch_checks import check_first_batch
from maxlib.training._evaluation import Evaluation, by_prefix, evaluate, target_reached
from maxlib.training._gradients import bind_options, parameters_outside
from maxlib.training._placement import copy_model, host_rows, shard_batch
from maxlib.training._prefetch import StatefulLoader, as_loader, follow_layout
from maxlib.training._restore import ResumePoint, initial_state
from maxlib.training._saving import Export, SaveManager
from maxlib.training._state import TrainState, abstract_state, init_optimizer, is_builder, make_state
from maxlib.training._step import jit_step, make_eval_step, make_train_step
from maxlib.training.diloco import DiLoCo
from maxlib.training.losses import Batch, LossFunction, NextToken

MOST_EMPTY = 10  # batches in a row without a target
MOST_SKIPPED = 100  # steps in a row that `skip_spikes` skips


class DivergedError(FloatingPointError):
    """Error for a loss or gradient that is no longer a finite number."""


class Trainer:
    """Training loop around `make_train_step` that restores, saves, evaluates, measures and stops.

    It trains its own copy; the model you pass is not modified. Compiled programs are kept on disk
    (`maxlib.enable_compilation_cache`).

        optimizer = training.adamw(training.warmup_cosine(1e-3, steps=100, warmup=10))
        trainer = training.Trainer(model, optimizer=optimizer, loader=loader, loss=training.NextToken())
        metrics = trainer.fit(2)  # trains to step 2

    Args:
        model: An `nnx.Module`, which is copied, or a function that builds one, which is run under jit so that
            parameters are created already sharded; a run that resumes from a checkpoint does not run it.
        optimizer: An optax optimizer of `{path: array}`, such as `adamw(1e-3)`, which clips gradients to a norm of 1;
            optax.adamw does not clip.
        loader: Returns this host's rows of every batch: a loader with a state (`StatefulLoader`), or any iterable of
            batches, such as a list or a generator. Of an iterable, a resumed run reads and drops the batches of the
            steps done. The Trainer tells a `data.Loader` which rows to read (`follow`).
        loss: The loss; see `make_train_step`.
        dtype: Dtype of the computation; None for the loss's default, bfloat16.
        remat: What layers keep for the backward pass; None keeps everything.
        microbatches: Number of parts of a batch whose gradients are computed one after the other.
        neftune_alpha: Size of the noise of token vectors in training; None for no noise.
        dropout: Probability of a zero by name of an intermediate value (`nn.with_dropout`); None drops nothing.
        log_schedule: Schedule to log as `learning_rate`; the optimizer needs the same schedule.
        router_bias_update_rate: Step size of the expert biases of trained routers.
        qk_clip: Largest attention logit (MuonClip); None clips nothing.
        layout: The mesh and how arrays are sharded over it, such as `sharding.Layout(mesh)`.
        diloco: Lets replicas train alone and meet rarely; the model is then that of the last meeting.
        filter: Selects the trained parameters; None as in `make_state`.
        evaluation: Held-out data, and how often to compute the loss on it; always computed at the end. Several sets
            are a dictionary of evaluations by name, whose metrics are `eval/NAME/...`.
        checkpointer: Saves by its own policy, and at the end.
        callbacks: Pairs `(n, f)`, where `f(trainer)` runs after every `n` steps (its time does not count as step time
            unless n is 1), and exports such as `HuggingFaceExport`, which also run at the end, and at start-up if the
            previous run was killed during an export.
        directory: Directory of `metrics.jsonl` and `goodput.jsonl`.
        timeout: Limit in seconds for start-up, one batch or one device result; when exceeded, the process prints what
            it waited for and every thread's stack, and exits with status 75. None, the default, disables it.
        key: Random key of the whole run (for embedding noise, for example), or a seed. A resumed run uses the key of
            its checkpoint.

    Attributes:
        state: The current state; the next step deletes its arrays. `fit` or `restore` loads the newest checkpoint;
            before them, it is the state of a new run.
        model: A copy of the state's model.
        step: Number of steps done.
        batch: The last step's batch, on its devices.
        loss: The loss as the step calls it, `loss(model, batch, key)`.
        train_step: Compiled.
        writers: Receive the metrics; you may append more.
        console: The terminal.
        clock: Measures where time goes.
    """

    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        loader: StatefulLoader | Iterable[Batch],
        *,
        loss: LossFunction = NextToken(),
        dtype: Any = None,
        remat: nn.remat.Policy = None,
        microbatches: int = 1,
        neftune_alpha: float | None = None,
        dropout: Mapping[str, float] | None = None,
        log_schedule: optax.Schedule | None = None,
        router_bias_update_rate: float = 1e-3,
        qk_clip: float | None = None,
        layout: sharding.Layout | None = None,
        diloco: DiLoCo | None = None,
        filter: nn.tree.Filter | None = None,
        evaluation: Evaluation | Mapping[str, Evaluation] | None = None,
        checkpointer: Checkpointer | Tiers | None = None,
        callbacks: Sequence[tuple[int, Callable[["Trainer"], Any]] | Export] = (),
        directory: str | Path | None = None,
        timeout: float | None = None,
        key: jax.Array | int = 0,
    ):
        enable_compilation_cache()
        loader = as_loader(loader, "loader")
        evaluations = by_prefix(evaluation)
        _check_arguments(model, loader, evaluations, checkpointer, callbacks)
        sharding.check_layout(layout)
        exports = [callback for callback in callbacks if isinstance(callback, Export)]
        if diloco is not None and any(getattr(x, "ema", False) for x in (*evaluations.values(), *exports)):
            raise ValueError(
                "under DiLoCo each replica has averages of its own, which are no model: leave out ema=True"
            )
        if layout is None and jax.process_count() > 1:
            raise ValueError(
                f"without a layout, each of the {jax.process_count()} processes would train its own model: pass layout=, "
                "for example sharding.Layout(sharding.make_mesh(fsdp=-1))"
            )
        train_step = make_train_step(
            loss,
            optimizer,
            dtype=dtype,
            remat=remat,
            microbatches=microbatches,
            neftune_alpha=neftune_alpha,
            dropout=dropout,
            log_schedule=log_schedule,
            router_bias_update_rate=router_bias_update_rate if diloco is None else 0.0,
            qk_clip=qk_clip,
        )
        self.loss = bind_options(loss, dtype=dtype, remat=remat, neftune_alpha=neftune_alpha, dropout=dropout)
        self.train_step = jit_step(train_step) if diloco is None else diloco.wrap(train_step)
        self._eval_steps = {
            prefix: jax.jit(make_eval_step(loss if e.loss is None else e.loss, dtype=dtype, ema=e.ema))
            for prefix, e in evaluations.items()
        }
        follow_layout(loader, layout)
        for e in evaluations.values():
            follow_layout(e.loader, layout)
        self.clock = GoodputRecorder(directory if jax.process_index() == 0 else None)
        self.layout, self.timeout = layout, timeout
        self.loader, self.evaluation, self.checkpointer = loader, evaluation, checkpointer
        self._evaluations = evaluations
        self.callbacks = [callback for callback in callbacks if not isinstance(callback, Export)]
        self._saving = SaveManager(checkpointer, exports, clock=self.clock, timeout=timeout, log=self.log)
        self._interrupt = StopRequest()
        self.console = Console()
        if layout is None and jax.default_backend() != "cpu" and jax.device_count() > 1:
            here = f"one of {jax.device_count()} devices"
            self.log(f"this run uses {here}; layout=sharding.Layout(sharding.make_mesh(fsdp=-1)) uses all")
        self.writers = Writers([self.console] if jax.process_index() == 0 else [], log=self.log)
        if directory is not None and jax.process_index() == 0:
            self.writers.append(Jsonl(Path(directory) / "metrics.jsonl"))

        def make() -> TrainState:
            source = model if is_builder(model) else copy_model(model, layout)
            state = make_state(source, optimizer, filter=filter, key=key)
            return jax.block_until_ready(state if diloco is None else diloco.init(state))

        def restart(state: TrainState) -> TrainState:
            new = dataclasses.replace(state, opt_state=init_optimizer(optimizer, state.trainable, state.rest))
            return new if diloco is None else diloco.init(new)

        self._restart = restart
        self._make: Callable[[], TrainState] | None = make  # None when the state has arrays
        with self.sharded(), hard_timeout(timeout, "the model's parameters and moments"):
            if is_builder(model) and diloco is None:
                self._state = abstract_state(model, optimizer, layout=layout, filter=filter, key=key)
            else:
                self.state = make()
        self.step, self.batch, self._batch_before = 0, None, None
        self._meter = Meter()
        self._empty = self._skipped = 0  # consecutive steps without a target, and skipped ones
        self._counted = False  # True once a step has been started
        self._flops: dict[Any, float | None] = {}  # of a step, by the shapes of its batch
        self._last: dict[str, Any] = {}  # newest metrics, saved with checkpoints
        self._evaluated: dict[str, int] = {}  # step of each set's newest evaluation
        self._counts_at: int | None = None  # step at which the loaders' counts were last written
        self._origin: ResumePoint | None = None  # None until `restore` has run

    @property
    def state(self) -> TrainState:
        """Returns the current state. Arrays are created here if none were restored; then all processes must call it."""
        if self._make is not None:
            name = "the model's parameters and moments"
            with self.clock.span("startup"), self.sharded(), hard_timeout(self.timeout, name):
                self.state = self._make()
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state, self._make = state, None

    @property
    def model(self) -> Any:
        """Returns a copy of the current model, with its own arrays."""
        return copy_model(self.state.model)

    def restore(self, *, resume_from: str | Path | None = None, params_from: str | Path | None = None) -> str:
        """Restores the state from the first of these that exists, prints which one, and returns that line.

        These are this run's newest complete checkpoint, `resume_from` and `params_from`; without any of them, the run
        begins with new values. `fit` calls it if it has not been called.

        Args:
            resume_from: Directory of full checkpoints.
            params_from: Directory of a checkpoint or in Hugging Face's format, of which only the model is read, both
                trained and frozen parameters. Before the first step the optimizer state is initialized from it.

        Raises:
            ValueError: `params_from` after the first step, when the optimizer holds copies of the parameters.
        """
        with self.clock.span("restore"), self.sharded(), hard_timeout(self.timeout, "the checkpoint to be restored"):
            self.state, origin = initial_state(
                self._state,
                lambda: self.state,
                self.checkpointer,
                resume_from,
                params_from,
                restart=self._restart,
                layout=self.layout,
            )
        self._origin, self.step, self._last = origin, int(self.state.step), dict(origin.metrics)
        if origin.data_state is not None:
            self.loader.set_state(origin.data_state)
        self.writers.resume(self.step)
        self.log(origin.text)
        return origin.text

    def fit(self, steps: int) -> dict[str, Any]:
        """Trains until `steps` steps are done, including those of earlier calls and runs; returns the last metrics.

        Raises DivergedError when loss or gradient are not finite, naming the step and the last good checkpoint, and
        when `skip_spikes` skips a hundred steps in a row;
        ValueError when ten batches in a row have no targets; Interrupted after Ctrl-C or SIGTERM, once everything is
        saved.
        """
        if self._origin is None:
            self.restore()
        self._meter.peak = peak_flops()
        with self._running(steps):
            begin = self.step
            try:
                self._catch_up()
                self._loop(steps)
                self._evaluate([prefix for prefix in self._evaluations if self._evaluated.get(prefix) != self.step])
            except Interrupted:
                self._save_at_end(urgent=True)
                self.log(f"stopped on request after step {self.step} of {steps}; the same command continues from there")
                raise
            self._saving.export(self.step, self.state, missing=self.step == begin, last=True)
            self._save_at_end()
        return self._last

    def evaluate(self) -> dict[str, Any]:
        """Computes the metrics over the held-out batches of `evaluation`, written as `eval/...` or `eval/NAME/...`.

        Restores first if `restore` has not been called: with a checkpointer these are the metrics of its newest
        checkpoint.
        """
        if not self._evaluations:
            raise ValueError(
                "this trainer has no held-out data; pass evaluation=Evaluation(loader), or call training.evaluate"
            )
        if self._origin is None:
            self.restore()
        return self._evaluate(list(self._evaluations))

    def save(self, *, urgent: bool = False) -> None:
        """Starts saving everything. A save that fails is reported, and training continues. urgent: do not wait for
        exports.
        """
        if self.checkpointer is None:
            raise ValueError("this trainer has no checkpointer; pass checkpointer=Checkpointer(directory)")
        self._flush()  # a state that is not finite raises here, before it is saved
        self._write_counts()
        self._saving.start(self.step, self.state, self.loader.get_state(), self._last, urgent=urgent)

    def _evaluate(self, prefixes: Collection[str]) -> dict[str, Any]:
        """Computes, writes and returns the metrics of some of the held-out sets."""
        if not prefixes:
            return {}
        self._flush()
        values: dict[str, Any] = {}
        with self.clock.span("evaluation"), self.sharded():
            for prefix in prefixes:
                evaluation = self._evaluations[prefix]
                evaluation.loader.reset()
                computed = evaluate(self._eval_steps[prefix], self.state, self._batches(evaluation))
                evaluation.check_stop_at(computed)
                values |= {f"{prefix}{name}": value for name, value in computed.items()}
        self._evaluated |= dict.fromkeys(prefixes, self.step)
        self._last = self._last | values
        self.writers.write(self.step, values)
        self._write_counts()
        return values

    def log(self, text: str) -> None:
        """Prints a line on the first process's terminal."""
        if jax.process_index() == 0:
            self.console.log(text)

    def sharded(self) -> contextlib.AbstractContextManager:
        """Returns the context in which this trainer's computations run: its layout."""
        return contextlib.nullcontext() if self.layout is None else sharding.use(self.layout)

    @contextlib.contextmanager
    def _running(self, steps: int) -> Iterator[None]:
        if jax.process_index() == 0:
            self.console.start(self.step, steps)
        failed_alone = False
        try:
            with stop_on_signal() as self._interrupt:
                yield
        except (Exception, KeyboardInterrupt):
            failed_alone = jax.process_count() > 1
            raise
        finally:
            self.writers.close()
            if failed_alone:  # may affect only this process; do not enter a barrier that the others never reach
                self._saving.settle()
            else:
                self._saving.wait()
            self.clock.close()

    def _loop(self, steps: int) -> None:
        while self.step < steps:
            if (reached := target_reached(self._evaluations, self._last)) is not None:
                self.log(f"training ends after step {self.step} of {steps}: {reached}")
                break
            # Programs, also those of loaders, are traced until the first step has run.
            tracing = contextlib.nullcontext() if self._counted else collection_paused()
            with self.clock.step(self.step + 1), tracing:
                begin = time.perf_counter()
                batch = self._wait_for_batch()
                if batch is None:
                    self.log(f"the data ended after step {self.step}, before step {steps}")
                    break
                counts = collect_metrics(self.loader) if jax.process_count() == 1 else {}
                self._dispatch_step(batch, data_seconds=time.perf_counter() - begin, **counts)
                self._after_step(last=self.step == steps)
                if self._interrupt.requested(self.step):
                    raise self._interrupt.stop()
        with self.clock.step(self.step):
            self._flush()

    def _wait_for_batch(self) -> Batch | None:
        position = self.loader.get_state()
        try:
            with self.clock.span("data"), self._interrupt.while_waiting():
                return self._next(self.loader, "training")
        except Interrupted:
            self.loader.set_state(position)  # a batch may have been taken from the loader but not delivered
            raise

    def _dispatch_step(self, batch: Batch, **here: float) -> None:
        """Starts the next step, and reports the previous one."""
        if not self._counted:
            self.log("compiling the step ...")
        with hard_timeout(self.timeout, f"step {self.step + 1} to be compiled and started, the one before to end"):
            with self.sharded(), self.clock.span(None if self._counted else "compile"):
                self._batch_before, self.batch = self.batch, shard_batch(batch, self.layout)
                self.state, metrics = self.train_step(self.state, self.batch)
            self.step += 1
            if not self._counted:  # while the first step runs
                check_first_batch(host_rows(batch), self.state.model)
                self._say_what_is_outside(host_rows(batch))
                self._counted = True
            self._meter.flops = self._flops_of(batch)
            ready = self._meter.push(self.step, metrics | memory_use(max_age=1.0), **here)
        self._report(ready)

    def _write_counts(self) -> None:
        """Writes the loaders' metrics over all processes; a single process reports them every step."""
        if jax.process_count() == 1 or self._counts_at == self.step:
            return
        self._counts_at = self.step
        with hard_timeout(self.timeout, "the other processes' counts of their data"):
            counts = collect_metrics(self.loader, all_processes=True)
        self.writers.write(self.step, counts)

    def _after_step(self, *, last: bool) -> None:
        """Runs the callbacks, evaluations, exports and saves that are due after this step; all evaluations after the
        `last` one, so that a save has their metrics.
        """
        for every, callback in self.callbacks:
            if self.step % every == 0:
                if every > 1:  # infrequent callbacks may be slow; exclude them from step time
                    self._flush()
                with self.clock.span("callbacks"):
                    callback(self)
        self._evaluate([prefix for prefix, e in self._evaluations.items() if last or e.is_due(self.step)])
        if self._saving.export_is_due(self.step):
            self._flush()  # a state that is not finite raises here, before it replaces a good export
            self._saving.export(self.step, self.state)
        if self.checkpointer is not None and self.checkpointer.should_save(self.step):
            self.save()

    def _next(self, loader: StatefulLoader, what: str) -> Batch | None:
        with hard_timeout(self.timeout, f"a batch of {what} data"):
            return next(loader, None)

    def _batches(self, evaluation: Evaluation) -> Iterator[Batch]:
        for _ in itertools.count() if evaluation.batches is None else range(evaluation.batches):
            if (batch := self._next(evaluation.loader, "evaluation")) is None:
                return
            self._interrupt.check()
            yield shard_batch(batch, self.layout)

    def _flush(self) -> None:
        """Waits for the running steps and reports them."""
        with hard_timeout(self.timeout, f"the devices to finish step {self.step}"):
            ready = self._meter.flush()
        self._report(ready)

    def _report(self, ready: list[tuple[int, dict[str, Any]]]) -> None:
        for step, values in ready:
            self._check_targets(step, values["num_targets"])
            self._check_skipped(step, values.get("skipped"))
            finite = values.pop("finite")
            self.writers.write(step, values)
            self._last = values
            if not finite:
                batch = self.batch if step == self.step else self._batch_before
                sentences = [
                    f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}",
                    "Training has stopped and this state is not saved",
                    self._saving.last_good(),
                    self._saving.cause(step, self.state, batch, self.loss),
                    "Try a lower learning rate, a longer warm-up or clipping, or look at the data of this step",
                ]
                raise DivergedError(" ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence))

    def _check_targets(self, step: int, num_targets: Any) -> None:
        """Logs that a step had no targets, and raises after too many of them: only weight decay would act."""
        self._empty = 0 if num_targets else self._empty + 1
        why = "all targets are -1, or the loss finds nothing to compare"
        if self._empty == 1:
            self.log(f"step {step}: the batch has no target to learn: {why}")
        if self._empty == MOST_EMPTY:
            raise ValueError(f"the last {MOST_EMPTY} batches, up to step {step}, have no target to learn: {why}")

    def _check_skipped(self, step: int, skipped: Any) -> None:
        """Raises DivergedError after too many skipped steps: the means that they are compared with never move."""
        self._skipped = self._skipped + 1 if skipped == 1 else 0
        if self._skipped == MOST_SKIPPED:
            raise DivergedError(
                f"the last {MOST_SKIPPED} steps, up to step {step}, were skipped: their loss or gradient is not finite, or "
                "stays far above the means of the steps done, so nothing is learned any more. Look at the data, or resume "
                "with larger factors of skip_spikes"
            )

    def _catch_up(self) -> None:
        """Runs the evaluation, exports and slower tiers' saves that were due at the restored step but not done."""
        due = [prefix for prefix, e in self._evaluations.items() if e.is_due(self.step)]
        self._evaluate([prefix for prefix in due if not any(name.startswith(prefix) for name in self._last)])
        self._saving.export(self.step, self.state, missing=True)
        if self.checkpointer is not None and self.checkpointer.should_save(self.step):
            self.save()

    def _save_at_end(self, *, urgent: bool = False) -> None:
        if self.checkpointer is not None:
            self.save(urgent=urgent)
            self._saving.wait()

    def _say_what_is_outside(self, rows: Batch) -> None:
        """Logs that trained parameters do not enter the loss, such as an image encoder's of a batch of texts."""
        state = self.state
        try:
            outside = parameters_outside(self.loss, state.trainable, state.rest, rows, state.key)
        except Exception as error:  # a check that fails must not end a run
            self.log(f"whether all parameters are trained is not known: {type(error).__name__}: {error}")
            return
        if outside:
            self.log(
                f"{len(outside)} of {len(state.trainable)} trained parameters, such as {outside[0]}, do not enter the loss "
                "of the first batch: their gradients are zero, and weight decay shrinks them: freeze them (filter=)"
            )

    def _flops_of(self, batch: Batch) -> float | None:
        """Returns the FLOPs of a step, counted for the first batch of each shape."""
        shapes = tuple(x.shape for x in jax.tree.leaves(self.batch))
        if shapes not in self._flops:
            self._flops[shapes] = self._count_flops(batch)
        return self._flops[shapes]

    def _count_flops(self, batch: Batch) -> float | None:
        """Counts the FLOPs of a step from this host's rows of its batch, which other hosts may share."""
        try:
            rows = host_rows(batch)
            share = len(jax.tree.leaves(rows)[0]) / len(jax.tree.leaves(self.batch)[0])
            frozen = jax.tree.map(lambda _: False, self.state.rest)
            trained = nn.combine(dict.fromkeys(self.state.trainable, True), frozen)
            return training_flops(self.loss, self.state.model, rows, trained=trained) / share
        except Exception as error:  # a failed estimate must not end a run
            self.log(f"no MFU: counting FLOPs failed with {type(error).__name__}: {error}")
            return None


def _check_arguments(
    model: Any, loader: Any, evaluations: Mapping[str, Evaluation], checkpointer: Any, callbacks: Iterable[Any]
) -> None:
    """Raises TypeError for an argument of a wrong type, and ValueError for a loader that is used twice."""
    if not callable(model) and not nn.variables(model):
        raise TypeError(
            f"model must be an nnx.Module, a pytree of them or a function that builds one, got {type(model).__name__}"
        )
    if any(_innermost(evaluation.loader) is _innermost(loader) for evaluation in evaluations.values()):
        raise ValueError(
            "evaluation has the training loader, which each evaluation would reset to its first batch: give "
            "Evaluation a loader of its own, over held-out data"
        )
    if checkpointer is not None and not hasattr(checkpointer, "should_save"):
        raise TypeError(f"checkpointer must be a checkpoint.Checkpointer(directory) or Tiers, got {checkpointer!r}")
    for callback in callbacks:
        match callback:
            case Export():
                pass
            case (int(every), function) if type(every) is int and every > 0 and callable(function):
                pass
            case _:
                raise TypeError(
                    "callbacks must be pairs (every, function), such as (1, f), or exports such as HuggingFaceExport, "
                    f"got {callback!r}"
                )


def _innermost(loader: Any) -> Any:
    """Returns the loader inside `Prefetch` and other wrappers."""
    return _innermost(loader.loader) if hasattr(loader, "loader") else loader
