// Triton's wire form of strings, from and to object arrays of numpy.
#pragma once

#include "../python/python_abi.h"

namespace pytriton {

// The functions of the module; what they are is described in `_accelerator.pyi`.
extern PyMethodDef string_functions[];

}  // namespace pytriton
