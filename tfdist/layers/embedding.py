"""`Embedding`: Keras's layer, whose table may be in parts on several parameter servers."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.layers import combine
from tfdist.layers import ids as ids_lib
from tfdist.layers import shards as shards_lib


@keras.saving.register_keras_serializable(package="tfdist")
class Embedding(keras.layers.Layer):
    """Turns ids into vectors, from a table that may be in parts on several parameter servers.

    In place of `keras.layers.Embedding`: the same arguments, the same results, the same files. A
    step reads and, with a row-sparse optimizer (`tfdist.optimizers.RowSparse`; automatic under
    parameter servers), writes only the rows of the batch, each once.

    Under `tf.distribute.ParameterServerStrategy` the table is several variables, each with a
    range of rows: as many as the strategy's `variable_partitioner` says, or at most one for each
    server and at least 256 KiB each. Elsewhere it is one. Saved weights (`.keras`,
    `.weights.h5`) and `get_weights` of the layer hold one table of shape [input_dim, output_dim]
    however many shards there are: a file of any number of shards, or of Keras's layer, loads into
    any other. Not so the optimizer's state in a `.keras` file and `tf.train.Checkpoint`, which
    have one entry for each shard: with another number, Keras starts the optimizer anew, with a
    warning.

    Random initializers draw the shards one by one: from the distribution of the whole table (also
    those that depend on its shape), but not the same values as in one piece.

    A regularizer reads the whole table in every step, as Keras's does, and its gradient is of all
    rows. A constraint holds row by row; one over all rows (`axis=0`) needs a table in one piece.
    XLA is not used for models with this layer unless asked for, as it copies tables.

    Args:
        input_dim: Number of rows. Ids are in [0, input_dim); others are an error.
        output_dim: Number of columns.
        embeddings_initializer: As in Keras.
        embeddings_regularizer: As in Keras. The sum over shards must be that of the whole, as it
            is for L1 and L2.
        embeddings_constraint: As in Keras.
        mask_zero: Whether id 0 (or "", hashed) is padding: masked, or left out by the combiner.
        weights: Array of shape [input_dim, output_dim] to start from.
        lora_rank: Not supported.
        lora_alpha: Not supported.
        quantization_config: Not supported.
        combiner: None for one vector for each id. "sum", "mean" or "sqrtn" for one vector for all
            ids along the last axis of dense, ragged or sparse ids; "mean" divides the sum by the
            sum of the weights of the ids, "sqrtn" by the root of the sum of their squares. No ids
            give zeros.
        num_shards: Number of shards, or None to have it chosen.
        hash_ids: Whether ids are any integers or strings, to be hashed into `input_dim` rows, to
            those of `keras.layers.Hashing(input_dim)`. With `mask_zero`, id 0 or "" has row 0
            for itself.
        **kwargs: Of `keras.layers.Layer`.

    Call arguments:
        inputs: Ids of shape [batch, ...], dense, ragged or sparse; integers, floats that hold
            integers, or with `hash_ids` strings. Sparse ids without a combiner are made dense
            with row 0.
        weights: With a combiner, the weight of each id; of the kind and shape of `inputs`.

    Returns of a call:
        Vectors in the layer's compute dtype: [batch, ..., output_dim], without the last axis of
        `inputs` if there is a combiner. Ragged ids give ragged vectors, unless their only ragged
        axis is combined.

    Raises:
        ConfigError: An argument cannot be right.
        UnsupportedError: LoRA or quantization; a regularizer or constraint that cannot be
            computed by shards.

    Example:
    ```python
    table = tfdist.layers.Embedding(1_000_000, 16, combiner="mean", hash_ids=True)
    table(tf.ragged.constant([["red", "new"], [], ["blue"]]))  # of shape [3, 16]
    ```
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        quantization_config: Any = None,
        *,
        combiner: str | None = None,
        num_shards: int | None = None,
        hash_ids: bool = False,
        **kwargs: Any,
    ):
        _check_positive(input_dim=input_dim, output_dim=output_dim)
        if num_shards is not None:
            _check_positive(num_shards=num_shards)
        if combiner is not None and combiner not in combine.COMBINERS:
            raise ConfigError(f"a combiner out of {combine.COMBINERS}, or None", repr(combiner))
        _refuse(lora_rank=lora_rank, lora_alpha=lora_alpha, quantization_config=quantization_config)
        if kwargs.pop("input_length", None) is not None:
            warnings.warn("`input_length` has no effect: remove it.", stacklevel=2)
        super().__init__(**kwargs)
        _refuse(quantization_mode=self.dtype_policy.quantization_mode)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.combiner = combiner
        self.num_shards = num_shards
        self.hash_ids = hash_ids
        self.supports_masking = mask_zero
        self.supports_jit = False
        self.autocast = False
        self._shards: list[Any] = []
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Creates the shards."""
        if self.built:
            return
        shape = (self.input_dim, self.output_dim)
        count = self.num_shards or shards_lib.count_for(shape, self.variable_dtype)
        starts = shards_lib.starts(self.input_dim, min(count, self.input_dim))
        count = len(starts) - 1
        if count > 1:
            self._check_by_shards()
        self._shards = []
        with shards_lib.unpartitioned():
            for index, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
                name = "embeddings" if count == 1 else f"embeddings_{index}"
                initializer = self.embeddings_initializer
                if count > 1:
                    initializer = shards_lib.initializer_of(initializer, shape, first, index)
                shard = self.add_weight(
                    shape=(end - first, self.output_dim),
                    initializer=initializer,
                    name=name,
                    regularizer=self.embeddings_regularizer,
                    constraint=self.embeddings_constraint,
                    autocast=False,  # That would cast all rows to read a few.
                )
                shard._tfdist_table = True
                self._shards.append(shard)
                setattr(self, f"_{name}", shard)  # tf.train.Checkpoint does not look into lists.
        self.built = True

    @property
    def shards(self) -> list[Any]:
        """The variables, of shape [rows of the shard, output_dim], in the order of rows."""
        return list(self._shards)

    @property
    def embeddings(self) -> Any:
        """The whole table: a tensor of shape [input_dim, output_dim]."""
        if not self.built:
            raise AttributeError("Build the layer before you read `embeddings`.")
        return tf.concat([tf.convert_to_tensor(shard) for shard in self._shards], axis=0)

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Looks up the vectors of ids."""
        buckets = self.input_dim if self.hash_ids else None
        rows = combine.map_values(lambda ids: ids_lib.to_rows(ids, buckets, self.mask_zero), inputs)
        if self.combiner is None:
            if weights is not None:
                raise ConfigError(
                    "weights of ids only where ids are combined",
                    "weights and combiner=None",
                    "pass combiner='sum', 'mean' or 'sqrtn' to the Embedding",
                )
            if isinstance(rows, tf.SparseTensor):
                rows = tf.sparse.to_dense(rows, validate_indices=False)
            return combine.map_values(
                lambda ids: tf.cast(self._vectors(ids), self.compute_dtype), rows
            )
        vectors = self._vectors(combine.values_of(rows))
        factors = self._factors(inputs, weights, vectors.dtype)
        result = combine.combine(rows, vectors, factors, self.combiner)
        return combine.map_values(lambda sums: tf.cast(sums, self.compute_dtype), result)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns which ids are not padding; None where that is not asked or they are combined."""
        is_dense = isinstance(inputs, (tf.Tensor, keras.KerasTensor))
        if not self.mask_zero or self.combiner is not None or not is_dense:
            return None
        if isinstance(inputs, tf.Tensor):
            return tf.logical_not(ids_lib.is_padding(inputs))
        return None if inputs.dtype == "string" else keras.ops.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns the shape of the vectors for ids of shape `input_shape`."""
        ids = tuple(input_shape)
        return (*(ids if self.combiner is None else ids[:-1]), self.output_dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Returns a `keras.KerasTensor` like the vectors for ids like `inputs`."""
        shape = self.compute_output_shape(inputs.shape)
        is_ragged = bool(getattr(inputs, "ragged", False))
        if self.combiner is not None:
            is_ragged = is_ragged and len(shape) > 2
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=is_ragged)

    def get_weights(self) -> list[Any]:
        """Returns the whole table as one array, in a list."""
        parts = [np.asarray(shard.numpy()) for shard in self._shards]
        return [np.concatenate(parts)] if parts else []

    def set_weights(self, weights: Any) -> None:
        """Sets the table.

        Args:
            weights: List of one array of shape [input_dim, output_dim].
        """
        if len(weights) != len(self._shards[:1]):
            raise ConfigError(
                f"{len(self._shards[:1])} arrays for the layer {self.name!r}",
                str(len(weights)),
                "pass what get_weights returns",
            )
        for table in weights:
            self._assign(table)

    def save_own_variables(self, store: Any) -> None:
        """Saves the whole table as one array, as `keras.layers.Embedding` does."""
        for table in self.get_weights():
            store["0"] = table

    def load_own_variables(self, store: Any) -> None:
        """Loads what any number of shards, or `keras.layers.Embedding`, has saved."""
        if not self.built:
            self._check_load_own_variables(store)
        elif list(store.keys()) != ["0"]:
            raise ConfigError(
                f"one table for the layer {self.name!r}",
                f"the arrays {sorted(store.keys())}",
                "load the weights of an embedding that is neither quantized nor another layer",
            )
        else:
            self._assign(store["0"])

    def get_config(self) -> dict[str, Any]:
        """Returns the config of the layer."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "num_shards": self.num_shards,
            "hash_ids": self.hash_ids,
        }

    def quantize(self, *unused: Any, **unused_too: Any) -> None:
        """Raises: not supported."""
        _refuse(quantize=True)

    def _vectors(self, rows: tf.Tensor) -> tf.Tensor:
        flat = shards_lib.look_up(self._shards, self.name, tf.reshape(rows, [-1]))
        shape = tf.concat([tf.shape(rows), [self.output_dim]], 0)
        return tf.ensure_shape(tf.reshape(flat, shape), [*rows.shape, self.output_dim])

    def _factors(self, inputs: Any, weights: Any, dtype: tf.DType) -> tf.Tensor | None:
        """Returns the weights of the values of `inputs`, those of padding 0; None for all 1."""
        factors = None
        if weights is not None:
            if type(weights) is not type(inputs):
                weights = tf.convert_to_tensor(weights)
            factors = tf.cast(combine.values_of(weights), dtype)
        if not self.mask_zero:
            return factors
        kept = tf.logical_not(ids_lib.is_padding(combine.values_of(inputs)))
        kept = tf.cast(kept, dtype)
        return kept if factors is None else kept * factors

    def _assign(self, table: Any) -> None:
        shape = (self.input_dim, self.output_dim)
        if tuple(table.shape) != shape:
            raise ConfigError(
                f"a table of shape {shape} for the layer {self.name!r}",
                f"shape {tuple(table.shape)}",
                "build the layer with the same input_dim and output_dim",
            )
        first = 0
        for shard in self._shards:
            end = first + shard.shape[0]
            shard.assign(table[first:end])
            first = end

    def _check_by_shards(self) -> None:
        axis = getattr(self.embeddings_constraint, "axis", None)
        if axis is not None and 0 in (axis if isinstance(axis, (list, tuple)) else [axis]):
            raise UnsupportedError(
                "an embeddings_constraint that holds row by row, for a table in shards",
                f"{type(self.embeddings_constraint).__name__}(axis={axis!r}), over all rows",
                "give it axis=1, one norm for each row, or pass num_shards=1",
            )
        if isinstance(self.embeddings_regularizer, keras.regularizers.OrthogonalRegularizer):
            raise UnsupportedError(
                "an embeddings_regularizer that is a sum over rows, for a table in shards",
                "OrthogonalRegularizer",
                "use L1 or L2, or pass num_shards=1",
            )


def _check_positive(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"a positive integer as {name}", f"{name}={value!r}")


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                "an embedding without LoRA and quantization",
                f"{name}={value!r}",
                "use keras.layers.Embedding, which cannot be sharded",
            )
