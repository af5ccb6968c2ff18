"""A list of Python ints as an array, in one pass; a long prompt is a long list."""

import numpy as np

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport int64_t


def int64_of(list ids):
    """(n,) int64 of a list of exact ints that fit; None where an entry is anything else."""
    cdef Py_ssize_t count = PyList_GET_SIZE(ids), i
    array = np.empty(count, dtype=np.int64)
    cdef int64_t[::1] values = array
    cdef object entry
    cdef int overflow = 0
    for i in range(count):
        entry = <object>PyList_GET_ITEM(ids, i)
        if not PyLong_CheckExact(entry):
            return None
        values[i] = PyLong_AsLongAndOverflow(entry, &overflow)
        if overflow:
            return None
    return array
