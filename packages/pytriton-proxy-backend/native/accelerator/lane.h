// The types of the accelerator.
#pragma once

#include "../python/python_abi.h"

namespace pytriton {

// Makes the types; the one that Python makes objects of, null with an exception.
PyObject* MakeLaneType();

}  // namespace pytriton
