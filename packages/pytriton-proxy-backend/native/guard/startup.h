// What happens once, before the program's `main`: whether this is tritonserver, its settings, secrets and stacks.
#pragma once

#include <string>

#include "limits.h"

namespace pytriton::guard {

// Version of what the starter of the server and this library tell each other: the variables and the line it reports.
constexpr int kVersion = 1;

// Whether the program is linked to Triton. Shells and launchers, through which the server may be started, are not: they
// hand everything on.
bool IsTritonServer();

// Takes the settings out of the environment, and this library too: what the server starts shall have neither.
Limits ReadSettings();

// Puts secrets into the arguments that end with a mark for them. The kernel's copy of the arguments, which other users
// may read, keeps the mark.
void ReadSecrets(int argc, char** argv);

// Whether the arguments keep what the inputs of models are from those who do not know a secret.
bool RestrictsModels(int argc, char** argv);

// Gives all threads to come larger stacks; returns the bytes of a stack from now on. Leaves them as they are where the
// system counts reserved memory as used.
uint64_t EnlargeStacks(uint64_t bytes);

// Has the front end for gRPC not find the header `triton_grpc_error`, by which callers ask to have a stream end with the
// status of its first error: it frees the requests of such a stream that are still served.
void HideErrorMode();

// Has the server end some time after its starter has: it gets SIGTERM then, but one that hangs acts on no signal but
// SIGKILL.
void EndWithStarter();

// The prefix of the names of memory that Triton's Python backend shares with its own processes.
std::string PythonBackendPrefix(int argc, char** argv);

// Whether an address belongs to the program itself and not to a library.
bool IsInProgram(const void* address);

// Writes a line to standard error in one piece, in the form of Triton's log.
void Log(char severity, const std::string& text);

}  // namespace pytriton::guard
