// Corrects the front end's answers to `generate`. An output of several samples is divided into a list for each sample.
// If a decoupled model fails after its first response, or has not exactly one response, the answer gets a status that
// says so. Further responses of the model are dropped, because the front end would keep them all until the last one.
//
// The front end writes an output as one flat list, whatever its shape is, and begins its answer with the first response
// of a model, before it knows how the request ends.
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

// An output of a response to several samples: how many samples, and how many elements each has.
struct OutputRows {
  std::string name;
  uint64_t rows;
  uint64_t row_size;
};

// Finds how an output is divided in the answer to a request of `samples`. Returns false if its list stays as it is: for
// one sample, for one element in each, or if its length shows that its rows are not the samples.
bool FindRows(std::string_view name, const int64_t* shape, uint64_t dims_count, uint64_t samples, OutputRows* rows);

// Divides the lists of outputs in a JSON object, whose text passes in pieces of any size.
class JsonRows {
 public:
  explicit JsonRows(std::vector<OutputRows> outputs);
  void Feed(std::string_view text, std::string* out);

 private:
  void OnByte(char byte, std::string* out);

  const std::vector<OutputRows> outputs_;
  size_t longest_name_ = 0;
  const OutputRows* output_ = nullptr;  // the output whose list is open
  std::string name_;                    // of the member, as it stands in the text
  bool is_name_ = false;                // a string of the object itself is being read, which may be a name
  bool in_string_ = false;
  bool is_escaped_ = false;
  int depth_ = 0;
  uint64_t commas_ = 0;  // in the open list
};

// The responses to one request, as Triton reports them. Triton's threads write this object, and the thread that writes
// the answer reads it.
class GenerateResponses {
 public:
  // `samples` is the number in the request; 0 if the model takes no batches.
  GenerateResponses(std::string model, uint64_t samples, bool is_decoupled)
      : model_(std::move(model)), samples_(samples), is_decoupled_(is_decoupled) {}
  uint64_t samples() const { return samples_; }
  bool is_decoupled() const { return is_decoupled_; }

  // Returns false for responses after the first one of a decoupled model, which are not wanted.
  bool Add(std::vector<OutputRows> rows);
  void AddError(std::string_view error);

  // The rows of each output of the response.
  std::vector<OutputRows> rows() const;
  // Describes why there is no valid answer to `generate`; "" if there is one.
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

// The body of an answer in chunks. The head is held back until the first byte of it.
class GenerateBody : public BodyCorrection {
 public:
  struct Ending {
    std::string status;  // such as "500 Internal Server Error"; "" keeps the front end's
    std::string body;
  };

  // `end` is called once, when the front end has written the whole answer.
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
