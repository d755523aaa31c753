// What the front end's answers to `generate` lack: an output of several samples is divided by them, and a decoupled model
// that fails after its first response, or has not exactly one, is answered with a status that says so. It gets no second
// one: the front end would keep all of them until the last, for an answer that is none.
//
// The front end writes an output as one flat list, whatever its shape. And it begins its answer with the first response of
// a model, long before it knows how the request ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "http_response.h"

namespace pytriton::guard {

// An output of a response to several samples: how many there are, and how many elements each of them has.
struct OutputRows {
  std::string name;
  uint64_t rows;
  uint64_t row_size;
};

// That of an output in the answer to a request of so many samples; false where its list stays as it is: for one sample,
// with one element for each, or of another length, which says that its rows are not the samples.
bool FindRows(std::string_view name, const int64_t* shape, uint64_t dims_count, uint64_t samples, OutputRows* rows);

// Divides the lists of outputs in a JSON object while its text passes, in pieces of any size.
class JsonRows {
 public:
  explicit JsonRows(std::vector<OutputRows> outputs);
  void Feed(std::string_view text, std::string* out);

 private:
  void OnByte(char byte, std::string* out);

  const std::vector<OutputRows> outputs_;
  size_t longest_name_ = 0;
  const OutputRows* output_ = nullptr;  // whose list is open
  std::string name_;                    // of the member, as it is written
  bool is_name_ = false;                // a string of the object itself is read that may be a name
  bool in_string_ = false;
  bool is_escaped_ = false;
  int depth_ = 0;
  uint64_t commas_ = 0;  // in the open list
};

// What Triton says of the responses to one request. Its threads write it, and the one that writes the answer reads it.
class GenerateResponses {
 public:
  // `samples`: how many the request has; 0 where the model takes no batches.
  GenerateResponses(std::string model, uint64_t samples, bool is_decoupled)
      : model_(std::move(model)), samples_(samples), is_decoupled_(is_decoupled) {}
  uint64_t samples() const { return samples_; }
  bool is_decoupled() const { return is_decoupled_; }

  // False for one behind the first of a decoupled model: nobody wants it, nor any other.
  bool Add(std::vector<OutputRows> rows);
  void AddError(std::string_view error);

  // How many rows each output of the response has.
  std::vector<OutputRows> rows() const;
  // Why the answer is no answer to `generate`, in words; empty where it is one.
  std::string FindError() const;

 private:
  const std::string model_;
  const uint64_t samples_;
  const bool is_decoupled_;
  mutable std::mutex mutex_;
  std::vector<OutputRows> rows_;
  std::string error_;
  uint64_t count_ = 0;
};

// The body of an answer in chunks. The head waits for its first byte.
class GenerateBody : public BodyCorrection {
 public:
  struct Ending {
    std::string status;  // "500 Internal Server Error" or the like; empty: the answer stays
    std::string body;
  };

  // `end` is asked once, when the front end has the whole of the answer.
  GenerateBody(std::vector<OutputRows> rows, std::function<Ending()> end) : rows_(std::move(rows)), end_(std::move(end)) {}

  std::string Begin() override;
  void Feed(std::string_view part, std::string* out) override;

 private:
  JsonRows rows_;
  const std::function<Ending()> end_;
  Ending ending_;
  bool is_replaced_ = false;
};

}  // namespace pytriton::guard
