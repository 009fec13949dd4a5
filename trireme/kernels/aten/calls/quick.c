/* The shortest way through remembered calls: what repeat.py and notes.py do, without a frame of Python.
 *
 * Call tries the recent kinds of calls and otherwise asks the function it stands for. repeat() does a call again by its plan: it
 * allocates results and workspaces, fills in addresses and stream, and starts the kernels, through the driver where it knows how.
 * Knows tuples and addresses, which only quick.py makes and nobody changes; nothing of tensors but data_ptr().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <string.h>

/* Behind a kernel's own parameters stand two for memory that Triton would give it; none is wanted. */
enum { VALUES = 64, TENSORS = 8, MEMORY = 16, PARAMETERS = 48, SCRATCH = 2 };

/* Places in a plan: which arguments are tensors; for each the number of the first that shares its memory; (shape, stride, type) of new
 * memory; the numbers of the results; whether these are a tuple; what makes memory, what tells the stream of a device, the device; the
 * only stream it may run on (or None), and what tells whether that records a graph; (what to ask, what it must answer) of settings;
 * starts; where the stream stands in a start's values. */
enum { PLACES, SHARED, LAYOUTS, RETURNED, AS_TUPLE, EMPTY, STREAM, DEVICE, BOUND, CAPTURING, SETTINGS, STARTS, STREAM_PLACE };
/* Places in a start: Triton's raw start; its values; (place, number of the memory, bytes into it) of addresses; `quick.Raw` or None. */
enum { START, TEMPLATE, POINTERS, RAW };
/* Places in a `quick.Raw`; of each value a kind: p an address, i a whole number, f and d floats, - no parameter. */
enum { DRIVER, FUNCTION, THREADS, SHARED_BYTES, GRID_X, GRID_Y, GRID_Z, KINDS, EARLY };

/* A driver's own start of a kernel: grid, block, shared memory, stream, the addresses of its parameters. */
typedef int (*Driver)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
/* CUDA's other start, of a kernel that may come onto the chip before the one before it is done: its structures, as they lie in memory. */
typedef struct {
    int id, unused;
    unsigned value[16] __attribute__((aligned(8)));
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Configuration;
typedef int (*ExtendedDriver)(const Configuration *, void *, void **, void **);
enum { PROGRAMMATIC_SERIALISATION = 6 }; /* CU_LAUNCH_ATTRIBUTE_… */

static PyObject *data_ptr_name;

#define item PyTuple_GET_ITEM
static Py_ssize_t size_of(PyObject *tuple) { return PyTuple_GET_SIZE(tuple); }
static unsigned long long whole(PyObject *tuple, Py_ssize_t i) { return PyLong_AsUnsignedLongLongMask(item(tuple, i)); }
static int yes(PyObject *tuple, Py_ssize_t i) { return item(tuple, i) == Py_True; }

/* The address of a tensor's memory as Python's number. */
static PyObject *address_of(PyObject *tensor, unsigned long long *value) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
    if (!number) return NULL;
    *value = PyLong_AsUnsignedLongLong(number);
    if (*value == (unsigned long long)-1 && PyErr_Occurred()) Py_CLEAR(number);
    return number;
}

/* One parameter's bits; 0 for an error. */
static int bits_of(PyObject *value, char kind, unsigned long long *bits) {
    float narrow;
    double wide;
    if (kind == 'p' && value == Py_None) return *bits = 0, 1;
    if (kind == 'p' || kind == 'i') *bits = PyLong_AsUnsignedLongLongMask(value);
    else {
        wide = PyFloat_AsDouble(value), narrow = (float)wide, *bits = 0;
        if (kind == 'f') memcpy(bits, &narrow, sizeof narrow);
        else memcpy(bits, &wide, sizeof wide);
    }
    return !PyErr_Occurred();
}

/* The driver's answer to a start with these parameters: 0 if it took it. */
static int answer_of(PyObject *raw, void *stream, void **parameters) {
    void *driver = (void *)(uintptr_t)whole(raw, DRIVER), *function = (void *)(uintptr_t)whole(raw, FUNCTION);
    unsigned x = whole(raw, GRID_X), y = whole(raw, GRID_Y), z = whole(raw, GRID_Z);
    unsigned threads = whole(raw, THREADS), shared = whole(raw, SHARED_BYTES);
    int code, early = yes(raw, EARLY);
    Attribute may_come_early = {PROGRAMMATIC_SERIALISATION, 0, {1}};
    Configuration all = {{x, y, z}, {threads, 1, 1}, shared, stream, &may_come_early, 1};
    Py_BEGIN_ALLOW_THREADS;
    code = early ? ((ExtendedDriver)driver)(&all, function, parameters, 0)
                 : ((Driver)driver)(function, x, y, z, threads, 1, 1, shared, stream, parameters, 0);
    Py_END_ALLOW_THREADS;
    return code;
}

