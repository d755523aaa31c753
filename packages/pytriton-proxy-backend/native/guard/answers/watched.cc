#include "watched.h"

#include <memory>
#include <utility>
#include <vector>

#include "../../grpc/front_end.h"
#include "../../proxy/text/json_reader.h"
#include "../in_force.h"
#include "../refuse/shape_check.h"
#include "generate_answer.h"

namespace pytriton::guard {
namespace {

constexpr uint32_t kFirstDim = 2;   // TRITONSERVER_BATCH_FIRST_DIM
constexpr uint32_t kDecoupled = 2;  // TRITONSERVER_TXN_DECOUPLED

// Replaces a front end's callback for the responses of a request, until the last one has come.
struct WatchedResponses {
  void (*next)(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user);
  void* user;
  std::shared_ptr<RequestOutcome> request;
  const TRITONSERVER_InferenceRequest* made;
  int connection;  // the descriptor for HTTP; -1 for gRPC
};

// Belongs to the request that this thread is making, until Triton gets that request.
thread_local WatchedResponses* t_watched = nullptr;

// The request that this thread is making, and the samples of its last input, if that has a batch axis.
struct Samples {
  const TRITONSERVER_InferenceRequest* request = nullptr;
  uint64_t count = 0;
};
thread_local Samples t_samples;

void NoteError(RequestOutcome* request, TRITONSERVER_Error* error) {
  const char* const text = g_triton.error_text(error);
  request->Note(OutcomeOfError(g_triton.error_code(error), text));
  if (request->responses != nullptr) request->responses->AddError(text);
}

// The outputs of a response that have several elements for each of several samples.
std::vector<OutputRows> RowsOf(TRITONSERVER_InferenceResponse* response, uint64_t samples) {
  std::vector<OutputRows> all;
  if (samples < 2) return all;
  uint32_t count = 0;
  if (IsError(g_triton.output_count(response, &count))) return all;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const int64_t* shape = nullptr;
    uint64_t dims_count = 0;
    int type = 0, memory_type = 0;
    const void* base = nullptr;
    size_t size = 0;
    int64_t memory_type_id = 0;
    void* user = nullptr;
    const bool is_error = IsError(g_triton.output(response, i, &name, &type, &shape, &dims_count, &base, &size,
                                                  &memory_type, &memory_type_id, &user));
    OutputRows rows;
    if (!is_error && FindRows(name, shape, dims_count, samples, &rows)) all.push_back(std::move(rows));
  }
  return all;
}

// Notes, before Triton has a request to `generate`, what must be known of its responses.
void ExpectResponses(TRITONSERVER_Server* server, const TRITONSERVER_InferenceRequest* made, RequestOutcome* request) {
  if (request->generate == nullptr || request->is_stream || g_triton.properties == nullptr) return;
  if (g_triton.batch_properties == nullptr || g_triton.output_count == nullptr || g_triton.output == nullptr) return;
  const GenerateRequest& generate = *request->generate;
  uint32_t batching = 0;
  uint32_t transactions = 0;
  if (IsError(g_triton.batch_properties(server, generate.model.c_str(), generate.version, &batching, nullptr)) ||
      IsError(g_triton.properties(server, generate.model.c_str(), generate.version, &transactions, nullptr))) {
    return;
  }
  const bool is_batched = (batching & kFirstDim) != 0;
  const bool is_decoupled = (transactions & kDecoupled) != 0;
  if (!is_batched && !is_decoupled) return;
  const uint64_t samples = is_batched && t_samples.request == made ? t_samples.count : 0;
  request->responses = std::make_unique<GenerateResponses>(generate.model, samples, is_decoupled);
}

// Drops a response that is not wanted, like all that follow, so the model is asked to end.
void DropResponse(const WatchedResponses& watched, TRITONSERVER_InferenceResponse* response) {
  watched.request->Note(Outcome::kInvalid);
  IsError(g_triton.delete_response(response));
  if (Guard* const guard = Active(); guard != nullptr) guard->callers.OnLeave(watched.made, watched.connection);
}

void OnWatchedResponse(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user) {
  auto* const watched = static_cast<WatchedResponses*>(user);
  const bool is_final = (flags & kFinal) != 0;
  const std::unique_ptr<WatchedResponses> ended(is_final ? watched : nullptr);
  RequestOutcome* const request = watched->request.get();
  TRITONSERVER_Error* const error = response == nullptr ? nullptr : g_triton.response_error(response);
  if (response != nullptr && error == nullptr && request->responses != nullptr) {
    GenerateResponses& responses = *request->responses;
    if (!responses.Add(RowsOf(response, responses.samples())) && g_triton.delete_response != nullptr) {
      DropResponse(*watched, response);
      if (!is_final) return;
      response = nullptr;
    }
  }
  if (error != nullptr) {
    NoteError(request, error);
    g_triton.delete_error(error);
  }
  if (response != nullptr && request->backlog != nullptr) {
    if (const uint64_t bytes = GivenResponse::TakeBytes(); bytes > 0) request->backlog->Add(bytes);
    GivenResponse::Note(request->backlog);
  }
  if (is_final) {
    request->Conclude();
    // The status of a stream was written when it began.
    if (request->is_stream) request->CountNotedOr(Outcome::kOk);
  }
  watched->next(response, flags, watched->user);
}

// Returns the request for whose responses a front end is about to ask: that of the HTTP connection which this thread
// handles, or one that the front end for gRPC has passed on.
std::shared_ptr<RequestOutcome> FindOutcome(Guard* guard, const TRITONSERVER_InferenceRequest* request) {
  if (const int fd = HandledConnection(guard); fd >= 0) {
    const Connection* const connection = guard->connections.FindKnown(fd);
    if (connection == nullptr || connection->unanswered.empty()) return nullptr;
    const auto& found = connection->unanswered.front();
    // This may be a request of Triton's front end for a cloud, for example.
    return found == nullptr || found->is_plain ? nullptr : found;
  }
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  return front_end == nullptr ? nullptr : front_end->forwarded().FindOutcome(request);
}

}  // namespace

