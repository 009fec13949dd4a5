/* The shortest way through a remembered call: what repeat.py and notes.py do, without a frame of Python.
 *
 * Call tries the recent kinds of calls and otherwise asks the function it stands for. Launch repeats a call: it allocates results and
 * workspaces, fills in addresses and stream, and starts the kernels, through the driver where it knows how. Onward hands a call to
 * another function. Knows tuples and addresses; nothing of tensors but data_ptr().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stddef.h>
#include "driver.h"

enum { VALUES = 64, TENSORS = 8, MADE = 8, STARTS = 4, ASKS = 2, DRAWN = 8 };

typedef struct {
    int place, index;
    long long offset; /* bytes into the memory */
} Slot;

/* One kernel to be started. */
typedef struct {
    PyObject *start;          /* Triton's raw start */
    PyObject *values[VALUES]; /* its arguments, those to be filled in NULL or of the recorded call */
    Slot pointers[TENSORS + MADE], floats[TENSORS];
    Slot drawn[DRAWN]; /* which of the asks, and `offset` into its answer */
    int num_values, num_pointers, num_floats, num_drawn;
    Cut cut;            /* without a driver only `start` starts it */
    char kinds[VALUES]; /* of each value: p an address, m one in a map, i a whole number, f and d floats, - no parameter */
} Start;

/* A call to be repeated. Memory is numbered: tensors among the arguments, then what is allocated. */
typedef struct {
    PyObject_HEAD
    PyObject *empty, *stream, *device; /* new memory; the stream of a device */
    PyObject *kept;                    /* memory that stays, which starts know by address */
    PyObject *settings;                /* (what to ask, what it must answer) */
    PyObject *bound, *capturing;       /* the only stream it may run on, and whether that records a graph; or NULL */
    PyObject *layouts[MADE];           /* (shape, stride, type) */
    PyObject *asks[ASKS];              /* what answers with numbers that are others every time, or with None */
    Slot tensors[TENSORS];             /* which argument, and the number of the first that shares its memory */
    int returned[MADE];
    Start *starts;
    int num_tensors, num_made, num_returned, num_starts, num_asks, stream_place, as_tuple;
} Launch;

static PyObject *data_ptr_name;
static PyTypeObject LaunchType;

/* The address of a tensor's memory as Python's number. */
static PyObject *address_of(PyObject *tensor, unsigned long long *value) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
    if (!number) return NULL;
    *value = PyLong_AsUnsignedLongLong(number);
    if (*value == (unsigned long long)-1 && PyErr_Occurred()) Py_CLEAR(number);
    return number;
}

static PyObject *results_of(const Launch *self, PyObject *const *memory) {
    if (!self->as_tuple) return Py_NewRef(memory[self->returned[0]]);
    PyObject *tuple = PyTuple_New(self->num_returned);
    for (int i = 0; tuple && i < self->num_returned; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(memory[self->returned[i]]));
    return tuple;
}

/* One parameter's bits; 0 for an error. */
static int bits_of(PyObject *value, char kind, unsigned long long *bits) {
    float narrow;
    double wide;
    if (kind == 'p' && value == Py_None) return *bits = 0, 1;
    if (kind == 'p' || kind == 'm' || kind == 'i') *bits = PyLong_AsUnsignedLongLongMask(value);
    else {
        wide = PyFloat_AsDouble(value), narrow = (float)wide, *bits = 0;
        if (kind == 'f') memcpy(bits, &narrow, sizeof narrow);
        else memcpy(bits, &wide, sizeof wide);
    }
    return !PyErr_Occurred();
}

/* Whether the driver took the launch. It does not where this thread has no context yet; Triton's own start makes one. */
static int driven(const Start *self, PyObject *const *values, PyObject *on) {
    unsigned long long bits[PARAMETERS], none = 0;
    void *parameters[PARAMETERS + SCRATCH], *stream = PyLong_AsVoidPtr(on);
    Map maps[MAPS];
    int count = 0, used = 0, code;
    for (int i = 0; i < self->num_values; i++) {
        if (self->kinds[i] == '-') continue;
        if (count == PARAMETERS || !bits_of(values[i], self->kinds[i], &bits[count])) return PyErr_Clear(), 0;
        parameters[count] = parameter_of(&self->cut, self->kinds[i], &bits[count], maps, &used);
        if (!parameters[count++]) return 0;
    }
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    for (int i = 0; i < SCRATCH; i++) parameters[count + i] = &none; /* memory that Triton would give it; none is wanted */
    Py_BEGIN_ALLOW_THREADS;
    code = answer_of(&self->cut, stream, parameters);
    Py_END_ALLOW_THREADS;
    return code == 0;
}

