// Opens the log file of the server again after somebody has moved or removed it, as logrotate does.
//
// Bug: tritonserver opens its log once, and goes on writing to the file that was moved or removed.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <sys/types.h>

#include <string>

namespace pytriton::guard {

class LogFile {
 public:
  // Triton has opened the file. The front ends also open it, before or after that.
  void OnOpened(const char* path);
  // Whether there is a log file.
  explicit operator bool() const { return !path_.empty(); }
  // If another file has the name now, or none has and one can be made, replaces the old file everywhere in this
  // process.
  void Look();

 private:
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Keeps a log in this way for ever.
void KeepLogFile(LogFile* log);

}  // namespace pytriton::guard
