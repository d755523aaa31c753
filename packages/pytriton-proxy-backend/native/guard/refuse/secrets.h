// The access token and other secrets of the server's command line.
#pragma once

namespace pytriton::guard {

// Replaces the marks at the ends of arguments by their secrets. The kernel's copy of the arguments, which other users
// may read, keeps the marks. This is always in force, because without it the server would have no token.
void ReadSecrets(int argc, char** argv);

// Whether the server's options hide the inputs of models from callers without a secret.
bool RestrictsModels(int argc, char** argv);

}  // namespace pytriton::guard
