#include "responses.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../proxy/text/json_reader.h"
#include "../frontend/callers.h"
#include "../hooks.h"
#include "../protections.h"
#include "../refuse/held_back.h"
#include "../refuse/http_requests.h"
#include "generate_answer.h"
#include "questions.h"

namespace pytriton::guard {
namespace {

// The text that replaces the front end's own in an answer; "" keeps that.
std::string BetterError(Guard* guard, const RequestOutcome& request, int status) {
  if (status == kNotAllowed && !request.is_post) return "inference takes POST, with the inputs as JSON: curl sends it with -d '{...}'";
  const bool is_wrong = status == 400 || status == 500;
  if (!is_wrong || request.generate == nullptr || request.is_submitted || guard->hides_models) return "";
  const GenerateRequest& generate = *request.generate;
  const bool has_parameters =
      guard->limits.generate_extra_names != 0 || guard->models.HasParameters(generate.model, generate.version);
  const std::vector<GenerateInput> inputs = InterfaceOf(guard, generate.model, generate.version).inputs;
  return inputs.empty() ? "" : FindGenerateError(generate, inputs, has_parameters);
}

// How an answer to `generate` of a decoupled model ends, which the front end began before it knew the end.
GenerateBody::Ending EndGenerate(RequestOutcome* request) {
  const std::string error = request->responses->FindError();
  if (error.empty()) {
    request->Count(Outcome::kOk);
    return {};
  }
  const Outcome outcome = request->NotedOr(Outcome::kInvalid);
  request->Count(outcome);
  const int status = StatusOfOutcome(outcome, 400);
  return {StatusText(status == 0 ? 400 : status), "{\"error\":" + JsonString(error) + "}"};
}

// Replaces an answer to `generate` by one with a list for each sample, and with the true error.
void CorrectGenerate(Connection* connection) {
  const std::shared_ptr<RequestOutcome>& request = connection->unanswered.front();
  const bool is_decoupled = request->responses->is_decoupled();
  std::vector<OutputRows> rows = request->responses->rows();
  if (!is_decoupled && rows.empty()) return;
  std::function<GenerateBody::Ending()> end = [] { return GenerateBody::Ending{}; };
  if (is_decoupled) end = [request] { return EndGenerate(request.get()); };
  connection->corrected = std::make_unique<HttpResponse>(std::make_unique<GenerateBody>(std::move(rows), std::move(end)),
                                                         !request->has_chunks);
}

// Counts a request when its response begins, and corrects the response.
void CorrectResponse(Guard* guard, Connection* connection, RequestOutcome* request, int fd, int code) {
  if (request->is_page) {
    if (code == 404) connection->corrected = PageFor(guard, fd, request->wants_html);
    return;
  }
  const std::string error = code < 400 ? "" : BetterError(guard, *request, code);
  const Outcome outcome =
      error.empty() ? request->NotedOr(OutcomeOfStatus(code, request->is_submitted)) : Outcome::kInvalid;
  const bool is_held = code == 200 && request->responses != nullptr && request->responses->is_decoupled();
  if (!is_held && (!request->is_stream || !request->is_submitted)) request->Count(outcome);
  if (code == 200 && request->responses != nullptr) CorrectGenerate(connection);
  if (connection->corrected != nullptr) return;
  if (!error.empty()) {
    const bool is_method = code == kNotAllowed;
    connection->corrected =
        std::make_unique<HttpResponse>(StatusText(is_method ? kNotAllowed : 400), !request->has_chunks,
                                       "{\"error\":" + JsonString(error) + "}", is_method ? "Allow: POST\r\n" : "");
    return;
  }
  const int right = StatusOfOutcome(outcome, code);
  if (right == 0 && request->has_chunks) return;
  connection->corrected = std::make_unique<HttpResponse>(right == 0 ? "" : StatusText(right), !request->has_chunks);
}

// To be called before a response is written, because its caller may look at the counts as soon as it has the response.
void BeginResponse(Guard* guard, Connection* connection, int fd, std::string_view status) {
  if (status.empty() || connection->corrected != nullptr) return;
  RequestOutcome* const request = connection->unanswered.front().get();
  if (request == nullptr) return;
  if (!request->is_plain) {
    CorrectResponse(guard, connection, request, fd, std::atoi(std::string(status.substr(0, 3)).c_str()));
  }
  if (!request->is_head && request->has_chunks && request->headers.empty()) return;
  if (connection->corrected == nullptr) connection->corrected = std::make_unique<HttpResponse>("", !request->has_chunks);
  connection->corrected->AddHeaders(request->headers);
  if (request->is_head) connection->corrected->LeaveOutBody(!request->is_options);
  if (request->is_options) connection->corrected->AddHeaders("Allow: GET, HEAD, OPTIONS\r\n");
}

// An answer has been written after which the connection ends: everything that its caller sends afterwards is read and
// dropped, because it cannot be answered.
void EndBehindAnswer(Connection* connection, int fd) {
  shutdown(fd, SHUT_WR);
  connection->is_refused = true;
  connection->refused_at = time(nullptr);
  connection->held.clear();
  connection->is_held_cut = false;
  ReadOn(connection, fd);
}

ssize_t WriteCorrected(Connection* connection, int fd, const iovec* parts, int count) {
  const ssize_t size = connection->corrected->Write(parts, count, [fd](const char* data, size_t bytes) {
    return send(fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
  if (connection->corrected->is_at_end() && !connection->is_refused) EndBehindAnswer(connection, fd);
  if (connection->corrected->is_done()) connection->corrected.reset();
  return size;
}

void OnResponse(Guard* guard, Connection* connection, int fd) {
  auto& request = connection->unanswered.front();
  // The text of a request is used for its error only, which has been made by now, so its memory is freed.
  if (request != nullptr) request->generate.reset();
  // The caller of a stream may still leave before its end, so its request is kept.
  const bool goes_on =
      request != nullptr && (request->is_stream || (request->responses != nullptr && request->responses->is_decoupled()));
  connection->streamed = goes_on ? std::move(request) : nullptr;
  if (connection->streamed != nullptr && connection->streamed->backlog != nullptr) connection->streamed->backlog->SetSocket(fd);
  connection->unanswered.erase(connection->unanswered.begin());
  StopAwaiting(guard, connection);
  if (connection->scan.complete() && !connection->awaits_response()) ReleaseMemory(guard, connection);
}

}  // namespace

void CountLeft(const Connection& connection) {
  const auto leave = [](const std::shared_ptr<RequestOutcome>& request) {
    if (request == nullptr) return;
    request->Count(Outcome::kCancelled);
    // Otherwise a model that waits for its caller to read something would wait for ever.
    if (request->backlog != nullptr) request->backlog->End();
  };
  std::for_each(connection.unanswered.begin(), connection.unanswered.end(), leave);
  leave(connection.streamed);
}

void BeginOutcome(Guard* guard, Connection* connection) {
  InferencePath path;
  bool wants_html = false;
  RequestText text = connection->scan.TakeText();
  std::shared_ptr<RequestOutcome> request;
  if (connection->scan.FindInference(&path)) {
    request = std::make_shared<RequestOutcome>(&guard->outcomes, Protocol::kHttp, path.model);
    request->is_stream = path.is_stream;
    if (path.is_stream) request->backlog = std::make_shared<StreamBacklog>();
    request->is_post = path.is_post;
    if (connection->scan.keeps_text()) {
      request->generate = std::make_unique<GenerateRequest>(
          GenerateRequest{path.model, path.version, path.endpoint, std::move(text), std::nullopt});
    }
  } else if (guard->limits.page != 0 && connection->scan.AsksForPage(&wants_html)) {
    request = std::make_shared<RequestOutcome>(&guard->uncounted, Protocol::kHttp, "");
    request->is_page = true;
    request->wants_html = wants_html;
  } else if (connection->scan.is_head() || !connection->scan.has_chunks() || guard->cors.is_on()) {
    request = std::make_shared<RequestOutcome>(&guard->uncounted, Protocol::kHttp, "");
    request->is_plain = true;
  }
  if (request != nullptr) {
    request->has_chunks = connection->scan.has_chunks();
    request->is_head = connection->scan.is_head();
    request->is_options = connection->scan.is_options();
    if (guard->cors.is_on()) request->headers = guard->cors.Headers(connection->scan.origin());
  }
  connection->unanswered.push_back(std::move(request));
}

ssize_t WriteHttp(int fd, const iovec* parts, int count) {
  const auto next = NEXT(writev);
  Guard* guard = Active();
  const bool is_http = guard != nullptr && count > 0 && guard->connections.FindInterest(fd) != nullptr;
  if (is_http) Reach(Protection::kHttpResponses);
  Connection* connection = is_http ? guard->connections.FindKnown(fd) : nullptr;
  if (connection == nullptr) return next(fd, parts, count);
  BeginHandling(guard, fd);
  HttpAnswers& answers = connection->answers;
  const uint64_t chunks = answers.chunks();
  const bool begins = answers.is_at_begin() && connection->awaits_response();
  const std::string status = begins ? StatusIn(parts, count) : "";
  const bool is_unasked = answers.is_at_begin() && !begins && !StatusIn(parts, count).empty();
  BeginResponse(guard, connection, fd, status);
  // Only one response is handled at a time; the front end writes the following ones again.
  HttpAnswers behind = answers;
  const size_t given = SizeOf(parts, count);
  const size_t most = behind.Feed(parts, given);
  std::vector<iovec> first;
  if (most < given) {
    first = FirstOf(parts, count, most);
    parts = first.data();
    count = static_cast<int>(first.size());
  }
  const bool is_right = connection->corrected == nullptr;
  const ssize_t size = is_right ? next(fd, parts, count) : WriteCorrected(connection, fd, parts, count);
  if (size > 0 && static_cast<size_t>(size) < most) answers.Feed(parts, static_cast<size_t>(size));
  if (size > 0 && static_cast<size_t>(size) == most) answers = std::move(behind);
  if (size > 0 && is_unasked) connection->is_out_of_step = true;
  if (size > 0 && !status.empty()) OnResponse(guard, connection, fd);
  // An answer to `generate` that is under way has chunks and no backlog.
  if (connection->streamed != nullptr && connection->streamed->backlog != nullptr && size > 0) {
    connection->streamed->backlog->Write(static_cast<uint64_t>(size), answers.chunks() - chunks);
  }
  if ((connection->is_paused || !connection->held.empty()) && !connection->is_being_answered()) ReadOn(connection, fd);
  return size;
}

}  // namespace pytriton::guard
