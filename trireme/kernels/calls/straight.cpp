/* Remembered calls that come through torch's dispatcher, answered without a line of Python.
 *
 * An Operator stands above the Python kernel of one operator at one dispatch key. A call like one it remembers is launched from here: results are
 * allocated, addresses and numbers filled in, kernels started through the driver; or it goes to torch's own kernel, if that has the
 * work. Every other call goes on to the Python kernel, which may say what to remember of it while it runs (keep, leave).
 * Knows arguments as the dispatcher boxes them; never what an operator computes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"

namespace {

using c10::IValue;
using torch::jit::Stack;
enum { MEMORY = 16, KINDS = 16 };

/* What the chip is, and the addresses of functions that answer with 0 if all went well. */
struct Chip {
    c10::DispatchKey key = c10::DispatchKey::CPU;
    c10::DeviceType type = c10::kCPU;
    int (*stream)(int32_t, void **) = nullptr;  /* the current stream of a device */
    int (*capturing)(void *, int *) = nullptr;  /* whether a stream records a graph */
    int (*context)(void **) = nullptr;          /* what this thread has of the driver; nothing until something is started in it */
    bool several = false;                       /* of its kind are in this machine */
} chip;

/* ---- a call to be repeated. Memory is numbered: tensors among the arguments, then what is allocated. */

struct Slot {
    int place, index;
    long long offset;
};

struct Layout {
    c10::ScalarType type;
    std::vector<int64_t> sizes, strides;
};

struct Start {
    Cut cut{};
    std::string kinds;           /* of each parameter: p an address, m one in a map, i a whole number, f and d floats */
    std::vector<uint64_t> bits;  /* of each parameter, as it was recorded */
    std::vector<Slot> pointers;  /* parameter, memory, bytes into it */
    std::vector<Slot> floats;    /* parameter, argument */
    std::vector<Slot> drawn;     /* parameter, which asking, place in its answer */
};

struct Setting {
    enum { DEFAULT_TYPE, TF32, AUTOCAST };
    int what;
    long long answer;
    long long now() const;
};

struct Program {
    std::vector<Slot> tensors;  /* argument, number of the first that shares its memory */
    std::vector<Layout> made;
    std::vector<Start> starts;  /* none: torch's own kernel has the work */
    std::vector<int> returned;
    std::vector<Setting> settings;
    std::vector<uint64_t> asks;  /* how far each asking moves the generator of random numbers */
    int device = 0;
    bool bound = false;  /* it has memory that stays, and runs on one stream only, outside of graphs */
    void *stream = nullptr;
    PyObject *kept = nullptr;  /* that memory */

    Program() = default;
    Program(const Program &) = delete;
    ~Program() {
        if (!kept || !Py_IsInitialized()) return;
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(kept);
        PyGILState_Release(state);
    }

    bool as_set() const;
    bool run(size_t count, Stack &stack) const;
};

