// Written by `python3 tools/dev.py reference` from
// wire/layout.py. Change that.
#pragma once

#include <cstdint>

namespace pytriton {

// What a peer can do beyond the base of the protocol; a pair uses what both have.
constexpr uint64_t kCapDecoupled = 1u << 0;  // the worker may answer one request with any number of responses
constexpr uint64_t kCapCancel = 1u << 1;  // the worker reads CANCEL
constexpr uint64_t kCapCalls = 1u << 2;  // calls into the server, over a connection of their own
constexpr uint64_t kCapReschedule = 1u << 3;  // a response may be RESCHEDULE
constexpr uint64_t kCapExecuted = 1u << 4;  // the worker says when it can take the next batch: EXECUTED
constexpr uint64_t kCapContinues = 1u << 5;  // a response that is an error may be CONTINUES
constexpr uint64_t kCapAhead = 1u << 6;  // the worker may get its next batch before it has answered the current one
constexpr uint64_t kCapReferences = 1u << 7;  // a tensor of a response may be one of the inputs
// the worker only answers batches with the reason why the model is not ready
constexpr uint64_t kCapStandsIn = 1u << 8;
constexpr uint64_t kCapPace = 1u << 9;  // the worker reads PAUSE and RESUME
// the worker keeps the place of one that sleeps: it gets WAKE and no batches
constexpr uint64_t kCapAsleep = 1u << 10;
// the worker may send response records of several batches together: RESPONSES
constexpr uint64_t kCapTogether = 1u << 11;
// Those of the native proxy: all.
constexpr uint64_t kCapabilities = 4095;

// The first field of every packet.
enum class MessageType : uint16_t {
  kHello = 1,  // worker -> proxy: greeting
  kWelcome = 2,  // proxy -> worker: greeting
  kRefuse = 3,  // proxy -> worker: greeting whose text is the reason; the connection ends
  kSegment = 4,  // owner -> peer, with the memfd: a new segment of the sender's arena
  kSegmentClose = 5,  // owner -> peer: the segment will not be used again
  kBatch = 6,  // proxy -> worker: a batch record lies at (segment, offset, length)
  kResponse = 7,  // worker -> proxy: a response record lies at (segment, offset, length)
  kFail = 8,  // worker -> proxy: the whole batch failed; the reason is in the message
  kRelease = 9,  // peer -> owner: the block at (segment, offset) is free again
  kCancel = 10,  // proxy -> worker: request `index` of the batch is not wanted any more
  kDetach = 11,  // worker -> proxy: asks for no more batches; the proxy closes when all are answered
  // in place of a greeting: asks for the batches in flight; also the answer, which ends the connection
  kActivity = 12,
  kCaller = 13,  // in place of HELLO, with the same greeting: this connection is for calls
  kCall = 14,  // worker -> proxy, in one: an operation, with a CallBody and a text; a batch record may lie there
  kResult = 15,  // proxy -> worker, in one: the call is done, and its value
  kExecuted = 16,  // worker -> proxy: the callable has returned from the batch, whether or not it is answered
  kPause = 17,  // proxy -> worker: the caller of request `index` does not read: send no more for now
  kResume = 18,  // proxy -> worker: the caller reads again
  kWake = 19,  // proxy -> worker that is asleep: a batch waits, and no worker is awake
  kResponses = 20,  // worker -> proxy: response records of several batches lie there, one behind the other
};

// Flags of a packet.
constexpr uint16_t kFlagInputReleased = 1u << 0;  // RESPONSE, FAIL, RESULT: the batch's input block is free again
constexpr uint16_t kFlagBatchDone = 1u << 1;  // RESPONSE, FAIL, RESULT: nothing more comes for this batch
constexpr uint16_t kFlagStream = 1u << 2;  // CALL of INFER: any number of responses may come
constexpr uint16_t kFlagExecuting = 1u << 3;  // RESPONSE, FAIL, with BATCH_DONE: EXECUTED is still to come

// What a CALL asks for; its `index`.
enum class Operation : uint32_t {
  kInfer = 1,
  kLoadModel = 2,
  kUnloadModel = 3,
  kModelReady = 4,
  kMetricFamily = 5,
  kMetric = 6,
  kMetricIncrement = 7,
  kMetricSet = 8,
  kMetricObserve = 9,
  kMetricValue = 10,
  kMetricDelete = 11,
  kMetricFamilyDelete = 12,
  kLog = 13,
  kReadiness = 14,
};

// Flags of WELCOME.
constexpr uint32_t kModelBatching = 1u << 0;
constexpr uint32_t kModelDecoupled = 1u << 1;

// Flags of a request entry.
constexpr uint32_t kRequestSequenceStart = 1u << 0;
constexpr uint32_t kRequestSequenceEnd = 1u << 1;

// Flags of a response entry.
constexpr uint32_t kResponseFinal = 1u << 0;  // nothing more comes for this request
constexpr uint32_t kResponseError = 1u << 1;
constexpr uint32_t kResponseEmpty = 1u << 2;  // no outputs: only ends the request (decoupled)
constexpr uint32_t kResponseReschedule = 1u << 3;  // no outputs: the request goes back to Triton's scheduler
constexpr uint32_t kResponseContinues = 1u << 4;  // with ERROR: more comes for this request (decoupled)

}  // namespace pytriton
