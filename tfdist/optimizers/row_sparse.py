"""Updates only the rows of a table that have a gradient, with the optimizer's own rule.

    update_rows(optimizer, table, tf.IndexedSlices(values, ids), optimizer.learning_rate)

Keras's `update_step` computes new moments for every row, also for those without a gradient: a step
over a table of 1e7 rows takes seconds where the batch has 400 ids. Here the rows of the table and
of the optimizer's slots are gathered, `update_step` runs on these rows as if they were the whole
variable, and what it assigns is scattered back. All of it happens on the device that holds the
table, so that only ids and gradients travel.

What differs from the dense update is called lazy: a row without a gradient keeps its moments, and
so does not move on by momentum, nor decay; bias corrections still count every step; norms over the
variable (Lamb, Adafactor) are over the rows of the batch. Where every row has a gradient, the
result is that of the dense update.

Other workers may update the same rows at the same time. What the optimizer adds (`assign_add`,
`assign_sub`: the table under most optimizers, the moments of Adam, the accumulators of Adagrad) is
added to the table as it is then, so nobody's update is lost; what it assigns (Ftrl's table, the
moments of RMSprop) is the last writer's, as in the dense update. TensorFlow locks neither.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError


def update_rows(
    optimizer: Any,
    variable: Any,
    slices: tf.IndexedSlices,
    learning_rate: Any,
    unique: bool = False,
) -> None:
    """Runs `optimizer.update_step` on the rows that have a gradient.

    Args:
        optimizer: Keras optimizer that has been built for `variable`.
        variable: `keras.Variable` or `tf.Variable` of shape [rows, ...].
        slices: The gradient: `values` of shape [n, ...] and the `indices`, of shape [n] and an
            integer dtype, of their rows. A row that is named more than once gets the sum.
        learning_rate: Number or tensor.
        unique: Whether no row is named more than once; saves a pass over the indices.

    Raises:
        ConfigError: The optimizer has not been built.
        UnsupportedError: The optimizer needs the whole variable.
    """
    _update(optimizer, variable, slices, learning_rate, unique, decay=False, constrain=False)


def apply_rows(
    optimizer: Any,
    variable: Any,
    slices: tf.IndexedSlices,
    learning_rate: Any,
    unique: bool = False,
    constrain: bool = True,
) -> None:
    """Does to the rows that have a gradient all that a step does to a variable.

    Weight decay, then the update, then the variable's constraint, in the order of
    `optimizer.apply`. A row decays only in the steps in which it has a gradient. Clipping comes
    before (it needs all gradients together), averages come after.

    Args:
        optimizer: Keras optimizer that has been built for `variable`.
        variable: `keras.Variable` or `tf.Variable` of shape [rows, ...].
        slices: The gradient, as for `update_rows`.
        learning_rate: Number or tensor.
        unique: Whether no row is named more than once; saves a pass over the indices.
        constrain: Whether to apply the variable's constraint.

    Raises:
        ConfigError: The optimizer has not been built.
        UnsupportedError: The optimizer or the constraint needs the whole variable.
    """
    _update(optimizer, variable, slices, learning_rate, unique, decay=True, constrain=constrain)


def deduplicated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with every row named once, by the sum.

    Args:
        slices: `values` of shape [n, ...] and `indices` of shape [n].
    """
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _update(
    optimizer: Any,
    variable: Any,
    slices: tf.IndexedSlices,
    learning_rate: Any,
    unique: bool,
    decay: bool,
    constrain: bool,
) -> None:
    if not optimizer.built:
        raise ConfigError(
            "an optimizer that has been built",
            f"a new {type(optimizer).__name__}",
            "call optimizer.build(model.trainable_variables) first",
        )
    index = optimizer._get_variable_index(variable)
    table = optimizer._trainable_variables[index]
    _refuse_whole(optimizer, index, table)
    constraint = getattr(table, "constraint", None) if constrain else None
    _refuse_constraint(constraint, table)
    if not unique:
        # Here, not beside the table: rows that have been summed are fewer bytes to send.
        slices = deduplicated(slices)
    target = _component(variable)
    with tf.device(target.device):
        scope = _RowScope(optimizer, table, target, tf.convert_to_tensor(slices.indices))
        redirected = _redirect(optimizer, scope)
        with scope:
            if decay:
                _decay(redirected, scope.rows, learning_rate)
            redirected.update_step(slices.values, scope.rows, learning_rate)
            if constraint is not None:
                scope.assign(scope.rows, constraint(scope.rows.value))
        scope.write()


