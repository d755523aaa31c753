// The functions that this library replaces, and the addresses of the original ones.
//
// They are looked up when the library is loaded; a call before that looks up its own. Nothing here waits for a lock,
// because waiting for a lock calls `syscall`, which is such a function.
#pragma once

#include <cstddef>

namespace pytriton::guard {

#define PYTRITON_HOOKS(HOOK)                                                \
  HOOK(accept4)                                                             \
  HOOK(bind)                                                                \
  HOOK(close)                                                               \
  HOOK(epoll_ctl)                                                           \
  HOOK(epoll_wait)                                                          \
  HOOK(inflate)                                                             \
  HOOK(ioctl)                                                               \
  HOOK(listen)                                                              \
  HOOK(mmap)                                                                \
  HOOK(munmap)                                                              \
  HOOK(pthread_create)                                                      \
  HOOK(readv)                                                               \
  HOOK(recv)                                                                \
  HOOK(recvmsg)                                                             \
  HOOK(send)                                                                \
  HOOK(sendmsg)                                                             \
  HOOK(setpriority)                                                         \
  HOOK(shm_open)                                                            \
  HOOK(shutdown)                                                            \
  HOOK(signal)                                                              \
  HOOK(socketpair)                                                          \
  HOOK(syscall)                                                             \
  HOOK(writev)                                                              \
  HOOK(TRITONBACKEND_OutputBuffer)                                          \
  HOOK(TRITONSERVER_BufferAttributesSetByteSize)                            \
  HOOK(TRITONSERVER_DataTypeByteSize)                                       \
  HOOK(TRITONSERVER_InferenceRequestAddInput)                               \
  HOOK(TRITONSERVER_InferenceRequestAddRequestedOutput)                     \
  HOOK(TRITONSERVER_InferenceRequestAppendInputData)                        \
  HOOK(TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes)    \
  HOOK(TRITONSERVER_InferenceRequestDelete)                                 \
  HOOK(TRITONSERVER_InferenceRequestNew)                                    \
  HOOK(TRITONSERVER_InferenceRequestSetBoolParameter)                       \
  HOOK(TRITONSERVER_InferenceRequestSetDoubleParameter)                     \
  HOOK(TRITONSERVER_InferenceRequestSetIntParameter)                        \
  HOOK(TRITONSERVER_InferenceRequestSetResponseCallback)                    \
  HOOK(TRITONSERVER_InferenceRequestSetStringParameter)                     \
  HOOK(TRITONSERVER_ServerDelete)                                           \
  HOOK(TRITONSERVER_ServerInferAsync)                                       \
  HOOK(TRITONSERVER_ServerIsReady)                                          \
  HOOK(TRITONSERVER_ServerModelConfig)                                      \
  HOOK(TRITONSERVER_ServerModelIsReady)                                     \
  HOOK(TRITONSERVER_ServerNew)                                              \
  HOOK(TRITONSERVER_ServerOptionsSetLogFile)                                \
  HOOK(TRITONSERVER_ServerOptionsSetStrictReadiness)

enum class Hook : size_t {
#define PYTRITON_NAME(name) name,
  PYTRITON_HOOKS(PYTRITON_NAME)
#undef PYTRITON_NAME
      kCount
};

void FindAllNext();

// Returns the original function; null if the program has none.
void* FindNext(Hook hook);

#define NEXT(name) reinterpret_cast<decltype(&name)>(FindNext(Hook::name))

}  // namespace pytriton::guard
