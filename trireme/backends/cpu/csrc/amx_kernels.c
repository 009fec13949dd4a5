/* The AMX kernels as one unit, compiled with their own flags. */
#include "amx.c"
#include "amx_attention.c"