def _decay(optimizer: Any, rows: Any, learning_rate: Any) -> None:
    if type(optimizer)._apply_weight_decay is not Optimizer._apply_weight_decay:
        optimizer._apply_weight_decay([rows])  # An optimizer's own rule (Muon).
    elif optimizer.weight_decay is not None and optimizer._use_weight_decay(rows):
        decay = tf.cast(optimizer.weight_decay, rows.dtype)
        optimizer.assign_sub(rows, rows * decay * tf.cast(learning_rate, rows.dtype))


@dataclasses.dataclass
class _Part:
    """The rows, or the whole, of one variable during an update.

    Attributes:
        target: The `tf.Variable`.
        by_rows: Whether this is about rows of it.
        value: What the optimizer reads.
        added: The sum of what it has added so far, if it has only added.
        assigned: Whether it has assigned.
    """

    target: Any
    by_rows: bool
    value: Any
    added: Any = None
    assigned: bool = False


class _RowScope(keras.StatelessScope):
    """Where a read of the table or of its slots gives rows, and an update is kept for later.

    Attributes:
        rows: Stands in for the table.
    """

    def __init__(self, optimizer: Any, table: Any, target: Any, ids: tf.Tensor):
        super().__init__(initialize_variables=False)
        self.table = table
        self.rows = _Rows(table, self)
        self._own = {id(variable) for variable in optimizer.variables}
        self._shape = tuple(target.shape)
        self._ids = ids
        self._parts = {id(self.rows): self._read(target, by_rows=True)}

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) not in self._own and id(variable) not in self._parts:
            return None  # Not the optimizer's: as it is.
        if id(variable) not in self._parts and self.original_scope is not None:
            # A step on a parameter server has brought the counter along.
            known = self.original_scope.get_current_value(variable)
            if known is not None:
                return known
        return self._part(variable).value

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assign(*update)

    def assign(self, variable: Any, value: Any) -> None:
        part = self._part(variable)
        part.value = _like(value, part.value)
        part.assigned = True

    def assign_add(self, variable: Any, value: Any) -> None:
        part = self._part(variable)
        value = _like(value, part.value)
        part.value = part.value + value
        part.added = value if part.added is None else part.added + value

    def write(self) -> None:
        """Scatters what has been assigned and added."""
        # Without rows the means that a factor is made of are not numbers.
        some = tf.size(self._ids) > 0
        for part in self._parts.values():
            if part.assigned and part.by_rows:
                part.target.scatter_update(tf.IndexedSlices(part.value, self._ids))
            elif part.assigned:
                part.target.assign(tf.where(some, part.value, part.target))
            elif part.added is not None and part.by_rows:
                part.target.scatter_add(tf.IndexedSlices(part.added, self._ids))
            elif part.added is not None:
                part.target.assign_add(tf.where(some, part.added, tf.zeros_like(part.added)))

    def _part(self, variable: Any) -> _Part:
        if id(variable) not in self._parts:
            target = _component(variable)
            by_rows = self._goes_by_rows(tuple(variable.shape), variable)
            self._parts[id(variable)] = self._read(target, by_rows)
        return self._parts[id(variable)]

    def _read(self, target: Any, by_rows: bool) -> _Part:
        if by_rows:
            return _Part(target, True, tf.gather(target, self._ids))
        with tf.device(target.device):  # Counters may be on another device than the table.
            return _Part(target, False, tf.identity(target))

    def _goes_by_rows(self, shape: tuple[int, ...], variable: Any) -> bool:
        if shape == self._shape:
            return True
        if not shape or shape[0] != self._shape[0]:
            return False
        if self._shape[0] in self._shape[1:]:
            raise UnsupportedError(
                "a table with another number of rows than of columns, to know whether the "
                f"optimizer's {variable.name!r} goes by rows or by columns",
                f"shape {self._shape}",
                "change input_dim or output_dim by one, or use another optimizer",
            )
        return True


