// Converts between Triton's wire form of strings and numpy's arrays of objects.
#pragma once

#include "../python/python_abi.h"

namespace pytriton {

// The functions of the module, which `_accelerator.pyi` describes.
extern PyMethodDef string_functions[];

}  // namespace pytriton
