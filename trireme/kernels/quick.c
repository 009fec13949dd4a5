/* The shortest way through a remembered call: what repeat.py and notes.py do, without a frame of Python.
 *
 * Call tries the recent kinds of calls and otherwise asks the function it stands for. Launch repeats one launch: it allocates the
 * results, fills in addresses and stream, and starts the kernel, through the driver where it knows how. Knows tuples and addresses;
 * nothing of tensors but data_ptr().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

enum { VALUES = 64, TENSORS = 8, RESULTS = 4, PARAMETERS = 48, SCRATCH = 2 };

/* A driver's own start of a kernel: grid, block, shared memory, stream, the addresses of its parameters. CUDA and HIP have the same. */
typedef int (*Driver)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

typedef struct {
    int place, index;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *start, *empty, *stream, *device; /* raw start of a kernel; new memory; the stream of a device */
    PyObject *values[VALUES];                  /* of the start, those to be filled in NULL or of the recorded call */
    PyObject *layouts[RESULTS];                /* (shape, stride, type) */
    Slot sources[TENSORS], floats[TENSORS];
    int targets[RESULTS];
    int num_values, num_sources, num_floats, num_targets, stream_place, as_tuple;
    Driver driver;                             /* NULL: only through `start` */
    void *function;
    unsigned grid[3], threads, shared;
    char kinds[VALUES];                        /* of each value: p an address, i a whole number, f and d floats, - no parameter */
} Launch;

static PyObject *data_ptr_name;
static PyTypeObject LaunchType;

/* The address of a tensor's memory as Python's number, its low bits gathered in `together`. */
static PyObject *address_of(PyObject *tensor, unsigned long long *together) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
    if (!number) return NULL;
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        Py_DECREF(number);
        return NULL;
    }
    if (together) *together |= value;
    return number;
}

