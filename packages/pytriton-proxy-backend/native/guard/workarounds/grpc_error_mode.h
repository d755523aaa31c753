// The header `triton_grpc_error`, with which callers over gRPC ask that a stream ends with the status of its first
// error.
//
// Bug: Triton's front end for gRPC frees the requests of such a stream that are still being served, which crashes the
// server.
// Until: no version of tritonserver is known to do better; the guard's own front end does not have the bug.
#pragma once

namespace pytriton::guard {

// Makes the front end ignore the header.
void HideErrorMode();

}  // namespace pytriton::guard