class _Rows(keras.Variable):  # type: ignore[misc]
    """Stands in for a table: its name and dtype, but only the rows of the batch.

    It has no storage: its value is a tensor of the scope.
    """

    def __init__(self, table: Any, scope: _RowScope):
        self._scope = scope
        self._name = table.name
        self._path = getattr(table, "path", table.name)
        self._shape = (None, *table.shape[1:])
        self._ndim = len(self._shape)
        self._dtype = keras.backend.standardize_dtype(table.dtype)
        self._trainable = True
        self._autocast = False
        self._aggregation = "none"
        self._synchronization = "auto"
        self._layout = None
        self._initializer = None
        self._regularizer = None
        self._constraint = None
        self._overwrite_with_gradient = False
        self._value = None

    @property
    def value(self) -> Any:
        return self._scope.get_current_value(self)

    @property
    def dtype(self) -> str:
        return str(self._dtype)

    def assign(self, value: Any) -> Any:
        self._scope.assign(self, value)
        return self.value


class _Redirected:
    """An optimizer, in all but that its updates go to a scope."""

    __slots__ = ("row_scope",)

    row_scope: _RowScope

    def assign(self, variable: Any, value: Any) -> None:
        self.row_scope.assign(variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        self.row_scope.assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        self.row_scope.assign_add(variable, -tf.convert_to_tensor(value))

    def _var_key(self, variable: Any) -> Any:
        scope = self.row_scope
        return super()._var_key(scope.table if variable is scope.rows else variable)  # type: ignore[misc]


def _redirect(optimizer: Any, scope: _RowScope) -> Any:
    """Returns a second view of the optimizer, for this call alone, so that threads do not meet."""
    cls: Any = type(optimizer)
    redirected = object.__new__(_redirected_class(cls))
    object.__setattr__(redirected, "__dict__", optimizer.__dict__)
    object.__setattr__(redirected, "row_scope", scope)
    return redirected


@functools.cache
def _redirected_class(cls: Any) -> Any:
    return type(cls.__name__, (_Redirected, cls), {})


def _component(variable: Any) -> Any:
    """Returns the `tf.Variable` that this replica updates."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def _like(value: Any, other: tf.Tensor) -> tf.Tensor:
    value = tf.cast(value, other.dtype)
    return (
        value if value.shape.rank == other.shape.rank else tf.broadcast_to(value, tf.shape(other))
    )


def _refuse_whole(optimizer: Any, index: int, table: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Muon):
        return
    if optimizer.adam_velocities[index] is None:
        raise UnsupportedError(
            "an optimizer that updates row by row",
            f"Muon for {table.path!r}: it makes the whole matrix orthogonal",
            f"add {table.path!r} to Muon's exclude_layers, to update it as AdamW does",
        )


def _refuse_constraint(constraint: Any, table: Any) -> None:
    axis = getattr(constraint, "axis", None)
    if axis is not None and 0 in (axis if isinstance(axis, (list, tuple)) else [axis]):
        raise UnsupportedError(
            f"a constraint that holds row by row on {table.path!r}",
            f"{type(constraint).__name__}(axis={axis!r}), over all rows",
            "give it axis=1, one norm for each row",
        )