void NoteSamples(const TRITONSERVER_InferenceRequest* request, const int64_t* shape, uint64_t dims_count) {
  t_samples = {request, dims_count > 0 && shape[0] > 0 ? static_cast<uint64_t>(shape[0]) : 0};
}

TRITONSERVER_Error* WatchResponses(SetCallbackFunction next, TRITONSERVER_InferenceRequest* request,
                                   TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
                                   OnResponseFunction on_response, void* user) {
  Guard* const guard = Active();
  auto outcome = guard == nullptr ? nullptr : FindOutcome(guard, request);
  if (outcome == nullptr) return next(request, allocator, allocator_user, on_response, user);
  auto watched = std::make_unique<WatchedResponses>(
      WatchedResponses{on_response, user, std::move(outcome), request, HandledConnection(guard)});
  TRITONSERVER_Error* const error = next(request, allocator, allocator_user, OnWatchedResponse, watched.get());
  if (error != nullptr) return error;
  // An earlier request was never handed to Triton, so its callback will not be called; it is deleted.
  delete std::exchange(t_watched, watched.release());
  return nullptr;
}

TRITONSERVER_Error* SubmitWatched(SubmitFunction next, TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* made,
                                  void* trace) {
  WatchedResponses* const watched = std::exchange(t_watched, nullptr);
  const auto request = watched == nullptr ? nullptr : watched->request;
  if (request != nullptr) ExpectResponses(server, made, request.get());
  TRITONSERVER_Error* const error = next(server, made, trace);
  if (request == nullptr) return error;
  request->is_submitted = error == nullptr;
  if (error == nullptr) {
    request->generate.reset();
    return error;
  }
  delete watched;
  NoteError(request.get(), error);
  return error;
}

// Triton makes a parameter of each name in a request to `generate` that is no input, so a model that reads none would
// answer as if a misspelt name was right. Names in `parameters` are meant as parameters. Returns null if nothing is
// wrong.
TRITONSERVER_Error* CheckName(const TRITONSERVER_InferenceRequest* request, const char* name) {
  Guard* guard = Active();
  if (guard == nullptr || name == nullptr || guard->limits.generate_extra_names != 0 || HandledConnection(guard) < 0) return nullptr;
  const auto outcome = FindOutcome(guard, request);
  if (outcome == nullptr || outcome->generate == nullptr) return nullptr;
  GenerateRequest& generate = *outcome->generate;
  if (!generate.own_names) {
    // This is asked only once, because there may be very many names.
    const bool has_parameters = guard->models.HasParameters(generate.model, generate.version);
    generate.own_names = has_parameters ? OwnNames() : OwnNames(generate.body);
  }
  if (!generate.own_names->Has(name)) return nullptr;
  return g_triton.make_error(kInvalidArgument, ("'" + NameText(name) + "' is no input of the model").c_str());
}

}  // namespace pytriton::guard
