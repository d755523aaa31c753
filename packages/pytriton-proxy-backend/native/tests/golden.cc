// The golden vectors from C++. `golden FOLDER`: writes the batch record and packs every message, compares them with the
// files byte for byte, parses the response records and compares every field.
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "../proxy/wire/record.h"
#include "check.h"

using namespace pytriton;

namespace {

std::string folder;

std::string Read(const char* name) {
  std::ifstream file(folder + "/" + name + ".bin", std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

void Compare(const char* name, const void* bytes, size_t size) {
  const std::string expected = Read(name);
  for (size_t i = 0; i < expected.size() && i < size; ++i) {
    if (expected[i] != static_cast<const char*>(bytes)[i]) {
      std::fprintf(stderr, "%s.bin differs at byte %zu\n", name, i);
      std::exit(1);
    }
  }
  if (expected.size() != size) std::fprintf(stderr, "%s.bin has %zu bytes, expected %zu\n", name, expected.size(), size);
  CHECK(expected.size() == size);
}

void CompareMessage(const char* name, Message message, const std::string& body = "") {
  message.size = static_cast<uint32_t>(sizeof(message) + body.size());
  std::string packet(reinterpret_cast<const char*>(&message), sizeof(message));
  packet += body;
  Compare(name, packet.data(), packet.size());
}

void CompareGreeting(const char* name, MessageType type, Greeting greeting, const std::string& text) {
  std::memcpy(greeting.magic, kMagic, sizeof(kMagic));
  greeting.major = 1;
  greeting.pid = 4242;
  greeting.uid = 1000;
  greeting.text_length = static_cast<uint32_t>(text.size());
  Message message{};
  message.type = static_cast<uint16_t>(type);
  CompareMessage(name, message, std::string(reinterpret_cast<const char*>(&greeting), sizeof(greeting)) + text);
}

void Messages() {
  Greeting greeting{};
  greeting.max_in_flight = 64;
  greeting.capabilities = kCapDecoupled | kCapCancel;
  greeting.model_version = 1;
  CompareGreeting("hello", MessageType::kHello, greeting, "classify\nmodel\n07e15f480f14f849abbf0cefca44dce9");
  greeting.model_version = 0;
  greeting.max_in_flight = 1;
  CompareGreeting(
      "refuse", MessageType::kRefuse, greeting, "it runs as user 7, the server as user 0: both must be the same user");
  greeting.model_flags = kModelBatching;
  greeting.model_version = 3;
  greeting.arena_budget = uint64_t{1} << 32;
  greeting.arena_idle_ms = 10000;
  greeting.execution_timeout_ms = 2500;
  CompareGreeting("welcome", MessageType::kWelcome, greeting, "digits");
  greeting.model_flags |= kModelDecoupled;
  greeting.capabilities = 0;
  CompareGreeting("welcome_decoupled_no_capabilities", MessageType::kWelcome, greeting, "tokens");
  Greeting caller{};
  caller.max_in_flight = 1;
  caller.capabilities = kCapDecoupled | kCapCancel | kCapCalls;
  CompareGreeting("caller", MessageType::kCaller, caller, "classify");

  const auto message = [](MessageType type) {
    Message made{};
    made.type = static_cast<uint16_t>(type);
    return made;
  };
  Message segment = message(MessageType::kSegment);
  segment.segment = 2;
  segment.length = uint64_t{1} << 33;
  CompareMessage("segment", segment);
  Message close = message(MessageType::kSegmentClose);
  close.segment = 2;
  CompareMessage("segment_close", close);
  Message batch = message(MessageType::kBatch);
  batch.batch = 7;
  batch.consumed = 5;
  batch.segment = 2;
  batch.offset = (uint64_t{1} << 32) + 128;
  batch.length = uint64_t{1} << 32;
  CompareMessage("batch", batch);
  Message response = message(MessageType::kResponse);
  response.flags = kFlagInputReleased | kFlagBatchDone;
  response.batch = 7;
  response.segment = 1;
  response.offset = uint64_t{1} << 33;
  response.length = 4096;
  CompareMessage("response", response);
  Message responses = message(MessageType::kResponses);
  responses.segment = 1;
  responses.offset = uint64_t{1} << 33;
  responses.length = 8192;
  CompareMessage("responses", responses);
  Message fail = message(MessageType::kFail);
  fail.flags = kFlagBatchDone;
  fail.batch = 7;
  fail.index = 3;
  CompareMessage("fail", fail, "gr\xc3\xb6\xc3\x9f" "er");
  Message acknowledge = message(MessageType::kRelease);
  acknowledge.consumed = 6;
  CompareMessage("release_acknowledge", acknowledge);
  Message block = message(MessageType::kRelease);
  block.segment = 2;
  block.offset = (uint64_t{1} << 32) + 128;
  CompareMessage("release_block", block);
  const auto of_request = [&message](MessageType type) {
    Message made = message(type);
    made.batch = 7;
    made.index = 2;
    return made;
  };
  CompareMessage("cancel", of_request(MessageType::kCancel));
  CompareMessage("pause", of_request(MessageType::kPause));
  CompareMessage("resume", of_request(MessageType::kResume));
  CompareMessage("wake", message(MessageType::kWake));
  CompareMessage("detach", message(MessageType::kDetach));
  CompareMessage("activity_ask", message(MessageType::kActivity));
  Message executed = message(MessageType::kExecuted);
  executed.batch = 7;
  CompareMessage("executed", executed);
  Message activity = message(MessageType::kActivity);
  activity.batch = 9;
  activity.length = 3;
  CompareMessage("activity", activity);
  Message call = message(MessageType::kCall);
  call.flags = kFlagStream;
  call.batch = 9;
  call.segment = 2;
  call.index = static_cast<uint32_t>(Operation::kInfer);
  call.offset = (uint64_t{1} << 32) + 128;
  call.length = uint64_t{1} << 32;
  const CallBody infer{-1, 0, 7, 2, {}};
  CompareMessage(
      "call_infer", call, std::string(reinterpret_cast<const char*>(&infer), sizeof(infer)) + "gr\xc3\xb6\xc3\x9f" "er");
  Message set = message(MessageType::kCall);
  set.batch = 10;
  set.index = static_cast<uint32_t>(Operation::kMetricSet);
  const CallBody metric{3, 0.25, 0, 0, {}};
  CompareMessage("call_metric", set, std::string(reinterpret_cast<const char*>(&metric), sizeof(metric)));
  Message result = message(MessageType::kResult);
  result.flags = kFlagBatchDone;
  result.batch = 10;
  result.length = uint64_t{1} << 62;
  CompareMessage("result", result);
}

uint64_t Bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The batch of golden_batch() in generate.py. The inputs of the requests come in several buffers, as Triton may have them.
void WriteTheBatch() {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(i);
  const char text[] = "\0\0\0\0" "\1\0\0\0a" "\2\0\0\0\0\xff" "\7\0\0\0gr\xc3\xbc\xc3\x9f" "e";
  const int64_t opt_first[] = {-1, int64_t{1} << 40};
  const int64_t opt_last[] = {1, 2, 3};

  BatchSource source;
  source.outputs = {"y", "label", "y"};
  source.parameters = {
      {"text", 0, "gr\xc3\xbc\xc3\x9f" "e", 0},
      {"empty", 0, "", 0},
      {"count", 1, {}, static_cast<uint64_t>(-(int64_t{1} << 62))},
      {"flag", 2, {}, 1},
      {"rate", 3, {}, Bits(0.25)},
      {"last", 2, {}, 0},
  };
  source.requests.resize(3);
  auto& first = source.requests[0];
  first.rows = 2;
  first.flags = kRequestSequenceStart;
  first.priority = uint64_t{1} << 40;
  first.timeout_us = 1500000;
  first.correlation_id = 77;
  first.id = "first";
  first.trace_context = "00-abc-01";
  first.parameter_count = 5;
  first.output_count = 2;
  auto& second = source.requests[1];
  second.id = "zweite";
  second.correlation_string = "s\xc3\xa9" "ance-9";
  second.first_parameter = 5;
  second.output_count = 2;
  auto& third = source.requests[2];
  third.flags = kRequestSequenceEnd;
  third.first_parameter = 5;
  third.parameter_count = 1;
  third.first_output = 2;
  third.output_count = 1;
  source.dims = {4, 2, 4, 1, 2, 1, 1, 3};
  const auto piece = [&](const void* data, uint64_t size) { source.pieces.push_back({data, size}); };
  const auto tensor = [&](const char* name, uint32_t dtype, uint32_t owner, uint32_t dim, uint32_t piece_count) {
    uint64_t length = 0;
    const auto first_piece = static_cast<uint32_t>(source.pieces.size()) - piece_count;
    for (uint32_t i = 0; i < piece_count; ++i) length += source.pieces[first_piece + i].size;
    source.tensors.push_back({name, dtype, owner, dim, 2, first_piece, piece_count, length});
  };
  piece(x, 12);
  piece(nullptr, 0);
  piece(x + 3, 4);
  piece(x + 4, 16);
  tensor("x", 11, kWholeBatch, 0, 4);
  piece(text, 7);
  piece(text + 7, sizeof(text) - 1 - 7);
  tensor("text", 13, kWholeBatch, 2, 2);
  piece(opt_first, sizeof(opt_first));
  tensor("opt", 9, 0, 4, 1);
  piece(opt_last, sizeof(opt_last));
  tensor("opt", 9, 2, 6, 1);

  BatchLayout layout;
  std::string error;
  CHECK(LayoutBatch(source, &layout, &error));
  // Whatever the memory held before: a record of zeros below, so that the padding is comparable.
  const std::string expected = Read("record_batch");
  CHECK(layout.record_length == expected.size());
  alignas(64) static uint8_t out[4096];
  WriteBatch(source, layout, 7, 1000000007, out);
  StampSent(out, (uint64_t{1} << 40) + 3);
  Compare("record_batch", out, layout.record_length);
  CHECK(CancelledOffset(2) == 64 + 2 * 80 + 72);
}

void ParseColumns() {
  const std::string raw = Read("record_response_columns");
  ResponseRecord record;
  std::string error;
  CHECK(record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 7, 3, false, &error));
  CHECK(record.entries().size() == 3);
  const uint32_t rows[] = {2, 1, 1};
  for (uint32_t i = 0; i < 3; ++i) {
    const auto& entry = record.entries()[i];
    CHECK(entry.request == i && entry.rows == rows[i] && entry.flags == kResponseFinal && entry.parameters_count == 0);
  }
  CHECK(record.tensors().size() == 2);
  const auto& y = record.tensors()[0];
  CHECK(std::string(y.name) == "y" && y.dtype == 11 && y.owner == kWholeBatch && y.dims_count == 2);
  CHECK(y.dims[0] == 4 && y.dims[1] == 2 && y.payload_length == 32);
  float values[8];
  std::memcpy(values, y.payload, sizeof(values));
  for (int i = 0; i < 8; ++i) CHECK(values[i] == 0.5f * static_cast<float>(i));
  const auto& label = record.tensors()[1];
  CHECK(std::string(label.name) == "label" && label.dtype == 13 && label.dims_count == 1 && label.dims[0] == 4);
  std::vector<uint64_t> ends;
  CHECK(SplitStrings(label.payload, label.payload_length, {2, 1, 1}, &ends));
  CHECK((ends == std::vector<uint64_t>{12, 20, 25}));
  // The same record for another batch, for fewer requests, and cut off.
  CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 8, 3, false, &error));
  CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 7, 2, false, &error));
  for (size_t length = 0; length < raw.size(); ++length) {
    error.clear();
    CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), length, 7, 3, false, &error));
    CHECK(!error.empty());
  }
}

