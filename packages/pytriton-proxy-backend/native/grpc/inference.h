// One inference over gRPC: a serialized request in, serialized responses out, with Triton's C API in between. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../guard/answers/outcomes.h"

struct TRITONSERVER_Server;

namespace pytriton::grpc {

// Bytes with their memory. The chunks of a message are sent in order.
struct Chunk {
  std::unique_ptr<char[]> data;
  size_t size = 0;
  std::shared_ptr<void> held = nullptr;  // kept as long as these bytes
};
using Message = std::vector<Chunk>;

// The status codes of gRPC that are used here.
enum class Code : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

struct Status {
  Code code = Code::kOk;
  std::string text;
  // How the request ended, if the code alone does not say it.
  guard::Outcome outcome = guard::Outcome::kUnknown;
};

// Returns how a request with this status ended.
guard::Outcome OutcomeOf(const Status& status);

// ModelInfer has one response, and errors are the status of the call. A request of ModelStreamInfer has any number of
// responses, and errors are messages of the stream.
enum class Method { kInfer, kStreamInfer };

// Gets the responses of one request. Triton's threads call it, one at a time, possibly before `Start` has returned.
class Responses {
 public:
  virtual ~Responses() = default;
  // The message is a ModelInferResponse for kInfer, a ModelStreamInferResponse for kStreamInfer, without the prefix of
  // gRPC.
  virtual void OnMessage(Message message) = 0;
  // Is called once, after everything else. For kInfer, `status` is that of the call: kOk after exactly one message, an
  // error after none. For kStreamInfer it is kOk with the outcome of the first error, because errors came as messages;
  // but if the stream stops at an error, it is the status of that error.
  virtual void OnEnd(Status status) = 0;
};

// A parameter of a request; only the member of its type is set.
struct Parameter {
  enum class Type { kBool, kInt, kString, kDouble, kUnsigned };
  std::string name;
  Type type = Type::kBool;
  bool truth = false;
  int64_t integer = 0;
  uint64_t whole = 0;
  double number = 0;
  std::string text;
};

// By this parameter the caller of a stream asks for an empty response that marks the end, if no other response does.
constexpr char kEmptyFinal[] = "triton_enable_empty_final_response";

struct Input {
  std::string name;
  std::string datatype;
  std::vector<int64_t> shape;
  // For elements that are not raw: a message InferTensorContents, and the size of an element in a tensor.
  bool has_elements = false;
  std::string_view elements;
  size_t elements_bytes = 0;
  uint32_t element_size = 0;  // 0 for texts
};

// A ModelInferRequest after parsing. It refers to its message, which must stay.
struct Request {
  std::string model;
  std::string version;
  std::string id;
  std::vector<Parameter> parameters;
  std::vector<Input> inputs;
  std::vector<std::string> outputs;
  std::vector<std::string_view> contents;  // raw inputs in order; empty if no input is raw
  int64_t version_number = -1;
  bool is_in_sequence = false;
  // Triton's own front end must serve it: it uses shared memory or the classification extension, or has an error that
  // this front end cannot describe as Triton does.
  bool is_for_triton = false;
  // Whether an error of the model becomes the status of the stream, which a caller asks for by the header
  // triton_grpc_error.
  bool stops_at_error = false;
};

// Parses a message. Returns an error status if it is no ModelInferRequest, or has more parts than are read. This takes
// at most 16 times the memory of the message, and 300 MiB.
Status Read(const char* message, size_t size, Request* request);

// Returns the model that a message names, even if the message has other errors.
std::string_view ModelOf(const char* message, size_t size);

// Writes the elements of an input in the form of a tensor, `elements_bytes` in all.
void CopyElements(const Input& input, char* to);

// Whether the model sends any number of responses. Returns false if Triton returns an error, for instance because the
// model does not exist.
bool IsDecoupled(TRITONSERVER_Server* server, const Request& request);

// A request that Triton has.
class Running {
 public:
  virtual ~Running() = default;
  // Tells Triton, its queue and the backend that nobody wants the responses; they are still reported to the end. May be
  // called any number of times, from any thread, also after the end and within OnMessage and OnEnd.
  virtual void Cancel() = 0;
};

// Hands a request to Triton. An error is reported through `responses` before this returns. Takes the message over:
// inputs are read from it without a copy until Triton has released the request.
std::shared_ptr<Running> Start(TRITONSERVER_Server* server, Method method, Request request, Chunk message,
                               std::shared_ptr<Responses> responses);

}  // namespace pytriton::grpc