/* Fills in the numbers that were drawn; 0 for an error. */
static int filled(const Start *self, PyObject *const *answers, PyObject **values) {
    for (int i = 0; i < self->num_drawn; i++) {
        const Slot *slot = &self->drawn[i];
        PyObject *answer = answers[slot->index];
        if (!PyTuple_Check(answer) || slot->offset < 0 || slot->offset >= PyTuple_GET_SIZE(answer)) {
            PyErr_SetString(PyExc_TypeError, "asked for numbers, and answered with others");
            return 0;
        }
        values[slot->place] = PyTuple_GET_ITEM(answer, slot->offset);
    }
    return 1;
}

/* Starts one kernel on this memory; 0 for an error. */
static int started(const Start *self, PyObject *const *args, PyObject *const *addresses, PyObject *const *answers, int stream_place,
                   PyObject *stream) {
    PyObject *values[VALUES], *inner[TENSORS + MADE];
    int num_inner = 0, good = 1;
    memcpy(values, self->values, sizeof(PyObject *) * self->num_values);
    for (int i = 0; good && i < self->num_pointers; i++) {
        const Slot *slot = &self->pointers[i];
        PyObject *address = addresses[slot->index];
        if (slot->offset) {
            address = PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(address) + slot->offset);
            if (!(good = address != NULL)) break;
            inner[num_inner++] = address;
        }
        values[slot->place] = address;
    }
    for (int i = 0; i < self->num_floats; i++) values[self->floats[i].place] = args[self->floats[i].index];
    good = good && filled(self, answers, values);
    values[stream_place] = stream;
    if (good && !(self->cut.driver && driven(self, values, stream))) {
        PyObject *answer = PyObject_Vectorcall(self->start, values, self->num_values, NULL);
        good = answer != NULL;
        Py_XDECREF(answer);
    }
    while (num_inner) Py_DECREF(inner[--num_inner]);
    return good;
}

/* 1 if all settings, (what to ask, what it must answer), are as they were, 0 if not, -1 for an error. */
static int as_set(PyObject *settings) {
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(settings); i++) {
        PyObject *setting = PyList_GET_ITEM(settings, i), *now = PyObject_CallNoArgs(PyTuple_GET_ITEM(setting, 0));
        if (!now) return -1;
        same = PyObject_RichCompareBool(now, PyTuple_GET_ITEM(setting, 1), Py_EQ);
        Py_DECREF(now);
    }
    return same;
}

/* 1 if the call may run on this stream, 0 if not, -1 for an error. */
static int may_run(const Launch *self, PyObject *stream) {
    int set = as_set(self->settings);
    if (set != 1 || !self->bound) return set;
    int same = PyObject_RichCompareBool(stream, self->bound, Py_EQ);
    if (same != 1) return same;
    PyObject *recorded = PyObject_CallNoArgs(self->capturing);
    if (!recorded) return -1;
    same = PyObject_Not(recorded);
    Py_DECREF(recorded);
    return same;
}