/* A number that the dispatcher wraps as a tensor because the operator's schema says so. */
bool is_number(const IValue &x) {
    return x.isTensor() && x.toTensor().defined() && x.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

/* A number that was wrapped as itself; None for a type that nobody remembers. */
IValue unwrapped(const IValue &x) {
    const at::Tensor &number = x.toTensor();
    if (!number.is_cpu()) return IValue();
    const void *at = number.const_data_ptr();
    if (number.scalar_type() == c10::kDouble) return IValue(*static_cast<const double *>(at));
    if (number.scalar_type() == c10::kLong) return IValue(*static_cast<const int64_t *>(at));
    if (number.scalar_type() == c10::kBool) return IValue(*static_cast<const bool *>(at));
    return IValue();
}

double float_of(const IValue &x) { return x.isDouble() ? x.toDouble() : unwrapped(x).toDouble(); }

long long Setting::now() const {
    if (what == TF32) return at::globalContext().allowTF32CuBLAS();
    if (what == AUTOCAST) return at::autocast::is_autocast_enabled(chip.type);
    return static_cast<long long>(c10::get_default_dtype_as_scalartype());
}

bool Program::as_set() const {
    return std::all_of(settings.begin(), settings.end(), [](const Setting &setting) { return setting.now() == setting.answer; });
}

/* Seed and place of fresh random words, past which the generator is moved; what torch itself refuses (while a graph is recorded) is an
 * error of its own. */
std::pair<uint64_t, uint64_t> draw(int device, uint64_t past) {
    at::Generator generator = at::globalContext().defaultGenerator(c10::Device(chip.type, device));
    std::lock_guard<std::mutex> lock(generator.mutex());
    uint64_t offset = generator.get_offset();
    generator.set_offset(offset + past);
    return {generator.current_seed(), offset};
}

/* The same as a kernel takes it: seed and first counter, each as a lower and a higher half. */
void drawn_as(int device, uint64_t past, uint64_t *answer) {
    auto [seed, offset] = draw(device, past);
    uint64_t counter = offset / 4;
    answer[0] = seed & 0xffffffff, answer[1] = seed >> 32 & 0x7fffffff;
    answer[2] = counter & 0xffffffff, answer[3] = counter >> 32 & 0x7fffffff;
}

/* Whether the driver can start something in this thread: asked before numbers are drawn, which would be lost if it refused. */
bool has_context() {
    void *context = nullptr;
    return !chip.context || (chip.context(&context) == 0 && context);
}

void fill(uint64_t *bits, char kind, double value) {
    float narrow = static_cast<float>(value);
    *bits = 0;
    if (kind == 'f') std::memcpy(bits, &narrow, sizeof narrow);
    else std::memcpy(bits, &value, sizeof value);
}

bool started(const Start &self, const IValue *args, const uint64_t *addresses, const uint64_t (*answers)[4], void *stream) {
    uint64_t bits[PARAMETERS], none = 0;
    void *parameters[PARAMETERS + SCRATCH];
    Map maps[MAPS];
    int used = 0;
    size_t count = self.bits.size();
    std::memcpy(bits, self.bits.data(), count * sizeof *bits);
    for (const Slot &slot : self.pointers) bits[slot.place] = addresses[slot.index] + slot.offset;
    for (const Slot &slot : self.floats) fill(&bits[slot.place], self.kinds[slot.place], float_of(args[slot.index]));
    for (const Slot &slot : self.drawn) bits[slot.place] = answers[slot.index][slot.offset];
    for (size_t i = 0; i < count; i++)
        if (!(parameters[i] = parameter_of(&self.cut, self.kinds[i], &bits[i], maps, &used))) return false;
    for (int i = 0; i < SCRATCH; i++) parameters[count + i] = &none;
    return answer_of(&self.cut, stream, parameters) == 0;
}

/* Whether it could be repeated; if not, nothing has happened that matters, and the stack is as it was. */
bool Program::run(size_t count, Stack &stack) const {
    const IValue *args = stack.data() + stack.size() - count;
    at::Tensor memory[MEMORY];
    uint64_t addresses[MEMORY], answers[2][4];
    size_t known = 0;
    for (const Slot &tensor : tensors) {
        memory[known] = args[tensor.place].toTensor();
        addresses[known] = reinterpret_cast<uintptr_t>(memory[known].const_data_ptr());
        if (addresses[known] & 15 || addresses[known] != addresses[tensor.index]) return false;
        known++;
    }
    void *now = nullptr;
    int recorded = 0;
    if (chip.several && c10::impl::VirtualGuardImpl(chip.type).getDevice().index() != device) return false;
    if (!as_set() || (chip.stream && chip.stream(device, &now))) return false;
    if (bound && (now != this->stream || (chip.capturing && (chip.capturing(now, &recorded) || recorded)))) return false;
    if (!asks.empty() && !has_context()) return false;
    try {
        for (size_t i = 0; i < asks.size(); i++) drawn_as(device, asks[i], answers[i]);
    } catch (const c10::Error &) {
        return false;
    }
    c10::Allocator *allocator = c10::GetAllocator(chip.type);
    for (const Layout &layout : made) {
        memory[known] = at::detail::empty_strided_generic(layout.sizes, layout.strides, allocator, c10::DispatchKeySet(chip.key), layout.type);
        addresses[known] = reinterpret_cast<uintptr_t>(memory[known].const_data_ptr());
        known++;
    }
    for (const Start &start : starts)
        if (!started(start, args, addresses, answers, now)) return false;
    stack.erase(stack.end() - count, stack.end());
    for (int number : returned) stack.emplace_back(memory[number]);
    return true;
}

/* ---- which calls are like a remembered one */

struct Wanted {
    enum { LAYOUT, SIGN, VALUE } how;
    bool wrapped = false;  /* a number in a tensor's place */
    c10::DispatchKeySet keys;
    c10::Device device{c10::kCPU};
    Layout layout;
    IValue value;
};

bool same(const IValue &a, const IValue &b) {
    if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
    if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
    if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
    if (a.isDouble()) {
        if (!b.isDouble()) return false;
        double one = a.toDouble(), other = b.toDouble();
        return std::memcmp(&one, &other, sizeof one) == 0;
    }
    if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
    if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
    if (!a.isIntList() || !b.isIntList()) return false;
    auto one = a.toListRef(), other = b.toListRef();
    if (one.size() != other.size()) return false;
    for (size_t i = 0; i < one.size(); i++)
        if (one[i].toInt() != other[i].toInt()) return false;
    return true;
}

/* A float that counts by its sign: it has a fraction, and is neither a half nor one of the rare values. */
bool has_sign(const IValue &x, bool positive) {
    if (!x.isDouble()) return false;
    double value = x.toDouble();
    return std::isfinite(value) && value != std::trunc(value) && std::abs(value) != 0.5 && (value > 0) == positive;
}

bool is_like(const IValue &x, const Wanted &wanted) {
    if (wanted.how == Wanted::LAYOUT) {
        if (!x.isTensor() || !x.toTensor().defined()) return false;
        const at::Tensor &tensor = x.toTensor();
        /* keys first: only of a tensor like the remembered one are sizes and strides plain numbers */
        return tensor.key_set() == wanted.keys && tensor.scalar_type() == wanted.layout.type && tensor.device() == wanted.device &&
               tensor.sizes() == wanted.layout.sizes && tensor.strides() == wanted.layout.strides;
    }
    if (x.isTensor() && !x.toTensor().defined()) return wanted.value.isNone() && !wanted.wrapped;
    if (is_number(x) != wanted.wrapped) return false;
    const IValue &value = wanted.wrapped ? unwrapped(x) : x;
    return wanted.how == Wanted::SIGN ? has_sign(value, wanted.value.toDouble() > 0) : same(value, wanted.value);
}

/* What calls with an argument like this one are known by; false if they cannot be. */
bool known_by(const IValue &x, bool by_sign, Wanted &wanted) {
    wanted.how = Wanted::VALUE;
    if (x.isTensor() && !x.toTensor().defined()) return true;
    wanted.wrapped = is_number(x);
    if (x.isTensor() && !wanted.wrapped) {
        const at::Tensor &tensor = x.toTensor();
        if (tensor.device().type() != chip.type || tensor.layout() != c10::kStrided || tensor.is_neg() || tensor.is_conj()) return false;
        wanted.how = Wanted::LAYOUT;
        wanted.keys = tensor.key_set(), wanted.device = tensor.device();
        wanted.layout = {tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
        return true;
    }
    wanted.value = wanted.wrapped ? unwrapped(x) : x;
    if (wanted.wrapped && wanted.value.isNone()) return false;
    if (by_sign) {
        wanted.how = Wanted::SIGN;
        return wanted.value.isDouble() && has_sign(wanted.value, wanted.value.toDouble() > 0);
    }
    if (x.isIntList()) wanted.value = IValue(x.toIntVector()); /* a list that nobody changes */
    return same(wanted.value, wanted.value);
}

struct Kind {
    std::vector<Wanted> wanted;
    Program program;

    bool like(const IValue *args) const {
        for (size_t i = 0; i < wanted.size(); i++)
            if (!is_like(args[i], wanted[i])) return false;
        return true;
    }
};

/* ---- an operator and its place in the dispatcher */

using Kinds = std::vector<std::shared_ptr<const Kind>>;

struct State {
    c10::OperatorHandle handle;
    size_t count;
    c10::DispatchKey key;
    c10::SafeKernelFunction torchs;
    std::atomic<long long> passed_on{0}; /* how many calls went on to Python */
    std::optional<c10::KernelFunction> ours; /* made once and kept, since a call may be in it while it is removed */
    std::optional<c10::RegistrationHandleRAII> placed;
    std::mutex lock;                                      /* of what follows */
    std::shared_ptr<const c10::SafeKernelFunction> below; /* the Python kernel, while it is registered */
    std::shared_ptr<const Kinds> kinds = std::make_shared<Kinds>();

    State(c10::OperatorHandle op, c10::DispatchKey key)
        : handle(op), count(op.schema().arguments().size()), key(key), torchs(op.getComputedKernelForDispatchKey(key)) {}

    /* Whether calls may be answered here: above autograd only those of which no gradient is wanted, and that nobody watches (a mode, a
     * transform, derivatives that are carried forward). */
    bool may_answer(const IValue *args) const {
        if (key == chip.key) return true;
        if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
        if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
        if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) return false;
        for (size_t i = 0; at::GradMode::is_enabled() && i < count; i++)
            if (args[i].isTensor() && args[i].toTensor().defined() && args[i].toTensor().requires_grad()) return false;
        return true;
    }

    std::shared_ptr<const Kinds> remembered() {
        std::lock_guard<std::mutex> held(lock);
        return kinds;
    }

    std::shared_ptr<const c10::SafeKernelFunction> python() {
        std::lock_guard<std::mutex> held(lock);
        return below;
    }

    void stand_above(std::shared_ptr<const c10::SafeKernelFunction> kernel) {
        std::lock_guard<std::mutex> held(lock);
        below = std::move(kernel);
    }

    void remember(std::shared_ptr<const Kind> kind) {
        std::lock_guard<std::mutex> held(lock);
        auto more = std::make_shared<Kinds>(*kinds);
        more->insert(more->begin(), std::move(kind));
        if (more->size() > KINDS) more->pop_back();
        kinds = std::move(more);
    }
};

thread_local int recordings = 0; /* how many calls this thread records now: what these call is recorded with them */

/* The arguments of the call that the Python kernel has now, in this thread. */
struct Passed {
    static thread_local Passed *last;
    State *state;
    std::vector<IValue> args;
    Passed *before;

    Passed(State *state, const IValue *args) : state(state), args(args, args + state->count), before(last) { last = this; }
    ~Passed() { last = before; }
};
thread_local Passed *Passed::last = nullptr;

struct Kernel final : c10::OperatorKernel {
    std::shared_ptr<State> state;

    explicit Kernel(std::shared_ptr<State> state) : state(std::move(state)) {}

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
        const IValue *args = stack->data() + stack->size() - state->count;
        auto kinds = recordings || !state->may_answer(args) ? nullptr : state->remembered();
        for (size_t i = 0; kinds && i < kinds->size(); i++) {
            const Kind &kind = *(*kinds)[i];
            if (!kind.like(args)) continue;
            if (kind.program.starts.empty() && kind.program.as_set()) return state->torchs.callBoxed(op, keys, stack);
            if (!kind.program.starts.empty() && kind.program.run(state->count, *stack)) return;
            break;
        }
        auto python = state->python();
        if (!python) return state->torchs.callBoxed(op, keys, stack); /* removed while this call was on its way */
        state->passed_on++;
        Passed passed(state.get(), args);
        python->callBoxed(op, keys, stack);
    }
};

