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

// Bytes that own their memory. A message that is made of several is sent in their order.
struct Chunk {
  std::unique_ptr<char[]> data;
  size_t size = 0;
  std::shared_ptr<void> held = nullptr;  // for as long as these bytes
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
  // How the request ended, where the code alone does not say it.
  guard::Outcome outcome = guard::Outcome::kUnknown;
};

// How a request with that status ended.
guard::Outcome OutcomeOf(const Status& status);

// Whether a call is ModelInfer (one response, errors are the status of the call) or one request of ModelStreamInfer
// (any number of responses, errors are messages of the stream).
enum class Method { kInfer, kStreamInfer };

// Where the responses of one request go. Called from threads of Triton, one call at a time, and possibly before `Start`
// has returned.
class Responses {
 public:
  virtual ~Responses() = default;
  // A ModelInferResponse for kInfer, a ModelStreamInferResponse for kStreamInfer; no prefix of gRPC.
  virtual void OnMessage(Message message) = 0;
  // Nothing comes after this; once for each request. For kInfer with the status of the call: kOk after exactly one
  // message, anything else after none. For kStreamInfer the status is kOk, with the outcome of the first error: errors came
  // as messages; unless the stream stops at an error, whose status comes here then.
  virtual void OnEnd(Status status) = 0;
};

// A parameter of a request; exactly one member is meant, that of its type.
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

// The parameter by which a caller of a stream asks to be told of an end without a response.
constexpr char kEmptyFinal[] = "triton_enable_empty_final_response";

struct Input {
  std::string name;
  std::string datatype;
  std::vector<int64_t> shape;
  // Where its elements are not raw: a message InferTensorContents, and what these elements are in a tensor.
  bool has_elements = false;
  std::string_view elements;
  size_t elements_bytes = 0;
  uint32_t element_size = 0;  // 0 for texts
};

// A ModelInferRequest, read. What it names lies in its message, which must stay.
struct Request {
  std::string model;
  std::string version;
  std::string id;
  std::vector<Parameter> parameters;
  std::vector<Input> inputs;
  std::vector<std::string> outputs;
  std::vector<std::string_view> contents;  // raw, in the order of the inputs; empty where no input is raw
  int64_t version_number = -1;
  bool is_in_sequence = false;
  // Triton's own front end serves it: it names a region of shared memory, asks for the classification extension, or is
  // wrong in a way of which that front end says what it is.
  bool is_for_triton = false;
  // Whether an error of the model becomes the status of the stream, as a caller with the header triton_grpc_error wants.
  bool stops_at_error = false;
};

// Reads a message. The status says what is wrong with one that is no ModelInferRequest, or that names more than is read.
// The memory that it takes is at most 16 times that of the message, and 300 MiB.
Status Read(const char* message, size_t size, Request* request);

// The model that a message names, which may be wrong in any other way.
std::string_view ModelOf(const char* message, size_t size);

// Writes the elements of an input as a tensor has them, `elements_bytes` in all.
void CopyElements(const Input& input, char* to);

// Whether the model sends any number of responses; false with an error of Triton's, as of a model that does not exist.
bool IsDecoupled(TRITONSERVER_Server* server, const Request& request);

// A request that Triton has.
class Running {
 public:
  virtual ~Running() = default;
  // Tells Triton, the queue and the backend that nobody wants the responses any more; they are still reported to the
  // end. May be called any number of times, from any thread, also after the end, and within OnMessage and OnEnd.
  virtual void Cancel() = 0;
};

// Hands a request to Triton. Whatever is wrong with it is reported through `responses`, before this returns. Takes the
// message: inputs are read where they lie, without a copy, until Triton has released the request.
std::shared_ptr<Running> Start(TRITONSERVER_Server* server, Method method, Request request, Chunk message,
                               std::shared_ptr<Responses> responses);

}  // namespace pytriton::grpc
