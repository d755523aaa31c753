// The access token and other secrets of the server's command line.
#pragma once

namespace pytriton::guard {

// Puts secrets into the arguments that end with a mark for them. The kernel's copy of the arguments, which other users
// may read, keeps the mark. In force whatever is switched off: without it the server would have no token.
void ReadSecrets(int argc, char** argv);

// Whether the arguments keep what the inputs of models are from those who do not know a secret.
bool RestrictsModels(int argc, char** argv);

}  // namespace pytriton::guard
