// One call of a worker, from its packet to the last answer.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "../arena.h"
#include "../late_ends.h"
#include "../protocol.h"
#include "../triton_util.h"

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
  const uint32_t segment;  // the place of its record
  const uint64_t offset;
  const bool stream;  // any number of responses may come

  // The memory that the inputs lie in. It belongs to the reader until Triton has the request, and then to nobody.
  std::shared_ptr<Segment> memory;
  // Payloads of strings, which a target is to find as they were checked. One that is added leaves the others where they
  // are: Triton has their addresses, of short ones, too, which lie in the string itself.
  std::deque<std::string> strings;

  // Guarded by the caller's mutex.
  bool holds_block;    // the worker has not been told that its record is free again
  bool done = false;   // the last answer is on its way

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
  TRITONSERVER_InferenceRequest* request_ = nullptr;  // while Triton has it
};

using CallRef = std::shared_ptr<Call>;

}  // namespace pytriton