/* New reference to the result; None where an argument lies otherwise than that of the recorded call; NULL for an error. */
static PyObject *repeat(const Launch *self, PyObject *const *args) {
    PyObject *memory[TENSORS + MADE], *addresses[TENSORS + MADE], *answers[ASKS], *stream = NULL, *result = NULL;
    unsigned long long value[TENSORS + MADE], together = 0;
    int known = 0, made = 0, same = 1, asked = 0;
    for (; known < self->num_tensors; known++) {
        memory[known] = args[self->tensors[known].place];
        if (!(addresses[known] = address_of(memory[known], &value[known]))) goto done;
        together |= value[known];
        same &= value[known] == value[self->tensors[known].index];
    }
    if (!(stream = PyObject_CallOneArg(self->stream, self->device))) goto done;
    int may = together & 15 || !same ? 0 : may_run(self, stream);
    if (may <= 0) {
        result = may < 0 ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    for (; asked < self->num_asks; asked++) {
        if (!(answers[asked] = PyObject_CallNoArgs(self->asks[asked]))) goto done;
        if (answers[asked] == Py_None) {
            result = answers[asked]; /* this reference is the result's */
            goto done;
        }
    }
    for (; made < self->num_made; made++, known++) {
        PyObject *const *layout = &PyTuple_GET_ITEM(self->layouts[made], 0);
        if (!(memory[known] = PyObject_Vectorcall(self->empty, layout, 3, NULL))) goto done;
        if (!(addresses[known] = address_of(memory[known], &value[known]))) {
            Py_DECREF(memory[known]);
            goto done;
        }
    }
    for (int i = 0; i < self->num_starts; i++)
        if (!started(&self->starts[i], args, addresses, answers, self->stream_place, stream)) goto done;
    result = results_of(self, memory);
done:
    while (asked) Py_DECREF(answers[--asked]);
    while (made) Py_DECREF(memory[self->num_tensors + --made]);
    while (known) Py_DECREF(addresses[--known]);
    Py_XDECREF(stream);
    return result;
}

/* Places and numbers below the limits, and offsets; 0 if there are others or more than `most`. */
static int read_slots(PyObject *list, Slot *slots, int *count, int most, int places, int indices) {
    *count = (int)PySequence_Size(list);
    if (*count < 0 || *count > most) return 0;
    for (int i = 0; i < *count; i++) {
        PyObject *pair = PySequence_GetItem(list, i);
        int read = pair && PyArg_ParseTuple(pair, "ii|L", &slots[i].place, &slots[i].index, &slots[i].offset);
        Py_XDECREF(pair);
        if (!read || slots[i].place < 0 || slots[i].place >= places || slots[i].index < 0 || slots[i].index >= indices) return 0;
    }
    return 1;
}

/* The driver's address, the function's, threads, shared memory, the grid, the kinds of the values, whether it may come early, blocks of
 * a cluster, its maps, and the address of what readdresses them; or None. */
static int read_driver(PyObject *raw, Start *self) {
    unsigned long long driver, function, readdress;
    Cut *cut = &self->cut;
    const char *kinds, *maps;
    Py_ssize_t length, bytes;
    if (raw == Py_None) return 1;
    if (!PyArg_ParseTuple(raw, "KKII(III)s#pIy#K", &driver, &function, &cut->threads, &cut->shared, &cut->grid[0], &cut->grid[1],
                          &cut->grid[2], &kinds, &length, &cut->early, &cut->cluster, &maps, &bytes, &readdress))
        return 0;
    cut->driver = (void *)(uintptr_t)driver, cut->function = (void *)(uintptr_t)function;
    cut->readdress = (Readdress)(uintptr_t)readdress;
    if (length != self->num_values || !takes_maps(cut, kinds, length, maps, bytes)) return 0;
    memcpy(self->kinds, kinds, length);
    return 1;
}

/* (raw start, its arguments, pointers, floats, driver, drawn) */
static int read_start(PyObject *item, Start *self, int memory, int asks) {
    PyObject *start, *template, *pointers, *floats, *raw, *drawn;
    if (!item || !PyArg_ParseTuple(item, "OO!OOOO", &start, &PyList_Type, &template, &pointers, &floats, &raw, &drawn)) return 0;
    if (PyList_GET_SIZE(template) > VALUES) return 0;
    self->start = Py_NewRef(start);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(template); i++) self->values[self->num_values++] = Py_NewRef(PyList_GET_ITEM(template, i));
    return read_slots(pointers, self->pointers, &self->num_pointers, TENSORS + MADE, self->num_values, memory) &&
           read_slots(floats, self->floats, &self->num_floats, TENSORS, self->num_values, INT_MAX) &&
           read_slots(drawn, self->drawn, &self->num_drawn, DRAWN, self->num_values, asks) && read_driver(raw, self);
}

static int read_settings(PyObject *list, PyObject **settings) {
    if (!PyList_Check(list)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if (!PyTuple_Check(PyList_GET_ITEM(list, i)) || PyTuple_GET_SIZE(PyList_GET_ITEM(list, i)) != 2) return 0;
    *settings = Py_NewRef(list);
    return 1;
}

static int read_asks(PyObject *list, Launch *self) {
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0 || count > ASKS) return 0;
    for (; self->num_asks < count; self->num_asks++)
        if (!(self->asks[self->num_asks] = PySequence_GetItem(list, self->num_asks))) return 0;
    return 1;
}

static int read_layouts(PyObject *list, Launch *self) {
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0 || count > MADE) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *layout = PySequence_GetItem(list, i);
        if (!layout) return 0;
        self->layouts[self->num_made++] = layout;
        if (!PyTuple_Check(layout) || PyTuple_GET_SIZE(layout) != 3) return 0;
    }
    return 1;
}

