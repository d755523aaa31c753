// Prints every number of protocol.h that is written by hand, one "name value" per line, for the test that holds them
// against docs/protocol.md.
#include <cstddef>
#include <cstdio>

#include "../proxy/wire/protocol.h"

using namespace pytriton;

namespace {

void Print(const char* name, unsigned long long value) { std::printf("%s %llu\n", name, value); }

}  // namespace

#define CONSTANT(name) Print(#name, static_cast<unsigned long long>(name))
#define SIZE(type) Print("sizeof." #type, sizeof(type))
#define FIELD(type, field) Print(#type "." #field, offsetof(type, field))

int main() {
  std::printf("kMagic %.8s\n", kMagic);
  CONSTANT(kMajor);
  CONSTANT(kMinor);
  CONSTANT(kMaxPacket);
  CONSTANT(kMaxText);
  CONSTANT(kAlignment);
  CONSTANT(kMaxMetadata);
  CONSTANT(kBatchMagic);
  CONSTANT(kResponseMagic);
  CONSTANT(kWholeBatch);
  for (uint32_t dtype = 0; dtype < 16; ++dtype) {
    char name[32];
    std::snprintf(name, sizeof(name), "element.%u", dtype);
    Print(name, FixedElementSize(dtype));
  }

  SIZE(Message);
  FIELD(Message, type);
  FIELD(Message, flags);
  FIELD(Message, size);
  FIELD(Message, batch);
  FIELD(Message, consumed);
  FIELD(Message, segment);
  FIELD(Message, index);
  FIELD(Message, offset);
  FIELD(Message, length);
  SIZE(Greeting);
  FIELD(Greeting, magic);
  FIELD(Greeting, major);
  FIELD(Greeting, minor);
  FIELD(Greeting, pid);
  FIELD(Greeting, uid);
  FIELD(Greeting, max_in_flight);
  FIELD(Greeting, capabilities);
  FIELD(Greeting, model_flags);
  FIELD(Greeting, text_length);
  FIELD(Greeting, model_version);
  FIELD(Greeting, arena_budget);
  FIELD(Greeting, arena_idle_ms);
  FIELD(Greeting, execution_timeout_ms);
  SIZE(CallBody);
  FIELD(CallBody, subject);
  FIELD(CallBody, value);
  FIELD(CallBody, parent_batch);
  FIELD(CallBody, parent_request);
  FIELD(CallBody, reserved);
  SIZE(RecordHeader);
  FIELD(RecordHeader, magic);
  FIELD(RecordHeader, entry_count);
  FIELD(RecordHeader, tensor_count);
  FIELD(RecordHeader, reserved);
  FIELD(RecordHeader, batch);
  FIELD(RecordHeader, metadata_length);
  FIELD(RecordHeader, record_length);
  FIELD(RecordHeader, entries_offset);
  FIELD(RecordHeader, tensors_offset);
  FIELD(RecordHeader, received_ns);
  FIELD(RecordHeader, sent_ns);
  SIZE(RequestEntry);
  FIELD(RequestEntry, rows);
  FIELD(RequestEntry, flags);
  FIELD(RequestEntry, priority);
  FIELD(RequestEntry, timeout_us);
  FIELD(RequestEntry, correlation_id);
  FIELD(RequestEntry, id);
  FIELD(RequestEntry, correlation_string);
  FIELD(RequestEntry, trace_context);
  FIELD(RequestEntry, parameters_offset);
  FIELD(RequestEntry, parameters_count);
  FIELD(RequestEntry, outputs_offset);
  FIELD(RequestEntry, outputs_count);
  FIELD(RequestEntry, cancelled);
  FIELD(RequestEntry, reserved);
  SIZE(ResponseEntry);
  FIELD(ResponseEntry, request);
  FIELD(ResponseEntry, flags);
  FIELD(ResponseEntry, rows);
  FIELD(ResponseEntry, error_code);
  FIELD(ResponseEntry, error);
  FIELD(ResponseEntry, parameters_offset);
  FIELD(ResponseEntry, parameters_count);
  FIELD(ResponseEntry, reserved);
  SIZE(TensorEntry);
  FIELD(TensorEntry, name);
  FIELD(TensorEntry, dtype);
  FIELD(TensorEntry, dims_count);
  FIELD(TensorEntry, owner);
  FIELD(TensorEntry, dims_offset);
  FIELD(TensorEntry, payload_offset);
  FIELD(TensorEntry, payload_length);
  FIELD(TensorEntry, source);
  SIZE(ParameterEntry);
  FIELD(ParameterEntry, key);
  FIELD(ParameterEntry, type);
  FIELD(ParameterEntry, length);
  FIELD(ParameterEntry, value);
  SIZE(StringRef);
  FIELD(StringRef, offset);
  FIELD(StringRef, length);
  return 0;
}