static PyObject *results_of(const Launch *self, PyObject **made) {
    if (!self->as_tuple) return Py_NewRef(made[0]);
    PyObject *tuple = PyTuple_New(self->num_targets);
    for (int i = 0; tuple && i < self->num_targets; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(made[i]));
    return tuple;
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

/* Whether the driver took the launch. It does not where this thread has no context yet; Triton's own start makes one. */
static int driven(const Launch *self, PyObject *const *values) {
    unsigned long long bits[PARAMETERS], none = 0;
    void *parameters[PARAMETERS + SCRATCH], *stream = PyLong_AsVoidPtr(values[self->stream_place]);
    int count = 0, code;
    for (int i = 0; i < self->num_values; i++) {
        if (self->kinds[i] == '-') continue;
        if (count == PARAMETERS || !bits_of(values[i], self->kinds[i], &bits[count])) break;
        parameters[count] = &bits[count];
        count++;
    }
    if (PyErr_Occurred() || count == PARAMETERS) return PyErr_Clear(), 0;
    for (int i = 0; i < SCRATCH; i++) parameters[count + i] = &none; /* memory that Triton would give it; none is wanted */
    Py_BEGIN_ALLOW_THREADS;
    code = self->driver(self->function, self->grid[0], self->grid[1], self->grid[2], self->threads, 1, 1, self->shared, stream,
                        parameters, NULL);
    Py_END_ALLOW_THREADS;
    return code == 0;
}

/* New reference to the result; None where an argument lies otherwise than that of the recorded call; NULL for an error. */
static PyObject *repeat(const Launch *self, PyObject *const *args) {
    PyObject *values[VALUES], *owned[TENSORS + RESULTS + 1], *made[RESULTS], *result = NULL;
    int num_owned = 0, num_made = 0;
    unsigned long long together = 0;
    memcpy(values, self->values, sizeof(PyObject *) * self->num_values);
    for (int i = 0; i < self->num_sources; i++) {
        PyObject *number = address_of(args[self->sources[i].index], &together);
        if (!number) goto done;
        values[self->sources[i].place] = owned[num_owned++] = number;
    }
    if (together & 15) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    for (int i = 0; i < self->num_floats; i++) values[self->floats[i].place] = args[self->floats[i].index];
    for (int i = 0; i < self->num_targets; i++) {
        PyObject *const *layout = &PyTuple_GET_ITEM(self->layouts[i], 0);
        PyObject *tensor = PyObject_Vectorcall(self->empty, layout, 3, NULL);
        if (!tensor) goto done;
        made[num_made++] = tensor;
        PyObject *number = address_of(tensor, NULL);
        if (!number) goto done;
        values[self->targets[i]] = owned[num_owned++] = number;
    }
    PyObject *stream = PyObject_CallOneArg(self->stream, self->device);
    if (!stream) goto done;
    values[self->stream_place] = owned[num_owned++] = stream;
    if (self->driver && driven(self, values)) {
        result = results_of(self, made);
        goto done;
    }
    PyObject *started = PyObject_Vectorcall(self->start, values, self->num_values, NULL);
    if (started) result = results_of(self, made);
    Py_XDECREF(started);
done:
    while (num_owned) Py_DECREF(owned[--num_owned]);
    while (num_made) Py_DECREF(made[--num_made]);
    return result;
}

static int read_slots(PyObject *list, Slot *slots, int *count) {
    *count = (int)PySequence_Size(list);
    if (*count < 0 || *count > TENSORS) return 0;
    for (int i = 0; i < *count; i++) {
        PyObject *pair = PySequence_GetItem(list, i);
        int read = pair && PyArg_ParseTuple(pair, "ii", &slots[i].place, &slots[i].index);
        Py_XDECREF(pair);
        if (!read) return 0;
    }
    return 1;
}

static int read_targets(PyObject *list, Launch *self) {
    self->num_targets = (int)PySequence_Size(list);
    if (self->num_targets < 1 || self->num_targets > RESULTS) return 0;
    for (int i = 0; i < self->num_targets; i++) {
        PyObject *pair = PySequence_GetItem(list, i), *layout = NULL;
        int read = pair && PyArg_ParseTuple(pair, "iO!", &self->targets[i], &PyTuple_Type, &layout) && PyTuple_GET_SIZE(layout) == 3;
        if (read) self->layouts[i] = Py_NewRef(layout);
        Py_XDECREF(pair);
        if (!read) return 0;
    }
    return 1;
}

static int inside(const Launch *self) {
    int good = self->stream_place >= 0 && self->stream_place < self->num_values;
    for (int i = 0; i < self->num_sources; i++) good &= self->sources[i].place < self->num_values;
    for (int i = 0; i < self->num_floats; i++) good &= self->floats[i].place < self->num_values;
    for (int i = 0; i < self->num_targets; i++) good &= self->targets[i] < self->num_values;
    return good;
}

/* The driver's address, the function's, threads, shared memory and the kinds of the values; or None. */
static int read_driver(PyObject *raw, Launch *self) {
    unsigned long long driver, function;
    const char *kinds;
    Py_ssize_t length;
    if (raw == Py_None) return 1;
    if (!PyArg_ParseTuple(raw, "KKIIs#", &driver, &function, &self->threads, &self->shared, &kinds, &length)) return 0;
    if (length != self->num_values || self->num_values < 3) return 0;
    memcpy(self->kinds, kinds, length);
    for (int i = 0; i < 3; i++) self->grid[i] = (unsigned)PyLong_AsUnsignedLongMask(self->values[i]);
    self->driver = (Driver)(uintptr_t)driver, self->function = (void *)(uintptr_t)function;
    return !PyErr_Occurred();
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *start, *template, *sources, *floats, *targets, *empty, *stream, *device, *raw;
    int stream_place, as_tuple;
    if (!PyArg_ParseTuple(args, "OO!iOOOOOOpO", &start, &PyList_Type, &template, &stream_place, &sources, &floats, &targets, &empty,
                          &stream, &device, &as_tuple, &raw))
        return NULL;
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->start = Py_NewRef(start), self->empty = Py_NewRef(empty);
    self->stream = Py_NewRef(stream), self->device = Py_NewRef(device);
    self->stream_place = stream_place, self->as_tuple = as_tuple;
    Py_ssize_t count = PyList_GET_SIZE(template);
    int good = count <= VALUES;
    for (Py_ssize_t i = 0; good && i < count; i++) self->values[self->num_values++] = Py_NewRef(PyList_GET_ITEM(template, i));
    good = good && read_slots(sources, self->sources, &self->num_sources) && read_slots(floats, self->floats, &self->num_floats);
    good = good && read_targets(targets, self) && inside(self) && read_driver(raw, self);
    if (good) return (PyObject *)self;
    Py_DECREF(self);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "more values than a quick launch holds");
    return NULL;
}

