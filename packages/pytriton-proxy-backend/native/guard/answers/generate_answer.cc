#include "generate_answer.h"

#include <algorithm>

namespace pytriton::guard {

bool FindRows(std::string_view name, const int64_t* shape, uint64_t dims_count, uint64_t samples, OutputRows* rows) {
  if (dims_count < 2 || samples < 2 || shape[0] < 0 || static_cast<uint64_t>(shape[0]) != samples) return false;
  uint64_t row_size = 1;
  for (uint64_t i = 1; i < dims_count; ++i) {
    if (shape[i] < 0 || __builtin_mul_overflow(row_size, static_cast<uint64_t>(shape[i]), &row_size)) return false;
  }
  if (row_size == 1) return false;
  *rows = {std::string(name), samples, row_size};
  return true;
}

JsonRows::JsonRows(std::vector<OutputRows> outputs) : outputs_(std::move(outputs)) {
  for (const OutputRows& output : outputs_) longest_name_ = std::max(longest_name_, output.name.size());
}

void JsonRows::Feed(std::string_view text, std::string* out) {
  if (outputs_.empty()) {
    *out += text;
    return;
  }
  for (const char byte : text) OnByte(byte, out);
}

void JsonRows::OnByte(char byte, std::string* out) {
  if (in_string_) {
    out->push_back(byte);
    if (!is_escaped_ && byte == '"') {
      in_string_ = false;
      is_name_ = false;
    } else {
      is_escaped_ = !is_escaped_ && byte == '\\';
      // Texts among the members are read as names, too, and may be as large as a response, so only short ones are kept.
      if (is_name_ && name_.size() <= longest_name_) name_.push_back(byte);
    }
    return;
  }
  switch (byte) {
    case '"':
      in_string_ = true;
      is_name_ = depth_ == 1;
      if (is_name_) name_.clear();
      break;
    case '{':
      ++depth_;
      break;
    case '[':
      if (++depth_ == 2) {
        const auto found = std::find_if(outputs_.begin(), outputs_.end(), [&](const auto& one) { return one.name == name_; });
        output_ = found == outputs_.end() ? nullptr : &*found;
        commas_ = 0;
        if (output_ != nullptr) {
          *out += "[[";
          // An output without elements still has its rows.
          for (uint64_t i = 1; output_->row_size == 0 && i < output_->rows; ++i) *out += "],[";
          return;
        }
      }
      break;
    case ',':
      if (output_ != nullptr && depth_ == 2 && output_->row_size > 0 && ++commas_ % output_->row_size == 0) {
        *out += "],[";
        return;
      }
      break;
    case ']':
    case '}':
      if (depth_-- == 2 && output_ != nullptr) {
        output_ = nullptr;
        *out += "]]";
        return;
      }
      break;
    default:
      break;
  }
  out->push_back(byte);
}

bool GenerateResponses::Add(std::vector<OutputRows> rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (++count_ > 1 && is_decoupled_) return false;
  rows_ = std::move(rows);
  return true;
}

void GenerateResponses::AddError(std::string_view error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = error.empty() ? "the model failed, and gave no reason" : error;
}

std::vector<OutputRows> GenerateResponses::rows() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_;
}

std::string GenerateResponses::FindError() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (count_ < 2 && !error_.empty()) return error_;
  if (count_ == 1) return "";
  return "the model '" + model_ + "' gave " + (count_ == 0 ? "no response" : "more than one response") +
         ", and generate takes one: ask /v2/models/" + model_ + "/generate_stream for all of them";
}

std::string GenerateBody::Begin() {
  ending_ = end_();
  return ending_.status;
}

void GenerateBody::Feed(std::string_view part, std::string* out) {
  if (ending_.status.empty()) {
    rows_.Feed(part, out);
  } else if (!is_replaced_) {
    is_replaced_ = true;
    *out += ending_.body;
  }
}

}  // namespace pytriton::guard