static int read_returned(PyObject *list, Launch *self, int memory) {
    Py_ssize_t count = PySequence_Size(list);
    if (count < 1 || count > MADE) return 0;
    for (; self->num_returned < count; self->num_returned++) {
        PyObject *number = PySequence_GetItem(list, self->num_returned);
        long value = number ? PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        if (value < 0 || value >= memory) return 0;
        self->returned[self->num_returned] = (int)value;
    }
    return 1;
}

static int read_starts(PyObject *list, Launch *self, int memory) {
    Py_ssize_t count = PySequence_Size(list);
    if (count < 1 || count > STARTS || !(self->starts = PyMem_Calloc(count, sizeof(Start)))) return 0;
    while (self->num_starts < count) {
        PyObject *item = PySequence_GetItem(list, self->num_starts);
        int read = read_start(item, &self->starts[self->num_starts++], memory, self->num_asks);
        Py_XDECREF(item);
        if (!read || self->stream_place < 0 || self->stream_place >= self->starts[self->num_starts - 1].num_values) return 0;
    }
    return 1;
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *starts, *tensors, *layouts, *returned, *empty, *stream, *device, *kept, *bound, *capturing, *settings, *asks;
    int stream_place, as_tuple;
    if (!PyArg_ParseTuple(args, "OiOOOpOOOOOOOO", &starts, &stream_place, &tensors, &layouts, &returned, &as_tuple, &empty, &stream,
                          &device, &kept, &bound, &capturing, &settings, &asks))
        return NULL;
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->empty = Py_NewRef(empty), self->stream = Py_NewRef(stream), self->device = Py_NewRef(device);
    self->kept = Py_NewRef(kept);
    if (bound != Py_None) self->bound = Py_NewRef(bound), self->capturing = Py_NewRef(capturing);
    self->stream_place = stream_place, self->as_tuple = as_tuple;
    int good = read_slots(tensors, self->tensors, &self->num_tensors, TENSORS, INT_MAX, TENSORS) && read_layouts(layouts, self) &&
               read_settings(settings, &self->settings) && read_asks(asks, self);
    for (int i = 0; good && i < self->num_tensors; i++) good = self->tensors[i].index <= i; /* compared with one that is known by then */
    int memory = self->num_tensors + self->num_made;
    if (good && read_returned(returned, self, memory) && read_starts(starts, self, memory)) return (PyObject *)self;
    Py_DECREF(self);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "more of something than a quick launch holds");
    return NULL;
}

static void launch_dealloc(Launch *self) {
    Py_XDECREF(self->empty), Py_XDECREF(self->stream), Py_XDECREF(self->device), Py_XDECREF(self->kept);
    Py_XDECREF(self->bound), Py_XDECREF(self->capturing), Py_XDECREF(self->settings);
    for (int i = 0; i < self->num_made; i++) Py_XDECREF(self->layouts[i]);
    for (int i = 0; i < self->num_asks; i++) Py_XDECREF(self->asks[i]);
    for (int i = 0; i < self->num_starts; i++) {
        Py_XDECREF(self->starts[i].start);
        for (int j = 0; j < self->starts[i].num_values; j++) Py_XDECREF(self->starts[i].values[j]);
    }
    PyMem_Free(self->starts);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* launch(args, kwargs), as the functions of notes.py are called. */
static PyObject *launch_call(Launch *self, PyObject *args, PyObject *kwargs) {
    PyObject *given, *named = NULL;
    if (!PyArg_ParseTuple(args, "O!|O", &PyTuple_Type, &given, &named)) return NULL;
    for (int i = 0; i < self->num_tensors; i++)
        if (self->tensors[i].place >= PyTuple_GET_SIZE(given)) return Py_NewRef(Py_None);
    for (int i = 0; i < self->num_starts; i++)
        for (int j = 0; j < self->starts[i].num_floats; j++)
            if (self->starts[i].floats[j].index >= PyTuple_GET_SIZE(given)) return Py_NewRef(Py_None);
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

/* A call that is somebody else's as long as the settings are what they were. */
typedef struct {
    PyObject_HEAD
    PyObject *function, *settings;
} Onward;

static PyObject *onward_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *function, *settings;
    if (!PyArg_ParseTuple(args, "OO", &function, &settings)) return NULL;
    Onward *self = (Onward *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->function = Py_NewRef(function);
    if (read_settings(settings, &self->settings)) return (PyObject *)self;
    Py_DECREF(self);
    PyErr_SetString(PyExc_ValueError, "settings are a list of pairs");
    return NULL;
}

static void onward_dealloc(Onward *self) {
    Py_XDECREF(self->function), Py_XDECREF(self->settings);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* onward(args, kwargs), as the functions of notes.py are called. */
static PyObject *onward_call(Onward *self, PyObject *args, PyObject *kwargs) {
    PyObject *given, *named = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyTuple_Type, &given, &PyDict_Type, &named)) return NULL;
    int set = as_set(self->settings);
    if (set != 1) return set < 0 ? NULL : Py_NewRef(Py_None);
    return PyObject_Call(self->function, given, named);
}

static PyTypeObject OnwardType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "trireme_quick.Onward",
    .tp_basicsize = sizeof(Onward),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = onward_new,
    .tp_dealloc = (destructor)onward_dealloc,
    .tp_call = (ternaryfunc)onward_call,
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

/* Whether floats that count by their sign alone have a fraction, which is no half, and the signs of this kind; none does once `exact`
 * holds something. */
static int are_signed(PyObject *signs, PyObject *const *args, PyObject *exact) {
    Py_ssize_t count = PyList_GET_SIZE(signs);
    if (count && PyList_GET_SIZE(exact)) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *sign = PyList_GET_ITEM(signs, i), *x = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(sign, 0))];
        if (!PyFloat_CheckExact(x)) return 0;
        double value = PyFloat_AS_DOUBLE(x);
        int whole = !(value > -9e15 && value < 9e15) || value == (double)(long long)value; /* so are infinities, and what is no number */
        if (whole || value == 0.5 || value == -0.5 || (value > 0) != (PyUnicode_READ_CHAR(PyTuple_GET_ITEM(sign, 1), 0) == '+')) return 0;
    }
    return 1;
}