void ParseMixed() {
  const std::string raw = Read("record_response_mixed");
  ResponseRecord record;
  std::string error;
  CHECK(record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 7, 3, true, &error));
  CHECK(record.entries().size() == 3);
  const auto& first = record.entries()[0];
  CHECK(first.request == 0 && first.flags == 0 && first.parameters_count == 5);
  std::vector<RecordParameter> parameters;
  record.Parameters(first, &parameters);
  CHECK(parameters.size() == 5);
  CHECK(std::string(parameters[0].key) == "text" && parameters[0].type == 0);
  CHECK(std::string(parameters[0].text) == "gr\xc3\xbc\xc3\x9f" "e");
  CHECK(std::string(parameters[1].key) == "empty" && std::string(parameters[1].text).empty());
  CHECK(std::string(parameters[2].key) == "count" && parameters[2].type == 1);
  CHECK(static_cast<int64_t>(parameters[2].value) == -(int64_t{1} << 62));
  CHECK(std::string(parameters[3].key) == "flag" && parameters[3].type == 2 && parameters[3].value == 1);
  CHECK(std::string(parameters[4].key) == "rate" && parameters[4].type == 3 && parameters[4].value == Bits(0.25));
  const auto& second = record.entries()[1];
  CHECK(second.request == 1 && second.flags == (kResponseFinal | kResponseError) && second.error_code == 3);
  CHECK(record.ErrorText(second) == "no such label: gr\xc3\xb6\xc3\x9f" "er");
  const auto& third = record.entries()[2];
  CHECK(third.request == 2 && third.flags == (kResponseFinal | kResponseEmpty));
  CHECK(record.tensors().size() == 2);
  const auto& y = record.tensors()[0];
  CHECK(y.owner == 0 && y.dims_count == 2 && y.dims[0] == 2 && y.dims[1] == 2 && y.payload_length == 16);
  const auto& label = record.tensors()[1];
  CHECK(label.owner == 0 && label.dims_count == 2 && label.dims[0] == 2 && label.dims[1] == 0);
  CHECK(label.payload_length == 0);
}

