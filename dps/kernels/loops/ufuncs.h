/* What numpy knows of a ufunc's loops, in C, because the declarations for Cython differ from release to release. */

#ifndef DPS_UFUNCS_H
#define DPS_UFUNCS_H

#include <numpy/ndarrayobject.h>
#include <numpy/ufuncobject.h>

/* From numpy 2.5 on the fields are behind a macro. */
#ifdef _PyUFuncObject_GET_ITEM_DATA
#define DPS_FIELDS(ufunc) _PyUFuncObject_GET_ITEM_DATA((PyUFuncObject *) (ufunc))
#else
#define DPS_FIELDS(ufunc) ((PyUFuncObject *) (ufunc))
#endif

/* How many operands and results it has, and how many loops. */
static inline int dps_operands(PyObject *ufunc) { return DPS_FIELDS(ufunc)->nargs; }

static inline int dps_loops(PyObject *ufunc) { return DPS_FIELDS(ufunc)->ntypes; }

/* The number of the dtype of one operand or result in one of its loops. */
static inline int dps_type_of(PyObject *ufunc, int loop, int operand) {
    return DPS_FIELDS(ufunc)->types[loop * DPS_FIELDS(ufunc)->nargs + operand];
}

/* A loop, and the data that it wants. */
static inline void *dps_loop(PyObject *ufunc, int loop) { return (void *) DPS_FIELDS(ufunc)->functions[loop]; }

static inline void *dps_data_of(PyObject *ufunc, int loop) {
    return DPS_FIELDS(ufunc)->data ? (void *) DPS_FIELDS(ufunc)->data[loop] : NULL;
}

#endif