/* ---- for Python */

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

long long number(PyObject *x) {
    long long value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) throw Refused("a number");
    return value;
}

void *address(PyObject *x) {
    void *value = PyLong_AsVoidPtr(x);
    if (!value && PyErr_Occurred()) throw Refused("an address");
    return value;
}

/* The parts of a list or tuple; `count` of them if that is not -1. */
std::vector<PyObject *> parts(PyObject *x, Py_ssize_t count = -1) {
    if (!PyList_Check(x) && !PyTuple_Check(x)) throw Refused("a list or a tuple");
    if (count >= 0 && PySequence_Fast_GET_SIZE(x) != count) throw Refused("so many parts");
    PyObject **items = PySequence_Fast_ITEMS(x);
    return {items, items + PySequence_Fast_GET_SIZE(x)};
}

template <class T> std::vector<T> numbers(PyObject *x) {
    std::vector<T> result;
    for (PyObject *part : parts(x)) result.push_back(static_cast<T>(number(part)));
    return result;
}

std::vector<Slot> slots(PyObject *x, size_t places, size_t indices) {
    std::vector<Slot> result;
    for (PyObject *part : parts(x)) {
        auto values = numbers<long long>(part);
        if (values.size() < 2 || values.size() > 3 || values[0] < 0 || values[0] >= static_cast<long long>(places)) throw Refused("a place");
        if (values[1] < 0 || values[1] >= static_cast<long long>(indices)) throw Refused("a number of something there is");
        result.push_back({static_cast<int>(values[0]), static_cast<int>(values[1]), values.size() == 3 ? values[2] : 0});
    }
    return result;
}