/* Whether arguments are given by the names of a kind, in its order. */
static int are_named(PyObject *wanted, PyObject *names) {
    Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
    if (PyTuple_GET_SIZE(wanted) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *other = PyTuple_GET_ITEM(wanted, i);
        if (name != other && PyUnicode_Compare(name, other)) return 0;
    }
    return 1;
}

/* Whether the arguments are the same that are the same in a kind. */
static int are_twins(PyObject *twins, PyObject *const *args) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(twins); i++) {
        PyObject *pair = PyList_GET_ITEM(twins, i);
        if (args[PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0))] != args[PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1))]) return 0;
    }
    return 1;
}

/* Whether the arguments are of this kind: (number, alike, places, others, signs, again, names, twins) of repeat.py; those with a name
 * come last. */
static int is_kind(PyObject *kind, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *exact) {
    PyObject *places = PyTuple_GET_ITEM(kind, 2), *others = PyTuple_GET_ITEM(kind, 3), *stack[TENSORS];
    Py_ssize_t tensors = PyTuple_GET_SIZE(places);
    if (PyLong_AsSsize_t(PyTuple_GET_ITEM(kind, 0)) != count || tensors > TENSORS || !are_named(PyTuple_GET_ITEM(kind, 6), names)) return 0;
    if (!are_signed(PyTuple_GET_ITEM(kind, 4), args, exact) || !are_twins(PyTuple_GET_ITEM(kind, 7), args)) return 0;
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

static PyObject *again_of(PyObject *kind, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *again = PyTuple_GET_ITEM(kind, 5);
    if (Py_TYPE(again) == &LaunchType) return repeat((Launch *)again, args);
    if (Py_TYPE(again) == &OnwardType) {
        int set = as_set(((Onward *)again)->settings);
        if (set != 1) return set < 0 ? NULL : Py_NewRef(Py_None);
        return PyObject_Vectorcall(((Onward *)again)->function, args, count, names);
    }
    PyObject *given = PyTuple_New(count), *named = PyDict_New(), *result = NULL;
    for (Py_ssize_t i = 0; given && i < count; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; named && names && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[count + i]) < 0) Py_CLEAR(named);
    if (given && named) result = PyObject_CallFunctionObjArgs(again, given, named, NULL);
    Py_XDECREF(given), Py_XDECREF(named);
    return result;
}

static PyObject *call_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
    Call *self = (Call *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    int quick = unwatched(self);
    if (quick < 0) return NULL;
    for (Py_ssize_t i = 0; quick && i < PyList_GET_SIZE(self->recent); i++) {
        PyObject *kind = Py_NewRef(PyList_GET_ITEM(self->recent, i)), *result = NULL;
        int same = is_kind(kind, args, count, names, self->exact);
        if (same == 1) result = again_of(kind, args, count, names);
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
    if (!data_ptr_name || !module || PyModule_AddType(module, &LaunchType) < 0 || PyModule_AddType(module, &OnwardType) < 0 ||
        PyModule_AddType(module, &CallType) < 0)
        return NULL;
    return module;
}
