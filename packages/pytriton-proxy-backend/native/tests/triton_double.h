// In place of Triton: nothing is logged, and a batch has nothing to take over. What it collects, and how it ends, is
// defined by the program.
#pragma once

#include "../proxy/batch/batch.h"
#include "../proxy/triton/triton_util.h"

extern "C" {

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel) { return false; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, int, const char*) { return nullptr; }
// A program whose Triton fails has errors of its own.
#ifndef PYTRITON_DOUBLE_HAS_ERRORS
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error*) { return ""; }
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*) {}
#endif

}  // extern "C"

namespace pytriton {

Batch::Batch(
    uint64_t id, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request**, uint32_t count, bool batching,
    bool decoupled, std::atomic<uint64_t>* in_flight, LateEnds* late_ends)
    : id_(id),
      instance_(instance),
      batching_(batching),
      decoupled_(decoupled),
      late_ends_(late_ends),
      in_flight_(in_flight),
      items_(count),
      open_(count),
      started_ns_(NowNs()) {}

uint64_t Batch::MarkSent() { return active_ns_ = sent_ns_ = NowNs(); }

void Batch::CancelOpen(const Tell&) {}

std::unique_ptr<Batch> Batch::SplitOff(uint64_t) { return nullptr; }
std::vector<std::unique_ptr<Batch>> Batch::CutByCost(
    const Settings&, uint64_t, BatchSource*, const std::function<uint64_t()>&) {
  return {};
}

}  // namespace pytriton
