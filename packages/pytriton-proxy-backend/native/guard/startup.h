// What is done once, before the program's `main`: finds out whether this is tritonserver, reads the settings and
// enlarges stacks.
#pragma once

#include <string>

#include "answers/cors.h"
#include "limits.h"

namespace pytriton::guard {

// Version of the interface between the starter of the server and this library: the variables and the line that is
// reported.
constexpr int kVersion = 1;

// Whether the program is linked to Triton. Shells and launchers that start the server are not; the guard does nothing
// in them.
bool IsTritonServer();

// Takes the settings, and this library, out of the environment, so that programs that the server starts get neither.
Limits ReadSettings();

// The same for the origins in the variable for CORS.
CorsOrigins ReadOrigins();

// Gives all later threads larger stacks, and returns the bytes of a stack. Changes nothing if the system counts
// reserved memory as used.
uint64_t EnlargeStacks(uint64_t bytes);

// The prefix of the names of the memory that Triton's Python backend shares with its own processes.
std::string PythonBackendPrefix(int argc, char** argv);

// Whether an address belongs to the program itself and not to a library.
bool IsInProgram(const void* address);

// Writes a line to standard error in one piece, in the form of Triton's log.
void Log(char severity, const std::string& text);

}  // namespace pytriton::guard
