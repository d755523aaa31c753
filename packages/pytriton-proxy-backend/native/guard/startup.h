// What happens once, before the program's `main`: whether this is tritonserver, its settings and stacks.
#pragma once

#include <string>

#include "answers/cors.h"
#include "limits.h"

namespace pytriton::guard {

// Version of what the starter of the server and this library tell each other: the variables and the line it reports.
constexpr int kVersion = 1;

// Whether the program is linked to Triton. Shells and launchers, through which the server may be started, are not: they
// hand everything on.
bool IsTritonServer();

// Takes the settings out of the environment, and this library too: what the server starts shall have neither.
Limits ReadSettings();

// As before: who is named in the variable for CORS.
CorsOrigins ReadOrigins();

// Gives all threads to come larger stacks; returns the bytes of a stack from now on. Leaves them as they are where the
// system counts reserved memory as used.
uint64_t EnlargeStacks(uint64_t bytes);

// The prefix of the names of memory that Triton's Python backend shares with its own processes.
std::string PythonBackendPrefix(int argc, char** argv);

// Whether an address belongs to the program itself and not to a library.
bool IsInProgram(const void* address);

// Writes a line to standard error in one piece, in the form of Triton's log.
void Log(char severity, const std::string& text);

}  // namespace pytriton::guard