void ParseReference() {
  const std::string raw = Read("record_response_reference");
  const auto* bytes = reinterpret_cast<const uint8_t*>(raw.data());
  ResponseRecord record;
  std::string error;
  alignas(64) static uint8_t memory[1024];
  Block batch;
  batch.data = memory;
  batch.length = 600;
  CHECK(record.Parse(bytes, raw.size(), 7, 2, false, &error, nullptr, &batch));
  CHECK(record.tensors().size() == 2);
  const auto& y = record.tensors()[0];
  CHECK(std::string(y.name) == "y" && y.payload == memory + 576 && y.payload_length == 24);
  const auto& n = record.tensors()[1];
  CHECK(n.payload > bytes && n.payload < bytes + raw.size() && n.payload_length == 24);
  int64_t last;
  std::memcpy(&last, n.payload + 16, sizeof(last));
  CHECK(last == int64_t{1} << 40);
  // A byte too far, a batch that was given back, and a peer whose tensors refer to nothing.
  batch.length = 599;
  CHECK(!record.Parse(bytes, raw.size(), 7, 2, false, &error, nullptr, &batch));
  CHECK(error.find("does not lie between 0 and 599 of its batch") != std::string::npos);
  batch = Block{};
  CHECK(!record.Parse(bytes, raw.size(), 7, 2, false, &error, nullptr, &batch));
  CHECK(!record.Parse(bytes, raw.size(), 7, 2, false, &error));
}

