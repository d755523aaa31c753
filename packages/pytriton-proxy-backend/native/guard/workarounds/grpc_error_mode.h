// The header `triton_grpc_error`, by which callers over gRPC ask to have a stream end with the status of its first error.
//
// Bug: Triton's front end for gRPC frees the requests of such a stream that are still served, which ends the server.
// Until: no version of tritonserver is known to do better; the guard's own front end is not concerned.
#pragma once

namespace pytriton::guard {

// Has the front end not find the header.
void HideErrorMode();

}  // namespace pytriton::guard
