"""Functions are put on workers, and taken off, without holding up the rest of the process.

TensorFlow tells every worker of each new function, and of each that Python has forgotten, one after
the other, and waits for the answer with the interpreter's lock held. One worker that is stopped
then stops all threads of the coordinator; measured at the end of `fit`, when the graphs of its
`tf.data` pipeline are let go. Here the same calls are made without the lock, and what is forgotten
is taken off in a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.framework import c_api_util
from tensorflow.python.framework import errors_impl

_LIBRARY = "libtensorflow_cc.so.2"

_forgotten: SimpleQueue[tuple[Any, bytes]] = SimpleQueue()
#: Names in `_forgotten`, or just being taken off.
_names: set[bytes] = set()
_none_left = threading.Condition()
_thread: threading.Thread | None = None


def begin() -> None:
    """Does it this way from now on; for the coordinator of parameter servers."""
    global _thread
    if _thread is None:
        _library()
        _thread = threading.Thread(target=_take_off, name="tfdist-functions", daemon=True)
        _thread.start()


def removed_later(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TensorFlow's `Context.remove_function` that waits for no worker."""

    @functools.wraps(original)
    def remove_function(self: Any, name: Any) -> None:
        if _thread is None:
            original(self, name)
        elif not sys.is_finalizing():
            # Called from wherever Python collects garbage, so no lock may be taken here.
            name = tf.compat.as_bytes(name)
            _names.add(name)
            _forgotten.put((self._handle, name))

    return remove_function


def added_definition(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TensorFlow's `Context.add_function_def` that lets other threads go on."""

    @functools.wraps(original)
    def add_function_def(self: Any, fdef: Any) -> None:
        if _thread is None:
            original(self, fdef)
            return
        self.ensure_initialized()
        name = tf.compat.as_bytes(fdef.signature.name)
        with _none_left:
            _none_left.wait_for(lambda: name not in _names)
        data = fdef.SerializeToString()
        _call("TFE_ContextAddFunctionDef", self._handle, data, ctypes.c_size_t(len(data)))

    return add_function_def


def added(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TensorFlow's `Context.add_c_function` that lets other threads go on."""

    @functools.wraps(original)
    def add_c_function(self: Any, c_func: Any) -> None:
        if _thread is None:
            original(self, c_func)
            return
        definition = function_pb2.FunctionDef()
        with c_api_util.tf_buffer() as buffer:
            c_api.TF_FunctionToFunctionDef(c_func, buffer)
            definition.ParseFromString(tf.compat.as_bytes(c_api.TF_GetBuffer(buffer)))
        self.add_function_def(definition)

    return add_c_function


def _take_off() -> None:
    while True:
        handle, name = _forgotten.get()
        with contextlib.suppress(tf.errors.OpError):  # It may not be there any more.
            _call("TFE_ContextRemoveFunction", handle, name)
        with _none_left:
            _names.discard(name)
            _none_left.notify_all()


@functools.cache
def _library() -> ctypes.CDLL:
    """Returns TensorFlow's library, whose functions are called without the interpreter's lock."""
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), _LIBRARY))
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    return library


def _call(name: str, handle: Any, *args: Any) -> None:
    """Calls `name(context, *args, status)`.

    Raises:
        tf.errors.OpError: It has failed.
    """
    library = _library()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    status = ctypes.c_void_p(library.TF_NewStatus())
    try:
        context = ctypes.c_void_p(pointer(handle, None))
        getattr(library, name)(context, *args, status)
        if code := library.TF_GetCode(status):
            message = tf.compat.as_text(library.TF_Message(status) or b"")
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)
    finally:
        library.TF_DeleteStatus(status)