/* (driver, function, threads, shared memory, grid, kinds, early, blocks of a cluster, maps, what readdresses them) */
void read_cut(PyObject *x, Start &start) {
    auto part = parts(x, 10);
    Cut &cut = start.cut;
    cut.driver = address(part[0]), cut.function = address(part[1]), cut.readdress = reinterpret_cast<Readdress>(address(part[9]));
    cut.threads = number(part[2]), cut.shared = number(part[3]), cut.early = number(part[6]), cut.cluster = number(part[7]);
    auto grid = numbers<unsigned>(part[4]);
    if (grid.size() != 3 || !cut.driver) throw Refused("a grid of three, and a driver");
    std::copy(grid.begin(), grid.end(), cut.grid);
    const char *kinds = PyUnicode_AsUTF8(part[5]);
    char *maps;
    Py_ssize_t bytes;
    if (!kinds || PyBytes_AsStringAndSize(part[8], &maps, &bytes) < 0) throw Refused("kinds, and bytes");
    start.kinds = kinds;
    if (!takes_maps(&cut, kinds, start.kinds.size(), maps, bytes)) throw Refused("as many maps as kinds say");
}

/* (what read_cut reads, bits, pointers, floats, drawn) */
Start start_of(PyObject *x, size_t args, size_t memory, size_t asks) {
    auto part = parts(x, 5);
    Start start;
    read_cut(part[0], start);
    for (PyObject *bits : parts(part[1], static_cast<Py_ssize_t>(start.kinds.size()))) start.bits.push_back(PyLong_AsUnsignedLongLongMask(bits));
    if (PyErr_Occurred() || start.bits.size() > PARAMETERS) throw Refused("parameters");
    start.pointers = slots(part[2], start.bits.size(), memory);
    start.floats = slots(part[3], start.bits.size(), args);
    start.drawn = slots(part[4], start.bits.size(), asks);
    for (const Slot &slot : start.drawn)
        if (slot.offset < 0 || slot.offset > 3) throw Refused("one of four numbers");
    return start;
}