/* Whether the driver took the launch. It does not where this thread has no context yet; Triton's own start makes one. */
static int driven(PyObject *raw, PyObject *const *values, PyObject *stream) {
    unsigned long long bits[PARAMETERS], none = 0;
    void *parameters[PARAMETERS + SCRATCH], *on = PyLong_AsVoidPtr(stream);
    const char *kinds = PyBytes_AS_STRING(item(raw, KINDS));
    Py_ssize_t num_values = PyBytes_GET_SIZE(item(raw, KINDS));
    int count = 0;
    for (Py_ssize_t i = 0; i < num_values; i++) {
        if (kinds[i] == '-') continue;
        if (count == PARAMETERS || !bits_of(values[i], kinds[i], &bits[count])) return PyErr_Clear(), 0;
        parameters[count] = &bits[count], count++;
    }
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    for (int i = 0; i < SCRATCH; i++) parameters[count + i] = &none;
    return answer_of(raw, on, parameters) == 0;
}

/* Starts one kernel on this memory; 0 for an error. */
static int started(PyObject *start, PyObject *const *addresses, Py_ssize_t stream_place, PyObject *stream) {
    PyObject *values[VALUES], *inner[MEMORY], *template = item(start, TEMPLATE), *pointers = item(start, POINTERS);
    Py_ssize_t count = size_of(template);
    int num_inner = 0, good = 1;
    for (Py_ssize_t i = 0; i < count; i++) values[i] = item(template, i);
    for (Py_ssize_t i = 0; good && i < size_of(pointers); i++) {
        PyObject *slot = item(pointers, i), *address = addresses[whole(slot, 1)];
        unsigned long long offset = whole(slot, 2);
        if (offset) {
            address = PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(address) + offset);
            if (!(good = address != NULL)) break;
            inner[num_inner++] = address;
        }
        values[whole(slot, 0)] = address;
    }
    values[stream_place] = stream;
    if (good && !(item(start, RAW) != Py_None && driven(item(start, RAW), values, stream))) {
        PyObject *answer = PyObject_Vectorcall(item(start, START), values, count, NULL);
        good = answer != NULL;
        Py_XDECREF(answer);
    }
    while (num_inner) Py_DECREF(inner[--num_inner]);
    return good;
}

/* 1 if all settings are as they were and it may run on this stream, 0 if not, -1 for an error. */
static int may_run(PyObject *plan, PyObject *stream) {
    PyObject *settings = item(plan, SETTINGS), *answer;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < size_of(settings); i++) {
        if (!(answer = PyObject_CallNoArgs(item(item(settings, i), 0)))) return -1;
        same = PyObject_RichCompareBool(answer, item(item(settings, i), 1), Py_EQ);
        Py_DECREF(answer);
    }
    if (same != 1 || item(plan, BOUND) == Py_None) return same;
    if ((same = PyObject_RichCompareBool(stream, item(plan, BOUND), Py_EQ)) != 1) return same;
    if (!(answer = PyObject_CallNoArgs(item(plan, CAPTURING)))) return -1;
    same = PyObject_Not(answer);
    Py_DECREF(answer);
    return same;
}

static PyObject *results_of(PyObject *plan, PyObject *const *memory) {
    PyObject *returned = item(plan, RETURNED);
    if (!yes(plan, AS_TUPLE)) return Py_NewRef(memory[whole(returned, 0)]);
    PyObject *tuple = PyTuple_New(size_of(returned));
    for (Py_ssize_t i = 0; tuple && i < size_of(returned); i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(memory[whole(returned, i)]));
    return tuple;
}

