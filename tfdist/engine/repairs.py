"""The functions of Keras and TensorFlow that the engine replaces, each with what is wrong with it.

Each is one entry: what is replaced, what was wrong with it upstream, and by what. Models that were
not created under a strategy of ours run the original.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Repair:
    """One replaced function of Keras.

    Attributes:
        owner: Class or module that holds it.
        name: Attribute to replace.
        defect: What is wrong upstream, in a few words, with the issue where there is one.
        make: Takes the original and returns the replacement.
        probe: Text of the upstream source that shows the defect, or None where the replacement
            adds behaviour. Once it is gone, upstream has changed the function and the repair must
            be looked at again.
    """

    owner: Any
    name: str
    defect: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    probe: str | None = None


def is_on_servers(model: Any) -> bool:
    """Whether `model` trains on parameter servers."""
    from tfdist.engine import replicas

    return replicas.is_asynchronous(getattr(model, "_distribute_strategy", None))


def is_ours(model: Any) -> bool:
    """Whether `model` trains on synchronous replicas, which is what the engine repairs."""
    from tfdist.engine import replicas

    return replicas.is_synchronous(getattr(model, "_distribute_strategy", None))


def needs_our_loop(call: inspect.BoundArguments) -> bool:
    """Whether a call with these arguments needs the engine on one device, too."""
    from tfdist.data.sharded import Sharded
    from tfdist.engine import watcher

    given = call.arguments
    if watcher.has_watchers(given.get("callbacks")):
        return True
    return any(isinstance(given.get(name), Sharded) for name in ("x", "validation_data"))


@functools.cache
def repairs() -> tuple[Repair, ...]:
    """Returns all repairs; imports Keras and TensorFlow."""
    import keras
    import tensorflow as tf
    from keras.src.backend.common import KerasVariable
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
    from keras.src.layers.preprocessing.index_lookup import IndexLookup
    from keras.src.losses import loss as losses
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.trainers.trainer import Trainer
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.distribute.parameter_server_strategy_v2 import (
        ParameterServerStrategyV2Extended,
    )
    from tensorflow.python.eager import context

    from tfdist.engine import adapt
    from tfdist.engine import alone
    from tfdist.engine import build
    from tfdist.engine import files
    from tfdist.engine import fit as fitting
    from tfdist.engine import gradients
    from tfdist.engine import loop
    from tfdist.engine import losses as loss_rules
    from tfdist.engine import numbers
    from tfdist.engine import on_batch as on_batches
    from tfdist.engine import prediction
    from tfdist.engine import randomness
    from tfdist.engine import reduction
    from tfdist.engine import role
    from tfdist.engine import scope
    from tfdist.engine import steps
    from tfdist.engine.servers import dispatcher
    from tfdist.engine.servers import functions
    from tfdist.engine.servers import loop as server_loop
    from tfdist.engine.servers import on_batch as server_batches
    from tfdist.engine.servers import placement
    from tfdist.engine.servers import prediction as server_prediction
    from tfdist.engine.servers import tables

    def ours(
        function: Callable[..., Any],
        on_servers: Callable[..., Any] | None = None,
        *,
        on_one_device: bool = False,
    ) -> Callable[..., Any]:
        """Sends models under a strategy of ours to `function(model, ...)`, or to `on_servers`.

        With `on_one_device`, also those under none, where a callback or the data needs our loop.
        """
        signature = inspect.signature(function)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                alone.warn(self)
                if is_ours(self):
                    return function(self, *args, **kwargs)
                if on_servers is not None and is_on_servers(self):
                    return on_servers(self, *args, **kwargs)
                is_alone = on_one_device and getattr(self, "_distribute_strategy", None) is None
                if is_alone and needs_our_loop(signature.bind_partial(self, *args, **kwargs)):
                    return function(self, *args, **kwargs)
                return original(self, *args, **kwargs)

            return method

        return make

    def on_batch(name: str, on_servers: Callable[..., Any]) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if is_ours(self):
                    return on_batches.on_batch(self, name, original, *args, **kwargs)
                if is_on_servers(self):
                    return on_servers(self, *args, **kwargs)
                return original(self, *args, **kwargs)

            return method

        return make

    def compile_in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(self: Any, *args: Any, **kwargs: Any) -> None:
            scope.join_current(self)
            steps.forget_prediction(self)
            if not is_ours(self) and not is_on_servers(self):
                original(self, *args, **kwargs)
                return
            # Metrics given by name make their variables here.
            with self._distribute_strategy.scope():
                original(self, *args, **kwargs)
            scope.adopt(self, self._distribute_strategy)

        return compile

    def symbolic_build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
            if not is_ours(self) or data_batch is None:
                original(self, iterator=iterator, data_batch=data_batch)
                return
            build.build(self, build.spec_of(data_batch))

        return method

    t = TensorFlowTrainer
    return (
        Repair(
            t,
            "fit",
            "a loop that knows one process only; counts a step too many (keras issue 20585)",
            lambda original: role.fit(ours(fitting.fit, fitting.fit, on_one_device=True)(original)),
            "self._maybe_symbolic_build(iterator=epoch_iterator)",
        ),
        Repair(
            t,
            "evaluate",
            "as fit",
            ours(loop.evaluate, server_loop.evaluate, on_one_device=True),
            "self._maybe_symbolic_build(iterator=epoch_iterator)",
        ),
        Repair(
            t,
            "predict",
            "as fit; an unbuilt model is not built",
            ours(prediction.predict, server_prediction.predict, on_one_device=True),
        ),
        Repair(
            t,
            "train_on_batch",
            "optimizers of another scope",
            on_batch("train_on_batch", server_batches.train_on_batch),
        ),
        Repair(
            t,
            "test_on_batch",
            "metrics of another scope",
            on_batch("test_on_batch", server_batches.test_on_batch),
        ),
        Repair(
            t,
            "predict_on_batch",
            "as predict",
            ours(on_batches.predict_on_batch, server_batches.predict_on_batch),
        ),
        Repair(
            t,
            "_make_function",
            "reads data inside the step, whose counters run although there is none",
            ours(steps.make_function),
            "iterator.get_next()",
        ),
        Repair(
            t,
            "_maybe_symbolic_build",
            "takes the mean over a batch to learn its shape",
            symbolic_build,
            '"MEAN"',
        ),
        Repair(
            inspect.getmodule(TensorFlowTrainer),
            "reduce_per_replica",
            "stops in TensorFlow where predictions are text",
            reduction.make,
        ),
        Repair(
            losses,
            "scale_loss_for_distribution",
            "counts replicas, not examples (tensorflow issue 45594)",
            loss_rules.scale,
            "1.0 / num_replicas",
        ),
        Repair(
            TFOptimizer,
            "_backend_apply_gradients",
            "clips before gradients are summed (tensorflow issue 33929)",
            gradients.apply,
            "grads = self._clip_gradients(grads)",
        ),
        Repair(
            keras.optimizers.LossScaleOptimizer,
            "_tf_apply",
            "one replica decides for all whether gradients are finite",
            gradients.apply_scaled,
            "Arbitrarily take",
        ),
        Repair(TFOptimizer, "_all_reduce_sum_gradients", "as above", gradients.sum_once),
        Repair(
            TFOptimizer,
            "_backend_update_step",
            "updates variables of parameter servers on the worker",
            gradients.update,
        ),
        Repair(
            BaseOptimizer,
            "apply",
            "makes variables inside a step that has copies of the others",
            gradients.build_first,
            "self.build(trainable_variables)",
        ),
        Repair(TFOptimizer, "_var_key", "knows variables by their value", gradients.key_of),
        Repair(
            ParameterServerStrategyV2Extended,
            "_create_variable_round_robin",
            "gives servers as many variables, not as many bytes",
            placement.create,
            "self._variable_count % self._num_ps",
        ),
        Repair(
            cluster_coordinator.WorkerPreemptionHandler,
            "stop",
            "waits for ever for a worker that is gone for good",
            dispatcher.stop_recovery,
            "with self._cluster_update_lock:",
        ),
        Repair(
            context.Context,
            "remove_function",
            "waits for every worker, also for one that is stopped",
            functions.removed_later,
            "pywrap_tfe.TFE_ContextRemoveFunction(self._handle, name)",
        ),
        Repair(
            context.Context,
            "add_function_def",
            "waits for every worker with the interpreter's lock held",
            functions.added_definition,
            "pywrap_tfe.TFE_ContextAddFunctionDef(",
        ),
        Repair(
            context.Context,
            "add_c_function",
            "as above",
            functions.added,
            "pywrap_tfe.TFE_ContextAddFunction(self._handle, c_func)",
        ),
        Repair(
            keras.Variable,
            "_initialize",
            "takes a variable in parts for a whole one",
            placement.whole,
        ),
        Repair(
            keras.layers.Embedding,
            "call",
            "reads a whole table for the rows of a batch",
            tables.embedding,
            "ops.take(self.embeddings, inputs, axis=0)",
        ),
        Repair(losses, "unscale_loss_for_distribution", "as scaling", loss_rules.unscale),
        Repair(
            losses,
            "reduce_weighted_values",
            "divides masked and weighted losses by what one replica has, scalars by nothing",
            loss_rules.reduce,
            "loss = reduce_values(values, sample_weight, reduction)",
        ),
        Repair(losses.Loss, "__call__", "tells the above which loss it is", loss_rules.called),
        Repair(
            keras.metrics.Mean,
            "update_state",
            "counts a number from each replica as much as one from all",
            loss_rules.tracked,
            "num_samples = 1",
        ),
        Repair(
            keras.random.SeedGenerator,
            "next",
            "draws the same numbers on all replicas",
            randomness.make,
            "new_seed_value = seed_state.value * 1",
        ),
        Repair(
            tf.distribute.Strategy.__mro__[1],
            "num_replicas_in_sync",
            "tells the above of a loss that is divided by it",
            loss_rules.watched,
        ),
        Repair(
            tf.GradientTape,
            "gradient",
            "tells the above of what gradients are taken",
            loss_rules.differentiated,
        ),
        *(
            Repair(tf.nn, name, "tells the above of a loss that is divided", loss_rules.averaged)
            for name in ("compute_average_loss", "scale_regularization_loss")
        ),
        Repair(
            KerasVariable,
            "__float__",
            "cannot read a variable that has a value on every replica",
            numbers.make(float),
        ),
        Repair(KerasVariable, "__int__", "as __float__", numbers.make(int)),
        Repair(
            Trainer,
            "compile",
            "leaves metrics and optimizers outside the scope of the model",
            compile_in_scope,
        ),
        *(
            Repair(
                layer,
                "adapt",
                "learns from this worker's data alone, and takes a worker's part for all of it",
                adapt.make,
            )
            for layer in (
                IndexLookup,
                keras.layers.TextVectorization,
                keras.layers.Normalization,
                keras.layers.Discretization,
            )
        ),
        Repair(keras.Model, "save", "every worker writes, in place", files.guarded),
        Repair(keras.Model, "save_weights", "every worker writes, in place", files.guarded),
        Repair(keras.Model, "export", "every worker writes, in place", files.guarded),
        Repair(keras.saving, "save_model", "every worker writes, in place", files.guarded),
        Repair(keras.saving, "save_weights", "every worker writes, in place", files.guarded),
        Repair(keras.models, "save_model", "every worker writes, in place", files.guarded),
        Repair(
            keras.callbacks.CSVLogger,
            "on_train_end",
            "asks a file whether it is closed, which one on gs:// cannot tell",
            files.closing,
            "not self.csv_file.closed",
        ),
    )