void read_settings(PyObject *x, Program &program) {
    for (PyObject *part : parts(x)) {
        auto pair = numbers<long long>(part);
        if (pair.size() != 2) throw Refused("a setting and its answer");
        program.settings.push_back({static_cast<int>(pair[0]), pair[1]});
    }
}

/* (tensors, layouts, starts, returned, settings, asks, device, stream or None, memory that stays) */
void read_program(PyObject *x, size_t args, Program &program) {
    auto part = parts(x, 9);
    program.tensors = slots(part[0], args, MEMORY);
    for (size_t i = 0; i < program.tensors.size(); i++)
        if (program.tensors[i].index > static_cast<int>(i)) throw Refused("memory that was seen before");
    for (PyObject *layout : parts(part[1])) {
        auto three = parts(layout, 3);
        program.made.push_back({static_cast<c10::ScalarType>(number(three[0])), numbers<int64_t>(three[1]), numbers<int64_t>(three[2])});
    }
    size_t memory = program.tensors.size() + program.made.size();
    program.asks = numbers<uint64_t>(part[5]);
    if (memory > MEMORY || program.asks.size() > 2) throw Refused("less memory, and less asking");
    for (PyObject *start : parts(part[2])) program.starts.push_back(start_of(start, args, memory, program.asks.size()));
    program.returned = numbers<int>(part[3]);
    for (int number : program.returned)
        if (number < 0 || number >= static_cast<int>(memory)) throw Refused("results that there are");
    if (program.starts.empty() || program.returned.empty()) throw Refused("something to start, and something to return");
    read_settings(part[4], program);
    program.device = static_cast<int>(number(part[6]));
    program.bound = part[7] != Py_None;
    if (program.bound) program.stream = address(part[7]);
    program.kept = Py_NewRef(part[8]);
}