static void launch_dealloc(Launch *self) {
    Py_XDECREF(self->start), Py_XDECREF(self->empty), Py_XDECREF(self->stream), Py_XDECREF(self->device);
    for (int i = 0; i < self->num_values; i++) Py_XDECREF(self->values[i]);
    for (int i = 0; i < RESULTS; i++) Py_XDECREF(self->layouts[i]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* launch(args, kwargs), as the functions of notes.py are called. */
static PyObject *launch_call(Launch *self, PyObject *args, PyObject *kwargs) {
    PyObject *given, *named = NULL;
    if (!PyArg_ParseTuple(args, "O!|O", &PyTuple_Type, &given, &named)) return NULL;
    for (int i = 0; i < self->num_sources; i++)
        if (self->sources[i].index >= PyTuple_GET_SIZE(given)) return Py_NewRef(Py_None);
    for (int i = 0; i < self->num_floats; i++)
        if (self->floats[i].index >= PyTuple_GET_SIZE(given)) return Py_NewRef(Py_None);
    return repeat(self, &PyTuple_GET_ITEM(given, 0));
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "trireme_quick.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = launch_new,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_call = (ternaryfunc)launch_call,
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *slow, *recent, *exact, *recordings, *traced, *transformed;
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

/* Whether floats that count by their sign alone have a fraction and the signs of this kind; none does once `exact` holds something. */
static int are_signed(PyObject *signs, PyObject *const *args, PyObject *exact) {
    Py_ssize_t count = PyList_GET_SIZE(signs);
    if (count && PyList_GET_SIZE(exact)) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *sign = PyList_GET_ITEM(signs, i), *x = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(sign, 0))];
        if (!PyFloat_CheckExact(x)) return 0;
        double value = PyFloat_AS_DOUBLE(x);
        int whole = !(value > -9e15 && value < 9e15) || value == (double)(long long)value; /* so are infinities, and what is no number */
        if (whole || (value > 0) != (PyUnicode_READ_CHAR(PyTuple_GET_ITEM(sign, 1), 0) == '+')) return 0;
    }
    return 1;
}

/* Whether the arguments are of this kind: (number, alike, places, others, signs, again) of repeat.py. */
static int is_kind(PyObject *kind, PyObject *const *args, Py_ssize_t count, PyObject *exact) {
    PyObject *places = PyTuple_GET_ITEM(kind, 2), *others = PyTuple_GET_ITEM(kind, 3), *stack[TENSORS];
    Py_ssize_t tensors = PyTuple_GET_SIZE(places);
    if (PyLong_AsSsize_t(PyTuple_GET_ITEM(kind, 0)) != count || tensors > TENSORS) return 0;
    if (!are_signed(PyTuple_GET_ITEM(kind, 4), args, exact)) return 0;
    for (Py_ssize_t i = 0; i < tensors; i++) stack[i] = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i))];
    PyObject *answer = PyObject_Vectorcall(PyTuple_GET_ITEM(kind, 1), stack, tensors, NULL);
    if (!answer) return -1;
    int same = answer == Py_True;
    Py_DECREF(answer);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(others); i++) {
        PyObject *other = PyList_GET_ITEM(others, i), *x = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(other, 0))];
        if ((PyObject *)Py_TYPE(x) != PyTuple_GET_ITEM(other, 1)) return 0;
        same = PyObject_RichCompareBool(x, PyTuple_GET_ITEM(other, 2), Py_EQ);
    }
    return same;
}

static PyObject *again_of(PyObject *kind, PyObject *const *args, Py_ssize_t count) {
    PyObject *again = PyTuple_GET_ITEM(kind, 5);
    if (Py_TYPE(again) == &LaunchType) return repeat((Launch *)again, args);
    PyObject *given = PyTuple_New(count), *named = PyDict_New(), *result = NULL;
    for (Py_ssize_t i = 0; given && i < count; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    if (given && named) result = PyObject_CallFunctionObjArgs(again, given, named, NULL);
    Py_XDECREF(given), Py_XDECREF(named);
    return result;
}

static PyObject *call_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
    Call *self = (Call *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    int quick = names && PyTuple_GET_SIZE(names) ? 0 : unwatched(self);
    if (quick < 0) return NULL;
    for (Py_ssize_t i = 0; quick && i < PyList_GET_SIZE(self->recent); i++) {
        PyObject *kind = Py_NewRef(PyList_GET_ITEM(self->recent, i)), *result = NULL;
        int same = is_kind(kind, args, count, self->exact);
        if (same == 1) result = again_of(kind, args, count);
        Py_DECREF(kind);
        if (same < 0 || (same == 1 && !result)) return NULL;
        if (result == Py_None) Py_CLEAR(result);
        if (result) return result;
    }
    return PyObject_Vectorcall(self->slow, args, nargsf, names);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *slow, *recent, *exact, *recordings, *traced, *transformed;
    if (!PyArg_ParseTuple(args, "OO!O!O!OO", &slow, &PyList_Type, &recent, &PyList_Type, &exact, &PyList_Type, &recordings, &traced,
                          &transformed))
        return NULL;
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = call_call;
    self->slow = Py_NewRef(slow), self->recent = Py_NewRef(recent), self->exact = Py_NewRef(exact);
    self->recordings = Py_NewRef(recordings);
    self->traced = Py_NewRef(traced), self->transformed = Py_NewRef(transformed);
    return (PyObject *)self;
}

static void call_dealloc(Call *self) {
    Py_XDECREF(self->slow), Py_XDECREF(self->recent), Py_XDECREF(self->exact), Py_XDECREF(self->recordings);
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

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "trireme_quick", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_trireme_quick(void) {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    PyObject *module = PyModule_Create(&definition);
    if (!data_ptr_name || !module || PyModule_AddType(module, &LaunchType) < 0 || PyModule_AddType(module, &CallType) < 0) return NULL;
    return module;
}
