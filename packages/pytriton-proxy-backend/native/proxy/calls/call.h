// One call of a worker, from its packet to its last answer.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "../triton/late_ends.h"
#include "../triton/triton_util.h"
#include "../wire/arena.h"
#include "../wire/protocol.h"

namespace pytriton {

class Caller;

struct Call {
  Call(std::shared_ptr<Caller> by, const Message& message, bool is_stream)
      : caller(std::move(by)),
        number(message.batch),
        segment(message.segment),
        offset(message.offset),
        stream(is_stream),
        holds_block(message.length != 0) {}

  const std::shared_ptr<Caller> caller;
  const uint64_t number;
  const uint32_t segment;  // where its record lies
  const uint64_t offset;
  const bool stream;  // any number of responses may come

  // The memory of the inputs. It belongs to the reading thread until Triton has the request, and nobody changes it
  // afterwards.
  std::shared_ptr<Segment> memory;
  // Copies of string payloads, so that the called model reads the bytes that were checked. A deque, because Triton has
  // the addresses of its elements, also of short strings that lie in the element itself.
  std::deque<std::string> strings;

  // Guarded by the caller's mutex.
  bool holds_block;    // the worker has not been told that its record is free again
  bool done = false;   // its last answer is being sent

  void SetRequest(TRITONSERVER_InferenceRequest* request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (request_ != nullptr) InnerRequests::Remove(request_);
    request_ = request;
    if (request_ != nullptr) InnerRequests::Add(request_);
  }
  bool HasRequest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return request_ != nullptr;
  }
  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (request_ != nullptr) PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestCancel(request_), "cancelling a call");
  }

 private:
  std::mutex mutex_;
  TRITONSERVER_InferenceRequest* request_ = nullptr;  // set while Triton has the request
};

using CallRef = std::shared_ptr<Call>;

}  // namespace pytriton