struct Operator {
    PyObject_HEAD
    std::shared_ptr<State> *state;
};

/* What is done for Python, with C++'s errors as Python's. */
template <class F> PyObject *answered(F function) {
    try {
        return function();
    } catch (const std::exception &error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
        return nullptr;
    }
}

PyObject *operator_new(PyTypeObject *type, PyObject *args, PyObject *) {
    const char *name, *overload, *key;
    if (!PyArg_ParseTuple(args, "sss", &name, &overload, &key)) return nullptr;
    return answered([&]() -> PyObject * {
        auto state = std::make_shared<State>(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), c10::parseDispatchKey(key));
        Operator *self = reinterpret_cast<Operator *>(type->tp_alloc(type, 0));
        if (self) self->state = new std::shared_ptr<State>(std::move(state));
        return reinterpret_cast<PyObject *>(self);
    });
}

void operator_dealloc(PyObject *self) {
    delete reinterpret_cast<Operator *>(self)->state;
    Py_TYPE(self)->tp_free(self);
}

State &state_of(PyObject *self) { return **reinterpret_cast<Operator *>(self)->state; }

/* torch warns of kernels that are replaced, which is the purpose. */
struct Silence : c10::WarningHandler {
    void process(const c10::Warning &) override {}
};

/* place(): from now on calls come here first, and go on to the kernel that is registered now. */
PyObject *operator_place(PyObject *self, PyObject *) {
    return answered([&] {
        Silence silence;
        c10::WarningUtils::WarningHandlerGuard quiet(&silence);
        State &state = state_of(self);
        state.stand_above(std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(state.key)));
        if (!state.ours) {
            auto kernel = std::make_unique<Kernel>(*reinterpret_cast<Operator *>(self)->state);
            state.ours = c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel));
        }
        auto &dispatcher = c10::Dispatcher::singleton();
        state.placed = dispatcher.registerImpl(state.handle.operator_name(), state.key, *state.ours, std::nullopt, nullptr, "trireme");
        return Py_NewRef(Py_None);
    });
}

/* remove(): calls no longer come here. */
PyObject *operator_remove(PyObject *self, PyObject *) {
    return answered([&] {
        state_of(self).placed.reset();
        state_of(self).stand_above(nullptr);
        return Py_NewRef(Py_None);
    });
}

/* passed_on(): how many calls went on to Python so far. */
PyObject *operator_passed_on(PyObject *self, PyObject *) { return PyLong_FromLongLong(state_of(self).passed_on); }

/* clear(): every call is new again. */
PyObject *operator_clear(PyObject *self, PyObject *) {
    State &state = state_of(self);
    std::shared_ptr<const Kinds> old = std::make_shared<Kinds>();
    {
        std::lock_guard<std::mutex> held(state.lock);
        old.swap(state.kinds);
    }
    Py_RETURN_NONE;
}