/* New reference to the result; None where an argument lies otherwise than that of the recorded call; NULL for an error. */
static PyObject *repeat(PyObject *plan, PyObject *const *args) {
    PyObject *memory[MEMORY], *addresses[MEMORY], *stream = NULL, *result = NULL;
    PyObject *places = item(plan, PLACES), *layouts = item(plan, LAYOUTS), *starts = item(plan, STARTS);
    unsigned long long value[MEMORY], together = 0;
    Py_ssize_t known = 0, made = 0, num_tensors = size_of(places);
    int same = 1, may;
    for (; known < num_tensors; known++) {
        memory[known] = args[whole(places, known)];
        if (!(addresses[known] = address_of(memory[known], &value[known]))) goto done;
        together |= value[known];
        same &= value[known] == value[whole(item(plan, SHARED), known)];
    }
    if (!(stream = PyObject_CallOneArg(item(plan, STREAM), item(plan, DEVICE)))) goto done;
    may = together & 15 || !same ? 0 : may_run(plan, stream);
    if (may <= 0) {
        result = may < 0 ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    for (; made < size_of(layouts); made++, known++) {
        PyObject *layout = item(layouts, made);
        if (!(memory[known] = PyObject_Vectorcall(item(plan, EMPTY), &item(layout, 0), 3, NULL))) goto done;
        if (!(addresses[known] = address_of(memory[known], &value[known]))) {
            Py_DECREF(memory[known]);
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < size_of(starts); i++)
        if (!started(item(starts, i), addresses, whole(plan, STREAM_PLACE), stream)) goto done;
    result = results_of(plan, memory);
done:
    while (made) Py_DECREF(memory[num_tensors + --made]);
    while (known) Py_DECREF(addresses[--known]);
    Py_XDECREF(stream);
    return result;
}

/* repeat(plan, args) */
static PyObject *repeat_plan(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    return repeat(given[0], &PyTuple_GET_ITEM(given[1], 0));
}

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *slow, *recent, *recordings, *traced, *transformed;
} Call;

/* 1 if nobody watches calls (a tracer, a transform), 0 if somebody may, -1 for an error. */
static int unwatched(const Call *self) {
    if (PyList_GET_SIZE(self->recordings)) return 0;
    if (self->traced == Py_None) return 1;
    PyObject *depth = PyObject_CallNoArgs(self->traced);
    if (!depth) return -1;
    int free = !PyObject_IsTrue(depth);
    Py_DECREF(depth);
    if (!free) return 0;
    PyObject *top = PyObject_CallNoArgs(self->transformed);
    if (!top) return -1;
    free = top == Py_None;
    Py_DECREF(top);
    return free;
}

/* Whether the arguments are of this kind: (number, alike, places of tensors, others, again) of repeat.py. */
static int is_kind(PyObject *kind, PyObject *const *args, Py_ssize_t count) {
    PyObject *places = item(kind, 2), *others = item(kind, 3), *stack[TENSORS];
    Py_ssize_t tensors = size_of(places);
    if ((Py_ssize_t)whole(kind, 0) != count || tensors > TENSORS) return 0;
    for (Py_ssize_t i = 0; i < tensors; i++) stack[i] = args[whole(places, i)];
    PyObject *answer = PyObject_Vectorcall(item(kind, 1), stack, tensors, NULL);
    if (!answer) return -1;
    int same = answer == Py_True;
    Py_DECREF(answer);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(others); i++) {
        PyObject *other = PyList_GET_ITEM(others, i), *x = args[whole(other, 0)];
        if ((PyObject *)Py_TYPE(x) != item(other, 1)) return 0;
        same = PyObject_RichCompareBool(x, item(other, 2), Py_EQ);
    }
    return same;
}

static PyObject *again_of(PyObject *again, PyObject *const *args, Py_ssize_t count) {
    PyObject *given, *result;
    if (PyTuple_CheckExact(again)) return repeat(again, args);
    if (!(given = PyTuple_New(count))) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    result = PyObject_CallOneArg(again, given);
    Py_DECREF(given);
    return result;
}

static PyObject *call_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
    Call *self = (Call *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    int named = names && PyTuple_GET_SIZE(names), quick = named ? 0 : unwatched(self);
    if (quick < 0) return NULL;
    for (Py_ssize_t i = 0; quick && i < PyList_GET_SIZE(self->recent); i++) {
        PyObject *kind = Py_NewRef(PyList_GET_ITEM(self->recent, i)), *result = NULL;
        int same = is_kind(kind, args, count);
        if (same == 1) result = again_of(item(kind, 4), args, count);
        Py_DECREF(kind);
        if (same < 0 || (same == 1 && !result)) return NULL;
        if (result == Py_None) Py_CLEAR(result);
        if (result) return result;
    }
    return PyObject_Vectorcall(self->slow, args, nargsf, names);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *slow, *recent, *recordings, *traced, *transformed;
    if (!PyArg_ParseTuple(args, "OO!O!OO", &slow, &PyList_Type, &recent, &PyList_Type, &recordings, &traced, &transformed)) return NULL;
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = call_call;
    self->slow = Py_NewRef(slow), self->recent = Py_NewRef(recent), self->recordings = Py_NewRef(recordings);
    self->traced = Py_NewRef(traced), self->transformed = Py_NewRef(transformed);
    return (PyObject *)self;
}

static void call_dealloc(Call *self) {
    Py_XDECREF(self->slow), Py_XDECREF(self->recent), Py_XDECREF(self->recordings);
    Py_XDECREF(self->traced), Py_XDECREF(self->transformed);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* What it has not itself, the function it stands for has: its name, its memory. */
static PyObject *call_getattr(PyObject *self, PyObject *name) {
    PyObject *own = PyObject_GenericGetAttr(self, name);
    if (own || !PyErr_ExceptionMatches(PyExc_AttributeError)) return own;
    PyErr_Clear();
    return PyObject_GetAttr(((Call *)self)->slow, name);
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "trireme_quick.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = call_new,
    .tp_dealloc = (destructor)call_dealloc,
    .tp_getattro = call_getattr,
};

static PyMethodDef methods[] = {{"repeat", (PyCFunction)(void (*)(void))repeat_plan, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "trireme_quick", NULL, -1, methods};

PyMODINIT_FUNC PyInit_trireme_quick(void) {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    PyObject *module = PyModule_Create(&definition);
    return data_ptr_name && module && PyModule_AddType(module, &CallType) == 0 ? module : NULL;
}
