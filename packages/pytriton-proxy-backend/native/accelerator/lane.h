// The types of the accelerator.
#pragma once

#include "../python/python_abi.h"

namespace pytriton {

// Makes the types. Returns the one of which Python makes objects; null with an exception.
PyObject* MakeLaneType();

}  // namespace pytriton