/* Remembers calls like the one that the Python kernel has now; True if it could. */
PyObject *remember(PyObject *self, PyObject *signs, std::shared_ptr<Kind> kind) {
    Passed *passed = Passed::last;
    if (!passed || passed->state != &state_of(self)) Py_RETURN_FALSE;
    auto by_sign = numbers<size_t>(signs);
    for (size_t i = 0; i < passed->args.size(); i++) {
        kind->wanted.emplace_back();
        if (!known_by(passed->args[i], std::find(by_sign.begin(), by_sign.end(), i) != by_sign.end(), kind->wanted.back())) Py_RETURN_FALSE;
    }
    for (const Slot &tensor : kind->program.tensors)
        if (kind->wanted[tensor.place].how != Wanted::LAYOUT) Py_RETURN_FALSE;
    for (const Start &start : kind->program.starts)
        for (const Slot &slot : start.floats)
            if (kind->wanted[slot.index].how == Wanted::LAYOUT || !kind->wanted[slot.index].value.isDouble()) Py_RETURN_FALSE;
    state_of(self).remember(std::move(kind));
    Py_RETURN_TRUE;
}

/* keep(program, arguments whose floats count by sign) */
PyObject *operator_keep(PyObject *self, PyObject *args) {
    PyObject *program, *signs;
    if (!PyArg_ParseTuple(args, "OO", &program, &signs)) return nullptr;
    return answered([&] {
        auto kind = std::make_shared<Kind>();
        read_program(program, state_of(self).count, kind->program);
        return remember(self, signs, std::move(kind));
    });
}

/* leave(settings, arguments whose floats count by sign): calls like this one are torch's. */
PyObject *operator_leave(PyObject *self, PyObject *args) {
    PyObject *settings, *signs;
    if (!PyArg_ParseTuple(args, "OO", &settings, &signs)) return nullptr;
    return answered([&] {
        auto kind = std::make_shared<Kind>();
        read_settings(settings, kind->program);
        return remember(self, signs, std::move(kind));
    });
}

PyMethodDef operator_methods[] = {
    {"place", operator_place, METH_NOARGS, nullptr}, {"remove", operator_remove, METH_NOARGS, nullptr},
    {"clear", operator_clear, METH_NOARGS, nullptr}, {"keep", operator_keep, METH_VARARGS, nullptr},
    {"leave", operator_leave, METH_VARARGS, nullptr}, {"passed_on", operator_passed_on, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject operator_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "trireme_straight.Operator";
    type.tp_basicsize = sizeof(Operator);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_new = operator_new;
    type.tp_dealloc = operator_dealloc;
    type.tp_methods = operator_methods;
    return type;
}();

/* set_up(dispatch key, addresses of what tells the stream, whether it is recorded, and the context; whether there are several chips) */
PyObject *set_up(PyObject *, PyObject *args) {
    const char *key;
    PyObject *stream, *capturing, *context;
    int several;
    if (!PyArg_ParseTuple(args, "sOOOp", &key, &stream, &capturing, &context, &several)) return nullptr;
    return answered([&] {
        chip.several = several;
        chip.key = c10::parseDispatchKey(key);
        chip.type = c10::dispatchKeyToDeviceType(chip.key);
        chip.stream = reinterpret_cast<int (*)(int32_t, void **)>(address(stream));
        chip.capturing = reinterpret_cast<int (*)(void *, int *)>(address(capturing));
        chip.context = reinterpret_cast<int (*)(void **)>(address(context));
        if (!c10::GetAllocator(chip.type)) throw Refused("memory of this device");
        return Py_NewRef(Py_None);
    });
}

/* record(1) as this thread begins to record a call, record(-1) at its end */
PyObject *record(PyObject *, PyObject *change) {
    recordings += static_cast<int>(PyLong_AsLong(change));
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

/* draw(device, past): seed and place of fresh random words, in one with those that are drawn without Python */
PyObject *draw_for_python(PyObject *, PyObject *args) {
    int device;
    unsigned long long past;
    if (!PyArg_ParseTuple(args, "iK", &device, &past)) return nullptr;
    try {
        auto [seed, offset] = draw(device, past);
        return Py_BuildValue("KK", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(offset));
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

PyMethodDef functions[] = {
    {"set_up", set_up, METH_VARARGS, nullptr}, {"record", record, METH_O, nullptr}, {"draw", draw_for_python, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "trireme_straight", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_trireme_straight(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module || PyModule_AddType(module, &operator_type) < 0) return nullptr;
    return module;
}
