/* Which instruction sets this machine has, and which one is in use. Knows nothing of what the kernels compute. */
#define _GNU_SOURCE
#include "trireme_cpu.h"
#include <string.h>

extern const Kernels kernels_portable;
#if defined(HAS_AVX2) || defined(HAS_AVX512VNNI) || defined(HAS_AMX) /* HAS_X: the build could compile X */
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
extern const Kernels kernels_avx2, kernels_avx512vnni, kernels_amx;

__attribute__((unused)) static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

__attribute__((unused)) static int has_avx512vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* AMX tiles need the kernel's leave besides the CPU's flags (leaf 7: bf16 22, tile 24, int8 25). Only Linux is asked for it. */
__attribute__((unused)) static int has_amx(void) {
    unsigned a, b, c, d;
    if (!has_avx512vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned need = 1u << 22 | 1u << 24 | 1u << 25;
    if ((d & need) != need) return 0;
#if defined(__linux__)
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}
#elif defined(HAS_DOTPROD)
extern const Kernels kernels_dotprod, kernels_i8mm, kernels_bf16;

#if defined(__APPLE__)
#include <sys/types.h>
#include <sys/sysctl.h>

static int has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0; /* a name that the system does not know: not there */
}

static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_FP16") && has_feature("hw.optional.arm.FEAT_DotProd"); }
static int system_has_i8mm(void) { return has_feature("hw.optional.arm.FEAT_I8MM"); }
static int system_has_bf16(void) { return has_feature("hw.optional.arm.FEAT_BF16"); }
#elif defined(__linux__)
#include <sys/auxv.h>

/* The bits of Linux' hwcap.h, which older systems lack: half floats 10 and dot products 20; of the second word i8mm 13, bf16 14. */
static int has_dotprod(void) {
    const unsigned long need = 1ul << 10 | 1ul << 20;
    return (getauxval(AT_HWCAP) & need) == need;
}

static int system_has_i8mm(void) { return (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }
static int system_has_bf16(void) { return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; }
#else /* a system that nobody has taught this file to ask: the portable kernels serve */
static int has_dotprod(void) { return 0; }
static int system_has_i8mm(void) { return 0; }
static int system_has_bf16(void) { return 0; }
#endif

__attribute__((unused)) static int has_i8mm(void) { return has_dotprod() && system_has_i8mm(); }
__attribute__((unused)) static int has_bf16(void) { return has_i8mm() && system_has_bf16(); }
#endif

static int always(void) { return 1; }

static const struct { const Kernels *kernels; int (*present)(void); } choices[] = {
#if defined(HAS_AMX) && defined(HAS_AVX512VNNI)
    {&kernels_amx, has_amx},
#endif
#if defined(HAS_AVX512VNNI)
    {&kernels_avx512vnni, has_avx512vnni},
#endif
#if defined(HAS_AVX2)
    {&kernels_avx2, has_avx2},
#endif
#if defined(HAS_BF16) && defined(HAS_DOTPROD)
    {&kernels_bf16, has_bf16},
#endif
#if defined(HAS_I8MM) && defined(HAS_DOTPROD)
    {&kernels_i8mm, has_i8mm},
#endif
#if defined(HAS_DOTPROD)
    {&kernels_dotprod, has_dotprod},
#endif
    {&kernels_portable, always},
};

const Kernels *trireme_kernels = &kernels_portable;

/* Chooses by name, or the best for "auto". Returns 0 when this machine cannot run it. */
int trireme_set_isa(const char *name) {
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        int named = !strcmp(name, "auto") || !strcmp(name, choices[i].kernels->name);
        if (named && choices[i].present()) {
            trireme_kernels = choices[i].kernels;
            return 1;
        }
    }
    return 0;
}

const char *trireme_isa(void) { return trireme_kernels->name; }