// Every place where it may be cut off, and every byte that may be wrong, is refused or read inside of it.
void ParseTheCall() {
  const std::string raw = Read("record_call");
  CallRecord record;
  std::string error;
  CHECK(record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 9, &error));
  const auto& entry = record.entry();
  CHECK(entry.flags == 3 && entry.priority == 2 && entry.timeout_us == 1500000 && entry.correlation_id == 77);
  CHECK(std::string(record.id()) == "call" && std::string(record.correlation_string()).empty());
  const auto outputs = record.Outputs();
  CHECK(outputs.size() == 2 && std::string(outputs[0]) == "y" && std::string(outputs[1]) == "label");
  const auto parameters = record.Parameters();
  CHECK(parameters.size() == 5 && std::string(parameters[0].text) == "gr\xc3\xbc\xc3\x9f" "e");
  CHECK(parameters[4].type == 3 && parameters[4].value == Bits(0.25));
  CHECK(record.tensors().size() == 2);
  const auto& x = record.tensors()[0];
  CHECK(std::string(x.name) == "x" && x.dtype == 11 && x.dims_count == 2 && x.dims[0] == 2 && x.payload_length == 16);
  CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 8, &error));
  for (size_t length = 0; length < raw.size(); ++length) {
    error.clear();
    CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), length, 9, &error));
    CHECK(!error.empty());
  }
  const std::string batch = Read("record_batch");
  CHECK(!record.Parse(reinterpret_cast<const uint8_t*>(batch.data()), batch.size(), 7, &error));
}

void WriteTheAnswer() {
  const float y[] = {1, 2, 3, 4};
  const char label[] = "\0\0\0\0" "\4\0\0\0eins";
  ResponseSource source;
  source.parameters = {
      {"text", 0, "gr\xc3\xbc\xc3\x9f" "e", 0},
      {"empty", 0, "", 0},
      {"count", 1, {}, static_cast<uint64_t>(-(int64_t{1} << 62))},
      {"flag", 2, {}, 1},
      {"rate", 3, {}, Bits(0.25)},
  };
  source.dims = {2, 2, 2};
  source.pieces = {{y, sizeof(y)}, {label, sizeof(label) - 1}};
  source.tensors = {{"y", 11, 0, 0, 2, 0, 1, sizeof(y)}, {"label", 13, 0, 2, 1, 1, 1, sizeof(label) - 1}};
  BatchLayout layout;
  std::string error;
  CHECK(LayoutResponse(source, &layout, &error));
  CHECK(layout.record_length == Read("record_call_answer").size());
  alignas(64) static uint8_t out[4096];
  WriteResponse(source, layout, 9, out);
  Compare("record_call_answer", out, layout.record_length);
}

void ParseRescheduled() {
  const std::string raw = Read("record_response_rescheduled");
  ResponseRecord record;
  std::string error;
  CHECK(record.Parse(reinterpret_cast<const uint8_t*>(raw.data()), raw.size(), 7, 3, false, &error));
  CHECK(record.entries()[1].flags == (kResponseFinal | kResponseReschedule));
  CHECK(record.tensors()[0].dims[0] == 2);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  folder = argv[1];
  Messages();
  WriteTheBatch();
  ParseColumns();
  ParseMixed();
  ParseReference();
  ParseTheCall();
  WriteTheAnswer();
  ParseRescheduled();
  return 0;
}
